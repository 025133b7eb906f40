"""Ranks as threads over one store: all stop at the same step, however far they are apart, and nobody waits for a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from reshard_ckpt.errors import PeerError
from reshard_ckpt.manager import stopping
from reshard_ckpt.manager.stopping import AgreedStop
from tests.comm.threads import Server, run_together
from tests.deadlines import over_when

Body = Callable[[AgreedStop, threading.Event], Any]


def run_ranks(server: Server, bodies: list[Body], *, gone: tuple[int, ...] = ()) -> list[Any]:
    """What each rank's body returns or raises; it is given its stop, and the event that tells this rank to stop."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        told = threading.Event()
        store = dist.PrefixStore("stop", server.store)
        try:
            with AgreedStop(store, rank, len(bodies), told.is_set, timeout_s=600) as stop:
                outcomes[rank] = bodies[rank](stop, told)
        except BaseException as error:
            outcomes[rank] = error

    run_together(run, {*range(len(bodies))} - {*gone})
    return outcomes


def step_of_stop(stop: AgreedStop, steps: int = 0) -> int:
    """The number of the first read that says stop, after some that have not."""
    while not stop.reached():
        steps += 1
    assert stop.reached(), "it stays so"
    return steps + 1


@pytest.fixture(params=["hash", "tcp"])
def server(request: pytest.FixtureRequest) -> Server:
    return Server(request.param)


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_stop_at_the_same_step_however_fast_they_go(server: Server, size: int):
    begun = threading.Barrier(size)

    def body(rank: int) -> Body:
        def run(stop: AgreedStop, told: threading.Event) -> int:
            ahead = 1000 * rank
            assert not any(stop.reached() for _ in range(ahead))
            begun.wait()  # so far ahead of each other they are when the signal comes
            if rank == 1:
                told.set()
            return step_of_stop(stop, ahead)

        return run

    found = run_ranks(server, [body(rank) for rank in range(size)])
    assert len(set(found)) == 1, found
    assert found[0] > 1000 * (size - 1)
    assert server.num_keys() == 0


def test_no_rank_waits_for_a_step_of_another(server: Server):
    """The last rank takes its next step only when the first has taken 100 more: a rendezvous at a step would never end."""
    far = threading.Event()

    def behind(stop: AgreedStop, told: threading.Event) -> int:
        steps = 0
        while not stop.reached():
            steps += 1
            if steps == 116:
                far.set()  # what the other needs, to go on from its 16th
        far.set()
        return steps + 1

    def ahead(stop: AgreedStop, told: threading.Event) -> int:
        assert not any(stop.reached() for _ in range(16))
        told.set()
        assert far.wait(600)
        return step_of_stop(stop, 16)

    first, second = run_ranks(server, [behind, ahead])
    assert first == second


def test_nobody_stops_where_nobody_is_told_to(server: Server):
    assert run_ranks(server, [lambda stop, told: [stop.reached() for _ in range(50)]] * 3) == [[False] * 50] * 3
    assert server.num_keys() == 0


def test_a_rank_that_has_ended_stops_nobody_before_the_end(server: Server):
    """Rank 0 has taken all its 20 steps when rank 1 is told: all take 20, none is left behind in a last save."""
    told, store = threading.Event(), dist.PrefixStore("stop", server.store)
    with AgreedStop(store, 1, 2, told.is_set, timeout_s=600) as second:
        with AgreedStop(store, 0, 2, told.is_set, timeout_s=600) as first:
            assert [first.reached() for _ in range(20)] == [False] * 20
        told.set()
        second._thread.join()
        assert [second.reached() for _ in range(20)] == [False] * 20
    assert server.num_keys() == 0


def test_a_rank_that_does_not_answer_is_named(server: Server):
    def body(stop: AgreedStop, told: threading.Event) -> int:
        told.set()
        return step_of_stop(stop)

    store = dist.PrefixStore("stop", server.store)
    with over_when(lambda: store.check(["posted"]) and store.add("posted", 0) == 2, stopping):
        found = run_ranks(server, [body] * 3, gone=(1,))
    for rank in (0, 2):
        assert isinstance(found[rank], PeerError)
        assert found[rank].ranks == (1,)
        assert "rank 1 did not report" in str(found[rank])


@pytest.mark.parametrize("kind", [dist.DistNetworkError, RuntimeError])
def test_a_store_that_is_gone_is_an_error_by_name(kind: type[Exception]):
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                raise kind("connection reset")

            return call

    with AgreedStop(Gone(), 0, 2, lambda: False, timeout_s=600) as stop:  # type: ignore[arg-type]
        stop._thread.join(600)
        with pytest.raises(PeerError, match="key-value store does not answer"):
            stop.reached()
