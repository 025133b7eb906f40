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
from tests.families.accelerate.turns import in_turn
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


LOADS = {
    1: [("ours-1", load, 1), ("ours-2", load, 2), ("stock-1", load, 2), ("stock-1", load_by_accelerate, 1, True),
        ("stock-2", load_by_accelerate, 2, False)],
    3: [("ours-1", load, 1), ("ours-2", load, 2), ("stock-2", load, 1), ("stock-1", load_by_accelerate, 1, True),
        ("stock-2", load_by_accelerate, 2, False)],
    2: [("ours-1", load, 2), ("ours-2", load, 1)],
}  # fmt: skip
"""By the number of ranks that load: the folder, which 2 ranks saved, the function, and its further arguments."""


def test_folders_go_on_at_other_numbers_of_ranks_and_under_the_other_fsdp(tmp_path: Path) -> None:
    """Folders that Accelerate saved through this library, and those that it wrote by DCP, with FSDP1 and FSDP2."""
    saves = {f"{kind}-{version}": (kind, version) for kind in ("ours", "stock") for version in (1, 2)}
    calls = [({"ours": save, "stock": save_by_accelerate}[kind], str(tmp_path / name), v) for name, (kind, v) in saves.items()]
    first, *_ = run_ranks(in_turn, 2, calls)
    expected = dict(zip(saves, first, strict=True))
    for name, (kind, _) in saves.items():
        for part, tensor in (("pytorch_model_fsdp_0", "model.0.weight"), ("optimizer_0", "optimizer.state.0.weight.exp_avg")):
            ours = kind == "ours"
            assert checkpoint.inspect(tmp_path / name / part).format == ("reshard_ckpt" if ours else "dcp")  # who was called
            assert not ours or tensor in checkpoint.catalog(tmp_path / name / part).names
        names = checkpoint.catalog(tmp_path / name / "optimizer_0").names if kind == "ours" else ()
        assert not any(tensor.startswith("model.") for tensor in names)
    for num, loads in LOADS.items():
        calls = [(function, str(tmp_path / name), *arguments) for name, function, *arguments in loads]
        for of_rank in run_ranks(in_turn, num, calls):
            for found, (name, function, *arguments) in zip(of_rank, loads, strict=True):
                what = f"{name} by {function.__name__}{arguments} on {num} ranks"
                assert found == pytest.approx(expected[name], rel=1e-5), what


def test_what_torch_cannot_do_with_fsdp1_is_refused_or_left_to_accelerate(tmp_path: Path) -> None:
    """Gather full state dicts on several processes of a CPU; load into an optimizer that has not stepped."""
    calls = [(save_full, str(tmp_path / "refused")), (save_by_accelerate, str(tmp_path / "stock"), 1)]
    found = run_ranks(in_turn, 2, calls)
    for said, _ in found:
        assert "FULL_STATE_DICT: torch cannot gather FSDP1's parameters on 2 processes of a CPU" in said
        assert "SHARDED_STATE_DICT" in said
    stock = found[0][1]
    ((full,),) = run_ranks(in_turn, 1, [(save_full, str(tmp_path / "full"))])
    calls = [(load_full, str(tmp_path / "full")), (load_by_accelerate, str(tmp_path / "stock"), 1, False)]
    for loaded, empty in run_ranks(in_turn, 2, calls):
        assert loaded == pytest.approx(full, rel=1e-5)
        assert empty[0] == stock[0]
        assert empty[1] != pytest.approx(stock[1], rel=1e-3), "Accelerate leaves a fresh optimizer of FSDP1 empty"


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
