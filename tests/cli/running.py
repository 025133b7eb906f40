"""Running a command in tests: in this process, by the application itself; or as a process of its own, as a user does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from reshard_ckpt.cli import COMMANDS
from reshard_ckpt.cli.app import app
from tests.launch import ROOT
from tests.warm_python import warm_python

for _name in COMMANDS:
    importlib.import_module(f"reshard_ckpt.cli.{_name}")


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code, and what it printed where."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: Any) -> Ran:
    """Run a command in this process; an error that is no answer is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reshard-ckpt")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


SCRIPT = Path(sys.executable).with_name("reshard-ckpt")
"""The installed command; a package that was installed before it had one is started as a module."""


def start(*arguments: Any, cold: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Start ``reshard-ckpt`` as a process of its own; as the installed command, if it is to start cold."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    installed = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "reshard_ckpt"]
    program = installed if cold else [warm_python(), "-m", "reshard_ckpt"]
    command = [*program, *map(str, arguments)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **streams)


def run_process(*arguments: Any, cold: bool = False) -> Ran:
    """Run it to its end."""
    process = start(*arguments, cold=cold)
    out, err = process.communicate()
    return Ran(process.returncode, out, err)
