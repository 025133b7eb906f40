"""The strategies of Lightning's Trainer, real ones: resumes on other numbers of ranks, retention, a killed save; stock too."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from tests.launch import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: make compat-lightning")
on_ranks = partial(run_ranks, imports="import lightning.pytorch")  # once for all ranks of a job

BATCH, EPOCHS, SAVED_AFTER = 6, 4, 2
SAMPLES = torch.arange(2 * BATCH * 5.0).view(2 * BATCH, 5) / 60  # two steps an epoch


def module(seed: int, losses: list[float], drops: bool) -> Any:
    """Make a small module that notes the loss of each step, over all ranks; with `drops` a hook leaves out its frozen part."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Small(pl.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

        def configure_model(self) -> None:
            if isinstance(self.trainer.strategy, FSDPStrategy):  # which itself would ask for a GPU
                self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)
            mesh = getattr(self, "device_mesh", None)
            if mesh is not None and not hasattr(self.net[0].weight, "placements"):
                if mesh["tensor_parallel"].size() > 1:
                    parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
                fully_shard(self.net, mesh=mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
            return loss

        def on_save_checkpoint(self, content: dict[str, Any]) -> None:
            if drops:
                for name in [name for name in content["state_dict"] if name.startswith("frozen.")]:
                    del content["state_dict"][name]
            content["mine"] = {"seen": torch.arange(3)}

        def on_load_checkpoint(self, content: dict[str, Any]) -> None:
            assert torch.equal(content["mine"]["seen"], torch.arange(3))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

        def train_dataloader(self) -> Any:
            mesh = getattr(self, "device_mesh", None)
            num = dist.get_world_size() if mesh is None else mesh["data_parallel"].size()
            return torch.utils.data.DataLoader(SAMPLES, batch_size=BATCH // num)

    made = Small()
    made.strict_loading = False  # the frozen part is not saved
    return made


def strategy_of(kind: str, ours: bool) -> Any:
    from lightning.pytorch import strategies as stock

    from reshard_ckpt.integrations import lightning

    name, _, axis = kind.partition("-")
    of = {"ddp": "DDPStrategy", "fsdp1": "FSDPStrategy", "fsdp2": "ModelParallelStrategy"}[name]
    sizes = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    if axis == "tp":
        sizes = {"data_parallel_size": 1, "tensor_parallel_size": dist.get_world_size()}
    options: dict[str, Any] = {
        "fsdp2": sizes,
        "fsdp1": {"state_dict_type": "sharded"},
    }.get(name, {})
    return getattr(lightning, f"Reshard{of}")(**options) if ours else getattr(stock, of)(**options)


def fit(root: str, kind: str, ours: bool, resume: str | None, epochs: int = EPOCHS, killed_at: int = 0) -> dict[str, Any]:
    """Train, and save after each epoch; return the losses, and the checkpoints at the end."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    losses: list[float] = []
    saves = pl.callbacks.ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=1, save_on_train_epoch_end=True)
    strategy = strategy_of(kind, ours)
    if kind == "fsdp1":  # on a CPU; Lightning asks for a GPU by the class of the strategy alone
        strategy.__class__ = type("OnCpu", (type(strategy),), {})
    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=epochs, callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with mock.patch("reshard_ckpt.engine.saving.commit.publish", _killing(killed_at)) if killed_at else mock.MagicMock():
        trainer.fit(module(0 if resume is None else 5, losses, drops=ours), ckpt_path=resume)
    dist.barrier()
    at_end = sorted(os.listdir(root))
    ours_at_end = [name for name in at_end if (Path(root) / name / "catalog.msgpack").exists()]
    return {"losses": losses, "at_end": at_end, "ours": ours_at_end}


def _killing(number: int) -> Any:
    from reshard_ckpt.engine.saving import commit

    publish, calls = commit.publish, 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os._exit(9)
        return publish(*arguments, **options)

    return call


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "fsdp2-tp"])
def test_a_run_goes_on_at_other_numbers_of_ranks_and_equals_stock_on_the_same(kind: str, tmp_path: Path) -> None:
    from reshard_ckpt.integrations.lightning import newest

    whole, *_ = on_ranks(fit, 2, str(tmp_path / "whole"), kind, True, None)
    assert whole["at_end"] == whole["ours"] == [f"epoch={EPOCHS - 1}.ckpt"]
    stock, *_ = on_ranks(fit, 2, str(tmp_path / "stock"), kind, False, None)
    assert whole["losses"] == stock["losses"]
    assert stock["at_end"] == [f"epoch={EPOCHS - 1}.ckpt"]
    on_ranks(fit, 2, str(tmp_path / "begun"), kind, True, None, SAVED_AFTER)
    begun = newest(tmp_path / "begun")
    assert begun is not None
    assert "model.net.0.weight" in checkpoint.catalog(begun).names
    assert not any("frozen" in name for name in checkpoint.catalog(begun).names if name.startswith("model."))
    on_three = kind if kind != "fsdp2-tp" else "fsdp2"
    for num, its in (
        (1, kind),
        (2, kind),
        (3, on_three),
        (2, "ddp" if kind != "ddp" else "fsdp2"),
    ):
        found, *_ = on_ranks(fit, num, str(tmp_path / f"{num}-{its}"), its, True, begun)
        assert found["losses"] == pytest.approx(whole["losses"][2 * SAVED_AFTER :], rel=1e-5), (num, its)
    on_ranks(fit, 2, str(tmp_path / "begun-by-stock"), kind, False, None, SAVED_AFTER)
    by_stock = str(tmp_path / "begun-by-stock" / f"epoch={SAVED_AFTER - 1}.ckpt")
    # Lightning itself goes on from its own checkpoints, on other numbers of ranks too, and this library on as many.
    for num, ours, its in ((2, True, kind), (2, False, kind), (1, False, kind), (3, False, on_three)):
        found, *_ = on_ranks(fit, num, str(tmp_path / f"on-{num}-{ours}"), its, ours, by_stock)
        assert found["losses"] == pytest.approx(whole["losses"][2 * SAVED_AFTER :], rel=1e-5), (num, ours)
    if kind == "ddp":  # its file has whole tensors
        found, *_ = on_ranks(fit, 2, str(tmp_path / "other"), "fsdp2", False, by_stock)
        assert found["losses"] == pytest.approx(whole["losses"][2 * SAVED_AFTER :], rel=1e-5)
    else:
        with pytest.raises(RanksFailed):
            on_ranks(fit, 2, str(tmp_path / "other"), "ddp", False, by_stock)


def test_a_kill_before_the_commit_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    from reshard_ckpt.integrations.lightning import newest

    whole, *_ = on_ranks(fit, 2, str(tmp_path / "whole"), "ddp", True, None)
    with pytest.raises(RanksFailed):
        on_ranks(fit, 2, str(tmp_path / "killed"), "ddp", True, None, EPOCHS, SAVED_AFTER + 1)
    left = newest(tmp_path / "killed")
    assert left == str(tmp_path / "killed" / f"epoch={SAVED_AFTER - 1}.ckpt")
    for num in (1, 2):
        found, *_ = on_ranks(fit, num, str(tmp_path / f"on-{num}"), "ddp", True, left)
        assert found["losses"] == pytest.approx(whole["losses"][2 * SAVED_AFTER :], rel=1e-5)
