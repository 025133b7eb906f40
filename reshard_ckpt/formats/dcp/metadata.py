"""Decoding ``.metadata``: tensors with their chunks, values, the places of their bytes, and the paths in the saved state.

``.metadata`` is a pickle of a few dataclasses of ``torch.distributed.checkpoint``: a `Metadata` with

1. ``state_dict_metadata``: for each name, the dtype, the global shape and the chunks (offsets and sizes) of a tensor; or a mark
   that it is bytes, which means a value;
2. ``storage_data``: for each name and offset, the file, and the first byte and the length in it;
3. ``planner_data``: for each name, the keys that lead to it in the saved state.

`read_pickle` makes stand-ins for them, and this module checks their structure. The classes are the same since torch 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ...core.catalog.specs import Ints
from ...core.report import with_article
from ...core.trees import MAX_ALIKE, too_many_alike
from ...errors import CheckpointError, CorruptError
from ...torchfile.pickle_reader import MAX_ARGUMENTS, StandInClass, StandInFunction, StandInObject, read_pickle
from ...torchfile.tensors import DTYPES, ORDERED_DICT, SIZE

METADATA_KEY = ".metadata"
MAX_METADATA_BYTES = 4 << 30
"""The largest ``.metadata`` that is read: some ten million chunks."""

MAX_ELEMENTS = 1 << 58
"""The most elements of a tensor, so that its bytes, and sums of such, fit in an int64."""

Key = str | int
"""A step of a path: a key of a dict, or an index of a list."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of a file, and the transforms (compression and the like) that the writer applied to it."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """The elements of a chunk that belong to one tensor: `count` elements, from element number `skip` of the chunk on.

    They are elements ``[start, start + count)`` of a box of that tensor, in row-major order.
    """

    offsets: Ints
    lengths: Ints
    start: int
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it is stored.

    If `head` is None, the bytes begin with a head of their own. If it is empty, the bytes are the box's elements in row-major
    order. Otherwise it is the pickle of a tensor whose storage the bytes are, because the writer keeps pickles in the metadata.
    If `run` is set, the tensor was saved inside another one, such as a flat parameter: the box is of that saved tensor, and `run`
    says which elements of the box belong to this tensor, and where in it.
    """

    offsets: Ints
    lengths: Ints
    extent: Extent
    head: bytes | None = None
    run: ChunkRun | None = None

    @property
    def num_elements(self) -> int:
        """The number of elements of the tensor that this chunk holds."""
        return prod(self.lengths) if self.run is None else self.run.count


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in the metadata of a DCP folder. Its `chunks` are distinct, and none of them is empty."""

    dtype: torch.dtype
    shape: Ints
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of ``.metadata``, in its order: tensors and values by the FQNs that ``torch.distributed.checkpoint`` gave."""

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Extent]
    paths: Mapping[str, tuple[Key, ...]]
    """For each FQN, the keys that lead to its tensor or value in the saved state; the FQN alone if no keys were recorded."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the metadata of another library, such as ``user_defined_dict``; they are not checked."""
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict)
    """The FQN of each tensor or value that cannot be read because ranks disagree about it, mapped to the error."""


DCP_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
DCP_FILES = "torch.distributed.checkpoint.filesystem"


def _ignore_arguments(*arguments: Any) -> None:
    """Return None. Stands for functions whose results are not needed: they make memory formats and layouts."""


def _path(*parts: Any) -> str:
    return "/".join(part for part in parts if isinstance(part, str))


