"""The driver of programs that kill processes at every point, or at every N-th: arguments, figures, and runs in tests."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.launch import ROOT
from tests.reliability.tracer import CannotTrace
from tests.warm_python import warm_python

T = TypeVar("T")
Figures = Iterable[tuple[str, Any]]
CANNOT_TRACE = 77
"""Exit status where this system lets no process follow its own child."""


def sweep(points: Sequence[Any], attempt: Callable[[int], T], every: int, first: int = 1) -> list[T]:
    """Kill at every N-th point: `attempt` takes the number of one, and judges what is left. Its error names the point."""
    found = []
    for n in range(first, len(points) + 1, every):
        try:
            found.append(attempt(n))
        except BaseException as error:
            raise AssertionError(f"killed at point {n}, {points[n - 1]}: {error}") from error
    return found


def main(
    doc: str | None,
    run: Callable[[Path, argparse.Namespace], Iterable[tuple[str, Any]]],
    folder: str | None = None,
    **options: Any,
) -> int:
    """Run a program: `run` takes an empty folder and the arguments, and yields figures by name; `options` are more arguments."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="try every N-th point")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    args, out = parser.parse_args(), {}
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="kills-", dir=folder) as base:
        try:
            for name, figures in run(Path(os.path.realpath(base)), args):
                out[name] = figures
                print(name, figures, flush=True)
        except CannotTrace as error:
            print(f"cannot follow a child: {error}")
            return CANNOT_TRACE
    if args.out:
        args.out.write_text(json.dumps(out, indent=1))
    return 0


def figures_of(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a program as a test does; return its figures. The program itself judges what is left after each kill."""
    command = [warm_python(), "-m", module, *arguments, "--out", str(folder / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode == CANNOT_TRACE:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "out").read_text())
    return found
