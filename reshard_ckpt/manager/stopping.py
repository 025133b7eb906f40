"""A stop that all ranks make at the same step, although every rank counts its steps by itself.

1. A rank counts its own steps (`AgreedStop.reached`). Until a rank is told to stop, this uses neither the store nor the network.
2. A thread of each rank polls the key "wanted" of the store, and sets it once its own rank is told to stop.
3. When a thread finds the key set, it holds its rank back from the next step, and posts the number of steps that the rank has
   begun. This needs no step of any rank, so no rank waits for another's training, however far apart they are.
4. The rank that posts last decides: all stop at the step after the furthest one. No rank has begun that step, as all are held.
5. All ranks go on up to that step; the thread of rank 0 ends last, because its process may host the store.

A rank that has finished its last step has closed its stop, and posted that. Then no stop is decided: the other ranks have only
the same steps left, and end by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ..comm.bounded import BoundedStore, PollingWait
from ..comm.payloads import KeyValueStore
from ..comm.sessions import current_group
from ..comm.wire import name_ranks
from ..errors import PeerError

_SLICE_S = 0.05
_FAREWELL_S = 5.0
_NEVER = -1
"""Posted by a rank that takes no further step, in place of its number of steps. Then it is also the decision: no rank stops."""


@contextmanager
def open_stop(
    name: str, wanted: Callable[[], bool], *, process_group: Any = None, timeout_s: float = 600
) -> Iterator[Callable[[], bool]]:
    """Let all ranks of a process group stop at the same step, once one of them is told to stop, while the ``with`` block lasts.

    Yields a function that tells before each step whether to stop: `AgreedStop.reached`, or `wanted` itself in a single process.

    Parameters
    ----------
    name
        A name for this stop, the same on all ranks; no other stop may have it.
    wanted
        Returns whether this rank has been told to stop; called again and again in another thread.
    process_group, timeout_s
        As for `open_session`.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        yield wanted
        return
    with AgreedStop(group.named(name, timeout_s), group.rank, group.size, wanted, timeout_s=timeout_s) as stop:
        yield stop.reached


class AgreedStop(AbstractContextManager["AgreedStop"]):
    """Lets ranks agree on the step at which all of them stop. Each rank makes one; its thread runs during the ``with`` block.

    Parameters
    ----------
    store
        The key-value store in which ranks post messages, the same on all ranks; nothing else may use its keys.
    wanted
        Returns whether this rank has been told to stop; called in the thread.
    timeout_s
        Seconds that a rank, once it is held back, waits for the other ranks to say how many steps they have begun.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, wanted: Callable[[], bool], *, timeout_s: float) -> None:
        self._store, self._rank, self._size = BoundedStore.of(store, timeout_s), rank, size
        self._wanted, self._timeout_s = wanted, timeout_s
        # All ranks together ask the store at most 2,000 times a second.
        self._pause_s = min(5.0, max(0.1, size / 2000))
        self._lock = threading.Lock()
        self._num_steps, self._stop_at = 0, _NEVER
        self._held_back = self._posted = False
        self._decided, self._closed = threading.Event(), threading.Event()
        self._error: PeerError | None = None
        self._thread = threading.Thread(target=self._watch, name="reshard-ckpt-stop", daemon=True)

    def __enter__(self) -> AgreedStop:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()  # it ends: each of its waits has a limit
        with suppress(Exception):  # the others have ended, and the store with them
            self._post(_NEVER)
            if self._store.add("gone", 1) == self._size:
                for key in ("wanted", "steps", "posted", "stop at", "informed", "gone"):
                    self._store.delete_key(key)

    def reached(self) -> bool:
        """Count one more step, and return whether all ranks stop at this step or have stopped before.

        Raise `PeerError` if a rank wants to stop, and others did not answer; or the store is gone.
        """
        with self._lock:
            self._num_steps += 1
            if not self._held_back:
                return False
        self._decided.wait()
        if self._error is not None:
            raise self._error
        return _NEVER < self._stop_at <= self._num_steps

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self._pause_s):
                if self._wanted():
                    self._store.set("wanted", b"1")
                if self._store.check(["wanted"]):
                    self._agree()
                    return
        except Exception as error:  # any error: if the thread ended silently, the ranks would train on for ever
            self._error = PeerError(
                f"the job's key-value store does not answer any more ({error}), so this rank cannot learn of a stop; "
                "the process that hosts it, often rank 0, has probably ended, or hangs: its log says why",
                ranks=(0,),
            )
        finally:
            with self._lock:
                self._held_back = self._held_back or self._error is not None
            self._decided.set()

    def _agree(self) -> None:
        with self._lock:
            self._held_back, num_steps = True, self._num_steps
        self._post(num_steps)
        if not self._wait(lambda: self._store.check(["stop at"]), self._timeout_s):
            if self._closed.is_set():
                return
            absent = sorted(set(range(self._size)) - self._all_posted().keys())
            self._error = PeerError(
                f"a rank was told to stop, and {name_ranks(absent)} did not report within {self._timeout_s:g} s how far it is; "
                "its own log says why",
                ranks=absent,
            )
            return
        self._stop_at = int(self._store.get("stop at"))
        self._store.add("informed", 1)
        if self._rank == 0:
            self._wait(lambda: self._store.add("informed", 0) + self._store.add("gone", 0) >= self._size, _FAREWELL_S)

    def _post(self, num_steps: int) -> None:
        """Write to the store, once, how many steps this rank has begun. The last rank to do so decides at which step all stop."""
        if self._posted:
            return
        self._posted = True
        self._store.append("steps", b"%d:%d " % (self._rank, num_steps))
        if self._store.add("posted", 1) == self._size:
            posted = self._all_posted().values()
            self._store.set("stop at", b"%d" % (_NEVER if _NEVER in posted else max(posted) + 1))

    def _all_posted(self) -> dict[int, int]:
        pairs = (pair.split(b":") for pair in self._store.get("steps").split())
        return {int(rank): int(num_steps) for rank, num_steps in pairs}

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Call `done` again and again. Return True once it does, False if the time is over or the ``with`` block has ended."""
        polled, until = PollingWait(done), time.monotonic() + timeout_s
        while not polled.ends(min(_SLICE_S, timeout_s)):
            if self._closed.is_set() or time.monotonic() >= until:
                return False
        return True
