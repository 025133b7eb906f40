"""Real parallel modules through real files: odd sizes under FSDP2 over TP, training that goes on, pipeline stages, experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError
from tests.distributed.cases import wrong_pairings
from tests.distributed.net import HIDDEN, UNITS, Layout, Net, local, positions, reference
from tests.launch import on_ranks, run_ranks
from tests.tries import pairs

ODD = (
    Layout("fsdp×tp", dp=3, tp=2),
    Layout("fsdp×tp", dp=2, tp=3),
    Layout("hsdp", rep=2, dp=3),
    Layout("hsdp×tp", rep=2, dp=2, tp=2),
    Layout("fsdp", dp=7),
    Layout("plain"),
    Layout("fsdp×tp", dp=3, tp=2, hidden=7),
    Layout("hsdp×tp", rep=2, dp=2, tp=2, hidden=7),
    Layout("plain", hidden=7),
)


def odd_job(folder: str) -> list[str]:
    of_size = [[i for i, layout in enumerate(ODD) if layout.hidden == hidden] for hidden in (HIDDEN, 7)]
    return wrong_pairings(Path(folder), ODD, [pair for chosen in of_size for pair in pairs(chosen)])


@pytest.mark.slow
def test_7_and_13_rows_on_fsdp_over_tp_and_hsdp(tmp_path: Path):
    wrong = [line for rank in run_ranks(odd_job, 8, str(tmp_path)) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])


Made = tuple[nn.Module, torch.optim.Optimizer]


def train(made: Made, steps: range) -> None:
    net, optimizer = made
    for step in steps:
        net(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def tensors(made: Made) -> list[dict[str, torch.Tensor]]:
    """Each parameter and its state."""
    net, optimizer = made
    assert optimizer.state
    return [{"": p.detach(), **optimizer.state.get(p, {})} for p in net.parameters()]


def close(one: Made, at: list[torch.Tensor], other: list[dict[str, torch.Tensor]], *, exact: bool) -> bool:
    """Whether a run is where another one is, whose whole tensors are given; `at` tells which of their elements this rank has.

    What the same layout computed must be equal bit for bit.
    """
    pairs = []
    for mine, places, theirs in zip(tensors(one), at, other, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(local(mine[key]).flatten(), theirs[key].flatten()[places if theirs[key].ndim else 0]) for key in mine]
    return all(
        torch.equal(x, y.expand_as(x)) if exact else torch.allclose(x, y.expand_as(x), rtol=1e-4, atol=1e-5) for x, y in pairs
    )


@pytest.mark.slow
@on_ranks(4)
def test_training_goes_on_where_it_was(tmp_path: Path):
    """Save in mid-training, right after an eval forward; go on in the same layout and in others."""
    world = dist.get_world_size()
    flat, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "dp"))

    def sharded(mesh: DeviceMesh, key: str) -> nn.Module:
        net = Net(UNITS, key)
        for layer in net.layers.values():
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    places: dict[str, list[torch.Tensor]] = {}

    def made(kind: str, key: str) -> Made:
        net = kinds[kind](key)
        places[kind] = [positions(p, name.removeprefix("module."), key) for name, p in net.named_parameters()]
        with torch.no_grad():
            for p in net.parameters():
                local(p).mul_(0.03)
        return net, torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.01)

    kinds: dict[str, Callable[[str], nn.Module]] = {
        "fsdp": lambda key: sharded(flat, key),
        "hsdp": lambda key: sharded(grid, key),
        "ddp": lambda key: DistributedDataParallel(Net(UNITS, key)),
        "plain": lambda key: Net(UNITS, key),
    }
    wrong: list[str] = []
    runs = {kind: made(kind, "") for kind in kinds}
    wholes = {}
    for kind, run in runs.items():
        train(run, range(3))
        run[0].eval()
        with torch.no_grad():
            run[0](torch.arange(5))  # leaves FSDP2's root unsharded
        checkpoint.save(tmp_path / kind, {"optimizer": run[1], "model": run[0]})
        run[0].train()
        train(run, range(3, 5))
        wholes[kind] = [{key: whole(t) for key, t in of_one.items()} for of_one in tensors(run)]
    for saved, loaded in pairs([*kinds]):
        target = made(loaded, "other")
        if saved == "ddp":
            train(target, range(1))  # one that has stepped
        checkpoint.load(tmp_path / saved, {"optimizer": target[1], "model": target[0]})
        train(target, range(3, 5))
        right = close(target, places[loaded], wholes[saved], exact=saved == loaded)
        wrong += [] if right else [f"{saved} to {loaded}"]
    assert not wrong


@on_ranks(2)
def test_stages_trained_by_a_schedule_and_stages_whose_names_clash(tmp_path: Path):
    """Two stages a rank, trained by torch's own schedule; then stages whose names clash."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    units = (("embedding", 0), (1,), (2,), (3, "head"))

    def stages(key: str) -> list[PipelineStage]:
        mine = range(rank, len(units), world)
        return [PipelineStage(Net(units[i], key), i, len(units), device) for i in mine]

    def optimizers(made: list[PipelineStage]) -> list[torch.optim.AdamW]:
        return [torch.optim.AdamW((p for p in s.submod.parameters() if p.requires_grad), lr=0.01) for s in made]

    made = stages("")
    opts = optimizers(made)
    schedule = ScheduleInterleaved1F1B(made, n_microbatches=2, loss_fn=lambda y, target: y.square().mean())
    x = torch.arange(4)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == world - 1 else {}))
    for optimizer in opts:
        optimizer.step()
    checkpoint.save(tmp_path / "stages", {"model": made, "optimizer": opts}, mesh={"pp": world})
    placement = {p.axis: p for p in checkpoint.catalog(tmp_path / "stages").tensor("model.layers.2.up.weight").placement or ()}
    assert (placement["pp"].kind, placement["pp"].coords) == ("resident", (0,))

    saved = checkpoint.read(tmp_path / "stages")
    for stage, optimizer in zip(made, opts, strict=True):
        for name, p in stage.submod.named_parameters():
            assert torch.equal(saved[f"model.{name}"], p), name
            for key, value in optimizer.state[p].items() if p.requires_grad else ():
                assert torch.equal(saved[f"optimizer.state.{name}.{key}"], value), (name, key)
    other = stages("other")
    checkpoint.load(tmp_path / "stages", {"model": other, "optimizer": optimizers(other)})
    for got, wanted in zip([s.submod for s in other], [s.submod for s in made], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got.parameters(), wanted.parameters(), strict=True))

    sequential, uneven = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 4 + rank))
    shapes = r"different names(?s:.*)model.0.weight: rank 0 has F32 \(4, 3\), rank 1 has F32 \(5, 3\)"
    for model, says in (
        (PipelineStage(sequential, rank, world, device), "distinct names(?s:.*)model.0.weight"),
        (uneven, shapes),
        ([sequential, uneven], "model.0.weight"),  # both on each rank
    ):
        with pytest.raises(LayoutError, match=says):
            checkpoint.save(tmp_path / "clash", {"model": model})
    assert not (tmp_path / "clash" / "catalog.msgpack").exists()

    tied = nn.Module()  # the same name on first and last
    tied.embedding = nn.Parameter(reference("embedding", (5, 3)) + (0 if rank in (0, world - 1) else torch.nan))
    checkpoint.save(tmp_path / "tied", {"model": [tied] if rank in (0, world - 1) else []})
    assert torch.equal(checkpoint.read(tmp_path / "tied")["model.embedding"], reference("embedding", (5, 3)))


