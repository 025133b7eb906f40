"""Tests of the simulated device run in a process of their own, one for each pytest process that meets such a test.

torch's autograd counts devices once, when it is first used, and a device cannot be taken away again: so it must be there from the
start, and must not be there in other tests. The process is sent the id of a test on a line, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

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


class Loop:
    """A session of pytest that runs tests as their ids come, instead of all that it has collected."""

    def __init__(self, asked: TextIO, answers: TextIO) -> None:
        self.asked, self.answers = asked, answers
        self.failures: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.freeze()  # or each collection would look at all that is imported
        for line in self.asked:
            self.failures.clear()
            gc.collect()  # what a test left in cycles must not count as memory of the next one
            session.config.hook.pytest_runtest_protocol(item=items[line.strip()], nextitem=None)
            print(json.dumps([bool(self.failures), "\n".join(self.failures)]), file=self.answers, flush=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures += [report.longreprtext, *(f"--- {title} ---\n{text}" for title, text in report.sections)]


def main() -> None:
    """Run the tests that come on standard input."""
    from tests import device

    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # pytest takes standard input away
    os.dup2(2, 1)  # what tests print must not look like an answer
    device.load()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([str(Path(__file__).parent), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], [Loop(asked, answers)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # as where a module cannot be imported
        print(printed.getvalue(), file=sys.stderr)


if __name__ == "__main__":
    main()
