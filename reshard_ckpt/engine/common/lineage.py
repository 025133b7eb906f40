"""The lineage of a run: a small file in its root that says which saves still count after the run went back to an older step.

An *attempt* is a part of the run from one load to the next; it begins with the first save after the load. Saves of earlier
attempts beyond the step that was loaded are superseded. A save in memory is known by its attempt and step, a save in the store by
its id. So a save on a node that was away and comes back is judged like any other. A load alone changes nothing.

The lineage is stored as a `Note`: a small file beside the checkpoints of a run, verified and bounded in size. A note is 8 bytes
of magic, the XXH3-128 of the body, and the body: msgpack of the note's version and of its value. The digest is checked before the
body is decoded. A hostile file can hold only a value of plain types, which `Note.parse` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgpack

from ...errors import CorruptError
from ...format.files import digest128
from ...storage import MissingKey, Storage

_MAGIC = b"RSHNOTE1"
_HEAD = len(_MAGIC) + 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note(Generic[T]):
    """A kind of small file that is kept in the root of a run, such as the lineage: its key, its limits and its decoding.

    Attributes
    ----------
    key
        The key of the file, below the root of a run.
    version
        Version of the encoded value; a reader refuses any other.
    max_bytes
        Size of the largest file that is read.
    parse
        Makes the value from the plain types of msgpack. It may raise any error for a body that does not fit.
    cure
        For messages: the next step if the note is damaged, and its consequence.
    """

    key: str
    version: int
    max_bytes: int
    parse: Callable[[Any], T]
    cure: str

    def encoded(self, value: Any) -> bytes:
        """Encode a value of plain types as the bytes of a note."""
        body: bytes = msgpack.packb([self.version, value])
        return _MAGIC + digest128(body) + body

    def decoded(self, data: bytes, *, where: str) -> T:
        """Verify the bytes of a note, and return its value.

        Raise `CorruptError` if the note is damaged, or of another version. The message names the file and the next step.
        """
        try:
            if len(data) > self.max_bytes:
                raise ValueError(f"{len(data):,} bytes, above the limit of {self.max_bytes:,}")
            body = data[_HEAD:]
            if data[: len(_MAGIC)] != _MAGIC or digest128(body) != data[len(_MAGIC) : _HEAD]:
                raise ValueError("its checksum does not fit")
            version, value = msgpack.unpackb(body)
            if version != self.version:
                raise ValueError(f"version {version!r:.40}, and this release reads {self.version}")
            return self.parse(value)
        except Exception as error:  # `parse` may raise any error for a body that no writer has made
            raise CorruptError(f"{where}: this note cannot be read ({error!s:.200}); {self.cure}") from error

    def read(self, storage: Storage) -> T | None:
        """Read the note in the root of a run. Return its value, or None without such a file. Errors are those of `decoded`."""
        where = f"{storage.url}/{self.key}"
        try:
            data = storage.read(self.key, self.max_bytes)
        except MissingKey:
            return None
        except CorruptError as error:
            raise CorruptError(f"{where}: this note cannot be read ({error}); {self.cure}") from error
        return self.decoded(data, where=where)

    def keep(self, storage: Storage, value: Any) -> None:
        """Encode a value as a note, and write it into the root of a run, atomically."""
        storage.publish(self.key, self.encoded(value))


_MAX_STARTS = 10_000


@dataclass(frozen=True, slots=True)
class Lineage:
    """The lineage of a run: at which step each of its attempts (from one load to the next) began.

    Attributes
    ----------
    run
        Random id of the run, new where there was no lineage: saves of other runs with this root do not count in memory.
    attempt
        The number of the newest attempt; 0 before the first.
    starts
        Pairs of an attempt and the step that it had loaded. An attempt that began from nothing has no pair.
    superseded
        Ids of saves in the store that no longer count.

    >>> line = Lineage().begun().begun(100).begun(50, ["s100"])
    >>> line.attempt, line.is_current(1, 50), line.is_current(2, 60), line.is_current(3, 60)
    (3, True, False, True)
    """

    run: str = ""
    attempt: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    superseded: tuple[str, ...] = ()

    def begun(self, step: int | None = None, newer: Iterable[str] = (), own: str = "") -> Lineage:
        """Return the lineage with one more attempt (the part of a run that follows a load).

        Parameters
        ----------
        step
            The step that was loaded; None if the attempt begins from nothing.
        newer
            Ids of the saves in the store beyond `step`: they are superseded from now on.
        own
            Id of the save that was loaded, if it lay in the store. It counts again if the run had gone back from it.
        """
        attempt = self.attempt + 1
        starts = self.starts if step is None else (*self.starts, (attempt, step))[-_MAX_STARTS:]
        superseded = tuple(dict.fromkeys(save_id for save_id in (*self.superseded, *newer) if save_id != own))
        return replace(self, attempt=attempt, starts=starts, superseded=superseded[-_MAX_STARTS:])

    def is_newer(self, other: Lineage) -> bool:
        """Whether both lineages are of one run, and this one has more attempts than `other`."""
        return self.run == other.run and self.attempt > other.attempt

    def is_current(self, attempt: int, step: int) -> bool:
        """Whether the save that an attempt made of a step still counts: no later attempt has begun before that step."""
        return not any(later > attempt and step > start for later, start in self.starts)


def _parsed(fields: Any) -> Lineage:
    run, attempt, starts, superseded = fields
    if not isinstance(run, str) or not all(isinstance(one, str) for one in superseded):
        raise TypeError("an id that is not text")
    pairs = tuple((number, step) for number, step in starts)
    if not all(isinstance(one, int) for one in (attempt, *(one for pair in pairs for one in pair))):
        raise TypeError("an attempt that is not a number")
    return Lineage(run, attempt, pairs, tuple(superseded))


LINEAGE = Note(
    ".reshard_ckpt.lineage", 1, 4 << 20, _parsed,
    "restore the file; or delete it, and checkpoints that the run went back from count again: delete them too, and what "
    "reshard-ckpt memory list shows of this run",
)  # fmt: skip
"""The key, format and limits of the file with a run's lineage, in its root."""