@on_ranks(4)
def test_parts_of_a_job_save_and_load_at_the_same_time(tmp_path: Path):
    """Two halves of a job save at the same time, neither of them the first ranks in order; each half loads the other's."""
    rank = dist.get_rank()
    halves = [[0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in halves]
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in halves]
    mine, place = rank % 2, rank // 2

    def made(key: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = fully_shard(Net(UNITS, key), mesh=meshes[mine])
        optimizer = torch.optim.AdamW(p for p in net.parameters() if p.requires_grad)
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().clone()}
        return net, optimizer

    for turn in range(3):
        net, optimizer = made(f"half {mine}")
        state = {"model": net, "optimizer": optimizer, "place": checkpoint.PerRank((mine, place, turn))}
        checkpoint.save(tmp_path / str(mine), state, process_group=groups[mine], mesh=meshes[mine])
        dist.barrier()
        other, fresh = made("blank")
        position = checkpoint.PerRank(None)
        state = {"model": other, "optimizer": fresh, "place": position}
        checkpoint.load(tmp_path / str(1 - mine), state, process_group=groups[mine])
        assert position.value == (1 - mine, place, turn)
        wanted, _ = made(f"half {1 - mine}")
        for got, value in zip(other.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(local(got), local(value))
            assert not got.requires_grad or torch.equal(local(fresh.state[got]["exp_avg"]), local(value))
        dist.barrier()
    catalog = checkpoint.catalog(tmp_path / "1")
    assert (catalog.mesh.axes, catalog.mesh.sizes, {f.rank for f in catalog.files}) == (("dp",), (2,), {0, 1})
