"""The lineage of a run, kept in its root: which saves count after somebody went back to an older step.

An attempt begins with the first save after a load. Saves of earlier attempts beyond the step that was loaded are superseded: in
memory by the pair of attempt and step, in the store by the ids of the saves. So saves on nodes that were away and come back are
judged alike. A load alone changes nothing.

The lineage is a `Note`: a small document beside the checkpoints of a run, verified and bounded in size. A note is 8 bytes of
magic, the XXH3-128 of the body, and the body: msgpack of the note's version and of its value. The digest is checked before the
body is decoded. A hostile file can hold only a value of plain types, which `Note.parse` checks.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Generic, TypeVar

import msgpack

from ...comm import open_session
from ...comm.protocol import Comm, value_of_first
from ...errors import CorruptError, StorageError
from ...format.files import digest128
from ...storage import MissingKey, Storage

_MAGIC = b"RSHNOTE1"
_HEAD = len(_MAGIC) + 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note(Generic[T]):
    """A kind of note.

    Attributes
    ----------
    key
        The key of its file, below the root of a run.
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
        """Encode a value of plain types."""
        body: bytes = msgpack.packb([self.version, value])
        return _MAGIC + digest128(body) + body

    def decoded(self, data: bytes, *, where: str) -> T:
        """Decode and verify a note.

        Raises
        ------
        CorruptError
            The note is damaged, or of another version. The message names the file and the next step.
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
        """Read the note from the root of a run; None if the file does not exist.

        Raises
        ------
        CorruptError
            As for `decoded`.
        """
        where = f"{storage.url}/{self.key}"
        try:
            data = storage.read(self.key, self.max_bytes)
        except MissingKey:
            return None
        except CorruptError as error:
            raise CorruptError(f"{where}: this note cannot be read ({error}); {self.cure}") from error
        return self.decoded(data, where=where)

    def keep(self, storage: Storage, value: Any) -> None:
        """Publish the note atomically."""
        storage.publish(self.key, self.encoded(value))


_MAX_STARTS = 10_000


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where each attempt of a run began.

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
        """Begin an attempt, at the step that was loaded, if any; `newer` are the ids of the saves in the store beyond it.

        `own` is the id of the save that was loaded, if it was in the store: it counts again if the run had gone back from it.
        """
        attempt = self.attempt + 1
        starts = self.starts if step is None else (*self.starts, (attempt, step))[-_MAX_STARTS:]
        superseded = tuple(dict.fromkeys(one for one in (*self.superseded, *newer) if one != own))
        return replace(self, attempt=attempt, starts=starts, superseded=superseded[-_MAX_STARTS:])

    def is_newer(self, other: Lineage) -> bool:
        """Whether this is a later state of the same run's lineage."""
        return self.run == other.run and self.attempt > other.attempt

    def is_current(self, attempt: int, step: int) -> bool:
        """Whether the save of an attempt at a step counts: no later attempt began before that step."""
        return not any(later > attempt and step > start for later, start in self.starts)


def _parsed(fields: Any) -> Lineage:
    run, attempt, starts, superseded = fields
    if not isinstance(run, str) or not all(isinstance(one, str) for one in superseded):
        raise TypeError("an id that is no text")
    pairs = tuple((number, step) for number, step in starts)
    if not all(isinstance(one, int) for one in (attempt, *(one for pair in pairs for one in pair))):
        raise TypeError("an attempt that is no number")
    return Lineage(run, attempt, pairs, tuple(superseded))


LINEAGE = Note(
    ".reshard_ckpt.lineage", 1, 4 << 20, _parsed,
    "restore the file; or delete it, and checkpoints that the run went back from count again: delete them too, and what "
    "reshard-ckpt memory list shows of this run",
)  # fmt: skip
"""The note of a run's lineage, in its root."""


