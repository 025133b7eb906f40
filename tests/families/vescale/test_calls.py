"""veScale's calls, with stand-ins for its classes, on real ranks: other parallel sizes, and the folders that veScale wrote."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import reshard_ckpt.vescale
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import AxisPlacement
from reshard_ckpt.errors import LayoutError, MismatchError, UsageError
from tests.distributed.net import reference
from tests.families.vescale import test_folders as folders
from tests.families.vescale.stand_ins import (
    MASTER,
    DistributedOptimizer,
    InterleavedShard,
    LegacyDTensor,
    Replicate,
    Shard,
    legacy,
    tp_local,
)
from tests.families.vescale.writing import split, write_folder
from tests.launch import on_ranks, run_ranks

SHAPES = {"up": (8, 3), "down": (5, 8), "norm": (7,)}
CUT: dict[str, Any] = {"up": Shard(0), "down": Shard(1), "norm": Replicate()}
SIZES = [(2, 2), (4, 1), (1, 4)]


def value(name: str, key: str, shape: Any) -> torch.Tensor:
    if key == "step":
        return torch.tensor(9.0)
    return reference(name, SHAPES[name], key) if key else reference(name, SHAPES[name]).bfloat16()


def nothing(name: str, key: str, shape: Any) -> torch.Tensor:
    return torch.zeros(()) if key == "step" else torch.zeros(SHAPES[name], dtype=torch.float32 if key else torch.bfloat16)


class Net(nn.Module):
    """A DModule: its parameters are DTensors of veScale's own class; `fused` is no parameter of the optimizer."""

    def __init__(self, mesh: Any, fill: Any) -> None:
        super().__init__()
        for name, placement in CUT.items():
            tensor = legacy(fill(name, "", SHAPES[name]), mesh, placement)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        whole = reference("fused", (12, 2)) if fill is value else torch.zeros(12, 2)
        # Each of three sections, where the size allows it.
        cut = InterleavedShard(0, 3) if mesh.shape[1] != 3 else Replicate()
        self.register_buffer("fused", legacy(whole, mesh, cut))


def job(sizes: tuple[int, int], fill: Any) -> tuple[Net, DistributedOptimizer]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("DP", "TP"))
    net = Net(mesh, fill)
    return net, DistributedOptimizer(net, mesh, fill=fill)


def wrong(sizes: tuple[int, int], net: Net, optimizer: DistributedOptimizer) -> list[str]:
    wanted_net, wanted = job(sizes, value)
    bad = [n for n, t in wanted_net.state_dict().items() if not torch.equal(net.state_dict()[n].to_local(), t.to_local())]
    for name, state in wanted.state.items():
        bad += [f"{name}.{key}" for key, tensor in state.items() if not torch.equal(optimizer.state[name][key], tensor)]
    # Of groups of which this rank has no parameter, nothing is known here.
    used = sorted({group for group, _ in optimizer.model_param_group_index_map.values()})
    rates = [[of.groups[i]["lr"] for i in used] for of in (optimizer, wanted)]
    return bad + ([f"lr {rates}"] if rates[0] != rates[1] else [])


@on_ranks(4)
def test_a_dmodule_and_a_distributed_optimizer_load_on_other_sizes(tmp_path: Path) -> None:
    for i, source in enumerate(SIZES):
        net, optimizer = job(source, value)
        path = tmp_path / str(i)
        reshard_ckpt.vescale.save(path, {"model": net, "optimizer": optimizer}, async_checkpoint=i == 1)
        for target in SIZES:
            net, optimizer = job(target, nothing)
            for group in optimizer.groups:
                group["lr"] = 7.0
            reshard_ckpt.vescale.load(path, {"model": net, "optimizer": optimizer}, broadcast_checkpoint=target == (4, 1))
            assert wrong(target, net, optimizer) == [], f"{source} to {target}"
        read = checkpoint.read(path)
        assert torch.equal(read["model.fused"], reference("fused", (12, 2)))
        for name in SHAPES:
            assert torch.equal(read[f"model.{name}"], value(name, "", ()))
            for key in ("exp_avg", MASTER, "step"):
                assert torch.equal(read[f"optimizer.state.{name}.{key}"], value(name, key, ()))
        groups = {tuple(group["params"]): group["lr"] for group in read["optimizer.param_groups"]}
        assert groups == {("up",): 0.5, ("down", "norm"): 0.125}
    catalog = checkpoint.catalog(tmp_path / "0")
    assert (catalog.mesh.axes, catalog.mesh.sizes) == (("DP", "TP"), (2, 2))
    assert AxisPlacement("TP", "shard", 0, turn=0, sections=(4, 4, 4)) in (catalog.tensor("model.fused").placement or ())


def test_signatures_are_those_of_vescale() -> None:
    save, load = (inspect.signature(call) for call in (reshard_ckpt.vescale.save, reshard_ckpt.vescale.load))
    assert [(p.name, p.default) for p in save.parameters.values()][1:] == [
        ("checkpoint_state", inspect.Parameter.empty),
        ("async_checkpoint", False),
    ]
    assert [(p.name, p.default) for p in load.parameters.values()][1:] == [
        ("checkpoint_state", inspect.Parameter.empty),
        ("broadcast_checkpoint", False),
    ]


