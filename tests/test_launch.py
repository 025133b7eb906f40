from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fork_server import num_threads
from tests.launch import ROOT, RanksFailed, run_ranks


def _sum_of_ranks(scale: int) -> tuple[int, int, str]:
    total = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.environ["WORLD_SIZE"]


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def _hangs() -> None:
    threading.Event().wait()


def test_every_rank_returns_its_own():
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 30, "3"), (1, 30, "3"), (2, 30, "3")]


def test_error_of_a_rank_is_shown():
    with pytest.raises(RanksFailed, match="rank 1 has had enough"):
        run_ranks(_one_fails, 2)


def test_hang_is_ended_and_its_stack_shown():
    with pytest.raises(RanksFailed, match="in _hangs"):
        run_ranks(_hangs, 2, timeout_s=2)
    assert run_ranks(_sum_of_ranks, 1, 10) == [(0, 0, "1")]


def _threads_left() -> int:
    """Count the threads; the one that faulthandler had before may take a moment to end."""
    end = time.monotonic() + 60
    while num_threads() > 2 and time.monotonic() < end:
        time.sleep(0.01)
    return num_threads()


def _state_of_process() -> dict[str, Any]:
    """What a rank finds, before it changes all of it."""
    umask = os.umask(0)
    state = {
        "threads": _threads_left(),
        "folder": os.getcwd(),
        "umask": umask,
        "variables": (os.environ.get("SET_BY_TEST"), os.environ.get("SET_BY_RANK")),
        "in torch": hasattr(torch, "set_by_rank"),
        "handlers": [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGPIPE)],
    }
    os.chdir("/")
    os.environ["SET_BY_RANK"] = "yes"
    torch.set_by_rank = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return state


def test_every_launch_finds_the_state_of_a_new_process(monkeypatch: pytest.MonkeyPatch):
    for variable, umask in (("one", 0o022), ("two", 0o077)):
        monkeypatch.setenv("SET_BY_TEST", variable)
        before = os.umask(umask)
        try:
            found = run_ranks(_state_of_process, 2, init=False)
        finally:
            os.umask(before)
        expected = {
            "threads": 2,  # with that of faulthandler
            "folder": str(ROOT),
            "umask": umask,
            "variables": (variable, None),
            "in torch": False,
            "handlers": [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN],
        }
        assert found == [expected] * 2


def _ends_the_launcher() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def test_death_of_the_launcher_is_reported_and_leaves_the_server():
    with pytest.raises(RanksFailed, match="exit status -9"):
        run_ranks(_ends_the_launcher, 2, init=False)
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 10, "2"), (1, 10, "2")]
