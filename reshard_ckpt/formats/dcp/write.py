"""Writing a checkpoint as a folder that ``torch.distributed.checkpoint.load`` accepts, as a stream, in bounded memory.

1. Flatten values as DCP does, and give each name the keys that lead to it (`lay_out`).
2. Cut tensors into chunks along their outermost dims, so that a rank that wants a part need not read all of it.
3. Write every value and every chunk as a file of ``torch.save``, one after the other in ``__0_N.distcp``.
4. Publish ``.metadata``, which lists them all, last.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from ...core.catalog.model import Catalog
from ...core.catalog.names import optimizer_of
from ...core.catalog.specs import Ints, ValueKind
from ...core.geometry.runs import cut_boxes
from ...core.trees import name_of
from ...engine.loading.stream import Run, whole_run
from ...errors import NameCollisionError
from ...format.columns import TORCH_DTYPES
from ...format.values import check_keys, decode_path
from ...state.optimizer_dicts import flat_groups
from ...storage.protocol import ABSENT, Storage, Writer
from ...torchfile.object_writer import write_tensor
from ..source import BytesOf
from ..tensor_stream import ByteStream
from .metadata import METADATA_KEY, Chunk, Extent, SavedTensor
from .metadata_writer import metadata_bytes
from .names import KeyPath, key_path, state_path, taken_apart

CHUNK_BYTES = 256 << 20
"""The most bytes of a chunk, because ``torch.distributed.checkpoint.load`` has a whole chunk in memory at once."""

FILE_BYTES = 4 << 30
GATHERED_BYTES = 1 << 20
"""Small parts are gathered up to this size and written in one call: a tensor in ``torch.save``'s format has some thirty."""

OPTIMIZER_FORMS = ("nested", "flat")


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """The content of a folder by DCP name: catalog indices of tensors, values, and the path of each in the state."""

    tensors: Mapping[str, int]
    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]


