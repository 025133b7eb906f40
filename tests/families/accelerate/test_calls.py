"""Accelerate's ``save_state`` and ``load_state`` through this library, with FSDP1 and FSDP2, on other numbers of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UsageError
from tests.launch import run_ranks

pytest.importorskip("accelerate")


def prepared(version: int, seed: int, kind: str = "SHARDED_STATE_DICT") -> tuple[Any, Any, Any]:
    """What Accelerate makes of a module and its optimizer. On a CPU it ignores the plugin, unless its state says FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from reshard_ckpt.integrations import accelerate

    accelerate.install()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=kind, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True)
    fsdp = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin, "device": torch.device("cpu")}
    accelerator.state._shared_state.update(fsdp)
    PartialState._shared_state.update(fsdp)  # the other state is made again from this one
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if version == 1:  # with flat parameters, which Accelerate wants an optimizer to be made of
        net = accelerator.prepare(net)
        optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=0.01))
    else:
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    assert accelerator.distributed_type == DistributedType.FSDP
    assert isinstance(net, FullyShardedDataParallel) if version == 1 else isinstance(next(net.parameters()), DTensor)
    return accelerator, net, optimizer


def losses(accelerator: Any, net: Any, optimizer: Any, num: int) -> list[float]:
    found = []
    for step in range(num):  # the same batches on every rank
        loss = net(torch.arange(20.0).view(4, 5) / 20 + step).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def save(folder: str, version: int) -> list[float]:
    accelerator, net, optimizer = prepared(version, 0)
    losses(accelerator, net, optimizer, 2)
    accelerator.save_state(folder)
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= set(os.listdir(folder))
    found = losses(accelerator, net, optimizer, 3)
    if version == 2:
        from accelerate.utils import load_fsdp_model, save_fsdp_model

        net[0].requires_grad_(False)
        options = {"model_index": 7, "adapter_only": True}
        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, net, folder, **options)
        assert set(checkpoint.read(Path(folder, "pytorch_model_fsdp_7"))) == {"model.1.weight", "model.1.bias"}
        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, net, folder, **options)
        accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        accelerator.save_state(f"{folder}-full")
        dist.barrier()  # rank 0 has written them
        assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= set(os.listdir(f"{folder}-full"))
    return found


def save_by_accelerate(folder: str, version: int) -> list[float]:
    from reshard_ckpt.integrations import accelerate as ours

    accelerator, net, optimizer = prepared(version, 0)
    ours.uninstall()
    losses(accelerator, net, optimizer, 2)
    accelerator.save_state(folder)
    return losses(accelerator, net, optimizer, 3)


def load(folder: str, version: int) -> list[float]:
    accelerator, net, optimizer = prepared(version, 5)
    accelerator.load_state(folder)
    return losses(accelerator, net, optimizer, 3)


def load_by_accelerate(folder: str, version: int, has_stepped: bool) -> list[float]:
    from reshard_ckpt.integrations import accelerate as ours

    accelerator, net, optimizer = prepared(version, 5)
    ours.uninstall()
    losses(accelerator, net, optimizer, int(has_stepped))
    accelerator.load_state(folder)
    return losses(accelerator, net, optimizer, 3)


def save_full(folder: str) -> list[float] | str:
    accelerator, net, optimizer = prepared(1, 0, "FULL_STATE_DICT")
    losses(accelerator, net, optimizer, 2)
    try:
        accelerator.save_state(folder)
    except UsageError as error:
        return str(error)
    return losses(accelerator, net, optimizer, 3)


def load_full(folder: str) -> list[float]:
    accelerator, net, optimizer = prepared(1, 5, "FULL_STATE_DICT")
    losses(accelerator, net, optimizer, 1)
    accelerator.load_state(folder)
    return losses(accelerator, net, optimizer, 3)


@pytest.mark.parametrize(("version", "other"), [(1, 2), (2, 1)])
def test_save_state_goes_on_at_other_numbers_of_ranks_and_under_the_other_fsdp(version: int, other: int, tmp_path: Path) -> None:
    (expected, *_) = run_ranks(save, 2, str(tmp_path / "state"), version, timeout_s=120)
    for part, name in (("pytorch_model_fsdp_0", "model.0.weight"), ("optimizer_0", "optimizer.state.0.weight.exp_avg")):
        assert checkpoint.inspect(tmp_path / "state" / part).format == "reshard_ckpt"  # our function was called
        assert name in checkpoint.catalog(tmp_path / "state" / part).names
    assert not any(name.startswith("model.") for name in checkpoint.catalog(tmp_path / "state" / "optimizer_0").names)
    for num, its in ((1, version), (3, version), (2, other)):
        for found in run_ranks(load, num, str(tmp_path / "state"), its, timeout_s=120):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("version", "num", "other"), [(1, 1, 2), (2, 3, 1)])
def test_folders_that_accelerate_wrote_by_dcp_go_on_at_other_numbers_of_ranks(
    version: int, num: int, other: int, tmp_path: Path
) -> None:
    (expected, *_) = run_ranks(save_by_accelerate, 2, str(tmp_path / "state"), version, timeout_s=120)
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert checkpoint.inspect(tmp_path / "state" / part).format == "dcp"
    for found in run_ranks(load, num, str(tmp_path / "state"), other, timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_accelerates_own_functions_go_on_too_but_leave_a_fresh_optimizer_of_fsdp1_empty(version: int, tmp_path: Path) -> None:
    (expected, *_) = run_ranks(save_by_accelerate, 2, str(tmp_path / "state"), version)
    for num in (1, 3):
        for found in run_ranks(load_by_accelerate, num, str(tmp_path / "state"), version, version == 1):
            assert found == pytest.approx(expected, rel=1e-5), num
    if version == 1:
        for found in run_ranks(load_by_accelerate, 2, str(tmp_path / "state"), version, False):
            assert found[0] == expected[0]
            assert found[1] != pytest.approx(expected[1], rel=1e-3)


def test_fsdp1_with_a_full_state_dict_is_refused_where_torch_cannot_save_it(tmp_path: Path) -> None:
    for said in run_ranks(save_full, 2, str(tmp_path / "refused")):
        assert "FULL_STATE_DICT: torch cannot gather FSDP1's parameters on 2 processes of a CPU" in said
        assert "SHARDED_STATE_DICT" in said
    (expected,) = run_ranks(save_full, 1, str(tmp_path / "full"))
    for found in run_ranks(load_full, 2, str(tmp_path / "full")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_install_binds_all_that_call_and_uninstall_gives_them_back() -> None:
    import accelerate.accelerator
    import accelerate.utils.fsdp_utils as owner

    from reshard_ckpt.integrations import accelerate as ours

    stock = owner.save_fsdp_model
    for _ in range(2):  # a second call changes nothing
        ours.install()
    modules = (owner, accelerate.utils, accelerate.accelerator)
    assert {module.save_fsdp_model.__module__ for module in modules} == {"reshard_ckpt.families.accelerate.calls"}
    ours.uninstall()
    assert {id(module.save_fsdp_model) for module in modules} == {id(stock)}
