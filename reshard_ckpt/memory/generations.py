"""Generations: the saves that this node knows, each a catalog with the step, the attempt and the nodes that hold its files.

A generation file is put in place atomically, on every node of the job, once all images of the save are in memory. Whether the
images are still there is for their slots to say: a slot that was refilled holds another save.

The name of the file says which save it is, and its place in the order of all; so a damaged file is still known by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from ..core.catalog.model import Catalog
from ..errors import CorruptError
from ..format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ..format.checksums import digest128
from ..storage.protocol import flat_bytes
from .node import GENERATION_SUFFIX, SLOT_SUFFIX, NoRoom, files_in, passing_over_gone, write_atomically
from .slots import ReadSlot, SlotRange

_MAGIC = b"RSHGENR2"
_NAME = re.compile(r"([^-]+)-(\d{8,})-(\d{12,})-(\d{8,})-(.+)" + re.escape(GENERATION_SUFFIX))
SPARE = "spare"
"""The memory of the next generation's file, which is reserved before a save is staged."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One save in memory.

    Attributes
    ----------
    run
        Id of the run, which is new where its root began anew.
    attempt, step
        Which attempt of the run saved, and at which step: the newest generation is the one with the largest pair.
    number
        Counts the saves that go to memory: of those of one attempt and step the newest has the largest.
    catalog
        The bytes of the catalog, as they would be on disk; empty where the file is damaged.
    save_id
        That of the catalog.
    holders
        By key of a shard file: the ids of the nodes that hold it. A hint; what counts is what each node has.
    """

    run: str
    attempt: int
    step: int
    number: int
    save_id: str
    catalog: bytes
    holders: Mapping[str, Sequence[str]]

    @property
    def is_damaged(self) -> bool:
        """Whether its file is damaged: then nothing but what its name says is known."""
        return not self.catalog

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key: the newest is last."""
        return self.attempt, self.step, self.number, self.save_id

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.run}-{self.attempt:08d}-{self.step:012d}-{self.number:08d}-{self.save_id}{GENERATION_SUFFIX}"

    def encoded(self) -> bytes:
        """Encode for a file, and for other ranks."""
        body: bytes = msgpack.packb(
            {
                "run": self.run,
                "attempt": self.attempt,
                "step": self.step,
                "number": self.number,
                "save_id": self.save_id,
                "catalog": self.catalog,
                "holders": {key: list(nodes) for key, nodes in self.holders.items()},
            }
        )
        return _MAGIC + digest128(body) + body

    def decoded_catalog(self) -> Catalog:
        """Decode the catalog."""
        return decode_catalog(self.catalog)


def decode_generation(data: bytes, *, where: str) -> Generation:
    """Decode a generation.

    Raises
    ------
    CorruptError
        It is damaged.
    """
    head = len(_MAGIC) + 16
    if data[: len(_MAGIC)] != _MAGIC or digest128(data[head:]) != data[len(_MAGIC) : head]:
        raise CorruptError(f"{where}: the generation is damaged; it is not used")
    try:
        fields: Any = msgpack.unpackb(data[head:], max_bin_len=MAX_CATALOG_BYTES)
        holders = {str(key): tuple(map(str, nodes)) for key, nodes in fields["holders"].items()}
        attempt, step, number = int(fields["attempt"]), int(fields["step"]), int(fields["number"])
        return Generation(str(fields["run"]), attempt, step, number, str(fields["save_id"]), bytes(fields["catalog"]), holders)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{where}: the generation cannot be read ({error}); it is not used") from error


def reserve_generation(folder: Path, num_bytes: int) -> None:
    """Reserve the memory of the file of the next generation.

    Raises
    ------
    NoRoom
        There is none.
    """
    try:
        fd = os.open(folder / SPARE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise NoRoom(f"{folder}: no {num_bytes:,} bytes of memory for the catalog of a save: {error.strerror}") from error


def keep_generation(folder: Path, generation: Generation) -> None:
    """Put a generation in place on this node: from now on it can be found."""
    write_atomically(folder / generation.name, generation.encoded(), folder / SPARE)


def find_generations(folder: Path) -> list[Generation]:
    """List the generations that this node knows, the newest last; of one whose file is damaged, what the file's name says.

    Raises
    ------
    StorageError
        One cannot be read, which does not mean that it is not there.
    """
    found = []
    for path in files_in(folder, GENERATION_SUFFIX):
        with passing_over_gone(path), open(path, "rb", opener=_opened) as file:
            try:
                found.append(decode_generation(file.read(), where=str(path)))
            except CorruptError:
                if (name := _NAME.fullmatch(path.name)) is not None:
                    run, attempt, step, number, save_id = name.groups()
                    found.append(Generation(run, int(attempt), int(step), int(number), save_id, b"", {}))
    return sorted(found, key=lambda generation: generation.order)


def next_number(folder: Path) -> int:
    """Return a number above those of all generations that this node knows, also damaged ones."""
    names = (_NAME.fullmatch(path.name) for path in files_in(folder, GENERATION_SUFFIX))
    return 1 + max((int(name[4]) for name in names if name is not None), default=0)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def drop_generations(folder: Path, names: Iterable[str]) -> None:
    """Forget generations; their slots are free from then on."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def files_here(folder: Path, generation: Generation) -> list[str]:
    """List the files of a generation that are whole on this node."""
    with closing(NodeImages(folder, generation.save_id)) as images:
        return sorted(images.keys() & frozenset(generation.holders))


class NodeImages:
    """The whole images on this node, by save and key, for reading: the slots of any rank, alive or dead.

    It has the reading half of a `Storage`, over the files of one save.
    """

    def __init__(self, folder: Path, save_id: str) -> None:
        self._folder, self._save_id = folder, save_id
        self._slots: list[ReadSlot] = []
        self._at: dict[str, tuple[ReadSlot, SlotRange]] = {}
        try:
            for path in files_in(folder, SLOT_SUFFIX):
                with passing_over_gone(path), suppress(CorruptError):
                    self._add(ReadSlot(str(path)))
        except BaseException:
            self.close()
            raise

    def _add(self, slot: ReadSlot) -> None:
        if slot.table is None or slot.table.save_id != self._save_id:
            slot.close()
            return
        self._slots.append(slot)
        for key, extent in slot.table.files.items():
            self._at.setdefault(key, (slot, extent))

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return f"memory of this node ({self._folder})"

    def keys(self) -> frozenset[str]:
        """The keys of all files that are whole here."""
        return frozenset(self._at)

    def size(self, key: str) -> int | None:
        """Look up the size of a file."""
        found = self._at.get(key)
        return None if found is None else found[1].size

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers from a byte of a file on."""
        slot, extent = self._find(key)
        slot.read_into(extent, offset, [flat_bytes(buffer) for buffer in buffers])

    def read(self, key: str, limit: int) -> bytes:
        """Read a whole file."""
        slot, extent = self._find(key)
        if extent.size > limit:
            raise CorruptError(f"{self.url}: {key} has {extent.size} bytes, above the limit of {limit}; this copy is not used")
        data = bytearray(extent.size)
        slot.read_into(extent, 0, [memoryview(data)])
        return bytes(data)

    def _find(self, key: str) -> tuple[ReadSlot, SlotRange]:
        try:
            return self._at[key]
        except KeyError:
            raise CorruptError(f"{self.url}: no image of {key} any more; this copy is not used") from None

    def close(self) -> None:
        """Close all slots."""
        for slot in self._slots:
            slot.close()