_READ = ("state_dict_metadata", "storage_data", "planner_data", "all_tensor_metadata")
_CLASSES = (
    *((DCP_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((DCP_METADATA, name) for name in ("TensorProperties", "MetadataIndex", "StorageMeta")),
    (_SHARDED, "TensorProperties"),  # DCP before torch 2.4 used this copy
    (DCP_FILES, "_StorageInfo"),
)
_PATHS = tuple((m, f"{p}{k}Path") for m in ("pathlib", "pathlib._local") for k in ("Posix", "Windows") for p in ("", "Pure"))

TABLE: dict[tuple[str, str], Any] = {
    **DTYPES,
    **{(module, name): StandInClass(name) for module, name in _CLASSES},
    **dict.fromkeys(_PATHS, StandInFunction("pathlib.Path", _path)),
    ("torch", "Size"): SIZE,
    ("torch.serialization", "_get_layout"): StandInFunction("torch.serialization._get_layout", _ignore_arguments),
    (DCP_METADATA, "_MEM_FORMAT_ENCODING"): StandInFunction("_MEM_FORMAT_ENCODING", _ignore_arguments),
    (_SHARDED, "MEM_FORMAT_ENCODING"): StandInFunction("MEM_FORMAT_ENCODING", _ignore_arguments),
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name). This stand-in looks nothing up.
    ("builtins", "getattr"): StandInFunction("getattr of an enum", _ignore_arguments),
    ("collections", "OrderedDict"): ORDERED_DICT,
}


Classes = Mapping[tuple[str, str], str | None]


def read_metadata(data: bytes, *, name: str, classes: Classes | None = None) -> Metadata:
    """Decode and check a ``.metadata`` file.

    Parameters
    ----------
    classes
        Maps module and name of another library's class to the name of DCP's class that it stands for, or to a name of its own.
        Functions and enums whose results are not needed are mapped to None.

    Raises
    ------
    UnsupportedError
        The file names a class or function that is neither in DCP's own metadata nor in `classes`.
    CorruptError
        The file is damaged, or has another structure than DCP writes.
    """
    others: dict[tuple[str, str], Any] = {
        key: StandInFunction(key[1], _ignore_arguments) if stands_for is None else StandInClass(stands_for)
        for key, stands_for in (classes or {}).items()
    }
    root = read_pickle(data, {**TABLE, **others}, name=name)
    try:
        return _decode(_fields(root, "Metadata"), len(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{name}: is not what torch.distributed.checkpoint writes ({error}); use another checkpoint") from None


def _fields(made: Any, kind: str) -> dict[str, Any]:
    if not isinstance(made, StandInObject) or made.kind.name != kind:
        found = made.kind.name if isinstance(made, StandInObject) else type(made).__name__
        raise ValueError(f"{with_article(found)} where {with_article(kind)} belongs")
    state = {} if made.state is None else made.state
    if not isinstance(state, dict):
        raise ValueError(f"{with_article(kind)} without fields")
    return state


def _decode(root: dict[str, Any], num_bytes: int) -> Metadata:
    described = _dict(root["state_dict_metadata"], "state_dict_metadata")
    stored = _by_name(root["storage_data"], "storage_data")
    # One extent for each object: a hostile pickle refers to one object many times.
    infos = {id(info): info for of_name in stored.values() for info in of_name.values()}
    extents = {key: _extent(info) for key, info in infos.items()}
    places = {fqn: {offset: extents[id(info)] for offset, info in of_name.items()} for fqn, of_name in stored.items()}
    # Some writers have the heads of chunks in the metadata.
    heads = _by_name(root.get("all_tensor_metadata") or {}, "all_tensor_metadata")
    num_chunks = 0
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Extent] = {}
    for fqn, entry in described.items():
        if not isinstance(fqn, str) or not isinstance(entry, StandInObject):
            raise ValueError("state_dict_metadata has an entry that is neither a tensor nor a value")
        if entry.kind.name == "BytesStorageMetadata":
            values[fqn] = places[fqn][None]
        else:
            fields = _fields(entry, "TensorStorageMetadata")
            tensors[fqn] = _tensor(fqn, fields, places.get(fqn, {}), heads.get(fqn))
            num_chunks += len(fields["chunks"])
            if num_chunks > num_bytes:  # a hostile pickle refers to one list of chunks many times
                raise ValueError("more chunks than its bytes can spell")
    planned = dict(_paths(root.get("planner_data")))
    numbers = {str(key): key for path in planned.values() for key in path if type(key) is int}
    if too_many_alike(numbers.values()) or too_many_alike(planned.values()):
        raise ValueError(f"more than {MAX_ALIKE} keys of its paths have the same hash")
    paths = {fqn: planned.get(fqn, (fqn,)) for fqn in (*tensors, *values)}
    return Metadata(tensors, values, paths, {key: value for key, value in root.items() if key not in _READ})


def _by_name(indexed: Any, what: str) -> dict[str, dict[Ints | None, Any]]:
    """Group the entries of a dict with ``MetadataIndex`` keys by name, and then by offset.

    Too many offsets with one hash are refused.
    """
    listed: dict[str, list[tuple[Ints | None, Any]]] = {}
    for index, entry in _dict(indexed, what).items():
        fields = _fields(index, "MetadataIndex")
        fqn, offset = fields["fqn"], fields.get("offset")
        if not isinstance(fqn, str):
            raise ValueError("an index without a name")
        listed.setdefault(fqn, []).append((None if offset is None else SIZE.make(offset), entry))
    for fqn, pairs in listed.items():
        if too_many_alike([offset for offset, _ in pairs]):
            raise ValueError(f"more than {MAX_ALIKE} offsets of {fqn:.200} have the same hash")
    return {fqn: dict(pairs) for fqn, pairs in listed.items()}


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a dict")
    return value


def _extent(info: Any) -> Extent:
    fields = _fields(info, "_StorageInfo")
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    transforms = fields.get("transform_descriptors") or ()
    if not (isinstance(file, str) and type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
        raise ValueError("a _StorageInfo without a file, an offset and a length")
    if not isinstance(transforms, list | tuple) or len(transforms) > MAX_ARGUMENTS:
        raise ValueError("a _StorageInfo whose transforms are not a list")
    return Extent(file, offset, length, tuple(str(t)[:100] for t in transforms if isinstance(t, str)))


def _tensor(
    fqn: str, fields: dict[str, Any], places: Mapping[Ints | None, Extent], heads: Mapping[Ints | None, Any] | None
) -> SavedTensor:
    shape, chunks = SIZE.make(fields["size"]), fields["chunks"]
    if not isinstance(chunks, list) or prod(max(size, 1) for size in shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
        raise ValueError(f"{fqn} has no chunks, or a size that no tensor has")
    # Several ranks may list the same chunk as replicas. Chunks without elements have no bytes.
    found: dict[Ints, Chunk] = {}
    for chunk in chunks:
        state = _fields(chunk, "ChunkStorageMetadata")
        offsets, lengths = state["offsets"], state["sizes"]
        _check_inside(fqn, shape, offsets, lengths)
        if 0 in lengths:
            continue
        earlier = found.get(offsets)
        if earlier is not None and earlier.lengths != lengths:
            raise ValueError(f"{fqn} has two chunks at {offsets}, of sizes {earlier.lengths} and {lengths}")
        if earlier is None:
            head = None if heads is None else heads[offsets]
            if heads is not None and not isinstance(head, bytes):
                raise ValueError(f"{fqn} has a chunk at {offsets} without a description")
            found[offsets] = Chunk(offsets, lengths, places[offsets], head)
    return SavedTensor(_dtype(fields["properties"]), shape, tuple(found.values()))


def _check_inside(fqn: str, shape: Ints, offsets: Ints, lengths: Ints) -> None:
    if not len(offsets) == len(lengths) == len(shape):
        raise ValueError(f"{fqn} of {len(shape)} dims has a chunk of {len(lengths)} dims")
    for low, length, size in zip(offsets, lengths, shape, strict=True):
        if low < 0 or length < 0 or low + length > size:
            raise ValueError(f"{fqn} of shape {shape} has a chunk at {offsets} of size {lengths}, which is not inside")


def _dtype(properties: Any) -> torch.dtype:
    if not isinstance(properties, StandInObject) or properties.kind.name != "TensorProperties" or not properties.state:
        raise ValueError("a tensor without properties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    return dtype


def _paths(planner_data: Any) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """Yield each FQN and its path in the state dict from the ``planner_data`` of DCP's default planner.

    Entries of any other form, which other planners write, are skipped.
    """
    if not isinstance(planner_data, dict):
        return
    for fqn, path in planner_data.items():
        if not isinstance(fqn, str) or not isinstance(path, tuple) or not 0 < len(path) <= MAX_ARGUMENTS:
            continue
        if all(type(key) in (str, int) for key in path) and type(path[0]) is str:
            yield fqn, path
