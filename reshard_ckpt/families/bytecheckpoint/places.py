"""FSDP1's flat parameters, as ByteCheckpoint saves them "decomposed": each parameter is a run of one vector.

``user_defined_dict`` of the model's metadata lists for each flat parameter the names and shapes of its parameters, and the sizes
of all runs of the vector, with a mask that marks padding. A chunk is a range of the vector. The elements that it holds of a
parameter are a run of that parameter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...plugins import Ints
from ...plugins.dcp import Chunk, ChunkRun, KeyPath, Metadata, SavedTensor
from ...plugins.errors import CorruptError
from ...plugins.names import name_of

_FIELDS = ("fsdp_flat_param_to_fqns", "fsdp_shapes", "fsdp_is_padding_mask", "fsdp_numels_with_padding")


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A parameter inside a flat parameter of FSDP1: elements ``[start, start + prod(shape))`` of the flat vector."""

    fqn: str
    shape: Ints
    start: int


FlatParams = Mapping[str, tuple[FlatPart, ...]]
"""Maps the name of each flat parameter of FSDP1 to the parameters that lie in it."""


def flat_params(notes: Any, where: str) -> FlatParams:
    """Read the flat parameters from `notes`, the ``user_defined_dict`` of a model's metadata; empty if it has none.

    Raise `CorruptError` if the notes contradict each other.
    """
    if not isinstance(notes, dict) or not any(field in notes for field in _FIELDS):
        return {}
    try:
        names, shapes, padding, sizes = (notes[field] for field in _FIELDS)
        return {flat: tuple(_parts(names[flat], shapes[flat], padding[flat], sizes[flat])) for flat in names}
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise CorruptError(f"{where}: its notes on flat parameters contradict each other ({error}); use another one") from None


def _parts(names: Any, shapes: Any, padding: Any, sizes: Any) -> Iterator[FlatPart]:
    described = list(zip(names, shapes, strict=True))
    if [not pad for pad in padding].count(True) != len(described):
        raise ValueError("another number of parameters than names")
    # Walk over the vector: each run is padding, or the next parameter.
    position = 0
    left = iter(described)
    for size, pad in zip(sizes, padding, strict=True):
        if type(size) is not int or size < 0:
            raise ValueError("a size that is not a number of elements")
        if not pad:
            fqn, shape = next(left)
            if not isinstance(fqn, str) or any(type(n) is not int or n < 0 for n in shape) or prod(shape) != size:
                raise ValueError(f"{size} elements of shape {shape}")
            yield FlatPart(fqn, tuple(shape), position)
        position += size


def unflattened(saved: Metadata, flats: FlatParams, where: str) -> Metadata:
    """Return metadata in which each flat parameter of FSDP1, and its optimizer state, is replaced by the parameters in it.

    Raise `CorruptError` if a tensor that `flats` lists is not a vector, or two flat parameters hold the same parameter.
    """
    tensors, paths = dict(saved.tensors), dict(saved.paths)
    for fqn, tensor in saved.tensors.items():
        flat, key = _flat_name(saved.paths[fqn])
        if flat not in flats:
            continue
        del tensors[fqn], paths[fqn]
        if len(tensor.shape) > 1:
            raise CorruptError(
                f"{where}: {fqn:.200} of shape {tensor.shape} is said to be a flat parameter; use another checkpoint"
            )
        if not tensor.shape:  # a count of parameters that require a gradient; only ByteCheckpoint itself uses it
            continue
        held = sorted(tensor.chunks, key=lambda chunk: chunk.offsets)
        for part in flats[flat]:
            path: KeyPath = (part.fqn,) if key is None else ("state", part.fqn, key)
            name = name_of(path)
            if name in tensors:
                raise CorruptError(f"{where}: {name:.200} is in two flat parameters; use another checkpoint")
            runs = (_run(chunk, part) for chunk in _within(held, part))
            tensors[name] = SavedTensor(tensor.dtype, part.shape, tuple(run for run in runs if run is not None))
            paths[name] = path
    named = {part.fqn for parts in flats.values() for part in parts}
    for fqn, path in paths.items():  # the path of a parameter's step count has its name and its key joined by a dot
        fqn_of, _, last = str(path[-1]).rpartition(".")
        if len(path) == 2 and path[0] == "state" and fqn_of in named:
            paths[fqn] = ("state", fqn_of, last)
    return replace(saved, tensors=tensors, paths=paths)


def _within(chunks: Sequence[Chunk], part: FlatPart) -> Sequence[Chunk]:
    """Select from the sorted chunks of a flat vector the ones that may hold elements of one parameter."""

    def begin(chunk: Chunk) -> int:
        return chunk.offsets[0]

    first = bisect_right(chunks, part.start, key=begin) - 1  # the last chunk that begins at or before the parameter
    return chunks[max(first, 0) : bisect_left(chunks, part.start + prod(part.shape), key=begin)]


def _flat_name(path: KeyPath) -> tuple[str, str | None]:
    """Split the path of a flat parameter, or of its optimizer state, into the flat parameter's name and the key of the state.

    The path of state is ``("state", "<flat>.<key>")``. For the parameter itself the key is None.
    """
    if len(path) == 2 and path[0] == "state":
        flat, _, key = str(path[1]).rpartition(".")
        return flat, key
    return str(path[0]), None


def _run(chunk: Chunk, part: FlatPart) -> Chunk | None:
    """Convert a chunk of a flat vector to a chunk of one parameter, with the run of that parameter's elements in it.

    Return None if the chunk holds no element of the parameter.
    """
    (first,), (count,) = chunk.offsets, chunk.lengths
    low, high = max(first, part.start), min(first + count, part.start + prod(part.shape))
    run = ChunkRun((0,) * len(part.shape), part.shape, start=low - part.start, skip=low - first, count=high - low)
    return replace(chunk, run=run) if low < high else None
