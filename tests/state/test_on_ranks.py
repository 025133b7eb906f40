"""What real parallel modules and optimizers hold, on real ranks: put together from all ranks it is the plain model's state, and a
fresh one of any layout takes it back.

Weights tell their global position, so a row in the wrong place is seen. Each job runs many cases, for starting ranks takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, Replication
from reshard_ckpt.errors import LayoutError, MismatchError, UnsupportedError, UsageError
from reshard_ckpt.state import capture
from reshard_ckpt.state.tensors import local_memory
from tests.factored import Factored
from tests.helpers import Saved, load, position_values, save
from tests.launch import on_ranks
from tests.tries import is_long

forward_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of torch 2.6 runs no forward on the CPU"
)

Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Net(nn.Module):
    """Two linear layers with a norm between; `rows` is the size that parallel ranks share."""

    def __init__(self, rows: int, *, values: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(5, rows)
        self.norm = nn.LayerNorm(rows)
        self.down = nn.Linear(rows, 4)
        self.register_buffer("table", torch.zeros(rows))
        with torch.no_grad():
            for salt, tensor in enumerate((*self.parameters(), self.table)):
                tensor.copy_(position_values(tensor.shape, salt=salt) / 1000 if values else torch.zeros_like(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def gathered(state: Any, **options: Any) -> Saved:
    """The checkpoint of all ranks, on each of them."""
    captures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(captures, capture(state, **options))
    return save(captures)


def reload(saved: Saved, state: Any, **options: Any) -> None:
    load(saved, state, rank=dist.get_rank(), size=dist.get_world_size(), **options)


def with_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the Adam state that a plain run would have, told by position, without any step."""
    for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        for salt, key in enumerate(("exp_avg", "exp_avg_sq")):
            value = position_values(p.shape, salt=10 * i + salt + 1)
            if isinstance(p, DTensor):
                like = torch.zeros_like(p)
                like.to_local().copy_(value.reshape(-1)[positions(p, i)])
                value = like
            optimizer.state[p][key] = value
        optimizer.state[p]["step"] = torch.tensor(7.0)


def positions(p: DTensor, salt: int) -> torch.Tensor:
    """Which elements of a parameter of `Net` torch has left here, told by their values."""
    values = (p.detach().to_local().double() * 1000 - 1000 * salt).round()
    return ((values - 1) / 2).long()


def parallel(rows: int, mesh: DeviceMesh, *, values: bool = True) -> nn.Module:
    """The net on a mesh."""
    return shard(Net(rows, values=values), mesh)


