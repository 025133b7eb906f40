"""A time limit for calls that may block in another library: `bounded` for any call, `BoundedStore` for a key-value store.

1. `bounded` makes the call in another thread. When the time is over, the caller goes on, and the thread stays with the stuck
   call. Threads are daemons, so a stuck one does not keep the process from ending. A free thread waits for the next call, because
   starting a thread takes longer than the reply of a store.
2. After a missed reply a `StoreConnection` is lost: every `BoundedStore` on it fails at once, so nobody waits for that store a
   second time. The next `StoreConnection.open` connects anew.
3. Waiting for a key (`BoundedStore.begin_get`) blocks in the store's server, and would block the same client for all other calls.
   So a `StoreConnection` keeps further clients, one for each wait under way. Where no further client can be made, `PollingWait`
   asks the store for the key again and again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError

T = TypeVar("T")

_SLICE_S = 0.5
_KEPT_S = 2.0
"""Seconds that a thread waits for its next call before it ends, so that no thread stays after a save or a load."""

_INTERRUPT_S = 5.0
"""Seconds that an interrupted wait gives the call under way to end, before the exception of the signal handler goes on."""

_LEAST_S, _LAST_S = 1.0, 4.0
"""The least and the most seconds that a store gets to answer after the deadline, when a rank that gives up still tells the other
ranks: `timeout_s`, but within these two bounds. So a rank gives up after at most `timeout_s` and 5 s, also if the store hangs."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.05
"""The shortest and the longest pause, in seconds, before a small job asks again for a key; a server answers some 50,000 requests
a second."""

_IDLE_S = 60.0
"""Seconds after which a connection is tried before it is used again: proxies and firewalls reset connections that are idle."""

_LATER_S = 60.0
"""Seconds that a wait in the store's server lasts longer than its caller waits."""

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores


class _Call(Generic[T]):
    """A function call that another thread makes; `end` is called once the result or the error is there."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._done = threading.Lock()
        self._done.acquire()

    def make(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def ends(self, within_s: float) -> bool:
        """Wait at most `within_s` for the call to end; return whether it has ended. Only one thread may wait."""
        return self._ended or self._done.acquire(timeout=max(within_s, 0.0))

    def end(self) -> None:
        self._ended = True  # before the lock is released: an interrupt may come when it has just been acquired
        self._done.release()

    def outcome(self) -> T:
        """Return the result of a call that has ended, or raise its error."""
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self._error = None  # its traceback refers to this


class PollingWait:
    """A wait that calls `done` again and again in the waiting thread. Each pause is a tenth of the time waited so far.

    Parameters
    ----------
    done
        Returns whether the wait is over; not called again after it has returned True.
    first_s, last_s
        The shortest and the longest pause between two calls of `done`.
    outcome
        Called after the wait; returns the result, such as the value of a key.
    """

    def __init__(
        self, done: Callable[[], bool], *, first_s: float = 0.0005, last_s: float = 0.05, outcome: Callable[[], bytes] = bytes
    ) -> None:
        self._done, self._first_s, self._last_s, self.outcome = done, first_s, last_s, outcome
        self._began = self._ask_at = time.monotonic()

    def ends(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds; return whether `done` has returned True."""
        until = time.monotonic() + within_s
        while True:
            if (now := time.monotonic()) >= self._ask_at:
                if self._done():
                    return True
                now = time.monotonic()
                self._ask_at = now + min(max((now - self._began) / 10, self._first_s), self._last_s)
            if now >= until:
                return False
            time.sleep(min(self._ask_at, until) - now)


