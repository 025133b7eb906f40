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

from ...plugins import Ints, Storage
from ...plugins.dcp import METADATA_KEY, Chunk, ChunkRun, Metadata, SavedTensor, read_part
from ...plugins.errors import CorruptError

_PLANNER = "torch.distributed.checkpoint.planner"
_TORCH_DIST = "megatron.core.dist_checkpointing.strategies.torch"
_SHAPE = "nd_reformulated_orig_global_shape"
_CLASSES = {
    **{(_PLANNER, name): name for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    (_PLANNER, "WriteItemType"): None,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): "_StoragePrefix",
    (_TORCH_DIST, "MCoreSavePlan"): "MCoreSavePlan",
    (_TORCH_DIST, "MCoreMetadata"): "Metadata",
}
"""The classes in Megatron's metadata. Those of plans are parsed and dropped."""


@dataclass(frozen=True, slots=True)
class MegatronMetadata:
    """The metadata of a folder, and the true shapes of the tensors that were saved flat, by key."""

    saved: Metadata
    true_shapes: Mapping[str, Ints]


def read_metadata(storage: Storage) -> MegatronMetadata:
    """Read the ``.metadata`` of a folder of Megatron; see `plugins.dcp.read_part` for the errors."""
    saved = read_part(storage, "", _CLASSES)
    assert saved is not None, "the caller has seen the file"
    return MegatronMetadata(replace(saved, paths={}), _true_shapes(saved, f"{storage.url}: {METADATA_KEY}"))


def _true_shapes(saved: Metadata, name: str) -> dict[str, Ints]:
    found = saved.notes.get("mcore_data") or {}
    shapes: dict[str, Ints] = {}
    for key, about in found.items() if isinstance(found, dict) else ():
        shape = about.get(_SHAPE) if isinstance(about, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptError(f"{name}: mcore_data has {shape!r:.80} as the shape of {key!r:.200}; use another checkpoint")
        shapes[key] = tuple(shape)
    return shapes


def unflattened(saved: SavedTensor, shape: Ints, name: str) -> SavedTensor:
    """Convert a flat tensor to its true shape: each chunk becomes a run of a box.

    Raises
    ------
    CorruptError
        The shapes do not fit each other, or a chunk spans several parts.
    """
    fragments, numel = saved.shape[:-1], saved.shape[-1]
    # fragments: into how many parts each dim is cut. lengths: the box of one part.
    fits = len(fragments) == len(shape) and all(f > 0 and size % f == 0 for size, f in zip(shape, fragments, strict=True))
    lengths = tuple(size // f for size, f in zip(shape, fragments, strict=True)) if fits else ()
    if not fits or prod(lengths) != numel or any(n != 1 for chunk in saved.chunks for n in chunk.lengths[:-1]):
        raise CorruptError(f"{name}: is saved flat, in shape {saved.shape}, which is no way to cut its true shape {shape}")

    def run(chunk: Chunk) -> Chunk:
        offsets = tuple(c * size for c, size in zip(chunk.offsets[:-1], lengths, strict=True))
        return replace(chunk, run=ChunkRun(offsets, lengths, chunk.offsets[-1], 0, chunk.lengths[-1]))

    return SavedTensor(saved.dtype, shape, tuple(map(run, saved.chunks)))
