"""How is a safetensors file, or a folder of them as Hugging Face's libraries write it, a checkpoint?

1. The path is one file, or a folder with an index (``*.safetensors.index.json``) that says which file holds which tensor, or
   a folder of files without one, which then holds what is in all of them.
2. The headers say where each tensor lies. They are read whole and proved; the data are not touched.
3. Names stand below ``model``, as a model saved with ``{"model": model}`` would have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from ...core.catalog import Catalog
from ...errors import CorruptError, UsageError
from ...format.shard_file import Header, header_num_bytes, parse_header
from ...storage import Storage
from .hub import Chosen, chosen_files
from .protocol import Foreign, locate
from .table import ForeignTensor, build, foreign_file, whole

ROOT = "model"
"""The key of the state below which the tensors of a flat file stand."""

SUFFIX = ".safetensors"


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
    chosen = chosen_files(storage, SUFFIX, main=f"model{SUFFIX}")
    return None if chosen is None else _catalog(storage, chosen)


def _catalog(storage: Storage, chosen: Chosen) -> Catalog:
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
    here = {member.name: member for member in header.members if names is None or member.name in names}
    for member, offset in zip(header.members, header.offsets, strict=True):
        if member.name in here:
            yield whole(f"{ROOT}.{member.name}", member.dtype, member.shape, file, offset)
    # Where tied tensors are stored once, safetensors' own save_model says here what else they are called.
    for name, source in header.metadata.items():
        if source in here and name not in here and name != "format":
            yield ForeignTensor(f"{ROOT}.{name}", here[source].dtype, here[source].shape, (), f"{ROOT}.{source}")


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
