"""The command line, ``reshard-ckpt COMMAND``; each command has a module of its own here.

A command parses its arguments, calls the public function of the same name, and prints the result. `app` has the common parts.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys

COMMANDS = ("inspect", "verify", "diff", "reshard", "convert", "compact", "plot", "goodput", "sizes", "memory")
"""The commands in the order of ``--help``; each module adds one of them to the application."""

NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command that the arguments name, and exit with its exit code.

    0: fine. 1: a problem was found, such as damage or a difference. 2: wrong use.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        sys.stderr.write(
            f"reshard-ckpt: the command line needs {' and '.join(absent)}; install them with: pip install 'reshard-ckpt[cli]'\n"
        )
        raise SystemExit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the locale may lack ×, and a name may have unencodable characters
    from .app import app

    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}")
    app(prog_name="reshard-ckpt")
