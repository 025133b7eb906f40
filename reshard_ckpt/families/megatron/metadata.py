"""Decoding the ``.metadata`` of a Megatron checkpoint: that of DCP, with plans of all ranks, and the true shapes of flat tensors.

Up to 0.15 a tensor of the distributed optimizer is saved flat: a tensor of shape X that is cut into f parts along its dims has
the shape ``[f…, elements of a part]``, and a chunk at ``(c…, start)`` of n elements is the run ``[start, start + n)`` of the box
``c · (X/f)`` of size ``X/f``. X stands in ``mcore_data``. The plans are parsed, as everything of the pickle is, and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ...core.catalog.specs import Ints
from ...errors import CorruptError
from ...formats.catalog_builder import FilePart
from ...formats.dcp.metadata import DCP_FILES, TABLE, Metadata, decode_metadata
from ...torchfile.pickle_reader import StandInClass, StandInFunction, StandInObject, read_pickle

_PLANNER = "torch.distributed.checkpoint.planner"
_TORCH_DIST = "megatron.core.dist_checkpointing.strategies.torch"
_SHAPE = "nd_reformulated_orig_global_shape"


def _nothing(*arguments: object) -> None:
    """Stand for a member of an enum, and for whatever else only plans have."""


_TABLE = {
    **TABLE,
    **{(_PLANNER, name): StandInClass(name) for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    (_PLANNER, "WriteItemType"): StandInFunction("WriteItemType", _nothing),
    (DCP_FILES, "_StoragePrefix"): StandInClass("_StoragePrefix"),
    (_TORCH_DIST, "MCoreSavePlan"): StandInClass("MCoreSavePlan"),
    (_TORCH_DIST, "MCoreMetadata"): StandInClass("Metadata"),
}


@dataclass(frozen=True, slots=True)
class MegatronMetadata:
    """The metadata of a folder, and the true shapes of the tensors that are saved flat."""

    saved: Metadata
    true_shapes: Mapping[str, Ints]


def read_metadata(data: bytes, *, name: str) -> MegatronMetadata:
    """Decode a ``.metadata`` file of Megatron; see `formats.dcp.metadata.read_metadata` for the errors."""
    root = read_pickle(data, _TABLE, name=name)
    saved = decode_metadata(root, len(data), name=name)
    return MegatronMetadata(replace(saved, paths={}), _true_shapes(root, name))


def _true_shapes(root: StandInObject, name: str) -> dict[str, Ints]:
    found = (root.state or {}).get("mcore_data") or {}
    shapes: dict[str, Ints] = {}
    for key, about in found.items() if isinstance(found, dict) else ():
        shape = about.get(_SHAPE) if isinstance(about, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptError(f"{name}: mcore_data has {shape!r:.80} as the shape of {key!r:.200}; use another checkpoint")
        shapes[key] = tuple(shape)
    return shapes


def unflattened(part: FilePart, stored: Ints, shape: Ints, name: str) -> FilePart:
    """Return a part of a flat tensor as a run of a box of the true shape.

    Raises
    ------
    CorruptError
        The shapes do not fit each other.
    """
    fragments, numel = stored[:-1], stored[-1]
    fits = len(fragments) == len(shape) and all(f > 0 and size % f == 0 for size, f in zip(shape, fragments, strict=True))
    lengths = tuple(size // f for size, f in zip(shape, fragments, strict=True)) if fits else ()
    if not fits or prod(lengths) != numel or any(n != 1 for n in part.lengths[:-1]):
        raise CorruptError(f"{name}: is saved flat, in shape {stored}, which is no way to cut its true shape {shape}")
    offsets = tuple(c * size for c, size in zip(part.offsets[:-1], lengths, strict=True))
    return FilePart(offsets, lengths, part.file, part.offset, part.offsets[-1], part.lengths[-1])
