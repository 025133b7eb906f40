"""Writing a checkpoint as a folder that ``torch.distributed.checkpoint.load`` accepts, as a stream, in bounded memory.

1. Flatten values as DCP does, and give each name the keys that lead to it (`lay_out`).
2. Cut tensors into chunks along their outermost dims, so that a rank that wants a part need not read all of it.
3. Lay out every value and every chunk as a file of ``torch.save``, one after the other in ``__0_N.distcp``.
4. Write the files, on one process or on several (`shared_files`).
5. Publish ``.metadata``, which lists them all, last.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ...comm.protocol import Comm, SoloComm
from ...core.catalog.model import Catalog
from ...core.catalog.names import STATE, optimizer_of
from ...core.catalog.specs import Ints, StateLink, ValueKind
from ...core.geometry.runs import cut_boxes
from ...core.trees import name_of
from ...engine.loading.stream import Run, whole_run
from ...errors import NameCollisionError
from ...format.dtypes import TORCH_DTYPES
from ...format.values import check_keys, decode_path
from ...storage.protocol import ABSENT, Storage
from ...torchfile.object_writer import around_tensor
from ..numbered import NumberedOptimizer, numbered_optimizers
from ..shared_files import NewFile, NewPart, write_files
from ..source import BytesOf
from .metadata import METADATA_KEY, Chunk, Extent, Key, SavedTensor
from .metadata_writer import metadata_bytes
from .names import KeyPath, inner_paths, key_path, taken_apart, tensor_path

CHUNK_BYTES = 256 << 20
"""The most bytes of a chunk that is written, unless one element is larger: DCP reads a whole chunk into memory."""

FILE_BYTES = 4 << 30
"""The size in bytes from which on a file of the folder gets no further parts; the next part begins another file."""

OPTIMIZER_FORMS = ("nested", "flat", "numbered")
"""The forms of optimizers: as from ``get_optimizer_state_dict``, as from that with ``flatten_optimizer_state_dict=True``, and as
from ``optimizer.state_dict()``."""


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """The content of a folder to write; all mappings are keyed by DCP's names.

    Attributes
    ----------
    tensors
        The index of each tensor in the catalog.
    values
        The values.
    paths
        The keys that lead to each tensor and value in the state.
    """

    tensors: Mapping[str, int]
    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]


def write_folder(
    storage: Storage,
    catalog: Catalog,
    layout: FolderLayout,
    bytes_of: BytesOf,
    encoded: Callable[[Any], bytes],
    *,
    comm: Comm | None = None,
    notes: Storage | None = None,
) -> int:
    """Write all files of a DCP folder, and its ``.metadata`` last; return the bytes of an earlier attempt's files that were kept.

    Parameters
    ----------
    storage
        The store to write to; without `notes` it must be empty.
    bytes_of
        Streams the bytes of tensors.
    encoded
        Converts a value to bytes.
    comm, notes
        The ranks that share the work, and the store of notes; see `shared_files.write_files`. Without `comm`, this process writes
        alone.
    """
    comm, out = comm or SoloComm(), _Files()
    places = {name: out.add(NewPart(None, 0, encoded(value))) for name, value in layout.values.items()}
    tensors = _lay_out_tensors(out, catalog, layout)
    kept = write_files(comm, storage, out.all(), bytes_of, notes=notes)
    # Readers look for ``.metadata``. It is published last, when all other files are durable.
    if comm.rank == 0:
        storage.publish(METADATA_KEY, metadata_bytes(tensors, places, layout.paths), expected=ABSENT)
    return kept


class _Files:
    """Lays out parts one after the other in the folder's files ``__0_N.distcp``."""

    def __init__(self) -> None:
        self._parts: list[list[NewPart]] = [[]]
        self._size = 0

    def add(self, part: NewPart) -> Extent:
        """Add a part to the last file, or to a new one if that has reached `FILE_BYTES`; return where the part will lie."""
        if self._size >= FILE_BYTES:
            self._parts.append([])
            self._size = 0
        self._parts[-1].append(part)
        extent = Extent(_file_key(len(self._parts) - 1), self._size, part.size)
        self._size += extent.length
        return extent

    def all(self) -> list[NewFile]:
        """Return the files to write; files without parts are left out."""
        return [NewFile(_file_key(number), tuple(parts)) for number, parts in enumerate(self._parts) if parts]


def _file_key(number: int) -> str:
    return f"__0_{number}.distcp"


def _lay_out_tensors(out: _Files, catalog: Catalog, layout: FolderLayout) -> dict[str, SavedTensor]:
    """Lay out the chunks of all tensors in the folder's files. Tied tensors are laid out once, and refer to the same chunks."""
    written: dict[int, SavedTensor] = {}
    for index in sorted({catalog.source(index) for index in layout.tensors.values()}):
        dtype = TORCH_DTYPES[catalog.dtype(index)]
        chunks: list[Chunk] = []
        for offsets, lengths, run in _boxes(catalog, index):
            before, behind = around_tensor(dtype, lengths)
            chunks.append(Chunk(offsets, lengths, out.add(NewPart(run, run.count * dtype.itemsize, before, behind))))
        written[index] = SavedTensor(dtype, catalog.shape(index), tuple(chunks))
    return {name: written[catalog.source(index)] for name, index in layout.tensors.items()}


