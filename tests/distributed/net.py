"""A small transformer-like model whose every value is known, built on any parallel layout by torch alone.

The values of a parameter, and of its optimizer state, are functions of its name and the global position (`reference`). A layout
is applied by torch to a model that holds the whole reference, so what torch leaves on a rank is the oracle for that rank: of
the package's own geometry nothing is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DIM, HIDDEN, VOCAB, LAYERS = 6, 13, 11, 2
TIED = ("embedding.weight", "head.weight")
FROZEN = "layers.0.norm.bias"
STATELESS = "layers.1.norm.bias"
KEYS = ("exp_avg", "exp_avg_sq")
STEP = 17.0


def reference(name: str, shape: Sequence[int], key: str = "") -> Tensor:
    """The whole tensor of a name; tied names have the same one."""
    name = TIED[0] if name == TIED[1] else name
    at = torch.arange(prod(shape), dtype=torch.int64)
    return (((at * 7919 + crc32(f"{name}/{key}".encode()) % 60013) % 65521).double() / 8192 - 3).float().reshape(tuple(shape))


def positions(p: Tensor, name: str, key: str = "") -> Tensor:
    """Where in the whole tensor the elements are that torch has left here, told by their values, no two of which are alike."""
    values, at = reference(name, p.shape, key).flatten().sort()
    return at[torch.searchsorted(values, local(p).flatten())]


def like(p: Tensor, name: str, key: str) -> Tensor:
    """The part of another tensor of this shape that lies as this one, which holds the reference, does."""
    part = reference(name, p.shape, key).flatten()[positions(p, name)].reshape(local(p).shape)
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """The parts of the model that `units` name: ``"embedding"``, layer numbers, ``"head"``; the names are those of the whole."""

    def __init__(self, units: Sequence[str | int], key: str = "", hidden: int = HIDDEN) -> None:
        super().__init__()
        if "embedding" in units:
            self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(u): Block(hidden) for u in units if isinstance(u, int)})
        if "head" in units:
            self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("table", torch.zeros(3, 5))
        self.tie()
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                tensor.copy_(reference(name, tensor.shape, key))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name != FROZEN)

    def tie(self) -> None:
        if hasattr(self, "embedding") and hasattr(self, "head"):
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


UNITS: tuple[str | int, ...] = ("embedding", *range(LAYERS), "head")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and how the dp axis is used: ``fsdp``, ``ddp``, or ``copies`` that nothing wraps; `flat` is ZeRO-1.

    With `rep` the FSDP mesh is 2-D (HSDP).
    """

    kind: str
    pp: int = 1
    rep: int = 1
    dp: int = 1
    tp: int = 1
    data: str = "fsdp"
    flat: bool = False
    stages_per_rank: int = 1
    hidden: int = HIDDEN

    @property
    def size(self) -> int:
        return self.pp * self.rep * self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.kind}(pp {self.pp}, rep {self.rep}, dp {self.dp} {self.data}, tp {self.tp})"


def share_device() -> None:
    """Make the groups of this process from now on use one device. Where torch has no such names, each has its own as before.

    The thread of each device wakes a hundred times a second: eight ranks with twenty groups each spend a fifth of a core on that.
    """
    # All private: torch's own way to make a group leaves no choice of the device.
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not hasattr(gloo, "_Options") or not hasattr(gloo, "create_default_device"):
        return
    device = gloo.create_default_device()

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


# Every group has a thread in each of its ranks that wakes fifty times a second, so all layouts on a mesh share its groups.
@cache
def _mesh(axes: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(prod(sizes)).view(*sizes), mesh_dim_names=axes)


@cache
def _group(size: int) -> Any:
    return dist.new_group(list(range(size)))


_PARTS: dict[tuple[Any, ...], list[dict[str, Tensor]]] = {}


