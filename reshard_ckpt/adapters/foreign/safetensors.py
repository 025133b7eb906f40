"""How is a safetensors file, or a folder of them as Hugging Face's libraries write it, a checkpoint?

1. The path is one file, or a folder with an index (``*.safetensors.index.json``) that says which file holds which tensor, or
   a folder of files without one, which then holds what is in all of them.
2. The headers say where each tensor lies. They are read whole and proved; the data are not touched.
3. Names stand below ``model``, as a model saved with ``{"model": model}`` would have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...core.catalog import Catalog
from ...errors import CorruptError, UsageError
from ...format.shard_file import Header, header_num_bytes, parse_header
from ...storage import Storage
from ...storage.protocol import key_parts
from .protocol import Foreign, locate
from .table import ForeignTensor, build, foreign_file, whole

ROOT = "model"
"""The key of the state below which the tensors of a flat file stand."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20

_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class SafetensorsFormat:
    """The format, as one of `FORMATS`."""

    name: str = "safetensors"
    looks_for: str = "a .safetensors file, or a folder with model.safetensors.index.json or .safetensors files"

    def open(self, path: str) -> Foreign | None:
        """See `ForeignFormat`."""
        with ExitStack() as stack:
            storage, key = locate(path)
            stack.enter_context(storage)
            catalog = _open_file(storage, key) if key is not None else _open_folder(storage)
            if catalog is None:
                return None
            stack.pop_all()
            return Foreign(storage, catalog, self.name)


def _open_file(storage: Storage, key: str) -> Catalog | None:
    return _catalog(storage, {key: None}) if key.endswith(SUFFIX) else None


def _open_folder(storage: Storage) -> Catalog | None:
    keys = top_level(storage)
    indices = [key for key in keys if key.endswith(INDEX_SUFFIX)]
    files = [key for key in keys if key.endswith(SUFFIX)]
    if indices:
        return _catalog(storage, read_index(storage, _one_index(storage, indices)))
    if not files:
        return None
    _check_parts(storage, files)
    return _catalog(storage, dict.fromkeys(files))


def top_level(storage: Storage) -> list[str]:
    """The files right in a folder."""
    return [key for key, _ in storage.list() if "/" not in key]


def _one_index(storage: Storage, indices: Sequence[str]) -> str:
    if len(indices) > 1 and f"model{INDEX_SUFFIX}" not in indices:
        raise UsageError(f"{storage.url}: has several indices ({', '.join(indices)}); keep those of one model in the folder")
    return f"model{INDEX_SUFFIX}" if f"model{INDEX_SUFFIX}" in indices else indices[0]


def _check_parts(storage: Storage, files: Sequence[str]) -> None:
    """Files that are called parts of a whole are all there: without an index nothing else would tell."""
    for match in filter(None, map(_PART.fullmatch, files)):
        digits, num = len(match["part"]), int(match["parts"])
        for part in range(1, min(num, 10**6) + 1):
            key = f"{match['stem']}-{part:0{digits}d}-of-{match['parts']}{SUFFIX}"
            if key not in files:
                lacking = f"{storage.url}: has {match[0]}, but neither {key} nor an index"
                raise CorruptError(f"{lacking}; copy the rest of it, or open one file by itself")


def read_index(storage: Storage, key: str) -> Mapping[str, frozenset[str] | None]:
    """The files that an index names, and which of their tensors count."""
    where = f"{storage.url}: {key}"
    weight_map = _weight_map(storage.read(key, limit=MAX_INDEX_BYTES), where)
    folder = key.rpartition("/")[0]
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file in by_file:
        key_parts(file)  # an index may come from anywhere: it names files of its own folder alone
    return {f"{folder}/{file}" if folder else file: frozenset(by_file[file]) for file in sorted(by_file)}


def _weight_map(data: bytes, where: str) -> Mapping[str, str]:
    try:
        index: Any = json.loads(data.decode())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{where}: is no JSON ({error}); use another copy of it") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptError(f"{where}: has no weight_map of names to files; use another copy of it")
    return weight_map


def _catalog(storage: Storage, chosen: Mapping[str, frozenset[str] | None]) -> Catalog:
    """The catalog of these files, and of these of their tensors; None stands for all."""
    tensors: list[ForeignTensor] = []
    files, metadata = [], {}
    for number, (key, names) in enumerate(chosen.items()):
        size, header = read_header(storage, key)
        files.append(foreign_file(key, size, "safetensors"))
        metadata.update(header.metadata)
        tensors += _tensors(header, number, names, f"{storage.url}: {key}")
    return build(tensors, files, format="safetensors", metadata=metadata or None, where=storage.url)


def _tensors(header: Header, file: int, names: frozenset[str] | None, where: str) -> Iterator[ForeignTensor]:
    absent = sorted((names or frozenset()).difference(member.name for member in header.members))
    if absent:
        raise CorruptError(f"{where}: has no tensor {absent[0]!r:.200}, which the index says is there; use another copy of it")
    for member, offset in zip(header.members, header.offsets, strict=True):
        if names is None or member.name in names:
            yield whole(f"{ROOT}.{member.name}", member.dtype, member.shape, file, offset)


def read_header(storage: Storage, key: str) -> tuple[int, Header]:
    """The size and the header of a safetensors file."""
    where = f"{storage.url}: {key}"
    size = storage.size(key)
    if size is None:
        raise CorruptError(f"{where}: is missing, though the index names it; copy it, or use another checkpoint")
    first = _read(storage, key, min(size, 8))
    end = header_num_bytes(first, name=where)
    if end > size:
        raise CorruptError(f"{where}: ends after {size} bytes, within its header of {end}; use another copy of it")
    header = parse_header(_read(storage, key, end), file_size=size, name=where)
    if header.metadata.get("writer") == "reshard_ckpt":
        raise UsageError(f"{where}: is one shard file of a checkpoint; pass the checkpoint's own folder")
    return size, header


def _read(storage: Storage, key: str, num_bytes: int) -> memoryview:
    data = memoryview(bytearray(num_bytes))
    storage.read_into(key, 0, [data])
    return data