class _Worker:
    """A daemon thread that makes the calls handed to it, one at a time, and ends if no call comes for a while."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        threading.Thread(target=self._run, name="reshard-ckpt-call", daemon=True).start()

    def begin(self, call: _Call[Any]) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_KEPT_S)
            except Empty:
                try:
                    _IDLE.remove(self)
                except ValueError:
                    continue  # a caller has just taken this worker, and its call is about to come
                return
            call.make()
            _IDLE.append(self)  # before `end`: the waiting thread may use this worker for its next call
            call.end()
            del call


_IDLE: list[_Worker] = []

os.register_at_fork(after_in_child=_IDLE.clear)


def bounded(call: Callable[[], T], timeout_s: float, what: str, *, look: Callable[[], None] | None = None) -> T:
    """Make a call that may block, and wait at most `timeout_s` for its result, which is returned.

    Raise `PeerError` if the time is over. The call goes on in its thread, so its arguments must not be used any more.

    Parameters
    ----------
    what
        The beginning of the error message, such as "the ranks did not meet".
    look
        Called about twice a second while the call is under way. It may raise, for example if the call can never return.
    """
    made = _begin(call)
    if made is None:
        return call()
    waited = 0.0
    while not _is_done(made, min(_SLICE_S, timeout_s - waited)):
        if waited >= timeout_s:
            raise PeerError(f"{what} within {timeout_s:g} s")
        # Counted in slices: if this process was stopped (SIGSTOP) meanwhile, it has not waited, and the reply may be there.
        waited += _SLICE_S
        if look is not None:
            look()
    return made.outcome()


def _begin(call: Callable[[], T]) -> _Call[T] | None:
    """Begin a call in another thread. Return None if the interpreter is about to end and can start no thread."""
    try:
        worker = _IDLE.pop() if _IDLE else _Worker()
    except IndexError:  # another thread was faster
        worker = _Worker()
    except RuntimeError:
        return None
    made = _Call(call)
    worker.begin(made)
    return made


def _is_done(made: _Call[Any], seconds: float) -> bool:
    try:
        return made.ends(seconds)
    except BaseException:  # raised by the handler of a signal
        made.ends(_INTERRUPT_S)
        raise


def holding(lock: threading.Lock, call: Callable[[], T], timeout_s: float, what: str) -> T:
    """Take a lock, make a call, release the lock, and return the result of the call.

    The lock is released also if an interrupt comes, at whatever moment. Before that, another thread may hold the lock for long,
    while that thread waits for other ranks. Raise `PeerError` if the lock was not free within `timeout_s`.
    """
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (True,), (timeout_s,)))  # one call: no interrupt comes before its result is kept
        if True not in taken:
            raise PeerError(f"{what} within {timeout_s:g} s: another thread of this process still waits for the same ranks")
        return call()
    finally:
        if True in taken:
            lock.release()


@contextmanager
def named_failure(what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Turn torch's errors in the ``with`` block (a rank is absent, a store does not answer) into a `PeerError` about `ranks`.

    Raise `PeerError` if torch raised an error. Torch does not say which rank is at fault.
    """
    try:
        yield
    except RuntimeError as error:  # also torch's DistError
        raise PeerError(
            f"{what} ({error}); another rank, or the process that hosts the job's key-value store (the launcher or rank 0), "
            "has probably ended, or hangs: its log says why",
            ranks,
        ) from error


Waiting = _Call[bytes] | PollingWait
"""A wait for a key under way: ``ends(within_s)`` waits and tells whether the key is there, `outcome` returns the key's value."""


class StoreLost(DistError):
    """Raised if a store did not reply in time, now or in an earlier call on this connection."""


class StoreConnection:
    """A connection to a key-value store; after it is lost, the next `open` connects anew.

    Parameters
    ----------
    connect
        Takes the seconds that it may need, and returns a client of the store. May raise the errors of `open`.
    client
        The first client, if there is one already.
    """

    def __init__(self, connect: Callable[[float], Any], client: Any = None) -> None:
        self._connect, self._client = connect, client
        self._lock = threading.Lock()
        self._opened_at = time.monotonic()
        self._can_wait = True
        self.free: list[Any] = []

    def open(self, timeout_s: float) -> BoundedStore:
        """Return the store with a limit of `timeout_s` seconds for each reply; connect first if there is no connection.

        Raise `PeerError` if no connection was made within `timeout_s`, and `DistError` if the store does not answer.
        """

        def opened() -> BoundedStore:
            began, left_s = time.monotonic(), timeout_s
            if self._client is not None and began - self._opened_at > _IDLE_S:
                try:
                    BoundedStore(self._client, self, _Limit(timeout_s)).check([""])
                except StoreLost:  # no reply came, and no time is left
                    raise
                except DistError:  # it was reset; nothing was under way, so a new one is as good
                    left_s -= time.monotonic() - began
            if self._client is None:
                self._client = self._connect(left_s)
            self._opened_at = time.monotonic()
            return BoundedStore(self._client, self, _Limit(timeout_s))

        return holding(self._lock, opened, timeout_s, "the job's key-value store was not reached")

    def mark_lost(self, client: Any) -> None:
        """Drop the client in use if it is this one, which did not answer, and all spare ones: the next `open` connects anew."""
        if self._client is client:
            self._client, self.free = None, []

    def has(self, client: Any) -> bool:
        """Tell whether this client is still in use: False once it was dropped because it did not answer."""
        return self._client is client

    def free_client(self, client: Any, timeout_s: float) -> Any:
        """Return a client of the store that no other call uses: from the list `free`, or a new one. None if no more can be made.

        The caller puts it into `free` afterwards.
        """
        with suppress(IndexError):
            return self.free.pop()
        if self._can_wait and hasattr(client, "clone"):
            try:
                return bounded(client.clone, timeout_s, "no further connection came")
            except (PeerError, RuntimeError):  # such as too many open files
                self._can_wait = False
        return None


