"""Writing a folder of safetensors files that Hugging Face's libraries load, as a stream, into files of a bounded size.

1. Tensors are divided over files in the order of their names; a new file begins where the next tensor would not fit.
2. In a file, larger elements come first, so that all are aligned. The header comes first; then the bytes pass through.
3. Tied tensors are stored once, as these libraries do it, and the header lists the tensor's other names.
4. One file is ``model.safetensors``; several are ``model-00001-of-00004.safetensors`` and so on, with an index of what is where.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from ..core.catalog.model import Catalog
from ..core.geometry.dtypes import ITEM_BYTES
from ..engine.common.finished_files import finished_digests
from ..engine.saving.write import FileLayout
from ..errors import UsageError
from ..format.checksums import BlockHasher
from ..format.shard_file import METADATA, Member, header, header_cost
from ..storage import Storage
from .tensor_stream import ByteStream, TensorBytes, aliases_of, in_natural_order

STEM = "model"
MAX_HEADER_BYTES = 48 << 20


def lay_out(catalog: Catalog, max_shard_bytes: int | None) -> list[FileLayout]:
    """Divide the tensors over files, none of which has more than `max_shard_bytes` of data unless a single tensor has."""
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
    """Yield the members of each file; of no tensors, one empty file."""
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
    # safetensors' own save_model lists the other names of a tensor in the same place.
    tied = {name: source for name, source in sorted(aliases.items()) if source in names}
    return header(members, {**tied, "format": "pt"})


def finished_files(storage: Storage, resume_info: Storage, files: Sequence[FileLayout]) -> list[FileLayout]:
    """Return the files that an earlier attempt finished: those whose every block matches its recorded digest."""
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
    """Write the files and, for several, their index, and make all of it durable.

    Parameters
    ----------
    resume_info
        Where the digests of each file are kept as soon as it is finished, for the next attempt if this one is killed.
    kept
        Files that are there already.

    Raises
    ------
    StorageError
        The store refused.
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
            # Only now is the file durable: digests of a file that a power cut may still take would be believed.
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
