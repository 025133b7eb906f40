"""The server that forks launchers, without torch: what it reports, and that nothing outlives the process that asked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.fork_server import ForkServer, Request, ServerDied, at_most
from tests.launch import ROOT

JOBS = """
import os, signal, sys, threading
def prints(*words): print(*words)
def exits(code): sys.exit(int(code))
def raises(message): raise ValueError(message)
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def ends_the_server():
    os.kill(os.getppid(), signal.SIGTERM)
def two_hold(path):
    os.fork()
    with open(path, "wb", buffering=0) as file:
        file.write(b"x")
        threading.Event().wait()
def one_stays_behind(path):
    if not os.fork():
        with open(path, "wb", buffering=0) as file:
            file.write(b"x")
            threading.Event().wait()
    with open(path, "rb", buffering=0) as file:
        file.read(1)
"""
CALLER = """
import os, sys
from pathlib import Path
from tests.fork_server import ForkServer, Request, at_most
server = ForkServer(Path.cwd(), os.environ, ())
server.run(Request("jobs", "two_hold", (sys.argv[1],), os.environ.copy(), os.getcwd(), 0o022, sys.argv[2]), at_most(600))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "output").touch()
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    server = ForkServer(ROOT, environment(folder), ())
    yield server
    server.close()


def request_of(folder: Path, function: str, *args: str) -> Request:
    return Request("jobs", function, args, environment(folder), str(folder), 0o022, str(folder / "output"))


def test_exit_codes_and_output_are_those_of_a_process(server: ForkServer, folder: Path):
    assert server.run(request_of(folder, "prints", "some", "words"), at_most(600)) == 0
    assert (folder / "output").read_text() == "some words\n"
    assert server.run(request_of(folder, "exits", "7"), at_most(600)) == 7
    assert server.run(request_of(folder, "raises", "had enough"), at_most(600)) == 1
    assert "ValueError: had enough" in (folder / "output").read_text()
    assert server.run(request_of(folder, "dies"), at_most(600)) == -signal.SIGKILL


def assert_all_leave(fifo: IO[bytes]) -> None:
    assert select.select([fifo], [], [], 600)[0], "a process that holds it open lives on"
    assert fifo.read(1) == b""


def test_job_that_takes_too_long_is_killed_and_the_next_one_runs(server: ForkServer, folder: Path):
    with pytest.raises(subprocess.TimeoutExpired):
        server.run(request_of(folder, "two_hold", str(folder / "fifo")), at_most(0))
    assert server.run(request_of(folder, "exits", "3"), at_most(600)) == 3


def test_processes_that_a_job_leaves_behind_are_killed(server: ForkServer, folder: Path):
    with open(os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as fifo:
        assert server.run(request_of(folder, "one_stays_behind", str(folder / "fifo")), at_most(600)) == 0
        assert_all_leave(fifo)


def test_jobs_die_with_the_process_that_asked_for_them(folder: Path):
    command = [sys.executable, "-c", CALLER, str(folder / "fifo"), str(folder / "output")]
    caller = subprocess.Popen(command, cwd=folder, env=environment(folder))
    with open(folder / "fifo", "rb", buffering=0) as fifo:
        assert fifo.read(1) + fifo.read(1) == b"xx", "both hold it open"
        caller.kill()
        caller.wait()
        assert_all_leave(fifo)


def test_server_that_died_is_named(server: ForkServer, folder: Path):
    with pytest.raises(ServerDied):
        server.run(request_of(folder, "ends_the_server"), at_most(600))


def test_server_that_cannot_start_says_why(folder: Path):
    with pytest.raises(ServerDied, match="No module named 'absent'"):
        ForkServer(folder, environment(folder), ("absent",))


def test_server_refuses_to_fork_with_threads(folder: Path):
    (folder / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.raises(ServerDied, match="has 2 threads"):
        ForkServer(ROOT, environment(folder), ("threaded",))