@dataclass
class Place:
    """A layout on the first ranks of the job: its mesh and group. Made by all ranks together."""

    layout: Layout
    mesh: DeviceMesh | None = field(init=False)
    group: Any = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        axes = {a: n for a, n in (("pp", layout.pp), ("rep", layout.rep), ("dp", layout.dp), ("tp", layout.tp)) if n > 1}
        self.mesh = _mesh(tuple(axes), tuple(axes.values())) if axes else None
        self.group = _group(layout.size)

    @property
    def mine(self) -> bool:
        return dist.get_rank() < self.layout.size

    def index(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis) if self.mesh is not None and axis in (self.mesh.mesh_dim_names or ()) else 0

    def axis_group(self, axis: str) -> Any:
        return self.mesh.get_group(axis)

    def modules(self, key: str = "") -> list[nn.Module]:
        """The modules of this rank, with its part of the reference."""
        pp, num = self.layout.pp, self.layout.pp * self.layout.stages_per_rank
        cuts = [len(UNITS) * i // num for i in range(num + 1)]
        stages = [UNITS[low:high] for low, high in pairwise(cuts)]
        return [self._module(stages[i], key) for i in range(self.index("pp"), num, pp) if stages[i]]

    def parts(self, key: str, modules: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
        """The same of a state of the optimizer, by name, cut as torch has cut these modules; nobody changes it.

        Layouts that cut the model alike share it.
        """
        layout = self.layout
        sharded = layout.dp > 1 and layout.data == "fsdp"
        mesh = self.mesh if sharded or layout.tp > 1 or layout.pp > 1 else None
        cut = (mesh, sharded, layout.stages_per_rank, layout.hidden, key)
        if cut not in _PARTS:
            _PARTS[cut] = [{name: like(p, name, key) for name, p in named([module])} for module in modules]
        return _PARTS[cut]

    def _module(self, units: Sequence[str | int], key: str) -> nn.Module:
        net = Net(units, key, self.layout.hidden)
        if self.layout.tp > 1:
            plan: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
            plan |= {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
            assert self.mesh is not None
            parallelize_module(net, self.mesh["tp"], {k: v for k, v in plan.items() if "." in k or hasattr(net, k)})
            net.tie()
        if self.layout.dp > 1 and self.layout.data == "fsdp":
            assert self.mesh is not None
            mesh = self.mesh["rep", "dp"] if self.layout.rep > 1 else self.mesh["dp"]
            for layer in net.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        if self.layout.dp > 1 and self.layout.data == "ddp":
            return DistributedDataParallel(net, process_group=self.axis_group("dp"))
        return net

    def model(self, modules: list[nn.Module]) -> Any:
        """The modules as a user would pass them: alone, as pipeline stages, or as a list."""
        if self.layout.pp == 1:
            return modules[0]
        if self.layout.data == "ddp":
            return modules
        num, group = self.layout.pp * self.layout.stages_per_rank, self.axis_group("pp")
        first, device = self.index("pp"), torch.device("cpu")
        return [PipelineStage(m, first + i * self.layout.pp, num, device, group=group) for i, m in enumerate(modules)]


def local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names."""
    for module in modules:
        module = module.module if isinstance(module, DistributedDataParallel) else module
        yield from module.named_parameters(remove_duplicate=False)


def groups(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    unique = {id(p): p for _, p in named(modules) if p.requires_grad}
    return [
        {"params": [p for p in unique.values() if p.ndim == 2], "lr": 0.25, "weight_decay": 0.5},
        {"params": [p for p in unique.values() if p.ndim < 2], "lr": 0.125, "weight_decay": 0.0},
    ]


def blank(modules: Sequence[nn.Module]) -> None:
    """Fill everything with what no reference holds."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            local(tensor).fill_(-77.0)


class FlatAdam:
    """The state of a ZeRO-1 optimizer: all local shards end to end, cut into ragged runs that know of no tensor's borders."""

    def __init__(self, place: Place, modules: Sequence[nn.Module], parts: dict[str, list[dict[str, Tensor]]] | None) -> None:
        sources = {key: merged(parts[key]) for key in KEYS} if parts else None
        self.named = list(named(modules))
        unique = {id(p): (name, p) for name, p in reversed(self.named) if p.requires_grad and name != STATELESS}
        self.state: dict[str, dict[str, Any]] = {}
        # What tensor parallelism replicates must be cut alike on all its ranks, though their shards differ in size: two vectors.
        for sharded in (False, True):
            self._cut([(n, p) for n, p in reversed(unique.values()) if is_sharded(p) is sharded], place, sources)
        self.param_groups: list[dict[str, Any]] = []
        for group in groups(modules):
            ids = {id(p) for p in group["params"]}
            names = [name for name, p in named(modules) if id(p) in ids]
            own = {k: v for k, v in group.items() if k != "params"} if sources else {"lr": 9.0, "weight_decay": 9.0}
            self.param_groups.append({**own, "params": names})

    def _cut(self, chosen: list[tuple[str, Tensor]], place: Place, sources: Any) -> None:
        total, num, i = sum(local(p).numel() for _, p in chosen), place.layout.dp, place.index("dp")
        low, high = (0 if j == 0 else total if j == num else min(total, total * j // num + 5) for j in (i, i + 1))
        at = 0
        for name, p in chosen:
            start, stop = (min(max(bound - at, 0), local(p).numel()) for bound in (low, high))
            at += local(p).numel()
            if start == stop and i % 2:
                continue  # some ranks leave out what they have nothing of, others have empty shards
            runs = {
                key: local(sources[key][name]).flatten()[start:stop].clone() if sources else torch.full((stop - start,), -7.0)
                for key in KEYS
            }
            entry = {**declared(p, place, start, runs), "step": torch.tensor(STEP if sources else 0.0)}
            self.state |= {known: entry for known, other in self.named if other is p}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {name: dict(entry) for name, entry in self.state.items()}, "param_groups": self.param_groups}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        assert tree["state"].keys() == self.state.keys()
        self.param_groups = tree["param_groups"]


def is_sharded(p: Tensor) -> bool:
    return isinstance(p, DTensor) and any(placement.is_shard() for placement in p.placements)


def declared(p: Tensor, place: Place, start: int, runs: dict[str, Tensor]) -> dict[str, Any]:
    """The runs as flat ranges of the tensor, or of the box that tensor parallelism leaves on this rank."""
    from reshard_ckpt import FlatShard

    if not isinstance(p, DTensor):
        return {key: FlatShard(run, p.shape, start) for key, run in runs.items()}
    (placement,) = p.placements
    offsets, lengths = [0] * p.ndim, list(p.shape)
    if placement.is_shard():
        each = -(-p.shape[placement.dim] // place.layout.tp)
        offsets[placement.dim] = min(each * place.index("tp"), p.shape[placement.dim])
        lengths[placement.dim] = local(p).shape[placement.dim]
    return {key: FlatShard(run, p.shape, start, pieces=[(offsets, lengths)]) for key, run in runs.items()}
