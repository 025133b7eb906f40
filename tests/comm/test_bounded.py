"""Calls that never return are given up in time, by name, and neither what they worked on nor their thread is in anybody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import DistError

from reshard_ckpt.comm import bounded as bounded_module
from reshard_ckpt.comm.bounded import BoundedStore, StoreConnection, StoreLost, bounded, holding
from reshard_ckpt.errors import PeerError
from tests.warm_python import warm_python


class Blocked:
    """A store of which one method does not return until it is let go."""

    def __init__(self) -> None:
        self.store, self.go = dist.HashStore(), threading.Event()
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.asked.append(name)
            if name == "check":
                assert self.go.wait(600)
            return getattr(self.store, name)(*args)

        return ask


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    store = Blocked()
    yield store
    store.go.set()


def test_what_a_call_returns_or_raises_is_its_callers():
    assert bounded(lambda: 7, 600, "it did not come") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 600, "it did not come")
    with pytest.raises(KeyboardInterrupt):
        bounded(lambda: (_ for _ in ()).throw(KeyboardInterrupt()), 600, "it did not come")


def test_a_call_that_does_not_return_is_given_up_by_name():
    go = threading.Event()
    with pytest.raises(PeerError, match=r"^rank 0 did not answer within 0.01 s$"):
        bounded(lambda: go.wait(600), 0.01, "rank 0 did not answer")
    go.set()


def test_a_call_may_be_given_up_for_another_reason():
    go = threading.Event()

    def look() -> None:
        raise PeerError("rank 1 has ended", (1,))

    with pytest.raises(PeerError, match="rank 1 has ended"):
        bounded(lambda: go.wait(600), 600, "rank 1 did not come", look=look)
    go.set()


def test_threads_are_used_again_but_not_while_their_call_is_under_way():
    go, names = threading.Event(), set()
    with pytest.raises(PeerError):
        bounded(lambda: names.add(threading.current_thread().ident) or go.wait(600), 0.01, "it did not come")
    stuck = set(names)
    own = {bounded(lambda: threading.current_thread().ident, 600, "it did not come") for _ in range(20)}
    assert len(own) == 1
    assert not own & stuck
    go.set()


def test_threads_without_calls_end_and_the_next_call_has_a_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_module, "_KEPT_S", 0.01)
    monkeypatch.setattr(bounded_module, "_IDLE", [])
    first = bounded(threading.current_thread, 600, "no reply")
    first.join(600)
    assert not first.is_alive()
    assert bounded_module._IDLE == []
    for _ in range(200):  # some of these calls come in the very moment in which a thread ends
        assert bounded(lambda: 5, 600, "no reply") == 5


def test_a_store_that_missed_a_reply_is_not_asked_again_until_it_is_reached_anew(
    blocked: Blocked, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bounded_module, "_LEAST_S", 0.0)
    anew = dist.HashStore()
    line = StoreConnection(lambda timeout_s: anew if blocked.asked else blocked)
    store = line.open(0.05)
    other = line.open(600)
    store.set("key", b"1")
    with pytest.raises(StoreLost, match="no reply came within 0.05 s"):
        store.check(["key"])
    for one in (store, other):
        with pytest.raises(DistError, match="it has not replied before"):
            one.get("key")
    assert blocked.asked == ["set", "check"]
    line.open(600).set("key", b"2")
    assert anew.get("key") == b"2"


def test_an_idle_connection_that_was_reset_is_replaced_before_it_is_used(monkeypatch: pytest.MonkeyPatch):
    """The other side has hung up meanwhile, as a proxy does; a call between two that come soon asks nothing."""
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for server in servers]
    line = StoreConnection(lambda timeout_s: clients[1], clients[0])
    line.open(600).set("key", b"1")
    servers[0] = None
    line.open(600)
    assert line.has(clients[0])
    monkeypatch.setattr(bounded_module, "_IDLE_S", 0.0)
    line.open(600).set("key", b"2")
    line.open(600).set("key", b"3")  # one that replies stays
    assert line.has(clients[1])
    assert servers[1].get("key") == b"3"


def test_what_trying_an_idle_connection_took_is_not_there_to_connect_anew():
    now, given = [0.0], []

    class Reset:
        def check(self, keys: list[str]) -> bool:
            now[0] += 40.0
            raise DistError("Connection reset by peer")

    with mock.patch.object(bounded_module, "time") as clock:
        clock.monotonic = lambda: now[0]
        line = StoreConnection(lambda timeout_s: given.append(timeout_s) or dist.HashStore(), Reset())
        now[0] = 100.0
        line.open(60)
    assert given == [20.0]


def test_replies_have_no_more_time_than_is_left_and_always_a_moment(monkeypatch: pytest.MonkeyPatch):
    now, given = [0.0], []
    with mock.patch.object(bounded_module, "time") as clock:
        clock.monotonic = lambda: now[0]
        monkeypatch.setattr(bounded_module, "bounded", lambda call, seconds, what: given.append(seconds) or call())
        store = BoundedStore.of(dist.HashStore(), 60)
        store.set("a", b"")  # each as long as it may take
        store.allow(60)
        for at in (0.0, 20.0, 58.0, 61.0):
            now[0] = at
            store.below("b").check(["a"])
        BoundedStore.of(dist.HashStore(), 3).check(["a"])
    assert given == [60, 60, 40, 4, 4, 3]  # the least is `_LAST_S`


def test_an_interrupt_waits_for_the_reply_under_way_so_that_the_next_comes_after_it(blocked: Blocked):
    store = BoundedStore.of(blocked, 600)

    def handler(*_: Any) -> None:
        blocked.go.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            store.check(["key"])
    finally:
        signal.signal(signal.SIGALRM, before)
    store.set("key", b"1")
    assert store.get("key") == b"1"


def test_an_interrupt_that_comes_with_the_reply_waits_no_longer(monkeypatch: pytest.MonkeyPatch):
    lock, waits = threading.Lock(), []

    def acquire(timeout: float = -1) -> None:
        waits.append(timeout)
        assert len(waits) <= 2, "the lock is released once"
        lock.acquire(timeout=timeout)
        if len(waits) == 2:
            raise KeyboardInterrupt

    made = SimpleNamespace(acquire=acquire, release=lock.release)
    monkeypatch.setattr(bounded_module, "threading", SimpleNamespace(Lock=lambda: made, Thread=threading.Thread))
    with pytest.raises(KeyboardInterrupt):
        bounded(lambda: 7, 600, "it did not come")


def test_a_lock_that_another_thread_keeps_is_a_named_error():
    lock = threading.Lock()
    with lock, pytest.raises(PeerError, match="did not meet within 0.01 s: another thread"):
        holding(lock, pytest.fail, 0.01, "the ranks did not meet")
    assert holding(lock, lambda: 7, 600, "the ranks did not meet") == 7
    assert not lock.locked()


def test_an_interrupt_at_any_moment_leaves_a_lock_that_is_being_taken_free():
    lock, codes = threading.Lock(), {holding.__code__}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    for moment in range(1, 1000):
        left = moment
        sys.settrace(trace)
        try:
            holding(lock, lambda: sys.settrace(None), 600, "the ranks did not meet")
            break
        except KeyboardInterrupt:
            assert not lock.locked()
    assert moment > 10


STUCK = """
import os
from reshard_ckpt.comm.bounded import bounded
from reshard_ckpt.errors import PeerError
nobody, writes = os.pipe()
try:
    bounded(lambda: os.read(nobody, 1), 0.01, "nobody came")
