"""Reading and writing a safetensors file, or a folder of them, as Hugging Face's libraries do.

Reading:

1. The path is one file; or a folder with an index (``*.safetensors.index.json``) that maps each tensor to its file; or a folder
   of files without an index, which are all read.
2. The headers have the place of each tensor. They are read whole and checked; the data are not touched.
3. Names get ``model.`` in front, as if the model had been saved with ``{"model": model}``.

torch's ``HuggingFaceStorageWriter(save_distributed=True)`` writes a file for each rank, with the offsets of its tensors in the
global ones. No file has the global shape: a tensor ends where the last of its parts ends.

Writing, as a stream, into files of limited size:

1. Divide the tensors over files, in the order of their names; a new file begins if the next tensor would not fit.
2. Sort the tensors of a file by element size, the largest first, so that all are aligned. Write the header, then the bytes.
3. Tied tensors are stored once, as these libraries do it, and the header lists the tensor's other names.
4. One file is named ``model.safetensors``; several are named ``model-00001-of-00004.safetensors`` and so on, with an index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ..comm.protocol import Comm
from ..core.catalog.model import Catalog
from ..core.catalog.specs import ITEM_BYTES, Ints
from ..engine.loading.stream import Run
from ..errors import CorruptError, UsageError
from ..format.shard_file import METADATA, Header, Member, header, header_cost, header_num_bytes, parse_header, unique
from ..storage import Storage
from ..storage.protocol import read_range
from .catalog_builder import CatalogBuilder
from .huggingface import POINTER, WeightFiles, is_shard, refuse_pointer, weight_files
from .parts import Part, are_alike
from .shared_files import NewFile, NewPart, in_natural_order, write_files
from .source import BytesOf, Format, Source

ROOT = "model"
"""The key under which the tensors of a safetensors file are put in the state."""

SUFFIX = ".safetensors"

SHARDING = "DCP_SHARDING_INFO"
"""A key in the metadata of files of torch's writer: for each tensor, the offsets of this file's part in the global tensor."""


def open_safetensors(storage: Storage, key: str | None) -> Source | None:
    """Open a safetensors file, or a folder of them; return None for anything else; see `Format.open`."""
    if key is not None and key.endswith(SUFFIX) and is_shard(key):
        raise UsageError(f"{storage.url}: {key} is what one rank saved; pass the folder, which has the files of all ranks")
    if key is None:
        weights = weight_files(storage, SUFFIX, main=f"model{SUFFIX}")
    else:
        weights = WeightFiles({key: None}) if key.endswith(SUFFIX) else None
    return None if weights is None else Source(storage, _catalog(storage, weights), "safetensors")


def _catalog(storage: Storage, weights: WeightFiles) -> Catalog:
    """Build the catalog over safetensors files. `weights` says which tensors of each file to take."""
    builder = CatalogBuilder("safetensors", storage.url)
    sharded: dict[str, list[tuple[Member, Part]]] = {}
    metadata = {}
    for key, names in weights.names.items():
        size, header = read_header(storage, key)
        where = f"{storage.url}: {key}"
        file = builder.file(key, size)
        metadata.update(header.metadata)
        sharding = metadata.pop(SHARDING, None)
        if sharding is None:
            for member, offset in _listed_members(header, names, where):
                builder.tensor(f"{ROOT}.{member.name}", member.dtype, member.shape)
                builder.piece(f"{ROOT}.{member.name}", file=file, offset=offset)
            continue
        for member, part in _parts(header, file, names, sharding, where):
            sharded.setdefault(member.name, []).append((member, part))
    for name, parts in sharded.items():
        with builder.reading(f"{ROOT}.{name}"):
            _join_parts(builder, storage, name, parts)
    # save_model of safetensors stores tied tensors once, and lists their other names in the metadata; huggingface_hub in those of
    # the index, if there are several files.
    stored = builder.tensors.keys()
    for name, source in {**weights.metadata, **metadata}.items():
        if f"{ROOT}.{source}" in stored and f"{ROOT}.{name}" not in stored and name != "format":
            builder.alias(f"{ROOT}.{name}", f"{ROOT}.{source}")
    return builder.finish(metadata or None)


def _parts(header: Header, file: int, names: frozenset[str] | None, sharding: str, where: str) -> Iterator[tuple[Member, Part]]:
    """Yield each tensor of a file that torch's writer made, with its part of the global tensor."""
    try:
        offsets = {name: tuple(entry["saved_offsets"]) for name, entry in json.loads(sharding, object_pairs_hook=unique).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{where}: its {SHARDING} is not what torch writes ({error!r:.200}); use another copy") from error
    for member, at in _listed_members(header, names, where):
        begin = offsets.get(member.name, ())
        if len(begin) != len(member.shape) or not all(type(low) is int and low >= 0 for low in begin):
            found = f"{member.name!r:.200} of shape {member.shape} begins at {begin!r:.80}"
            raise CorruptError(f"{where}: {found}, by its {SHARDING}; use another copy of it")
        yield member, Part(begin, member.shape, file, at)


def _join_parts(builder: CatalogBuilder, storage: Storage, name: str, parts: list[tuple[Member, Part]]) -> None:
    """Add a tensor that lies in parts in several files. Parts with the same box are compared, and the first one is read."""
    (first, _), *_ = parts
    for member, _ in parts:
        if (member.dtype, len(member.shape)) != (first.dtype, len(first.shape)):
            raise CorruptError(
                f"{builder.where}: {name!r:.200} is {first.dtype} of {len(first.shape)} dims in one file, and {member.dtype} of "
                f"{len(member.shape)} in another; keep the files of one save in the folder"
            )
    boxes: dict[tuple[Ints, Ints], list[Part]] = {}
    for _, part in parts:
        if part.num_elements:
            boxes.setdefault((part.offsets, part.lengths), []).append(part)
    for alike in boxes.values():
        places = [(builder.files[part.file].key, part.offset) for part in alike]
        if len(places) > 1 and not are_alike(storage, places, alike[0].num_elements * ITEM_BYTES[first.dtype]):
            raise CorruptError(
                f"{builder.where}: {name!r:.200} differs between {places[0][0]} and {places[1][0]}; keep the files of one save "
                "in the folder"
            )
    ends = [[low + n for low, n in zip(part.offsets, part.lengths, strict=True)] for _, part in parts]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    builder.tensor(f"{ROOT}.{name}", first.dtype, shape, [alike[0] for alike in boxes.values()])


def _listed_members(header: Header, names: frozenset[str] | None, where: str) -> Iterator[tuple[Member, int]]:
    """Yield the tensors of a file that are in `names`, or all, each with its first byte; refuse names that the file lacks."""
    absent = sorted((names or frozenset()).difference(member.name for member in header.members))
    if absent:
        raise CorruptError(f"{where}: has no tensor {absent[0]!r:.200}, which the index says is there; use another copy of it")
    for member, offset in zip(header.members, header.offsets, strict=True):
        if names is None or member.name in names:
            yield member, offset


def read_header(storage: Storage, key: str) -> tuple[int, Header]:
    """Read the size and the header of a safetensors file."""
    where = f"{storage.url}: {key}"
    size = storage.size(key)
    if size is None:
        raise CorruptError(f"{where}: is missing, though the index names it; copy it, or use another checkpoint")
    first = read_range(storage, key, 0, min(size, len(POINTER)))
    refuse_pointer(first, where)
    end = header_num_bytes(first, name=where)
    if end > size:
        raise CorruptError(f"{where}: ends after {size} bytes, within its header of {end}; use another copy of it")
    header = parse_header(read_range(storage, key, 0, end), file_size=size, name=where)
    if header.metadata.get("writer") == "reshard_ckpt":
        raise UsageError(f"{where}: is one shard file of a checkpoint; pass the checkpoint's own folder")
    return size, header


FORMAT = Format(
    "safetensors",
    "a .safetensors file, or a folder with model.safetensors.index.json or .safetensors files",
    open_safetensors,
    order=60,
)


STEM = "model"
PART_BYTES = 64 << 20
"""The most bytes of a tensor that are written in one part; several processes divide the parts of a large tensor."""

MAX_HEADER_BYTES = 48 << 20
"""The most bytes of a header that is written; a larger one is avoided by a new file. safetensors reads up to 100 MB."""


def lay_out(catalog: Catalog, max_shard_bytes: int | None, run_of: Callable[[int], Run]) -> list[NewFile]:
    """Divide the tensors over files of at most `max_shard_bytes` of data each, unless a single tensor has more.

    Parameters
    ----------
    run_of
        Returns the run that has the bytes of a tensor, by its index in the catalog.
    """
    aliases = _aliases_of(catalog)
    table, members = catalog.tensors_table, []
    for index in in_natural_order(catalog):
        if table.names[index] not in aliases:
            shape, dtype = catalog.shape(index), catalog.dtype(index)
            members.append(Member(table.names[index], dtype, shape, prod(shape) * ITEM_BYTES[dtype]))
    groups = list(_divide(members, max_shard_bytes))
    files: list[NewFile] = []
    for number, group in enumerate(groups, start=1):
        stem = f"{STEM}-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else STEM
        group.sort(key=lambda member: -ITEM_BYTES[member.dtype])
        runs = ((run_of(catalog.index(member.name)), ITEM_BYTES[member.dtype]) for member in group)
        parts = (part for run, each in runs for part in _cut(run, each))
        files.append(NewFile(f"{stem}.safetensors", (NewPart(None, 0, _header(group, aliases)), *parts)))
    return files


def _aliases_of(catalog: Catalog) -> dict[str, str]:
    """Map the name of each tensor that shares another one's bytes to the name of that one."""
    names = catalog.tensors_table.names
    by_index = {name: catalog.source(catalog.index(name)) for name in catalog.names}
    return {name: names[source] for name, source in by_index.items() if names[source] != name}


def _cut(run: Run, item_bytes: int) -> Iterator[NewPart]:
    """Cut a run into parts of at most `PART_BYTES`, so that several processes can write one tensor."""
    step = max(PART_BYTES // item_bytes, 1)
    for at in range(0, run.count, step):
        part = replace(run, start=run.start + at, count=min(step, run.count - at))
        yield NewPart(part, part.count * item_bytes)


def _divide(members: Sequence[Member], max_bytes: int | None) -> Iterator[list[Member]]:
    """Yield the tensors of each file: at most `max_bytes` of data, or one larger tensor.

    A header has at most `MAX_HEADER_BYTES`. Without tensors, yield one empty list.
    """
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
    if "format" in tied:
        raise UsageError("format: a tied tensor cannot have this name in a safetensors file; pass rename=")
    return header(members, {**tied, "format": "pt"})


def write_safetensors(storage: Storage, files: Sequence[NewFile], bytes_of: BytesOf, *, comm: Comm, notes: Storage | None) -> int:
    """Write the files from `lay_out`, and an index if there are several; see `shared_files.write_files`."""
    kept = write_files(comm, storage, files, bytes_of, notes=notes)
    if len(files) > 1 and comm.rank == 0:
        storage.publish(f"{STEM}.safetensors.index.json", _index(files))
    return kept


def _index(files: Sequence[NewFile]) -> bytes:
    members = [(member, file.key) for file in files for member in parse_header(memoryview(file.parts[0].before)).members]
    weight_map = {member.name: key for member, key in members}
    total = sum(member.num_bytes for member, _ in members)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
