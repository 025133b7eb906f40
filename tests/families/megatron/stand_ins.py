"""Classes with the attributes of Megatron's, and a small model on any grid of ranks, for tests without megatron.

Values are functions of global position: element i of the tensor of key k is ``base(k) + i``, whatever rank holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any
from zlib import crc32

import torch

Ints = tuple[int, ...]


@dataclass
class ShardedTensor:
    """As Megatron's, without its checks."""

    key: str
    data: torch.Tensor | None
    local_shape: Ints
    global_shape: Ints
    global_offset: Ints
    replica_id: int | Ints = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    dtype: torch.dtype = torch.float32

    def init_data(self, device: str) -> None:
        self.data = torch.full(self.local_shape, -1.0, device=device)

    def local_global_shape(self) -> Ints:
        """The local shape with the axes that the local tensor lacks."""
        return (1,) * self.prepend_axis_num + self.local_shape


@dataclass
class ShardedObject:
    """As Megatron's."""

    key: str
    data: Any
    global_shape: Ints
    global_offset: Ints
    replica_id: int | Ints = 0


@dataclass
class ShardedTensorFactory:
    """As Megatron's."""

    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], Any]
    replica_id: int | Ints = 0
    flattened_range: slice | None = None


class LocalNonpersistentObject:
    """As Megatron's."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


class StrictHandling(Enum):
    """Some of Megatron's."""

    LOG_ALL = "log_all"
    RETURN_ALL = "return_all"


def whole(key: str, shape: Ints) -> torch.Tensor:
    """The tensor of a key: each element tells its key and its place."""
    return (crc32(key.encode()) % 4096) * 1000.0 + torch.arange(prod(shape), dtype=torch.float32).view(shape)


