"""The log of a run's attempts, kept in its root: when each began and how it ended; and the mean time between its failures.

An attempt that was not closed has failed, so the log shows how often the job fails. Only rank 0 writes it, under the root's lock.
It is a note (`engine/common/lineage.py`) with the last 1,000 attempts, and each write replaces all of it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any

from ..engine.common.lineage import Note
from ..errors import CorruptError, StorageError
from ..storage import Storage

_MAX_ATTEMPTS = 1000

PRIOR_S = 86400.0
"""The mean time between failures in seconds that is assumed before any failure was seen: one day."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a job: from the start of its processes to their end or failure.

    Attributes
    ----------
    began, seen
        When its manager was made, and when it last wrote the log; seconds since 1970.
    closed
        Whether its manager was closed without an error.
    """

    began: float
    seen: float
    closed: bool = False


class AttemptLog:
    """The log of a run's attempts (`Attempt`: from a start of the job to its end); this process is in the last one.

    Parameters
    ----------
    storage
        The run's root, locked by this process.
    clock
        Returns seconds since 1970.
    timer
        Returns monotonic seconds. The length of an attempt is measured with it, because the clock may be set meanwhile.
    """

    def __init__(
        self, storage: Storage, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._timer, self._began = storage, timer, timer()
        self._earlier = read_attempts(storage)[-_MAX_ATTEMPTS + 1 :]
        began = clock()
        self._own = Attempt(began, began)
        self._write()

    def note_alive(self) -> None:
        """Write to the log that this attempt is alive; called after each commit."""
        self._own = replace(self._own, seen=self._own.began + self._own_s())
        self._write()

    def close(self, *, failed: bool) -> None:
        """Write to the log that this attempt has ended, and whether by a failure."""
        self._own = replace(self._own, closed=not failed)
        self.note_alive()

    def mtbf_s(self) -> float:
        """Estimate the mean time between failures in seconds."""
        return estimate_mtbf(self._earlier, self._own_s())

    def _own_s(self) -> float:
        return self._timer() - self._began

    def _write(self) -> None:
        with suppress(StorageError):  # the log is optional, and the store itself may have failed
            ATTEMPTS.keep(self._storage, [astuple(attempt) for attempt in (*self._earlier, self._own)])


def estimate_mtbf(earlier: list[Attempt], own_s: float = 0.0) -> float:
    """Add `PRIOR_S` to the seconds that all attempts ran, and divide the sum by the number of failures plus one.

    >>> day = 86400.0
    >>> estimate_mtbf([]) / day, estimate_mtbf([Attempt(0, 3 * day), Attempt(0, 4 * day, closed=True)]) / day
    (1.0, 4.0)
    """
    ran = sum(max(attempt.seen - attempt.began, 0.0) for attempt in earlier)
    failures = sum(not attempt.closed for attempt in earlier)
    return (PRIOR_S + ran + own_s) / (failures + 1)


def read_attempts(storage: Storage) -> list[Attempt]:
    """Read the attempts so far. If the log is damaged or cannot be read, warn and return an empty list."""
    try:
        return ATTEMPTS.read(storage) or []
    except (CorruptError, StorageError) as error:
        warnings.warn(f"{error}; pass mtbf= until it has seen some failures", stacklevel=3)
        return []


def _parsed(rows: Any) -> list[Attempt]:
    found = [Attempt(float(began), float(seen), bool(closed)) for began, seen, closed in rows]
    if not all(math.isfinite(attempt.seen - attempt.began) for attempt in found):
        raise ValueError("a time is not a number")
    return found


ATTEMPTS = Note(
    ".reshard_ckpt.attempts",
    1,
    1 << 20,
    _parsed,
    "a new log of the run's attempts replaces it, without the earlier attempts",
)
"""The file in a run's root that logs its attempts."""
