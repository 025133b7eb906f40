"""The parts of parameters that this rank of a DeepSpeed engine holds, beyond data parallelism.

1. Tensor-parallel ranks (AutoTP) gather the shapes of all their parameters once; the shards follow from these.
2. A save leaves out parameters that an earlier stage of a pipeline also has.
3. Each part is declared over the live memory, by its place in the whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...plugins import Ints, values_of_all
from .live import declared, declared_whole
from .shards import Shard, TensorParallel


class Parallel:
    """How tensor-parallel ranks and the stages of a pipeline divide parameters. Its construction is collective with AutoTP."""

    def __init__(self, engine: Any, *, loading: bool) -> None:
        # DeepSpeed marks parameters that an earlier stage also has, because a gradient norm must count them once.
        later = (name for param, name in engine.param_names.items() if getattr(param, "ds_pipe_replicated", False))
        self._elsewhere = set() if loading else set(later)
        self._map: TensorParallel | None = None
        self._known: dict[str, Shard] = {}
        info = getattr(engine.module, "universal_checkpoint_info", None)
        size = engine.autotp_size() if hasattr(engine, "autotp_size") else 0
        if size and size > 1:
            from deepspeed.utils import groups

            group = groups.get_tensor_model_parallel_group()
            self._rank = dist.get_rank(group=group)
            self._map = TensorParallel(info or {})
            mine = {name: tuple(getattr(p, "ds_shape", p.shape)) for p, name in engine.param_names.items()}
            self._shapes = values_of_all("share shapes of", "tensor-parallel parameters", mine, process_group=group)

    def counts(self, fqn: str) -> bool:
        """Tell whether this rank saves its part of a parameter. For tied modules of a pipeline, the first stage does."""
        return fqn not in self._elsewhere

    def shard(self, fqn: str, local: Ints) -> Shard:
        """Return the part of a parameter that this rank holds, given the shape of its local tensor."""
        if self._map is None:
            return Shard.whole(local)
        if fqn not in self._known:
            shapes: list[Ints] = [tuple(of_rank[fqn]) for of_rank in self._shapes]
            found = self._map.shard(fqn, self._rank, shapes)
            # A parameter that all ranks hold whole: each of them is a replica of rank 0, and they share the writing.
            self._known[fqn] = found if found.segments else self._map.shard(fqn, 0, shapes)
        return self._known[fqn]

    def part(self, fqn: str, local: Ints, tensor: torch.Tensor, start: int) -> Any:
        """Return a `FlatShard` over `tensor`: a run of a flattened local tensor of shape `local`, from element `start` on."""
        return declared(tensor, self.shard(fqn, local), start)

    def whole(self, fqn: str, tensor: torch.Tensor) -> Any:
        """Return a shard over a whole local tensor: a `FlatShard`, or a `LocalShard` if it is not row-major."""
        if tensor.is_contiguous() or self._map is not None:
            return self.part(fqn, tuple(tensor.shape), tensor, 0)
        return declared_whole(tensor)
