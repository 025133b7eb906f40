"""The part of each parameter that one model-parallel rank holds, as segments: boxes of the whole tensor, one after the other.

1. *Tensor-parallel* ranks hold shards, which follow from the shapes on all of them (`TensorParallel`). AutoTP saves maps of some
   parameters, and patterns that describe the kinds of others. A map lists each rank's pieces; a piece is a strided view of the
   whole tensor and one of the shard. Each piece is cut into segments whose elements are consecutive in the shard. The patterns
   apply if a parameter has no map. A parameter that neither describes is refused by name.
2. If several *stages* of a pipeline have a parameter, the first stage has all of it, and the later ones do not count.
3. `ModelParallelParts` are the parts in files, and `Parallel` the parts of a live engine, declared over its memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import CatalogBuilder, FlatShard, Ints, LocalShard
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.placements import parts_of_box, row_major_strides
from ...plugins.states import values_of_all
from ...plugins.torchfile import TorchFile
from .names import parameter_name
from .places import CURE_OF_ENGINES, CURE_OF_FOLDERS, Params, advised, local_shapes


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A segment: elements ``[at, at + prod(lengths))`` of a flattened shard, which are a box of the whole tensor."""

    at: int
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter that one rank holds: the shape of the whole tensor, and the segments.

    `segments` is empty if another rank has all of this part, too. If it is not `readable`, the parameter and its optimizer state
    are left out.
    """

    shape: Ints
    segments: tuple[FlatBox, ...]
    readable: bool = True

    @staticmethod
    def whole(shape: Ints) -> Shard:
        return Shard(shape, (FlatBox(0, (0,) * len(shape), shape),))


class TensorParallel:
    """How DeepSpeed divided parameters among tensor-parallel ranks, as ``universal_checkpoint_info`` describes it.

    Parameters
    ----------
    info
        ``universal_checkpoint_info`` of a file of model states, or of a live module.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        affine = info.get("affine_map") or {}
        if affine.get("version", 1) != 1:
            raise UnsupportedError(f"its affine_map has version {affine['version']!r}, and only version 1 is read")
        self._maps = _by_name(affine.get("params") or {})
        self._unsupported = _by_name(info.get("autotp_unsupported_parameter_patterns") or {})
        self._replicated = _by_name(dict.fromkeys(info.get("tp_replicated_parameter_patterns") or ()))
        self._rows = _by_name(dict.fromkeys(info.get("parameter_with_row_parallelism_patterns") or ()))
        # Kinds of Megatron-DeepSpeed; they are only named in the error.
        others = ("parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0")
        self._other_kinds = _by_name({pattern: key for key in others for pattern in info.get(key) or ()})
        for entry in info.get("parameter_with_sub_params") or ():
            for pattern in entry["patterns"]:
                self._other_kinds[_plain_name(pattern)] = "parameter_with_sub_params"

    def shard(self, name: str, rank: int, shapes: Sequence[Ints]) -> Shard:
        """Return the part of parameter `name` that one rank holds, given the shape of each rank's tensor.

        Raise `UnsupportedError` if the division of the parameter is not recorded, or of a kind that is not supported.
        """
        if (why := self._unsupported.get(name)) is not None:
            raise UnsupportedError(f"{name}: AutoTP itself says that it cannot be put together: {why}")
        if (found := self._maps.get(name)) is not None:
            return _shard_of(found, name, rank, shapes[rank])
        if (kind := self._other_kinds.get(name)) is not None:
            raise UnsupportedError(f"{name}: is divided among tensor-parallel ranks as {kind} says, and no affine_map says how")
        if name in self._replicated:
            return Shard.whole(shapes[rank]) if rank == 0 else Shard(shapes[0], ())
        return _cut_along(1 if name in self._rows else 0, name, rank, shapes)