def test_plain_modules_and_optimizers_and_other_keys(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    reshard_ckpt.vescale.save(tmp_path / "plain", {"model": net, "optimizer": optimizer})
    other = nn.Linear(3, 2)
    reshard_ckpt.vescale.load(tmp_path / "plain", {"model": other, "optimizer": torch.optim.AdamW(other.parameters())})
    assert torch.equal(other.weight, net.weight)
    with pytest.raises(UsageError, match="checkpoint_state has 'step': veScale's calls take 'model' and 'optimizer'"):
        reshard_ckpt.vescale.save(tmp_path / "plain", {"step": 3})
    with pytest.raises(UsageError, match="'step'"):
        reshard_ckpt.vescale.load(tmp_path / "plain", {"step": 3})


def test_an_error_advises_no_option_that_load_lacks(tmp_path: Path) -> None:
    reshard_ckpt.vescale.save(tmp_path, {"model": nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match="checkpoint.load has options that load the rest") as raised:
        reshard_ckpt.vescale.load(tmp_path, {"model": nn.Linear(2, 3)})
    assert "=" not in str(raised.value)


def old_folder_job(folder: str) -> list[str]:
    """Load what vescale.checkpoint wrote: 16-bit weights, and the state with its master."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("DP", "TP"))

    class Old(nn.Module):
        def __init__(self, filled: bool) -> None:
            super().__init__()
            for name in folders.SHAPES:
                whole = folders.weights(name).bfloat16() if filled else torch.zeros(folders.SHAPES[name], dtype=torch.bfloat16)
                self.register_parameter(name.replace(".", "/"), nn.Parameter(legacy(whole, mesh, Shard(0)), requires_grad=False))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name.replace("/", "."): tensor for name, tensor in super().state_dict(*args, **kwargs).items()}

    net = Old(filled=False)
    reshard_ckpt.vescale.load(folder, {"model": net.state_dict()})
    wanted = Old(filled=True).state_dict()
    return [name for name, tensor in net.state_dict().items() if not torch.equal(tensor.to_local(), wanted[name].to_local())]


def write_old(root: Path) -> Path:
    """A folder of vescale.checkpoint for `Net` and its optimizer, of tensor parallelism 2."""

    def cut(name: str, key: str) -> Any:
        placement = CUT[name]
        return split(value(name, key, ()), 2, placement.dim) if isinstance(placement, Shard) else value(name, key, ())

    write_folder(root / "model", {**{name: cut(name, "") for name in SHAPES}, "fused": reference("fused", (12, 2))})
    state = {(0, name): {"step": torch.tensor(9.0), **{key: cut(name, key) for key in ("exp_avg", MASTER)}} for name in SHAPES}
    groups = [{"lr": 0.25, "betas": (0.9, 0.95), "params": [0]}, {"lr": 0.25, "betas": (0.9, 0.95), "params": [1, 2]}]
    write_folder(root / "optimizer" / "pp_0", {"param_group_meta": groups, torch.float32: state})
    return root


def old_state_job(folder: str) -> list[str]:
    bad = []
    for target in SIZES:
        net, optimizer = job(target, nothing)
        reshard_ckpt.vescale.load(folder, {"model": net, "optimizer": optimizer})
        used = {group for group, _ in optimizer.model_param_group_index_map.values()}
        bad += [f"{target}: lr {group['lr']}" for i, group in enumerate(optimizer.groups) if i in used and group["lr"] != 0.25]
        bad += [f"{target}: {what}" for what in wrong(target, net, optimizer) if not what.startswith("lr ")]
    return bad


def old_jobs(weights: str, states: str) -> tuple[list[str], list[str]]:
    return old_folder_job(weights), old_state_job(states)


@pytest.mark.slow
def test_folders_of_vescale_load_through_its_calls(tmp_path: Path) -> None:
    assert run_ranks(old_jobs, 4, str(folders.write(tmp_path / "old")), str(write_old(tmp_path / "state"))) == [([], [])] * 4


def test_a_dtensor_of_vescale_whose_placements_do_not_explain_it_is_refused() -> None:
    class OneRank:
        ndim, shape, mesh_dim_names, mesh = 1, (2,), ("tp",), torch.arange(2)

        def get_coordinate(self) -> list[int]:
            return [1]

    says_shape = r"local shape of \(4, 2\) .* has \(3, 2\)"
    for placement, says in ((Shard(0), says_shape), (InterleavedShard(0, 3), "makes 3 equal parts")):
        tensor = LegacyDTensor(torch.zeros(3, 2), OneRank(), (placement,), (8, 2))
        with pytest.raises(LayoutError, match=says):
            checkpoint.save("memory://legacy/refused", {"x": tensor})
    whole = reference("w", (12, 2))
    tensor = LegacyDTensor(tp_local(whole, InterleavedShard(0, 3), 2, 1)[0], OneRank(), (InterleavedShard(0, 3),), (12, 2))
    with pytest.raises(LayoutError, match=r"no rank holds \[0:2, 0:2\] \(12 elements in all\)"):  # of one rank of two
        checkpoint.save("memory://legacy/part", {"x": tensor})