def _boxes(catalog: Catalog, index: int) -> Iterator[tuple[Ints, Ints, Run]]:
    """Cut a tensor into boxes that are contiguous in it, of at most `CHUNK_BYTES`, or of one element.

    Yield the offsets and lengths of each box, and the run of the tensor that has the box's elements.
    """
    shape, whole = catalog.shape(index), whole_run(catalog, index)
    each = TORCH_DTYPES[catalog.dtype(index)].itemsize
    if prod(shape) * each <= CHUNK_BYTES:
        yield (0,) * len(shape), shape, whole
        return
    size = np.array([shape], np.int64)
    _, offsets, lengths = cut_boxes(np.zeros_like(size), size, np.array([each]), np.array([CHUNK_BYTES]))
    # offsets[i], lengths[i]: box i. Box i + 1 begins in the tensor where box i ends, so each is a run of the whole.
    start = 0
    for corner, box in zip(map(tuple, offsets.tolist()), map(tuple, lengths.tolist()), strict=True):
        yield corner, box, Run(index, whole.offsets, shape, start, prod(box))
        start += prod(box)


def lay_out(catalog: Catalog, values: Mapping[str, Any], optimizer: str) -> FolderLayout:
    """Return the tensors and values to write, with the names and paths that DCP would have given them for the same state.

    A per-rank value becomes a list. `optimizer` is one of `OPTIMIZER_FORMS`. Raise `NameCollisionError` if two values or tensors
    have one name after values are flattened.
    """
    entries = catalog.values_table
    check_keys(decode_path(entry.path) for entry in entries)
    optimizers = numbered_optimizers(catalog, values)
    of_state = {
        name: _state_path(optimizers[link.optimizer], link, optimizer)
        for name, link in catalog.links().items()
        if link.optimizer in optimizers
    }
    paths: dict[str, KeyPath] = {}
    flat: dict[str, Any] = {}
    tensors: dict[str, int] = {}

    def add(path: KeyPath, leaf: Any, kept: dict[str, Any]) -> None:
        name = name_of(path)
        if name in paths:
            raise NameCollisionError(f"{name}: two things have this name in a folder of DCP; rename one of them")
        kept[name], paths[name] = leaf, path

    # Values: groups in the chosen form, state of optimizers beside its tensors, any other value at its own path.
    for entry in entries:
        own_path, value = key_path(entry.path), values[entry.name]
        path = of_state.get(entry.name, own_path)
        pairs: Iterable[tuple[KeyPath, Any]] = ()
        if entry.kind is ValueKind.PARAM_GROUPS:
            own = optimizers[optimizer_of(entry.name) or ""]
            if optimizer == "flat":
                pairs = (((*own_path[:-1], name), leaf) for name, leaf in own.flat(value))
            else:
                pairs = taken_apart(own_path, own.named(value) if optimizer == "nested" else own.numbered(value))
        elif path is not None:
            pairs = taken_apart(path, list(value) if entry.kind is ValueKind.PER_RANK else value)
        for where, leaf in pairs:
            add(where, leaf, flat)
    inner = inner_paths(paths.values())
    for name in catalog.names:
        path = of_state[name] if name in of_state else tensor_path(name, inner)
        if path is not None:
            add(path, catalog.index(name), tensors)
    return FolderLayout(tensors, flat, _built_by_torch(paths, tensors))


def _state_path(optimizer: NumberedOptimizer, link: StateLink, form: str) -> KeyPath | None:
    """Return the path of optimizer state in a form of `OPTIMIZER_FORMS`.

    Return None for the second name of a tied parameter if the form numbers the parameters: it has no number.
    """
    if form == "flat" and not optimizer.was_numbered:
        return (*optimizer.above, f"{STATE}.{link.fqn}.{link.key}")
    path = optimizer.path(link, by_name=form == "nested")
    return path and tuple(map(str, path))


def _built_by_torch(paths: Mapping[str, KeyPath], tensors: Container[str]) -> dict[str, KeyPath]:
    """Return the paths with some lists made dicts, so that torch builds a state from them that it flattens to the same names.

    torch flattens a list only if it holds a tensor, a dict, or a list that is flattened; and it fills the gaps of a list. Lists
    that torch would not flatten, or that have gaps, become dicts.
    """
    below: dict[Key, dict[str, KeyPath]] = {}
    for name, (key, *rest) in paths.items():
        below.setdefault(key, {})[name] = tuple(rest)
    # A rename may put a name below that of a leaf. Such a name becomes one key.
    crowded = {key for key, names in below.items() if len(names) > 1 and () in names.values()}
    is_flattened = any(rest or name in tensors for names in below.values() for name, rest in names.items())
    is_list = is_flattened and not crowded and below.keys() == set(range(len(below)))
    found: dict[str, KeyPath] = {}
    for key, names in below.items():
        if key in crowded:
            found |= {name: (name_of((key, *rest)),) for name, rest in names.items()}
        else:
            inner = names if () in names.values() else _built_by_torch(names, tensors)
            found |= {name: (key if is_list else str(key), *rest) for name, rest in inner.items()}
    return found