def part(key: str, shape: Ints, offsets: Ints, lengths: Ints) -> torch.Tensor:
    """A box of the tensor of a key."""
    return whole(key, shape)[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


LAYERS, HIDDEN, FFN, EXPERTS = 4, 4, 8, 4


@dataclass(frozen=True)
class Grid:
    """This rank's place: tp varies fastest, then dp, then pp; experts are divided over ep of the dp ranks."""

    rank: int
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vocabulary: int = 8
    bucket: int = 1 << 30

    @property
    def at_tp(self) -> int:
        return self.rank % self.tp

    @property
    def at_dp(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def at_pp(self) -> int:
        return self.rank // (self.tp * self.dp)

    @property
    def layers(self) -> range:
        each = LAYERS // self.pp
        return range(self.at_pp * each, (self.at_pp + 1) * each)


@dataclass
class Model:
    """The parameters of one rank, and what they are sharded as."""

    grid: Grid
    sharded: dict[str, ShardedTensor | ShardedTensorFactory] = field(default_factory=dict)
    experts: list[torch.nn.Parameter] = field(default_factory=list)
    dense: list[torch.nn.Parameter] = field(default_factory=list)

    def sharded_state_dict(self) -> dict[str, Any]:
        """The model's tree, with keys in other places than their names say."""
        replica = (0, self.grid.at_tp, self.grid.at_dp)
        extra = [ShardedObject("decoder.extra", {"of": [i]}, (LAYERS,), (i,), replica) for i in self.grid.layers]
        return {**self.sharded, "extra": extra, "a plain value": 3}


def build(grid: Grid, *, filled: bool) -> Model:
    """Make the model of a rank; where it is not `filled`, all is -1."""
    model = Model(grid)

    def add(name: str, key: str, shape: Ints, at: Ints, lengths: Ints, replica: Ints, prepend: int = 0, **options: Any) -> None:
        data = part(key, shape, at, lengths).clone().view(lengths[prepend:])
        param = torch.nn.Parameter(data if filled else torch.full_like(data, -1))
        model.sharded[name] = ShardedTensor(key, param, tuple(param.shape), shape, at, replica, prepend, **options)
        (model.experts if "expert" in name else model.dense).append(param)

    t, tp, d = grid.at_tp, grid.tp, grid.at_dp
    rows, each = grid.vocabulary // tp, EXPERTS // grid.ep
    for stage in {0, grid.pp - 1}:  # tied: the last stage has them too
        if grid.at_pp == stage:
            tied = (int(stage > 0), 0, d)
            shape = (grid.vocabulary, HIDDEN)
            add("embedding", "embedding", shape, (t * rows, 0), (rows, HIDDEN), tied, allow_shape_mismatch=True)
    for i, layer in enumerate(grid.layers):
        add(f"{i}.norm", "layers.norm", (LAYERS, HIDDEN), (layer, 0), (1, HIDDEN), (0, t, d), 1)
        of = HIDDEN // tp
        add(f"{i}.proj", "layers.proj", (LAYERS, HIDDEN, 6), (layer, t * of, 0), (1, of, 6), (0, 0, d), 1)
        _add_swiglu(model, f"{i}.fc1", layer, filled)
        for e in range(each):
            expert = grid.at_dp % grid.ep * each + e
            box = (layer, expert, 0, t * (FFN // tp)), (1, 1, HIDDEN, FFN // tp)
            add(f"{i}.expert.{e}", "layers.experts", (LAYERS, EXPERTS, HIDDEN, FFN), *box, (0, 0, d // grid.ep), 2)
    return model


def _add_swiglu(model: Model, name: str, layer: int, filled: bool) -> None:
    """Two halves of one local tensor are two tensors under one key."""
    grid, shape = model.grid, (LAYERS, 2 * FFN, 3)
    rows = FFN // grid.tp

    def split(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        halves = data.chunk(2)
        offsets = [(layer, half * FFN + grid.at_tp * rows, 0) for half in range(2)]
        return [ShardedTensor(key, h, tuple(h.shape), shape, at, replica_id, 1) for h, at in zip(halves, offsets, strict=True)]

    key = "layers.fc1"
    halves = [part(key, shape, (layer, half * FFN + grid.at_tp * rows, 0), (1, rows, 3))[0] for half in range(2)]
    data = torch.cat(halves)
    param = torch.nn.Parameter(data if filled else torch.full_like(data, -1))
    model.sharded[name] = ShardedTensorFactory(key, param, split, torch.cat, (0, 0, grid.at_dp))
    model.dense.append(param)


def shards_of(tree: Any) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors of a tree, those that factories build too."""
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from shards_of(child)
    elif isinstance(tree, ShardedTensorFactory):
        yield from shards_of(tree.build_fn(tree.key, tree.data, tree.replica_id, tree.flattened_range))
    elif isinstance(tree, ShardedTensor):
        yield tree


@dataclass
class Range:
    """As Megatron's."""

    start: int
    end: int


class DistributedOptimizer:
    """As Megatron's: masters and states are runs of the flattened parameters, as buckets divided by dp fall."""

    distributed_optimizer_instance_id = 0

    def __init__(self, params: list[torch.nn.Parameter], dp: int, at_dp: int, bucket: int, *, stepped: bool) -> None:
        self.optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
        self.gbuf_ranges = [{("p", "g"): [{"param_map": one} for one in _buckets(params, dp, at_dp, bucket)]}]
        self.held: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self.step = 7 if stepped else 0
        self.loaded: Any = None
        if stepped:
            self._allocate()

    def _allocate(self) -> None:
        for bucket in self.gbuf_ranges[0]["p", "g"]:
            for param, ranges in bucket["param_map"].items():
                run = ranges["param"]
                self.held[param] = {key: torch.full((run.end - run.start,), -2.0) for key in ("param", "exp_avg", "exp_avg_sq")}

    @property
    def config(self) -> None:
        return None

    def init_state_fn(self, inner: Any, config: Any) -> None:
        if not self.held:
            self._allocate()

    def fill(self, model: Model) -> None:
        """Give masters and states the values of their places."""
        for shard in (s for param in self.held for s in _shards_of_param(model, param)):
            param = next(p for p in self.held if p.untyped_storage().data_ptr() == shard.data.untyped_storage().data_ptr())
            first = shard.data.storage_offset()
            self._each(param, first, shard, lambda own, values: own.copy_(values))

    def wrong(self, model: Model, kept: Callable[[torch.Tensor], torch.Tensor] = lambda ok: ok) -> list[str]:
        """List the states that have not the values of their places."""
        bad: list[str] = []
        for param in self.held:
            for shard in _shards_of_param(model, param):
                first = shard.data.storage_offset()

                def judge(own: torch.Tensor, values: torch.Tensor, key: str = shard.key) -> None:
                    if not torch.equal(own, values):
                        bad.append(f"{key}: {own.tolist()} is not {values.tolist()}")

                self._each(param, first, shard, judge)
        return bad

    def _each(
        self, param: torch.Tensor, first: int, shard: ShardedTensor, do: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Call with this rank's part of a shard's state and the values that it should have."""
        ranges = next(b["param_map"][param] for b in self.gbuf_ranges[0]["p", "g"] if param in b["param_map"])
        low, high = max(first, ranges["param"].start), min(first + shard.data.numel(), ranges["param"].end)
        for key, state in self.held[param].items():
            box = part(f"optimizer.state.{key}.{shard.key}", shard.global_shape, shard.global_offset, shard.local_global_shape())
            if low < high:
                do(state[low - ranges["param"].start : high - ranges["param"].start], box.flatten()[low - first : high - first])

    def runs_of(self, param: torch.nn.Parameter) -> list[tuple[slice, dict[str, torch.Tensor]]]:
        """This rank's run of a parameter, if it has one, and the state of that."""
        found = [b["param_map"][param]["param"] for b in self.gbuf_ranges[0]["p", "g"] if param in b["param_map"]]
        return [(slice(run.start, run.end), self.held[param]) for run in found]

    def _get_main_param_and_optimizer_states(self, param: torch.nn.Parameter) -> dict[str, Any]:
        return {**self.held[param], "step": torch.tensor(float(self.step))}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [{"lr": 0.5, "step": self.step}]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        self.step = state["optimizer"]["param_groups"][0]["step"]


def _shards_of_param(model: Model, param: torch.nn.Parameter) -> Iterator[ShardedTensor]:
    return shards_of(next(s for s in model.sharded.values() if s.data is param))


def _buckets(params: list[torch.nn.Parameter], dp: int, at_dp: int, size: int) -> Iterator[dict[Any, Any]]:
    """Divide each bucket of parameters, padded, evenly over dp: a rank's part begins and ends in the middle of parameters."""
    waiting, num = [], 0
    for param in reversed(params):
        waiting.append((num, param))
        num += param.numel()
        if num >= size or param is params[0]:
            padded = -(-num // dp) * dp
            low, high = at_dp * padded // dp, (at_dp + 1) * padded // dp
            yield {
                p: {"param": Range(max(low - first, 0), min(high - first, p.numel()))}
                for first, p in waiting
                if first < high and low < first + p.numel()
            }
            waiting, num = [], 0


@dataclass
class ChainedOptimizer:
    """As Megatron's: one of the dense parameters, one of the experts."""

    chained_optimizers: list[DistributedOptimizer]


def optimizer_of(model: Model, *, stepped: bool) -> ChainedOptimizer:
    """Make the distributed optimizers of a model."""
    grid = model.grid
    return ChainedOptimizer(
        [
            DistributedOptimizer(model.dense, grid.dp, grid.at_dp, grid.bucket, stepped=stepped),
            DistributedOptimizer(model.experts, grid.dp // grid.ep, grid.at_dp // grid.ep, grid.bucket, stepped=stepped),
        ]
    )


def on_rank(grid: Grid, rank: int) -> Grid:
    """The same grid, seen from a rank."""
    return replace(grid, rank=rank)
