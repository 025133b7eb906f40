"""Writing a folder of safetensors files that Hugging Face's libraries load, as a stream, into files of limited size.

1. Divide the tensors over files, in the order of their names; a new file begins if the next tensor would not fit.
2. Sort the tensors of a file by element size, the largest first, so that all are aligned. Write the header, then the bytes.
3. Tied tensors are stored once, as these libraries do it, and the header lists the tensor's other names.
4. One file is named ``model.safetensors``; several are named ``model-00001-of-00004.safetensors`` and so on, with an index that
   maps each tensor to its file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from ..core.catalog.model import Catalog
from ..core.catalog.specs import ITEM_BYTES
from ..engine.common.resuming import finished_digests
from ..engine.saving.write import FileLayout
from ..errors import UsageError
from ..format.files import BlockHasher
from ..format.shard_file import METADATA, Member, header, header_cost
from ..storage import Storage
from .tensor_stream import ByteStream, TensorBytes, aliases_of, in_natural_order

STEM = "model"
MAX_HEADER_BYTES = 48 << 20
"""A new file is begun before its header has this many bytes: safetensors reads up to 100 MB."""


def lay_out(catalog: Catalog, max_shard_bytes: int | None) -> list[FileLayout]:
    """Divide the tensors over files of at most `max_shard_bytes` of data each, unless a single tensor has more."""
    aliases = aliases_of(catalog)
    own = [index for index in in_natural_order(catalog) if _name(catalog, index) not in aliases]
    groups = list(_divide([_member(catalog, index) for index in own], max_shard_bytes))
    layouts: list[FileLayout] = []
    begin = 0
    for number, group in enumerate(groups, start=1):
        stem = f"{STEM}-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else STEM
        members = tuple(sorted(group, key=lambda member: -ITEM_BYTES[member.dtype]))
        items = slice(begin, begin + len(group))
        layouts.append(FileLayout(f"{stem}.safetensors", items, members, _header(members, aliases)))
        begin += len(group)
    return layouts


def _name(catalog: Catalog, index: int) -> str:
    return catalog.tensors_table.names[index]


def _member(catalog: Catalog, index: int) -> Member:
    shape, dtype = catalog.shape(index), catalog.dtype(index)
    return Member(_name(catalog, index), dtype, shape, prod(shape) * ITEM_BYTES[dtype])


def _divide(members: Sequence[Member], max_bytes: int | None) -> Iterator[list[Member]]:
    """Yield the members of each file: at most `max_bytes` of data, or one larger tensor. Without tensors, yield an empty file."""
    group: list[Member] = []
    data_bytes = header_bytes = 0
    for member in members:
        data_bytes += member.num_bytes
        header_bytes += header_cost(member)
        is_too_large = max_bytes is not None and data_bytes > max_bytes
        if group and (is_too_large or header_bytes > MAX_HEADER_BYTES):
            yield group
            group, data_bytes, header_bytes = [], member.num_bytes, header_cost(member)
        group.append(member)
    yield group


def _header(members: Sequence[Member], aliases: Mapping[str, str]) -> bytes:
    names = {member.name for member in members}
    if METADATA in names:
        raise UsageError(f"{METADATA}: no tensor can have this name in a safetensors file; pass rename=")
    # The place where safetensors' own save_model lists the other names of a tensor.
    tied = {name: source for name, source in sorted(aliases.items()) if source in names}
    return header(members, {**tied, "format": "pt"})


def finished_files(storage: Storage, resume_info: Storage, files: Sequence[FileLayout]) -> list[FileLayout]:
    """Return the files that an earlier attempt finished: every block of them has its recorded digest."""
    return [
        file
        for file in files
        if finished_digests(storage, file.key, file.num_bytes, file.header, resume_info, _digests_key(file)) is not None
    ]


def _digests_key(file: FileLayout) -> str:
    return f"{file.key}.digests"


def write_safetensors(
    storage: Storage,
    catalog: Catalog,
    bytes_of: TensorBytes,
    files: Sequence[FileLayout],
    *,
    resume_info: Storage,
    kept: Collection[FileLayout] = (),
) -> None:
    """Write the files, and an index if there are several, and make them durable.

    Parameters
    ----------
    resume_info
        A store that keeps the digests of each finished file, for the next attempt if this one is killed.
    kept
        Finished files of an earlier attempt, which are not written again.

    Raises
    ------
    StorageError
        The store failed.
    """
    missing = [file for file in files if file not in kept]
    parts = ByteStream(bytes_of([catalog.index(member.name) for file in missing for member in file.members]))
    for file in missing:
        hasher = BlockHasher()
        with storage.create(file.key) as writer:
            for part in _bytes_of_file(file, parts):
                hasher.update(part)
                writer.write(part)
        if len(files) > 1:
            # Publish the digests after the file is durable. Otherwise a power cut could lose bytes that the digests vouch for.
            resume_info.publish(_digests_key(file), hasher.finish())
    if len(files) > 1:
        storage.publish(f"{STEM}.safetensors.index.json", _index(files))
    storage.sync([file.key for file in files])


def _bytes_of_file(file: FileLayout, parts: ByteStream) -> Iterator[bytes | memoryview]:
    yield file.header
    for member in file.members:
        yield from parts.take(member.num_bytes)


def _index(files: Sequence[FileLayout]) -> bytes:
    weight_map = {member.name: file.key for file in files for member in file.members}
    total = sum(member.num_bytes for file in files for member in file.members)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