def shard(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism over the axis ``tp``, FSDP2 over what other axes there are, with one layer in a group of its own."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = tuple(n for n in names if n != "tp")
    if data:
        for module in (net.up, net):
            fully_shard(module, mesh=mesh[data] if len(data) > 1 else mesh[data[0]])
    return net


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_saves(state: Any, expected: Saved, what: str) -> None:
    """What all ranks capture, put together on rank 0, is the expected checkpoint."""
    captures: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(capture(state), captures)
    if captures is not None:
        assert_equal(save(captures), expected, what)


def assert_equal(saved: Saved, expected: Saved, what: str) -> None:
    assert saved.tensors.keys() == expected.tensors.keys(), what
    for name, tensor in expected.tensors.items():
        assert torch.equal(saved.tensors[name], tensor), f"{what}: {name}"
    assert saved.values.keys() == expected.values.keys(), what
    for name, value in expected.values.items():
        assert saved.values[name] == value, f"{what}: {name}"


@pytest.mark.slow
@forward_on_cpu
@on_ranks(6)
def test_fsdp_tp_and_both_on_any_size_are_the_plain_model_and_placements_are_recorded():
    """1-D, HSDP, TP and FSDP2-over-TP layouts, on sizes that divide and that do not, against torch's own cuts."""
    shapes = [("dp",), (6,)], [("rep", "dp"), (2, 3)], [("tp",), (6,)], [("dp", "tp"), (3, 2)], [("dp", "tp"), (2, 3)]
    meshes = [init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names)) for names, sizes in shapes]
    # Each mesh has a size that divides, one that does not, and one below its ranks; in a long run, each has all sizes.
    left_out = {} if is_long() else {13: (0, 2, 4), 7: (1, 3)}
    for rows in (12, 13, 7, 2):
        reference = Net(rows)
        plain = torch.optim.AdamW(reference.parameters(), lr=0.5)
        with_state(plain)
        expected = save([capture({"model": reference, "optimizer": plain})])
        for mesh in (mesh for i, mesh in enumerate(meshes) if i not in left_out.get(rows, ())):
            net = parallel(rows, mesh)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
            with_state(optimizer)
            assert_saves({"model": net, "optimizer": optimizer}, expected, f"{rows} rows saved on {mesh}")

            fresh = parallel(rows, mesh, values=False)
            into = torch.optim.AdamW(fresh.parameters(), lr=0.1)
            reload(expected, {"model": fresh, "optimizer": into})
            for p, q in zip(net.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(local(p), local(q)), f"{rows} rows loaded on {mesh}"
                assert isinstance(p, DTensor) == isinstance(into.state[q]["exp_avg"], DTensor)
                assert all(torch.equal(local(v), local(into.state[q][k])) for k, v in optimizer.state[p].items())
    captured = capture({"model": parallel(13, meshes[3])})
    assert captured.mesh == Mesh(("dp", "tp"), (3, 2))
    by_name = {e.spec.name: e.spec for e in captured.tensors}
    weight, norm, table = (by_name[f"model.{name}"] for name in ("up.weight", "norm.weight", "table"))
    assert weight.placement == (AxisPlacement("dp", "shard", 0, turn=1), AxisPlacement("tp", "shard", 0, turn=0))
    assert norm.placement == (AxisPlacement("dp", "shard", 0, turn=0),)
    assert (weight.replication, table.replication) == (Replication.DECLARED, Replication.BUFFER)
    sliced = capture({"model": parallel(12, meshes[4]["tp"])}).mesh
    assert sliced == Mesh(("dp", "tp"), (2, 3)), "the mesh that the tp mesh was sliced from"


@forward_on_cpu
@on_ranks(3)
def test_steps_eval_forward_and_zero_redundancy_round_trip():
    """Real steps, after an eval forward, with DDP and ZeRO on 3 ranks; state goes both ways."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            net(position_values((4, 5)) * 0.01 + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def sharded(values: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = parallel(13, mesh, values=values)
        decayed = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim < 2]
        return net, torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others}], lr=0.01)

    def zero(values: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = DistributedDataParallel(Net(13, values=values))
        decayed = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others}]
        return net, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)

    saved = {}
    for kind, make in {"sharded": sharded, "zero": zero}.items():
        net, optimizer = make()
        train(net, optimizer)
        net.eval()
        with torch.no_grad():
            net(position_values((1, 5)))  # leaves FSDP2's root unsharded
        saved[kind] = gathered({"optimizer": optimizer, "model": net})
        expected = {
            f"optimizer.state.{fqn}.{key}" for fqn, _ in Net(1).named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
        }
        assert {n for n in saved[kind].tensors if n.startswith("optimizer.state")} == expected, kind
    for kind, make in {"sharded": sharded, "zero": zero}.items():
        for source in saved.values():
            net, optimizer = make(values=False)
            for group in optimizer.param_groups:
                group["lr"] = 9.0
            reload(source, {"model": net, "optimizer": optimizer})
            assert_equal(gathered({"model": net, "optimizer": optimizer}), source, kind)
            if kind == "zero":
                assert {g["lr"] for g in optimizer.optim.param_groups} == {0.01}
                assert len(optimizer.optim.state) < 6, "a rank keeps its own part alone"
            train(net, optimizer)  # what was allocated can be stepped


@forward_on_cpu
@on_ranks(3)
def test_factored_state_goes_wherever_its_place_is_known():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))

    def step(net: nn.Module, optimizer: Factored) -> None:
        net(position_values((4, 5)) * 0.01).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    net = parallel(13, mesh)
    optimizer = Factored(net.parameters())
    step(net, optimizer)
    saved = gathered({"model": net, "optimizer": optimizer})
    assert saved.tensors["optimizer.state.up.weight.row"].shape == (13,)
    assert saved.tensors["optimizer.state.up.weight.column"].shape == (5,)

    stepped = parallel(13, mesh, values=False)
    other = Factored(stepped.parameters())
    step(stepped, other)
    reload(saved, {"model": stepped, "optimizer": other})
    assert_equal(gathered({"model": stepped, "optimizer": other}), saved, "into one that has stepped")

    plain = Net(13, values=False)
    fresh = Factored(plain.parameters())
    reload(saved, {"model": plain, "optimizer": fresh})
    assert_equal(save([capture({"model": plain, "optimizer": fresh})]), saved, "into a fresh one that has whole parameters")

    net = parallel(13, mesh, values=False)
    fresh = Factored(net.parameters())
    with pytest.raises(MismatchError, match=r"up.weight.row: saved with shape \(13,\).*its place is unknown"):
        reload(saved, {"model": net, "optimizer": fresh})
    assert not fresh.state
    assert not any(p.full_tensor().any() for p in net.parameters())


@on_ranks(2)
def test_pipeline_stages_share_one_namespace():
    """Two stages a rank, the embedding tied between the first and the last."""
    rank = dist.get_rank()

    class Part(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(index): nn.Linear(3, 3)})
            if index in (0, 3):
                self.embedding = nn.Parameter(position_values((5, 3)))
            with torch.no_grad():
                self.layers[str(index)].weight.copy_(position_values((3, 3), salt=index))
                self.layers[str(index)].bias.copy_(position_values((3,), salt=index))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    indices = (0, 3) if rank == 0 else (1, 2)
    stages = [PipelineStage(Part(i), i, 4, torch.device("cpu")) for i in indices]
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=0.1) for stage in stages]
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p] = {"exp_avg": torch.ones_like(p), "step": torch.tensor(1.0)}
    saved = gathered({"model": stages, "optimizer": optimizers}, mesh={"pp": 2})
    assert saved.tensors["model.layers.2.weight"].flatten()[0] == 2001
    (group,) = saved.values["optimizer.param_groups"]
    assert sorted(group["params"]) == sorted(["embedding", *(f"layers.{i}.{k}" for i in range(4) for k in ("weight", "bias"))])
    names = [e.spec.name for e in capture({"model": stages, "optimizer": optimizers}).tensors]
    assert names.count("model.embedding") == names.count("optimizer.state.embedding.exp_avg") == (2 if rank == 0 else 0)

    whole = [Part(i) for i in range(4)]
    for part in whole:
        nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in part.parameters())), part.parameters())
    optimizer = torch.optim.AdamW([p for part in whole for p in part.parameters()])
    reload(saved, {"model": whole, "optimizer": optimizer})
    for part, index in zip(whole, range(4), strict=True):
        assert torch.equal(part.layers[str(index)].weight, position_values((3, 3), salt=index))
    assert torch.equal(whole[0].embedding, whole[3].embedding)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 10

    # A rank without any stage says so with an empty list, and the others do not mind.
    lone = {"model": stages, "optimizer": optimizers} if rank == 0 else {"model": [], "optimizer": []}
    half = gathered(lone)
    reload(half, lone)


def refusals() -> None:
    """What has no place is refused by name."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnsupportedError, match=r"x: .*Partial.* on axis 'tp' is a reduction not yet done; redistribute"):
        capture({"x": partial})

    local = torch.zeros(3 if dist.get_rank() == 0 else 2)
    uneven = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6,)), stride=(1,))
    if dist.get_rank() == 1:
        with pytest.raises(
            LayoutError, match=r"x: placements .* a local shape of \(3,\) of \(6,\), but the local tensor has \(2,\)"
        ):
            capture({"x": uneven})

    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    for lazily in (value.conj(), value.conj().imag):  # what is loaded would go into a copy
        view = DTensor.from_local(lazily, mesh, [Shard(0)])
        with pytest.raises(UnsupportedError, match="x: is a lazily conjugated view"):
            local_memory(view, "x", writes=True)

    for wrong in ({"dp": 3}, {"dp": 2, "tp": 2}):
        with pytest.raises(UsageError, match=r"mesh: axes .* ranks, but 2 take part"):
            capture({}, mesh=wrong)
    swapped = DeviceMesh("cpu", [1, 0])
    with pytest.raises(UsageError, match=r"mesh: the DeviceMesh has ranks \[1, 0\], but those that take part are \[0, 1\]"):
        capture({}, mesh=swapped)
    assert capture({}, mesh=mesh).mesh == Mesh(("tp",), (2,))

    alone = dist.new_group([0]), dist.new_group([1])
    own = capture({"x": torch.zeros(2)}, process_group=alone[dist.get_rank()])
    assert own.mesh == Mesh((), ())

    outside = distribute_tensor(position_values((4,)), DeviceMesh("cpu", [0]), [Replicate()])
    (entry,) = capture({"x": outside}).tensors
    assert len(entry.spec.pieces) == (1 if dist.get_rank() == 0 else 0)


def strided_views() -> None:
    """A flattened view of a tensor sharded on its second dim is strided in earnest: several boxes a rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    full = position_values((4, 6))
    flat = distribute_tensor(full, mesh, [Shard(1)]).view(24)
    if all(p.is_replicate() for p in flat.placements):
        return  # torch before 2.10 gathers instead
    captured = capture({"x": flat})
    assert len(captured.tensors[0].spec.pieces) == 4
    assert torch.equal(gathered({"x": flat}).tensors["x"], full.reshape(-1))


@on_ranks(2)
def test_strided_views_give_several_boxes_and_what_has_no_place_is_refused_and_ddp_declares_its_replicas():
    strided_views()
    refusals()
    net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with torch.no_grad():
        net.module[1].running_mean += dist.get_rank()
    captured = capture({"model": net, "extra": {"x": torch.zeros(1)}})
    claims = {e.spec.name: e.spec.replication for e in captured.tensors}
    assert captured.mesh == Mesh(("dp",), (2,))
    assert claims["model.0.weight"] == Replication.DECLARED
    assert claims["model.1.running_mean"] == claims["model.1.num_batches_tracked"] == Replication.BUFFER
    assert claims["extra.x"] == Replication.PLAIN
