"""The log of a run's attempts, kept in its root: when each began, was last seen, and how it ended.

An attempt that was not closed in order has failed. So the log tells how often the job fails. Rank 0 alone writes it, under the
root's lock; it is a note that is replaced whole, and holds the last attempts only.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any

from ..engine.common.notes import Note
from ..errors import CorruptError, StorageError
from ..storage import Storage

_MAX_ATTEMPTS = 1000

PRIOR_S = 86400.0
"""Until failures were seen, the estimate begins with one failure a day."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One time that the job ran.

    Attributes
    ----------
    began, seen
        When its manager was made, and when it last wrote the log; seconds since 1970.
    closed
        Whether it ended in order.
    """

    began: float
    seen: float
    closed: bool = False


class AttemptLog:
    """The attempts of a run, the one of this process as the last.

    Parameters
    ----------
    storage
        The run's root, locked by this process.
    clock
        Seconds since 1970.
    timer
        Seconds from any moment on, which no setting of the clock changes: an attempt is as long as it was.
    """

    def __init__(
        self, storage: Storage, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._timer, self._began = storage, timer, timer()
        self._earlier = read_attempts(storage)[-_MAX_ATTEMPTS + 1 :]
        began = clock()
        self._own = Attempt(began, began)
        self._write()

    def seen(self) -> None:
        """Note that this attempt is alive: called after each commit."""
        self._own = replace(self._own, seen=self._own.began + self._own_s())
        self._write()

    def close(self, *, failed: bool) -> None:
        """Note how this attempt ended."""
        self._own = replace(self._own, seen=self._own.began + self._own_s(), closed=not failed)
        self._write()

    def mtbf_s(self) -> float:
        """Estimate the mean time between failures in seconds."""
        return estimate_mtbf(self._earlier, self._own_s())

    def _own_s(self) -> float:
        return self._timer() - self._began

    def _write(self) -> None:
        with suppress(StorageError):  # the log is a help, and its store may be what has failed
            ATTEMPTS.keep(self._storage, [astuple(attempt) for attempt in (*self._earlier, self._own)])


def estimate_mtbf(earlier: list[Attempt], own_s: float = 0.0) -> float:
    """Divide the time that all attempts ran by the number that failed; `PRIOR_S` and one failure count as seen before.

    >>> day = 86400.0
    >>> estimate_mtbf([]) / day, estimate_mtbf([Attempt(0, 3 * day), Attempt(0, 4 * day, closed=True)]) / day
    (1.0, 4.0)
    """
    ran = sum(max(attempt.seen - attempt.began, 0.0) for attempt in earlier)
    failures = sum(not attempt.closed for attempt in earlier)
    return (PRIOR_S + ran + own_s) / (failures + 1)


def read_attempts(storage: Storage) -> list[Attempt]:
    """Read the attempts so far; none, with a warning, where the log is damaged or cannot be read."""
    try:
        return ATTEMPTS.read(storage) or []
    except (CorruptError, StorageError) as error:
        warnings.warn(f"{error}; pass mtbf= until it has seen some failures", stacklevel=3)
        return []


def _parsed(rows: Any) -> list[Attempt]:
    found = [Attempt(float(began), float(seen), bool(closed)) for began, seen, closed in rows]
    if not all(math.isfinite(attempt.seen - attempt.began) for attempt in found):
        raise ValueError("a time that is no number")
    return found


ATTEMPTS = Note(
    ".reshard_ckpt.attempts",
    1,
    1 << 20,
    _parsed,
    "the log of the run's attempts begins anew in its place, without those of before",
)
"""The note of a run's attempts, in its root."""
