"""RaggedShard DTensors on real ranks: trees, modules and optimizers, DCP's calls, and the way to every other layout.

Torch's own operations do not know the placement, so the DTensors are put together by hand (`tests.ragged`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import reshard_ckpt.dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import AxisPlacement
from tests.distributed.net import reference
from tests.launch import run_ranks
from tests.ragged import Ragged, StridedRagged, cut, dtensor
from tests.tries import pairs

SHAPES = {"matrix": (12, 6), "vector": (8,), "cube": (2, 3, 4), "empty": (0, 4)}


def ragged_on_4() -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    return mesh, {
        "matrix": (Ragged((0, 1), (7, 0, 1, 28)),),
        "vector": (Ragged((0,), (1, 1, 5, 1)),),
        "cube": (Ragged((), (0, 0, 1, 0)),),
        "empty": (Ragged((0,), (1, 1, 1, 1)),),
    }


def ragged_over_tp() -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    return mesh, {
        "matrix": (StridedRagged((0,), (4, 2), 2), Shard(0)),
        "vector": (Ragged((0,), (3, 5)), Replicate()),
        "cube": (Ragged((0, 1), (1, 5)), Shard(2)),
        "empty": (Replicate(), Replicate()),
    }


def plain_shards() -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    return mesh, {"matrix": (Shard(1),), "vector": (Shard(0),), "cube": (Replicate(),), "empty": (Shard(1),)}


LAYOUTS = [ragged_on_4, ragged_over_tp, plain_shards]


def tensors(layout: tuple[DeviceMesh, dict[str, Any]], *, filled: bool) -> dict[str, torch.Tensor]:
    mesh, placements = layout
    whole = {name: reference(name, shape) for name, shape in SHAPES.items()}
    return {name: dtensor(whole[name] if filled else whole[name] - 9, mesh, of) for name, of in placements.items()}


def wrong(found: dict[str, Any], layout: tuple[DeviceMesh, dict[str, Any]], what: str) -> list[str]:
    mesh, placements = layout
    where = tuple(mesh.get_coordinate() or ())
    return [
        f"{what}: {name}: {found[name].to_local()}"
        for name, of in placements.items()
        if not torch.equal(found[name].to_local(), cut(reference(name, SHAPES[name]), of, tuple(mesh.shape), where))
    ]


class Net(nn.Module):
    """Two parameters; those of one that is sharded are DTensors."""

    def __init__(self, layout: tuple[DeviceMesh, dict[str, Any]] | None, *, filled: bool) -> None:
        super().__init__()
        for name in ("matrix", "vector"):
            whole = reference(name, SHAPES[name])
            whole = whole if filled else whole - 5
            self.register_parameter(name, nn.Parameter(whole if layout is None else dtensor(whole, layout[0], layout[1][name])))


def with_state(net: nn.Module, layout: tuple[DeviceMesh, dict[str, Any]] | None, *, filled: bool) -> torch.optim.AdamW:
    """AdamW with the state that it has after a step, told by the position."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    for name, param in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            whole = reference(key + name, SHAPES[name])
            whole = whole if filled else whole - 5
            optimizer.state[param][key] = whole if layout is None else dtensor(whole, layout[0], layout[1][name])
        optimizer.state[param]["step"] = torch.tensor(3.0 if filled else 0.0)
    return optimizer


def wrong_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, layout: tuple[DeviceMesh, dict[str, Any]], what: str
) -> list[str]:
    mesh, placements = layout
    bad = []
    for name, param in net.named_parameters():
        held = {name: param, **{k + name: optimizer.state[param][k] for k in ("exp_avg", "exp_avg_sq")}}
        for key, value in held.items():
            expected = cut(reference(key, SHAPES[name]), placements[name], tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
            if not torch.equal(value.to_local(), expected):
                bad.append(f"{what}: {key}: {value.to_local()}")
        if optimizer.state[param]["step"] != 3:
            bad.append(f"{what}: step {optimizer.state[param]['step']}")
    return bad


def ragged_job(folder: str) -> list[str]:
    layouts = [make() for make in LAYOUTS]
    bad: list[str] = []
    for i, source in enumerate(layouts):
        path, dcp_path = f"{folder}/{i}", f"{folder}/dcp{i}"
        checkpoint.save(path, {"x": tensors(source, filled=True)})
        reshard_ckpt.dcp.save({"x": tensors(source, filled=True)}, checkpoint_id=dcp_path)
        net = Net(source, filled=True)
        checkpoint.save(f"{folder}/net{i}", {"model": net, "optimizer": with_state(net, source, filled=True)})
        bad += _under_fsdp2(f"{folder}/net{i}")
    for i, j in pairs(range(len(layouts))):
        target = layouts[j]
        for load, path in ((checkpoint.load, f"{folder}/{i}"), (_dcp_load, f"{folder}/dcp{i}")):
            found = tensors(target, filled=False)
            load(path, {"x": found})
            bad += wrong(found, target, f"{path}, {i} to {j}")
        net = Net(target, filled=False)
        optimizer = with_state(net, target, filled=False)
        checkpoint.load(f"{folder}/net{i}", {"model": net, "optimizer": optimizer})
        bad += wrong_state(net, optimizer, target, f"net, {i} to {j}")
    return bad


def _dcp_load(path: str, state: dict[str, Any]) -> None:
    reshard_ckpt.dcp.load(state, checkpoint_id=path)


def _under_fsdp2(path: str) -> list[str]:
    net = Net(None, filled=False)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    checkpoint.load(path, {"model": net, "optimizer": optimizer})
    shards = mesh, {"matrix": (Shard(0),), "vector": (Shard(0),)}
    return wrong_state(net, optimizer, shards, f"{path} to FSDP2")


def test_ragged_tensors_modules_and_optimizers_load_on_other_layouts(tmp_path: Path) -> None:
    assert run_ranks(ragged_job, 4, str(tmp_path), timeout_s=800) == [[]] * 4
    for i in range(len(LAYOUTS)):
        read = checkpoint.read(tmp_path / str(i))
        assert all(torch.equal(read[f"x.{name}"], reference(name, shape)) for name, shape in SHAPES.items())
        net, path = Net(None, filled=False), tmp_path / f"net{i}"
        optimizer = with_state(net, None, filled=False)
        checkpoint.load(path, {"model": net, "optimizer": optimizer})
        assert torch.equal(net.matrix, reference("matrix", SHAPES["matrix"]))
        assert torch.equal(optimizer.state[net.vector]["exp_avg_sq"], reference("exp_avg_sqvector", SHAPES["vector"]))
    catalog = checkpoint.catalog(tmp_path / "net1")
    expected = AxisPlacement("fsdp", "ragged", 0, (4, 2)), AxisPlacement("tp", "shard", 0, turn=0)
    assert catalog.tensor("model.matrix").placement == expected
    assert catalog.tensor("optimizer.state.matrix.exp_avg").placement == expected
    figure = tmp_path / "cuts.svg"
    checkpoint.plot(tmp_path / "net1", "model.matrix", to={"dp": 3}, output=figure)
    assert all(f"rank {rank}" in figure.read_text() for rank in range(4))
