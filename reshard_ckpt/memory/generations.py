"""Generation files: one for each save in memory, with its catalog, its step, its attempt, and the nodes that hold its files.

1. When all images (copies of the files of a save) are in memory, every node of the job writes the generation file, atomically
   (`keep_generation`).
2. `find_generations` lists the generation files of this node. A damaged file is still known by its name, which has the save id
   and the place in the order of all saves.
3. A generation file does not prove that the images are there: the slot (memory of one save) may have been refilled. `NodeImages`
   looks at the headers of the slots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.catalog.model import Catalog
from ..engine.common.lineage import Note
from ..errors import CorruptError
from ..format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ..storage.protocol import DISK, flat_bytes
from .node import GENERATION_SUFFIX, SLOT_SUFFIX, NoRoom, files_in, passing_over_gone, write_atomically
from .slots import ReadSlot, SlotRange

_NAME = re.compile(r"([^-]+)-(\d{8,})-(\d{12,})-(\d{8,})-(.+)" + re.escape(GENERATION_SUFFIX))
SPARE = "spare"
"""Name of the file that reserves memory for the next generation file. It is made before a save is copied into memory."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation: the description of one save in the memory of nodes.

    Attributes
    ----------
    run
        Id of the run. A root that was removed and begun again has a new one.
    attempt, step
        Number of the attempt that saved, and the step that it saved. The newest generation has the largest pair.
    number
        Counter of saves to memory. Of two saves of one attempt and step, the newer one has the larger number.
    save_id
        Id of the save, as in the catalog.
    catalog
        The bytes of the catalog, as they would be on disk; empty if the file is damaged.
    holders
        The key of each shard file, mapped to the ids of the nodes that held the file at the commit. Slots may have been refilled
        since.
    older
        Ids of the saves of the same step that memory and the store had at the commit. If the store has any other save of the
        step, that one is newer.
    """

    run: str
    attempt: int
    step: int
    number: int
    save_id: str
    catalog: bytes
    holders: Mapping[str, Sequence[str]]
    older: Sequence[str] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether the generation file is damaged. Then only the fields that stand in its name are known."""
        return not self.catalog

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The key by which generations are sorted; it puts the newest last."""
        return self.attempt, self.step, self.number, self.save_id

    @property
    def name(self) -> str:
        """Name of the generation file in the run's folder."""
        return f"{self.run}-{self.attempt:08d}-{self.step:012d}-{self.number:08d}-{self.save_id}{GENERATION_SUFFIX}"

    def encoded(self) -> bytes:
        """Encode this description of a save as the bytes of its generation file, which are also sent to other ranks."""
        holders = {key: list(nodes) for key, nodes in self.holders.items()}
        fields = [self.run, self.attempt, self.step, self.number, self.save_id, self.catalog, holders, list(self.older)]
        return NOTE.encoded(fields)

    def decoded_catalog(self) -> Catalog:
        """Return the catalog of the save, decoded. The generation file must not be damaged."""
        return decode_catalog(self.catalog)


def _parsed(value: Any) -> Generation:
    run, attempt, step, number, save_id, catalog, holders, older = value
    nodes_of = {str(key): tuple(map(str, nodes)) for key, nodes in holders.items()}
    ids = tuple(map(str, older))
    return Generation(str(run), int(attempt), int(step), int(number), str(save_id), bytes(catalog), nodes_of, ids)


NOTE = Note(GENERATION_SUFFIX, 4, 2 * MAX_CATALOG_BYTES, _parsed, "so this copy of the catalog is not used")
"""The suffix, format and limits of a generation file, whose bytes are also sent to ranks that lack the file."""


def reserve_generation(folder: Path, num_bytes: int) -> None:
    """Make the file `SPARE` with `num_bytes` of reserved memory, for the next generation file.

    Raise `NoRoom` if the tmpfs has too little memory.
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
    """Write the generation file of a save into the run's folder on this node."""
    write_atomically(folder / generation.name, generation.encoded(), folder / SPARE)


def find_generations(folder: Path) -> list[Generation]:
    """List the generations (saves in memory) that this node knows, the newest last.

    A generation whose file is damaged has an empty catalog and no holders. Raise `StorageError` if a generation file cannot be
    read. It may be whole all the same.
    """
    found = []
    for path in files_in(folder, GENERATION_SUFFIX):
        with passing_over_gone(path), open(path, "rb", opener=_opened) as file:
            # No more than the file has: `read` reserves address space for as much as it may read.
            size = min(os.fstat(file.fileno()).st_size, NOTE.max_bytes + 1)
            try:
                found.append(NOTE.decoded(file.read(size), where=str(path)))
            except CorruptError:
                if (name := _NAME.fullmatch(path.name)) is not None:
                    run, attempt, step, number, save_id = name.groups()
                    found.append(Generation(run, int(attempt), int(step), int(number), save_id, b"", {}))
    return sorted(found, key=lambda generation: generation.order)


def _names(folder: Path) -> list[re.Match[str]]:
    found = (_NAME.fullmatch(path.name) for path in files_in(folder, GENERATION_SUFFIX))
    return [name for name in found if name is not None]


def next_number(folder: Path) -> int:
    """Return a number for the next generation: above those of all generations on this node, damaged ones included."""
    return 1 + max((int(name[4]) for name in _names(folder)), default=0)


def saves_of(folder: Path, step: int) -> list[str]:
    """List the ids of all saves of a step in this node's memory, damaged ones included."""
    return [name[5] for name in _names(folder) if int(name[3]) == step]


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def drop_generations(folder: Path, names: Iterable[str]) -> None:
    """Delete generation files by name. From then on, the memory of their images may be freed or used again."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def files_here(folder: Path, generation: Generation) -> list[str]:
    """List the keys of a generation's shard files that this node has in memory, by the headers of its slots."""
    with closing(NodeImages(folder, generation.save_id)) as images:
        return sorted(images.keys() & frozenset(generation.holders))


class NodeImages:
    """The files of one save in this node's memory, opened for reading. Living and dead processes may have written them.

    It has the reading methods of a `Storage`. Bytes are not verified here.
    """

    hints = DISK

    def __init__(self, folder: Path, save_id: str) -> None:
        self._folder, self._save_id = folder, save_id
        self._slots: list[ReadSlot] = []
        self._at: dict[str, tuple[ReadSlot, SlotRange]] = {}
        try:
            # Slots may be deleted, or found damaged: then another node may have a copy.
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
        """The name of this store in messages: the memory of this node, and the folder."""
        return f"memory of this node ({self._folder})"

    def keys(self) -> frozenset[str]:
        """Return the keys of all files of the save that are here, digests files included."""
        return frozenset(self._at)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes; None if it is not on this node."""
        found = self._at.get(key)
        return None if found is None else found[1].size

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes of a file from `offset` on.

        Raise `CorruptError` if the file's memory was used for another save meanwhile, or the file has no such bytes. The buffers
        may then hold bytes of another save.
        """
        slot, extent = self._find(key)
        slot.read_into(extent, offset, [flat_bytes(buffer) for buffer in buffers])

    def lend(self, key: str, offset: int, num_bytes: int) -> AbstractContextManager[memoryview]:
        """Return a context manager that yields a view of bytes of a file, without a copy; see `ReadSlot.lend`."""
        slot, extent = self._find(key)
        return slot.lend(extent, offset, num_bytes)

    def read(self, key: str, limit: int) -> bytes:
        """Return the bytes of a whole file. A file of more than `limit` bytes raises a `CorruptError`."""
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
        """Close the files. A second call does nothing."""
        for slot in self._slots:
            slot.close()
