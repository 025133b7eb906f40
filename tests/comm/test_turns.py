"""Ranks as threads that meet over one store before their session, which is opened only where something is amiss."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist

from reshard_ckpt.comm import CHANGED, FAILED, Turn, interrupts_held
from reshard_ckpt.comm import store as store_module
from reshard_ckpt.comm.calls import call_of
from reshard_ckpt.comm.group import SessionCounter
from reshard_ckpt.comm.sessions import Place
from reshard_ckpt.comm.turns import Meeting
from reshard_ckpt.errors import PeerError
from tests.comm.threads import run_together

CALL = call_of("reshard_live", "")


def meet(store: Any, size: int, comes: Mapping[int, Callable[[Meeting], Any]], **options: Any) -> dict[int, Any]:
    """Let some ranks come to one meeting; returns what each gets, or the error that it raises."""
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        meeting = Meeting(store, rank, size, title="reshard_live ''", **{"timeout_s": 600, **options})
        try:
            found[rank] = comes[rank](meeting)
        except PeerError as error:
            found[rank] = error

    run_together(one, comes)
    return found


def flags(value: int) -> Callable[[Meeting], int]:
    return lambda meeting: meeting.meet(value, lambda: None)


@pytest.mark.parametrize("given", [(0, 0, 0), (0, FAILED, 0), (CHANGED, 0, CHANGED), (CHANGED, FAILED, CHANGED), (3, 3, 3)])
def test_all_ranks_get_the_flags_of_all_and_leave_no_key_once_forgotten(given: tuple[int, ...]):
    store = dist.HashStore()
    found = meet(store, 3, {rank: flags(value) for rank, value in enumerate(given)})
    assert found == dict.fromkeys(range(3), given[0] | given[1] | given[2])
    Meeting(store, 0, 3, title="", timeout_s=600).forget()
    assert store.num_keys() == 0


def test_a_rank_that_is_late_is_named_to_all_and_to_itself_when_it_comes():
    store = dist.HashStore()
    first = meet(store, 3, {0: flags(0), 2: flags(0)}, timeout_s=0.05)
    later = meet(store, 3, {1: flags(0)})
    for error in (*first.values(), *later.values()):
        assert isinstance(error, PeerError)
        assert 1 in error.ranks  # and one that came just after the other had waited too long
        assert "did not arrive within 0.05 s" in str(error)
    assert len({str(error) for error in (*first.values(), *later.values())}) == 1


def test_a_rank_whose_process_has_ended_is_not_waited_for():
    found = meet(dist.HashStore(), 3, {0: flags(0), 2: flags(0)}, timeout_s=3600, ended=lambda: frozenset({1}))
    for error in found.values():
        assert isinstance(error, PeerError)
        assert error.ranks == (1,)
        assert "reshard_live '': rank 1 ended before this began" in str(error)


def test_a_rank_that_holds_back_ctrl_c_waits_for_nobody_and_tells_the_others():
    store = dist.HashStore()

    def come() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            Meeting(store, 0, 2, title="reshard_live ''", timeout_s=60).meet(0, lambda: None)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a shell starts in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            come()
    finally:
        signal.signal(signal.SIGINT, before)
    told = meet(store, 2, {1: flags(0)})[1]
    assert str(told) == str(raised.value.__context__) == "reshard_live '': rank 0 was interrupted"


class KilledAfter:
    """A store for a rank that is killed after so many calls to it, the first of which waits for another rank's."""

    def __init__(self, store: Any, others: threading.Event, calls: int) -> None:
        self._store, self._others, self._left = store, others, calls
        self.killed = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._others.wait()
        if not self._left:
            self.killed.set()
            raise PeerError("killed")
        self._left -= 1
        return getattr(self._store, name)  # type: ignore[no-any-return]


def test_a_meeting_that_was_refused_leaves_no_key_once_the_last_rank_has_come():
    store, options = dist.HashStore(), {"title": "reshard_live ''", "timeout_s": 0.05}

    def come(rank: int) -> Callable[[Meeting], None]:
        turn = Turn(Place(lambda number: Meeting(store, rank, 3, **options), SessionCounter(), CALL))

        def meet_or_give_up(meeting: Meeting) -> None:
            try:
                turn.meet(0, None)
            except PeerError as error:
                turn.give_up(error)
                raise

        return meet_or_give_up

    first = meet(store, 3, {rank: come(rank) for rank in (0, 2)})
    assert "did not arrive within 0.05 s" in str(first[0])
    assert store.num_keys() > 0
    meet(store, 3, {1: come(1)})
    assert store.num_keys() == 0


class Noted:
    """A store that says when a rank has done all that it does before it waits."""

    def __init__(self, store: Any, done: threading.Event) -> None:
        self._store, self._done = store, done

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("check", "clone"):
            self._done.set()
        return getattr(self._store, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_last_rank_that_is_killed_at_any_instant_holds_up_nobody(calls: int):
    store, waiting, found = dist.HashStore(), threading.Event(), []
    last = KilledAfter(store, waiting, calls)
    options = {"title": "reshard_live ''", "timeout_s": 3600, "ended": lambda: frozenset({1} if last.killed.is_set() else ())}

    def first() -> None:
        try:
            found.append(Meeting(Noted(store, waiting), 0, 2, **options).meet(CHANGED, lambda: None))
        except PeerError as error:
            found.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(PeerError, match="killed"):
        Meeting(last, 1, 2, **options).meet(0, lambda: None)
    thread.join()
    assert found == [CHANGED] if calls == 2 else "rank 1 ended before this began" in str(found[0])


def test_a_rank_that_waits_sees_one_that_calls_something_else_or_gives_up():
    def come(meeting: Meeting) -> Any:
        def look() -> None:
            if meeting.is_for_others(CALL):
                raise PeerError("seen")

        return meeting.meet(0, look)

    def save(meeting: Meeting) -> None:
        meeting._arrive(call_of("save", "/ckpt"), shown=True)

    found = meet(dist.HashStore(), 2, {0: come, 1: save}, timeout_s=3600)
    assert str(found[0]) == "seen"
    found = meet(dist.HashStore(), 2, {0: come, 1: lambda meeting: meeting.abort(ValueError("no"))}, timeout_s=3600)
    assert str(found[0]) == "seen"


def test_a_process_that_must_end_waits_no_longer():
    """It is told while it waits, which is when it looks for the first time."""
    found = meet(dist.HashStore(), 2, {0: lambda meeting: meeting.meet(0, store_module.give_up_sessions)}, timeout_s=3600)
    assert "given up, as this process was told to end" in str(found[0])