def _by_name(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with parameter names as keys. AutoTP's keys are regular expressions: ``^``, an escaped name, ``$``."""
    return {_plain_name(pattern): value for pattern, value in patterns.items()}


def _plain_name(pattern: str) -> str:
    plain = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    if pattern != f"^{re.escape(plain)}$":
        raise UnsupportedError(f"{pattern!r:.200} is a pattern of parameters of Megatron-DeepSpeed, which are not supported")
    return plain


def _cut_along(dim: int, name: str, rank: int, shapes: Sequence[Ints]) -> Shard:
    """Return the part of a parameter that a rank holds, if the ranks' tensors, joined along `dim`, are the whole."""
    # The shapes of all ranks may differ only along `dim`.
    if any(len(shape) <= dim for shape in shapes) or len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise CorruptError(
            f"{name}: its tensor-parallel shards have shapes {shapes}, which do not fit along dim {dim}; use another checkpoint"
        )
    low = sum(shape[dim] for shape in shapes[:rank])
    shape = list(shapes[rank])
    shape[dim] = sum(other[dim] for other in shapes)
    offsets = tuple(low if d == dim else 0 for d in range(len(shape)))
    return Shard(tuple(shape), (FlatBox(0, offsets, shapes[rank]),))


def _shard_of(found: Mapping[str, Any], name: str, rank: int, held: Ints) -> Shard:
    """Return the part of a parameter that a rank holds, from AutoTP's map of the parameter."""
    try:
        shape = tuple(found["logical_shape"])
        own = found["ranks"][rank]
        if tuple(own["shard_shape"]) != held:
            raise CorruptError(
                f"{name}: its map says that rank {rank} holds {own['shard_shape']}, but it holds {held}; use another checkpoint"
            )
        segments: list[FlatBox] = []
        for piece in own["pieces"]:
            # Ranks share a piece that is replicated: only the lowest of them counts it.
            if min(piece["locations"]) == rank:
                if piece.get("scale", 1.0) != 1.0:
                    raise UnsupportedError(f"{name}: its tensor-parallel ranks hold it times {piece['scale']}")
                segments += _segments(name, shape, held, piece)
        return Shard(shape, tuple(segments))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptError(f"{name}: its affine_map is not a map of AutoTP ({error!r}); use another checkpoint") from None


def _segments(name: str, shape: Ints, held: Ints, piece: Mapping[str, Any]) -> list[FlatBox]:
    """Cut a piece of a map into segments whose elements are consecutive in the shard, which has shape `held`."""
    lengths = tuple(piece["shape"])
    (source, source_strides), (dest, dest_strides) = piece["source"], piece["dest"]
    strides = row_major_strides(shape)
    if not prod(lengths):
        return []
    # is_box: whether the piece is a box of the whole tensor, and not strided in it; offsets: where that box begins
    is_box = all(n == 1 or s == w for n, s, w in zip(lengths, source_strides, strides, strict=True))
    offsets = tuple(source // s % n if n else 0 for s, n in zip(strides, shape, strict=True))
    if not is_box or any(o + n > size for o, n, size in zip(offsets, lengths, shape, strict=True)):
        raise UnsupportedError(f"{name}: a piece of its affine_map is not a box of the tensor")
    last = dest + sum((n - 1) * s for n, s in zip(lengths, dest_strides, strict=True))
    if dest < 0 or last >= prod(held) or min(dest_strides, default=0) < 0:
        raise UnsupportedError(f"{name}: a piece of its affine_map lies beyond the shard")
    # Places are counted in elements of the shard, which stands for a file here.
    parts = parts_of_box(offsets, lengths, tuple(dest_strides), 0, dest, 1, name)
    return [FlatBox(part.offset, part.offsets, part.lengths) for part in parts]


class ModelParallelParts:
    """The parts of parameters that model-parallel ranks hold.

    Parameters
    ----------
    builder
        The catalog to which errors of unreadable parameters are added.
    models
        The file of model states of each model-parallel rank.
    parallel
        The description of tensor-parallel shards; None if the ranks are stages, or there is just one rank.
    """

    def __init__(self, builder: CatalogBuilder, models: Sequence[TorchFile], parallel: TensorParallel | None) -> None:
        self._builder, self.parallel = builder, parallel
        self._local_shapes = [local_shapes(model) for model in models] if parallel else []
        self._home: dict[str, int] = {}  # the first stage that has each parameter of a pipeline

    def has_home(self, fqn: str) -> bool:
        """Tell whether an earlier stage of the pipeline has this parameter."""
        return fqn in self._home

    def is_first_stage_of(self, mp: int, fqn: str) -> bool:
        """Tell whether pipeline stage `mp` is the first one that has this parameter. The stages must be asked in order."""
        return self._home.setdefault(fqn, mp) == mp

    def shards(self, mp: int, params: Params) -> list[Shard]:
        """Return the part of each parameter that model-parallel rank `mp` holds.

        A part has no segments if a lower rank has all of it: an earlier stage, or another tensor-parallel rank.
        """
        if self.parallel is not None:
            return [self.tensor_parallel_shard(mp, fqn) for fqn in params.names]
        return [
            Shard.whole(shape) if self.is_first_stage_of(mp, fqn) else Shard(shape, ())
            for fqn, shape in zip(params.names, params.shapes, strict=True)
        ]

    def tensor_parallel_shard(self, mp: int, fqn: str) -> Shard:
        """Return the part of a parameter that one tensor-parallel rank holds; not `readable` if its division is unknown."""
        assert self.parallel is not None
        shapes = [of_rank.get(fqn) for of_rank in self._local_shapes]
        try:
            if any(shape is None for shape in shapes):
                raise CorruptError(
                    f"{self._builder.where}: {fqn} is not on all {len(shapes)} tensor-parallel ranks; use another checkpoint"
                )
            return self.parallel.shard(fqn, mp, [shape for shape in shapes if shape is not None])
        except UnsupportedError as error:
            self._builder.unreadable(parameter_name(fqn), UnsupportedError(f"{self._builder.where}: {error}; {CURE_OF_FOLDERS}"))
            return Shard((), (), readable=False)


def num_tensor_parallel(engine: Any) -> int:
    """Return the number of ranks among which AutoTP divides the parameters of an engine; 1 without AutoTP."""
    return (engine.autotp_size() if hasattr(engine, "autotp_size") else 1) or 1


class Parallel:
    """How tensor-parallel ranks and the stages of a pipeline divide parameters. Its construction is collective with AutoTP."""

    def __init__(self, engine: Any, *, loading: bool) -> None:
        # DeepSpeed marks parameters that an earlier stage also has, because a gradient norm must count them once.
        later = (name for param, name in engine.param_names.items() if getattr(param, "ds_pipe_replicated", False))
        self._elsewhere = set() if loading else set(later)
        self._map: TensorParallel | None = None
        self._known: dict[str, Shard] = {}
        info = getattr(engine.module, "universal_checkpoint_info", None)
        if num_tensor_parallel(engine) > 1:
            from deepspeed.utils import groups

            group = groups.get_tensor_model_parallel_group()
            self._rank = dist.get_rank(group=group)
            with advised(CURE_OF_ENGINES):
                self._map = TensorParallel(info or {})
            own_shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for p, name in engine.param_names.items()}
            self._shapes = values_of_all("share shapes of", "tensor-parallel parameters", own_shapes, process_group=group)

    def saves(self, fqn: str) -> bool:
        """Tell whether this rank saves its part of a parameter. It does not if an earlier stage of the pipeline has it too.

        For loading, this is True for every parameter.
        """
        return fqn not in self._elsewhere

    def shard(self, fqn: str, local: Ints) -> Shard:
        """Return the part of a parameter that this rank holds, given the shape of its local tensor."""
        if self._map is None:
            return Shard.whole(local)
        if fqn not in self._known:
            shapes: list[Ints] = [tuple(of_rank[fqn]) for of_rank in self._shapes]
            with advised(CURE_OF_ENGINES):
                found = self._map.shard(fqn, self._rank, shapes)
                # A parameter that all ranks hold whole: each of them is a replica of rank 0, and they share the writing.
                self._known[fqn] = found if found.segments else self._map.shard(fqn, 0, shapes)
        return self._known[fqn]

    def part(self, fqn: str, local: Ints, tensor: torch.Tensor, start: int) -> Any:
        """Return a `FlatShard` over `tensor`: a run of a flattened local tensor of shape `local`, from element `start` on."""
        shard = self.shard(fqn, local)
        pieces = [(segment.offsets, segment.lengths) for segment in sorted(shard.segments, key=lambda segment: segment.at)]
        return FlatShard(tensor, shard.shape, start, pieces=pieces)

    def whole(self, fqn: str, tensor: torch.Tensor) -> Any:
        """Return a shard over a whole local tensor: a `FlatShard`, or a `LocalShard` if it is not row-major."""
        if tensor.is_contiguous() or self._map is not None:
            return self.part(fqn, tuple(tensor.shape), tensor, 0)
        return LocalShard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