class RunLineage:
    """The lineage of a run as the manager of one rank knows it: the same on all ranks. Made inside of a session.

    Parameters
    ----------
    storage
        The root of the run.
    comm
        The session.
    where
        The root, for messages.
    session
        Options of every session.
    had_manager
        On rank 0, whether the root had a manager before. If it had none, its run is new.

    Attributes
    ----------
    known
        The lineage as it is now.
    is_unwritten
        Whether the store refused the lineage when the newest attempt began.
    """

    def __init__(self, storage: Storage, comm: Comm, where: str, session: Mapping[str, Any], *, had_manager: bool = True) -> None:
        self._storage, self._where, self._session = storage, where, session
        self._is_first = comm.rank == 0
        self._loaded: tuple[int, bool] | None = None
        self._is_begun = self.is_unwritten = False
        stored = LINEAGE.read(storage) if self._is_first else None
        self._may_be_anyone = stored is None and had_manager
        self.known = self._shared(comm, (stored or Lineage(secrets.token_hex(16))) if self._is_first else None)

    def _shared(self, comm: Comm, own: Lineage | None) -> Lineage:
        data = comm.broadcast(None if own is None else LINEAGE.encoded(astuple(own)))
        return LINEAGE.decoded(data, where=self._where)

    def adopt(self, comm: Comm, copy: Lineage | None) -> None:
        """Go on from the newest of the copies that nodes have, if the store has none or an older state of it. Collective.

        A root that has a manager's lock and no lineage was begun by a job that could not write its lineage: then a copy is that
        job's. A root without the lock is new, and no copy is its own.
        """
        gathered = comm.gather(b"" if copy is None else LINEAGE.encoded(astuple(copy)))
        newest = self.known
        for data in filter(None, gathered or ()):
            found = LINEAGE.decoded(data, where="a copy from another node")
            if found.is_newer(newest) or (self._may_be_anyone and found.attempt > newest.attempt):
                newest = found
        self.known = self._shared(comm, newest if self._is_first else None)

    def refresh(self) -> None:
        """Read the note again: for readers, beside whom a job goes on."""
        self.known = LINEAGE.read(self._storage) or self.known

    def is_superseded(self, save_id: str) -> bool:
        """Whether a save in the store no longer counts, because the run went back to an older step."""
        return save_id in self.known.superseded

    def loaded(self, step: int, *, in_store: bool) -> None:
        """Remember which step was loaded: the next save goes on from there, and nothing is written before that."""
        self._loaded = step, in_store

    def begin(self, newer: Callable[[int], Iterable[str]], own: Callable[[int], str], *, always: bool) -> bool:
        """Before a save: begin an attempt, if none has begun since the last load. Collective then; returns whether it was.

        Parameters
        ----------
        newer, own
            Return the ids of saves in the store beyond a step, and that of a step that was loaded from there; called on rank 0.
        always
            Begin one also where nothing was loaded.
        """
        if self._loaded is None and (self._is_begun or not always):
            self._write_again()
            return False
        step, in_store = self._loaded or (None, False)
        with open_session("begin at", f"{self._where} step {step}", **self._session) as comm:
            found = None
            if comm.rank == 0:
                beyond = () if step is None else newer(step)
                found = self.known.begun(step, beyond, own(step) if step is not None and in_store else "")
                self._write(found)
            self.known = self._shared(comm, found)
            self.is_unwritten = value_of_first(comm, lambda: self.is_unwritten)
        self._loaded, self._is_begun = None, True
        return True

    def _write_again(self) -> None:
        if self.is_unwritten and self._is_first:
            self._write(self.known)

    def _write(self, lineage: Lineage) -> None:
        try:
            LINEAGE.keep(self._storage, astuple(lineage))
            self.is_unwritten = False
        except StorageError as error:  # it may be full, while memory is not
            self.is_unwritten = True
            warnings.warn(
                f"from which step this job went on could not be written: {error}; the next save tries again, and until then only "
                "a restart that finds its copy in the memory of a node knows it",
                stacklevel=5,
            )
