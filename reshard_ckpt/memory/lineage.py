"""The attempts of a run that has a memory tier, kept in its root: which saves count after somebody went back to an older step.

An attempt begins with each load. What earlier attempts had saved beyond the step that was loaded is superseded: in memory by the
pair of attempt and step, in the store by the ids of the saves. So nodes that were away, and bring back what they hold, are judged
alike.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ..errors import CorruptError
from ..storage import MissingKey, Storage

LINEAGE_KEY = ".reshard_ckpt.lineage.json"
_MAX_BYTES = 4 << 20
_MAX_STARTS = 10_000


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where each attempt of a run began.

    Attributes
    ----------
    run
        Random id of the run, new where there was no lineage: what other runs with this root left in memory does not count.
    attempt
        The number of the newest attempt; 0 before the first.
    starts
        Pairs of an attempt and the step that it had loaded; −1 where it began from nothing.
    superseded
        Ids of saves in the store that no longer count.

    >>> line = Lineage().begun().loaded(100, []).loaded(50, ["s100"])
    >>> line.attempt, line.counts(1, 50), line.counts(2, 60), line.counts(3, 60)
    (3, True, False, True)
    """

    run: str = ""
    attempt: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    superseded: tuple[str, ...] = ()

    def begun(self) -> Lineage:
        """Begin an attempt, before it is known from where."""
        return Lineage(self.run, self.attempt + 1, self.starts, self.superseded)

    def loaded(self, step: int, newer: Iterable[str], own: str = "") -> Lineage:
        """Begin an attempt at a step; `newer` are the ids of the saves in the store beyond it.

        `own` is that of what was loaded, if it was in the store: it counts again, also if it had been gone back from.
        """
        attempt = self.attempt + 1
        starts = (*self.starts, (attempt, step))[-_MAX_STARTS:]
        superseded = tuple(dict.fromkeys(one for one in (*self.superseded, *newer) if one != own))
        return Lineage(self.run, attempt, starts, superseded[-_MAX_STARTS:])

    def counts(self, attempt: int, step: int) -> bool:
        """Whether what an attempt saved at a step was not superseded by a later one that began before it."""
        return not any(later > attempt and step > start for later, start in self.starts)

    def encoded(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()


def decode_lineage(data: bytes, *, where: str) -> Lineage:
    """Decode a lineage.

    Raises
    ------
    CorruptError
        It cannot be read.
    """
    try:
        fields = json.loads(data)
        starts = tuple((int(attempt), int(step)) for attempt, step in fields["starts"])
        return Lineage(str(fields["run"]), int(fields["attempt"]), starts, tuple(map(str, fields["superseded"])))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{where}: the attempts of the run cannot be read ({error}); restore the file, or remove it and what "
            "reshard-ckpt memory list shows of this run"
        ) from error


def read_lineage(storage: Storage) -> Lineage:
    """Read the lineage from a run's root; that of a new run where there is none."""
    try:
        data = storage.read(LINEAGE_KEY, _MAX_BYTES)
    except MissingKey:
        return Lineage(secrets.token_hex(16))
    return decode_lineage(data, where=f"{storage.url}/{LINEAGE_KEY}")


def keep_lineage(storage: Storage, lineage: Lineage) -> None:
    """Put the lineage in place, atomically."""
    storage.publish(LINEAGE_KEY, lineage.encoded())