except PeerError as error:
    print(error)
"""


def test_a_call_that_was_given_up_does_not_keep_its_process_from_ending():
    done = subprocess.run([warm_python(), "-c", STUCK], capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (done.returncode, done.stdout) == (0, "nobody came within 0.01 s\n"), done.stderr


def test_a_forked_child_takes_none_of_its_parents_threads():
    assert bounded(lambda: 1, 600, "it did not come") == 1
    child = os.fork()
    if not child:
        os._exit(0 if bounded(lambda: 2, 600, "it did not come") == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_wait_that_asks_again_and_again_asks_less_and_less_often():
    asked: list[float] = []
    with mock.patch.object(bounded_module, "time") as clock:
        clock.monotonic.side_effect = lambda: now[0]
        clock.sleep.side_effect = lambda seconds: now.__setitem__(0, now[0] + seconds)
        now = [0.0]

        def done() -> bool:
            asked.append(now[0])
            return now[0] >= 9

        polled = bounded_module.PollingWait(done, first_s=0.1, last_s=2.0, outcome=lambda: b"there")
        assert not polled.ends(0.05)
        assert not polled.ends(0.04)  # not asked again: a tenth of a second is not over
        assert asked == [0.0]
        assert not polled.ends(5)
        assert polled.ends(60)
        assert polled.outcome() == b"there"
    assert asked[:3] == pytest.approx([0.0, 0.1, 0.2])
    assert len(asked) < 40
    assert max(later - sooner for sooner, later in pairwise(asked)) <= 2.0