class _Limit:
    """The time limits for replies of a store: `timeout_s` for each reply, and a deadline `ends` (`time.monotonic`) for all."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.ends = timeout_s, float("inf")

    def left(self) -> float:
        """Return the seconds that the next reply may take.

        They are never less than `timeout_s`, which counts here as 1 s at least and 4 s at most: a living store answers within
        that.
        """
        least = min(max(self.timeout_s, _LEAST_S), _LAST_S)
        return max(min(self.ends - time.monotonic(), self.timeout_s), least)


class BoundedStore:
    """A key-value store whose calls raise `DistError` if a reply does not come in time; it uses a shared `StoreConnection`."""

    def __init__(self, client: Any, connection: StoreConnection, limit: _Limit, prefix: str = "") -> None:
        self._client, self._connection, self._limit, self._prefix = client, connection, limit, prefix
        self._store = self._part_of(client)

    def _part_of(self, client: Any) -> Any:
        return _STORES.PrefixStore(self._prefix, client) if self._prefix else client

    @classmethod
    def of(cls, store: Any, timeout_s: float) -> BoundedStore:
        """Return `store` with a limit of `timeout_s` seconds for each reply; the same object if it has that limit already."""
        if not isinstance(store, BoundedStore):
            return StoreConnection(lambda _: store).open(timeout_s)
        if store._limit.timeout_s == timeout_s:
            return store
        return cls(store._client, store._connection, _Limit(timeout_s), store._prefix)

    def below(self, name: str) -> BoundedStore:
        """Return a view of the store that puts ``name/`` before all keys, with the same time limit."""
        return BoundedStore(self._client, self._connection, self._limit, f"{self._prefix}/{name}" if self._prefix else name)

    def allow(self, seconds: float) -> None:
        """Limit the time that all further replies of the store may take together to `seconds`.

        Once it is used up, each further reply still gets a few seconds (`_Limit.left`).
        """
        self._limit.ends = time.monotonic() + seconds

    def clone(self, timeout_s: float) -> Any:
        """Return a new connection as a store of torch; before torch 2.8, the same connection.

        It may block: call it through `bounded`.
        """
        if not hasattr(self._store, "clone"):
            return self._store
        client = self._store.clone()
        client.set_timeout(timedelta(seconds=timeout_s))
        return client

    def begin_get(self, key: str, timeout_s: float, num_asking: int = 1) -> Waiting:
        """Begin to wait for a key, and return the wait, whose outcome is the value of the key.

        To give up, write the key yourself.

        The wait blocks in the store's server, on a client of its own. If no further client can be made (before torch 2.8, or
        with too many open files) or the interpreter is ending, the wait asks the store again and again. `num_asking` ranks may do
        so at once: the more they are, the longer the pauses, so that the server has time for other requests.
        """
        if not self._connection.has(self._client):
            raise StoreLost("it has not replied before")
        first_s, last_s = max(_FIRST_PAUSE_S, num_asking * 20e-6), max(_LAST_PAUSE_S, num_asking * 100e-6)
        polled = PollingWait(lambda: self.check([key]), first_s=first_s, last_s=last_s, outcome=lambda: self.get(key))
        client = self._connection.free_client(self._client, self._limit.left())
        if client is None:
            return polled
        free = self._connection.free

        def get() -> bytes:
            store = self._part_of(client)
            # torch prints a warning when this time is over. Callers have shorter limits, so only a server that hangs causes it.
            store.set_timeout(timedelta(seconds=timeout_s + _LATER_S))
            value = bytes(store.get(key))
            free.append(client)
            return value

        return _begin(get) or polled

    def append(self, key: str, value: bytes, /) -> None:
        self._ask("append", key, value)

    def add(self, key: str, amount: int, /) -> int:
        return int(self._ask("add", key, amount))

    def set(self, key: str, value: bytes | str, /) -> None:
        self._ask("set", key, value)

    def get(self, key: str, /) -> bytes:
        return bytes(self._ask("get", key))

    def check(self, keys: list[str], /) -> bool:
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def multi_set(self, keys: list[str], values: list[bytes], /) -> None:
        self._ask("multi_set", keys, values)

    def delete_key(self, key: str, /) -> bool:
        return bool(self._ask("delete_key", key))

    def _ask(self, method: str, *args: Any) -> Any:
        return self.on_worker(lambda store: getattr(store, method)(*args))

    def on_worker(self, requests: Callable[[Any], T]) -> T:
        """Call ``requests(store)`` with torch's store on a worker thread, and return its result.

        Put several requests into one function: handing over to the thread costs more than a request. Raise `DistError` if the
        replies did not come in time, or the store has failed.
        """
        if not self._connection.has(self._client):
            raise StoreLost("it has not replied before")
        under_way = False

        def ask() -> T:
            nonlocal under_way
            under_way = True
            try:
                return requests(self._store)
            finally:
                under_way = False

        try:
            return bounded(ask, self._limit.left(), "no reply came")
        except DistError:
            self._connection.mark_lost(self._client)
            raise
        except PeerError as error:
            self._connection.mark_lost(self._client)
            raise StoreLost(str(error)) from None
        except BaseException:
            if under_way:  # an interrupt: later calls must not overtake this one
                self._connection.mark_lost(self._client)
            raise
