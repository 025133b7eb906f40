"""Decoding the ``.metadata`` of a Megatron checkpoint: DCP's metadata, the plans of all ranks, the true shapes of flat tensors.

Megatron up to 0.15 saves a tensor of the distributed optimizer flat. Say a tensor of shape X is cut into f parts along its dims.
Then the saved shape is ``[f…, elements of one part]``. A chunk of n elements at ``(c…, start)`` holds the run
``[start, start + n)`` of the box with the offsets ``c · (X/f)`` and the lengths ``X/f``. X is stored in ``mcore_data``. The plans
are parsed, because the pickle must be read to its end, and dropped.
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
    """Return None, as the stand-in of enum members and other constructors that occur in plans alone."""


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
    """The metadata of a folder, and the true shapes of the tensors that were saved flat, by key."""

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
    """Convert a part of a flat tensor to a run of a box of the true shape.

    Parameters
    ----------
    part
        Where a chunk lies in the tensor as it was saved.
    stored, shape
        The shape as it was saved, ``[f…, elements of one part]``, and the true shape.

    Raises
    ------
    CorruptError
        The shapes do not fit each other, or the chunk spans several parts.
    """
    fragments, numel = stored[:-1], stored[-1]
    # fragments: into how many parts each dim is cut. lengths: the box of one part. offsets: where this part begins.
    fits = len(fragments) == len(shape) and all(f > 0 and size % f == 0 for size, f in zip(shape, fragments, strict=True))
    lengths = tuple(size // f for size, f in zip(shape, fragments, strict=True)) if fits else ()
    if not fits or prod(lengths) != numel or any(n != 1 for n in part.lengths[:-1]):
        raise CorruptError(f"{name}: is saved flat, in shape {stored}, which is no way to cut its true shape {shape}")
    offsets = tuple(c * size for c, size in zip(part.offsets[:-1], lengths, strict=True))
    return FilePart(offsets, lengths, part.file, part.offset, part.offsets[-1], part.lengths[-1])
