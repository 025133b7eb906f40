"""Calls that may block outside of our hands, awaited for a limited time: `bounded`, and the replies of a key-value store.

1. `bounded` has another thread make the call. When the time is over its caller goes on, and the call, whenever it returns, is
   that thread's alone. The threads are daemons, so one that is stuck does not keep the process from ending. They are kept for
   the next call: starting one takes longer than a store takes to answer.
2. A `Line` is a connection to a store. Once a reply was missed, the line is lost: what is open on it (`BoundedStore`) fails at
   once from then on, so that no time is waited for twice, and whoever opens it next connects anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError

T = TypeVar("T")

_SLICE_S = 0.5
_KEPT_S = 2.0
"""How long a thread waits for its next call before it ends, so that no thread is left behind a save or a load."""

_INTERRUPT_S = 5.0
"""How long an interrupt waits for the call under way, so that what its handler does comes after it."""

_LEAST_S, _LAST_S = 1.0, 5.0
"""How long a store has to answer where a time is over already, as whoever gives up still tells the others: the time itself, but
at least the first and at most the second."""

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores


class _Call(Generic[T]):
    """A call that a thread makes: its outcome, once `done` can be acquired."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def make(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def outcome(self) -> T:
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self._error = None  # its traceback refers to this


class _Worker:
    """A thread that makes calls, one at a time."""

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
            _IDLE.append(self)  # first, so that whoever waited finds this one for its next call
            call.done.release()
            del call


_IDLE: list[_Worker] = []

os.register_at_fork(after_in_child=_IDLE.clear)


def bounded(call: Callable[[], T], timeout_s: float, what: str, *, look: Callable[[], None] | None = None) -> T:
    """Make a call that may block, and wait for it at most `timeout_s`.

    Parameters
    ----------
    what
        The subject of the error's sentence: "the ranks did not meet".
    look
        Called about twice a second while the call is under way; it may raise, as where the call can never return.

    Raises
    ------
    PeerError
        The time is over. The call goes on in its thread; nobody may use what it works on.
    """
    try:
        worker = _IDLE.pop() if _IDLE else _Worker()
    except IndexError:  # another thread was faster
        worker = _Worker()
    except RuntimeError:  # the interpreter is about to end, and starts no thread any more
        return call()
    made = _Call(call)
    worker.begin(made)
    waited = 0.0
    while not _is_done(made, min(_SLICE_S, timeout_s - waited)):
        if waited >= timeout_s:
            raise PeerError(f"{what} within {timeout_s:g} s")
        # A process that was itself stopped meanwhile has not waited for so long: the reply may be there.
        waited += _SLICE_S
        if look is not None:
            look()
    return made.outcome()


def _is_done(made: _Call[Any], seconds: float) -> bool:
    try:
        return made.done.acquire(timeout=max(seconds, 0.0))
    except BaseException:  # raised by the handler of a signal
        made.done.acquire(timeout=_INTERRUPT_S)
        raise


@contextmanager
def held(lock: threading.Lock, timeout_s: float, what: str) -> Iterator[None]:
    """Hold a lock that another thread may have while it waits for other ranks.

    Raises
    ------
    PeerError
        The time is over.
    """
    if not lock.acquire(timeout=timeout_s):
        raise PeerError(f"{what} within {timeout_s:g} s: another thread of this process still waits for the same ranks")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def named_failure(what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Raise what torch raises, where ranks do not come or a store does not answer, as an error of this package.

    Raises
    ------
    PeerError
        Torch, which does not say which rank is at fault, raised something.
    """
    try:
        yield
    except RuntimeError as error:  # also torch's DistError
        raise PeerError(
            f"{what} ({error}); another rank, or the process that hosts the job's key-value store (the launcher or rank 0), "
            "has probably ended, or hangs: its log says why",
            ranks,
        ) from error


class StoreLost(DistError):
    """A store did not reply in time, or another call on this connection has found so before."""


class Line:
    """A connection to a store, which is made anew when it was lost.

    Parameters
    ----------
    connect
        Connects within so many seconds; may raise what `open` raises.
    client
        A first connection, if there is one already.
    """

    def __init__(self, connect: Callable[[float], Any], client: Any = None) -> None:
        self._connect, self._client = connect, client
        self._lock = threading.Lock()

    def open(self, timeout_s: float) -> BoundedStore:
        """Return the store, each of whose replies may take so long.

        Raises
        ------
        PeerError
            There was no connection within that time.
        DistError
            Nobody answers.
        """
        with held(self._lock, timeout_s, "the job's key-value store was not reached"):
            if self._client is None:
                self._client = self._connect(timeout_s)
            return BoundedStore(self._client, self, _Limit(timeout_s))

    def lose(self, client: Any) -> None:
        """Say that a client does not answer."""
        if self._client is client:
            self._client = None

    def has(self, client: Any) -> bool:
        """Whether this is the client of this line still."""
        return self._client is client


class _Limit:
    """How long the replies of a store may take."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.ends = timeout_s, float("inf")

    def left(self) -> float:
        """Return the seconds that are left, at least the few in which a store that is there answers."""
        least = min(max(self.timeout_s, _LEAST_S), _LAST_S)
        return max(min(self.ends - time.monotonic(), self.timeout_s), least)


class BoundedStore:
    """The `KeyValueStore` of a line; every call raises `DistError` where no reply comes in time."""

    def __init__(self, client: Any, line: Line, limit: _Limit, store: Any = None) -> None:
        self._client, self._line, self._limit = client, line, limit
        self._store = client if store is None else store

    @classmethod
    def of(cls, store: Any, timeout_s: float) -> BoundedStore:
        """Return a store whose replies may take so long: itself where they are bounded so already."""
        if not isinstance(store, BoundedStore):
            return Line(lambda _: store).open(timeout_s)
        if store._limit.timeout_s == timeout_s:
            return store
        return cls(store._client, store._line, _Limit(timeout_s), store._store)

    def below(self, name: str) -> BoundedStore:
        """Return the keys below a name, with the same limit of time."""
        return BoundedStore(self._client, self._line, self._limit, _STORES.PrefixStore(name, self._store))

    def allow(self, seconds: float) -> None:
        """Let the replies from now on take so long in all; the few seconds of one reply are always allowed."""
        self._limit.ends = time.monotonic() + seconds

    def clone(self, timeout_s: float) -> Any:
        """Return a connection of its own as one of torch's stores; this very one before torch 2.8. To be called in `bounded`."""
        if not hasattr(self._store, "clone"):
            return self._store
        client = self._store.clone()
        client.set_timeout(timedelta(seconds=timeout_s))
        return client

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
        if not self._line.has(self._client):
            raise StoreLost("it has not replied before")
        under_way = False

        def ask() -> Any:
            nonlocal under_way
            under_way = True
            try:
                return getattr(self._store, method)(*args)
            finally:
                under_way = False

        try:
            return bounded(ask, self._limit.left(), "no reply came")
        except DistError:
            self._line.lose(self._client)
            raise
        except PeerError as error:
            self._line.lose(self._client)
            raise StoreLost(str(error)) from None
        except BaseException:
            if under_way:  # an interrupt: what comes next must not come before this
                self._line.lose(self._client)
            raise
