"""What each rank of `test_hf_llama` does."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import threading

from tests.launch import ROOT

EXAMPLE = ROOT / "examples" / "hf_llama.py"
NUM_STEPS = 12


class Printed(io.StringIO):
    """What a rank prints; it gets SIGTERM once that has a line, and goes on when the ranks have agreed on where they stop.

    A rank whose thread for that came late to its turn might else be done with all steps before.
    """

    def __init__(self, until: str) -> None:
        super().__init__()
        self.until = until

    def write(self, text: str) -> int:
        if self.until and self.until in text:
            os.kill(os.getpid(), signal.SIGTERM)
            for thread in threading.enumerate():
                if thread.name == "reshard-ckpt-stop":
                    thread.join()
        return super().write(text)


def job(root: str, until: str) -> str:
    sys.argv = [str(EXAMPLE), root, str(NUM_STEPS)]
    with contextlib.redirect_stdout(Printed(until)) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()
