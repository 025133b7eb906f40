"""Without a process group: a session of one, or an error that says what was forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from reshard_ckpt.comm import Comm, SoloComm, launched_group, open_session, open_session_by_name, open_turn, shared_store
from reshard_ckpt.errors import UsageError
from tests.comm.contract import CommContract, Run


class TestSoloComm(CommContract):
    @pytest.fixture
    def run(self) -> Run:
        return lambda body: [body(SoloComm())]


@pytest.mark.parametrize("world_size", [None, "1", "", "many"])
def test_a_process_on_its_own_is_a_session(monkeypatch: pytest.MonkeyPatch, world_size: str | None):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with open_session("save", "/ckpt") as comm:
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.gather(b"x") == [b"x"]


def test_an_error_leaves_a_session_of_one_as_it_is():
    error = ValueError("boom")

    def fail(comm: Comm) -> None:
        raise error

    with pytest.raises(ValueError) as caught, open_session("save", "/ckpt") as comm:
        fail(comm)
    assert caught.value is error


def test_a_world_without_a_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 4, but .* call torch\.distributed\.init_process_group first"):
        open_session("save", "/ckpt")


def test_a_process_group_without_torch_distributed_is_an_error():
    with pytest.raises(UsageError, match="not initialized"):
        open_session("save", "/ckpt", process_group=object())


@pytest.mark.parametrize("timeout_s", ["10", 0, -1, True, float("nan"), float("inf"), None])
def test_what_is_no_time_is_refused(timeout_s: Any):
    for begin in (
        lambda: open_session("save", "/ckpt", timeout_s=timeout_s),
        lambda: open_turn("save", "/ckpt", timeout_s=timeout_s),
        lambda: open_session_by_name("save", "/ckpt", timeout_s=timeout_s),
        lambda: shared_store("name", timeout_s=timeout_s),
        launched_group(timeout_s).__enter__,
    ):
        with pytest.raises(UsageError, match=r"timeout_s=.*: pass seconds, more than 0"):
            begin()
