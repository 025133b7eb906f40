"""Without a process group: a session of one, or an error that says what was forgotten."""

from __future__ import annotations

import pytest

from reshard_ckpt.comm import Comm, SoloComm, open_session
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
