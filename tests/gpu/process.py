"""Tests of the simulated device run in a process of their own, one for each pytest process that meets such a test.

torch's autograd counts devices once, when it is first used, and a device cannot be taken away again: so it must be there from the
start, and must not be there in other tests. The process is sent the id of a test on a line, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest

from tests.warm_python import warm_python

INNER = "RESHARD_CKPT_SIMULATED"
"""Set in the process that has the device."""

_END_S = 60
"""How long that process has to end."""


class SimulatedProcess:
    """The process, seen from the tests that it runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, test: str) -> str | None:
        """Run one test there; what pytest says of it, if it failed."""
        if self._process is None or self._process.poll() is not None:
            env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
            self._process = subprocess.Popen(
                [warm_python(), "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env | {INNER: "1"}
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(test, file=self._process.stdin, flush=True)
        try:
            answer = self._process.stdout.readline()
        except BaseException:  # the time of this test is over: what it may still say is no answer to the next one
            self._process.kill()
            self._process.wait()
            raise
        if not answer:
            code = self._process.wait()
            return f"the process of the simulated device ended with {code}: a host that touches device memory is killed"
        failed, output = json.loads(answer)
        return output if failed else None

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def main() -> None:
    """Run the tests that come on standard input."""
    from tests import device

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print must not look like an answer
    device.load()
    for line in sys.stdin:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = pytest.main([line.strip(), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"])
        print(json.dumps([int(code) != 0, printed.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    main()
