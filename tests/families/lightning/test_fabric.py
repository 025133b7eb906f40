"""Fabric's strategies with real Fabric, and ``load_from_checkpoint`` on a checkpoint of this library."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UsageError
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: make compat-lightning")
on_ranks = partial(run_ranks, imports="import lightning")  # once for all ranks of a job


def steps(root: str, kind: str, resume: bool, by_stock: bool = False) -> list[float]:
    """Take three steps and save, or go on from there; return the losses of three more."""
    import lightning
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from reshard_ckpt.integrations import lightning as ours

    def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(module, mesh=mesh["data_parallel"])

    torch.manual_seed(5 if resume else 0)
    num = dist.get_world_size()
    classes, prefix = (lightning.fabric.strategies, "") if by_stock else (ours, "ReshardFabric")
    strategy: Any
    if kind == "ddp":
        strategy = getattr(classes, f"{prefix}DDPStrategy")()
    elif kind == "fsdp1":
        strategy = getattr(classes, f"{prefix}FSDPStrategy")()
        strategy.__class__ = type("OnCpu", (type(strategy),), {})  # Fabric asks for a GPU by the class of the strategy alone
    else:
        made = getattr(classes, f"{prefix}ModelParallelStrategy")
        strategy = made(parallelize, data_parallel_size=num, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=num, strategy=strategy)
    fabric.launch()
    net: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if kind == "ddp":
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    else:
        if kind == "fsdp1":  # on a CPU; Fabric itself would not name a device
            net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
        model = fabric.setup(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))

    def train() -> list[float]:
        losses = []
        for step in range(3):
            loss = model(torch.arange(20.0).view(4, 5) / 20 + step).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        rest = fabric.load(f"{root}/state", state)
        assert state["step"] == 3
        assert rest == {"seen": {"samples": (1, 2)}}
        with_values = {"step": -1}
        fabric.load(f"{root}/state", with_values)
        assert with_values == {"step": 3}
    else:
        train()
        fabric.save(f"{root}/state", {**state, "step": 3, "seen": {"samples": (1, 2)}})
        if not by_stock:
            fabric.save(f"{root}/weights", {"model": model}, filter={"model": lambda name, tensor: name.endswith("weight")})
            with pytest.raises(UsageError, match="only the tensors of modules can be filtered"):
                fabric.save(f"{root}/no", {"optimizer": optimizer}, filter={"optimizer": lambda name, tensor: True})
            if dist.get_rank() == 0:
                assert checkpoint.catalog(f"{root}/weights").names == ("model.0.weight", "model.1.weight")
            assert fabric.load(f"{root}/state")["step"] == 3
    return train()


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_fabric_goes_on_at_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    expected, *_ = on_ranks(steps, 2, str(tmp_path), kind, False)
    for num, its in ((1, kind), (3, kind), (2, "fsdp2" if kind == "ddp" else "ddp")):
        for found in on_ranks(steps, num, str(tmp_path), its, True):
            assert found == pytest.approx(expected, rel=1e-5), (num, its)
    stock, *_ = on_ranks(steps, 2, str(tmp_path / "stock"), kind, False, True)
    assert stock == expected
    if kind == "ddp":  # this library loads Fabric's files too
        for found in on_ranks(steps, 1, str(tmp_path / "stock"), kind, True):
            assert found == pytest.approx(expected, rel=1e-5)


def test_modules_load_from_a_checkpoint_of_this_library(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from reshard_ckpt.integrations.lightning import ReshardDDPStrategy, install, newest

    class Small(pl.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, 2)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = Small(width=5)
    data = torch.utils.data.DataLoader(torch.ones(4, 5))
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = pl.Trainer(strategy=ReshardDDPStrategy(), default_root_dir=tmp_path, enable_model_summary=False, **options)
    trainer.fit(net, data)
    trainer.save_checkpoint(tmp_path / "after")  # committed when it returns
    path = newest(tmp_path)
    assert path == str(tmp_path / "after")
    for _ in range(2):  # a second call changes nothing
        install()
    again = Small.load_from_checkpoint(path)
    assert again.hparams.width == 5
    assert torch.equal(again.net.weight, net.net.weight)
    torch.save({"state_dict": net.state_dict(), "pytorch-lightning_version": pl.__version__}, tmp_path / "stock.ckpt")
    assert torch.equal(Small.load_from_checkpoint(tmp_path / "stock.ckpt", width=5).net.weight, net.net.weight)
    dist.destroy_process_group()
