"""How does a checkpoint become a folder that Hugging Face's libraries load? As a stream, into files of a bounded size.

1. Tensors are dealt to files in the order of their names, a new file where the next tensor would not fit.
2. In a file, larger elements come first, so that all are aligned. The header says so beforehand; then the bytes pass through.
3. Tied tensors are stored once, as these libraries do it, and the header says what else the tensor is called.
4. One file is ``model.safetensors``; several are ``model-00001-of-00004.safetensors`` and so on, and an index says what is where.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.catalog.model import Catalog
from ..core.geometry.dtypes import ITEM_BYTES
from ..errors import UsageError
from ..format.checksums import BlockHasher
from ..format.shard_file import METADATA, Member, header, header_cost
from ..storage import Storage
from .finished import is_finished, note_finished
from .tensor_stream import ByteStream, TensorBytes, aliases_of, in_natural_order

STEM = "model"
MAX_HEADER_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be: its tensors, by their indices in the catalog, and its header."""

    key: str
    tensors: tuple[int, ...]
    members: tuple[Member, ...]
    header: bytes

    @property
    def num_bytes(self) -> int:
        """The size that it will have."""
        return len(self.header) + sum(member.num_bytes for member in self.members)


def lay_out(catalog: Catalog, max_shard_bytes: int | None) -> tuple[OutFile, ...]:
    """Deal the tensors to files, none of which has more than `max_shard_bytes` of data unless a single tensor has."""
    aliases = aliases_of(catalog)
    groups = list(_dealt(catalog, [i for i in in_natural_order(catalog) if _name(catalog, i) not in aliases], max_shard_bytes))
    names = [f"{STEM}-{i + 1:05d}-of-{len(groups):05d}" for i in range(len(groups))] if len(groups) > 1 else [STEM]
    return tuple(_out_file(f"{name}.safetensors", catalog, group, aliases) for name, group in zip(names, groups, strict=True))


def _name(catalog: Catalog, index: int) -> str:
    return catalog.tensors_table.names[index]


def _member(catalog: Catalog, index: int) -> Member:
    shape, dtype = catalog.shape(index), catalog.dtype(index)
    num_bytes = ITEM_BYTES[dtype]
    for length in shape:
        num_bytes *= length
    return Member(_name(catalog, index), dtype, shape, num_bytes)


def _dealt(catalog: Catalog, tensors: Sequence[int], max_bytes: int | None) -> Iterator[list[int]]:
    group: list[int] = []
    used = header_used = 0
    for index in tensors:
        member = _member(catalog, index)
        used, header_used = used + member.num_bytes, header_used + header_cost(member)
        if group and ((max_bytes is not None and used > max_bytes) or header_used > MAX_HEADER_BYTES):
            yield group
            group, used, header_used = [], member.num_bytes, header_cost(member)
        group.append(index)
    yield group


def _out_file(key: str, catalog: Catalog, tensors: Sequence[int], aliases: Mapping[str, str]) -> OutFile:
    ordered = sorted(tensors, key=lambda index: -ITEM_BYTES[catalog.dtype(index)])
    members = tuple(_member(catalog, index) for index in ordered)
    if any(member.name == METADATA for member in members):
        raise UsageError(f"{METADATA}: no tensor can have this name in a safetensors file; pass rename=")
    here = {member.name for member in members}
    # What else a tensor is called is said where safetensors' own save_model says it.
    tied = {name: source for name, source in sorted(aliases.items()) if source in here}
    return OutFile(key, tuple(ordered), members, header(members, {**tied, "format": "pt"}))


def finished_files(storage: Storage, notes: Storage, files: Sequence[OutFile]) -> list[OutFile]:
    """Those of the files that an earlier attempt at the same had finished; see `finished`."""
    return [file for file in files if is_finished(storage, notes, file.key, file.num_bytes, file.header)]


def write_safetensors(
    storage: Storage, bytes_of: TensorBytes, files: Sequence[OutFile], *, notes: Storage, kept: Collection[OutFile] = ()
) -> None:
    """Write the files and, for several, their index, and make all of it durable.

    Parameters
    ----------
    notes
        Where the digests of each file are kept as soon as it is finished, for an attempt that comes after this one.
    kept
        Files that are there already.

    Raises
    ------
    StorageError
        The store refused.
    """
    lacking = [file for file in files if file not in kept]
    parts = ByteStream(bytes_of([index for file in lacking for index in file.tensors]))
    for file in lacking:
        hasher = BlockHasher()
        with storage.create(file.key) as writer:
            for part in _bytes_of_file(file, parts):
                hasher.update(part)
                writer.write(part)
        if len(files) > 1:
            note_finished(notes, file.key, hasher)
    if len(files) > 1:
        storage.publish(f"{STEM}.safetensors.index.json", _index(files))
    storage.sync([file.key for file in files])


def _bytes_of_file(file: OutFile, parts: ByteStream) -> Iterator[bytes | memoryview]:
    yield file.header
    for member in file.members:
        yield from parts.take(member.num_bytes)


def _index(files: Sequence[OutFile]) -> bytes:
    weight_map = {member.name: file.key for file in files for member in file.members}
    total = sum(member.num_bytes for file in files for member in file.members)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