def write_dcp(
    storage: Storage,
    catalog: Catalog,
    values: Mapping[str, Any],
    bytes_of: BytesOf,
    *,
    optimizer: str = "nested",
    chunk_bytes: int = CHUNK_BYTES,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a folder for ``torch.distributed.checkpoint``.

    Parameters
    ----------
    storage
        The store to write to; it must be empty.
    catalog, values
        All tensors, and all values by name. A value that each rank has its own of is written as a list.
    bytes_of
        Streams the bytes of tensors.
    optimizer
        The form of optimizers' groups: ``"nested"`` as from ``get_optimizer_state_dict``, ``"flat"`` as from that with
        ``flatten_optimizer_state_dict=True``.
    chunk_bytes, file_bytes
        The most bytes of a chunk, unless one element is larger; and the size after which a file is followed by another one.

    Raises
    ------
    NameCollisionError
        Two values or tensors have one name after values are flattened.
    """
    layout = lay_out(catalog, values, optimizer)
    write_folder(storage, catalog, layout, bytes_of, _torch_saved, chunk_bytes=chunk_bytes, file_bytes=file_bytes)


def write_folder(
    storage: Storage,
    catalog: Catalog,
    layout: FolderLayout,
    bytes_of: BytesOf,
    encoded: Callable[[Any], bytes],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a folder of this layout; `encoded` converts a value to bytes."""
    out = _Files(storage, file_bytes)
    try:
        places = _write_values(out, layout.values, encoded)
        tensors = _write_tensors(out, catalog, layout, bytes_of, chunk_bytes)
        out.finish()
        # Readers look for ``.metadata``. It is published last, when all other files are durable.
        storage.sync(out.keys)
        storage.publish(METADATA_KEY, metadata_bytes(tensors, places, layout.paths, where=storage.url), expected=ABSENT)
    except BaseException:
        out.abort()
        storage.delete(out.keys)
        raise


@dataclass(slots=True)
class _Files:
    """The files of the folder, written one after the other."""

    storage: Storage
    file_bytes: int
    keys: list[str] = field(default_factory=list)
    size: int = 0
    writer: Writer | None = None
    _gathered: bytearray = field(default_factory=bytearray)

    def begin(self) -> None:
        """Open the next file if there is none yet, or if this one has reached its size."""
        if self.writer is not None and self.size < self.file_bytes:
            return
        self.finish()
        self.keys.append(f"__0_{len(self.keys)}.distcp")
        self.writer, self.size = self.storage.create(self.keys[-1]), 0

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        if len(self._gathered) + len(data) > GATHERED_BYTES:
            self._write_gathered()
        if len(data) > GATHERED_BYTES:
            assert self.writer is not None
            self.writer.write(data)
        else:
            self._gathered += data

    def _write_gathered(self) -> None:
        if self.writer is not None and self._gathered:
            self.writer.write(self._gathered)
            self._gathered = bytearray()

    def extent_since(self, begin: int) -> Extent:
        """Return the extent of the bytes written to this file since its size was `begin`."""
        return Extent(self.keys[-1], begin, self.size - begin)

    def finish(self) -> None:
        if self.writer is not None:
            self._write_gathered()
            self.writer.finish()

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.abort()


def _torch_saved(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _write_values(out: _Files, values: Mapping[str, Any], encoded: Callable[[Any], bytes]) -> dict[str, Extent]:
    places: dict[str, Extent] = {}
    for name, value in values.items():
        out.begin()
        begin = out.size
        out.write(encoded(value))
        places[name] = out.extent_since(begin)
    return places


def _write_tensors(
    out: _Files, catalog: Catalog, layout: FolderLayout, bytes_of: BytesOf, chunk_bytes: int
) -> dict[str, SavedTensor]:
    """Write each tensor that has bytes of its own once; aliases refer to the same chunks."""
    sources = sorted({catalog.source(index) for index in layout.tensors.values()})
    boxes = {index: list(_boxes(catalog, index, chunk_bytes)) for index in sources}
    runs = [run for index in sources for _, _, run in boxes[index] if run.count]
    parts = ByteStream(bytes_of(runs))
    written: dict[int, SavedTensor] = {}
    for index in sources:
        dtype = TORCH_DTYPES[catalog.dtype(index)]
        chunks: list[Chunk] = []
        for offsets, lengths, run in boxes[index]:
            out.begin()
            begin = out.size
            write_tensor(out.write, dtype, lengths, parts.take(run.count * dtype.itemsize))
            chunks.append(Chunk(offsets, lengths, out.extent_since(begin)))
        written[index] = SavedTensor(dtype, catalog.shape(index), tuple(chunks))
    return {name: written[catalog.source(index)] for name, index in layout.tensors.items()}


def _boxes(catalog: Catalog, index: int, chunk_bytes: int) -> Iterator[tuple[Ints, Ints, Run]]:
    """Cut a tensor into boxes that are contiguous in it, each of at most `chunk_bytes` if one element is not larger."""
    shape, whole = catalog.shape(index), whole_run(catalog, index)
    each = TORCH_DTYPES[catalog.dtype(index)].itemsize
    if prod(shape) * each <= chunk_bytes:
        yield (0,) * len(shape), shape, whole
        return
    size = np.array([shape], np.int64)
    _, offsets, lengths = cut_boxes(np.zeros_like(size), size, np.array([each]), np.array([chunk_bytes]))
    start = 0
    for corner, box in zip(map(tuple, offsets.tolist()), map(tuple, lengths.tolist()), strict=True):
        yield corner, box, Run(index, whole.offsets, shape, start, prod(box))
        start += prod(box)


def lay_out(catalog: Catalog, values: Mapping[str, Any], optimizer: str) -> FolderLayout:
    """Return the names and paths that DCP would have given to everything if it had saved the same state."""
    entries = catalog.values_table
    check_keys(decode_path(entry.path) for entry in entries)
    optimizers = {optimizer_of(entry.name) for entry in entries if entry.kind is ValueKind.PARAM_GROUPS}
    links = {name: link for name, link in catalog.links().items() if link.optimizer in optimizers}
    paths: dict[str, KeyPath] = {}
    flat: dict[str, Any] = {}

    def add(path: KeyPath, value: Any) -> None:
        name = name_of(path)
        if name in flat or name in catalog:
            raise NameCollisionError(f"{name}: two things have this name in a folder of DCP; rename one of them")
        flat[name], paths[name] = value, path

    # Values: groups in the chosen form, state of optimizers beside its tensors, any other value at its own path.
    for entry in entries:
        path, value = key_path(entry.path), values[entry.name]
        if entry.kind is ValueKind.PARAM_GROUPS and optimizer == "flat":
            pairs = iter([((*path[:-1], name), leaf) for name, leaf in flat_groups(value)])
        elif entry.kind is ValueKind.PARAM_GROUPS:
            pairs = taken_apart(path, _without_tied_names(catalog, optimizer_of(entry.name), value))
        elif (link := links.get(entry.name)) is not None:
            pairs = taken_apart(state_path(link, optimizer), value)
        else:
            pairs = taken_apart(path, list(value) if entry.kind is ValueKind.PER_RANK else value)
        for where, leaf in pairs:
            add(where, leaf)
    # dicts: every path that values show to be a dict, so that a tensor below it goes into that dict
    dicts = {path[:i] for path in paths.values() for i in range(1, len(path))}
    tensors = {name: catalog.index(name) for name in catalog.names}
    for name in tensors:
        paths[name] = state_path(links[name], optimizer) if name in links else _tensor_path(name, dicts)
    return FolderLayout(tensors, flat, paths)


def _without_tied_names(catalog: Catalog, optimizer: str | None, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List each tied weight of a group once, under the name that its state has, because DCP counts a group's parameters."""
    shared = (link for i in np.flatnonzero(catalog.tensors_table.alias >= 0).tolist() if (link := catalog.link(i)) is not None)
    second = {link.fqn for link in shared if link.optimizer == optimizer}
    return [{**group, "params": [fqn for fqn in group["params"] if fqn not in second]} for group in groups]


def _tensor_path(name: str, dicts: set[KeyPath]) -> KeyPath:
    """Return the path of a tensor, given its name: the key of the state, then the rest of the name as one key.

    An example is ``{"model": {"layers.0.weight": …}}``. If values show that there are more dicts on the way, their keys come
    before the rest.
    """
    keys = name.split(".")
    above = 1
    while above < len(keys) - 1 and tuple(keys[: above + 1]) in dicts:
        above += 1
    return (*keys[:above], ".".join(keys[above:])) if len(keys) > above else tuple(keys)
