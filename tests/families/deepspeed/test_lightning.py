"""Lightning's ``DeepSpeedStrategy``, which asks for a GPU, on the CPU after ``install(always=True)``: other ranks, and a kill."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.families.deepspeed import jobs
from tests.families.kills import assert_died_at_commit, die_at_commit
from tests.launch import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("deepspeed", "lightning")),
    reason="needs DeepSpeed and Lightning: make compat-deepspeed",
)
on_ranks = partial(run_ranks, imports="import lightning.pytorch")  # once for all ranks of a job
BATCH, EPOCHS, SAVED_AFTER = 6, 4, 2
SAMPLES = torch.arange(2 * BATCH * 5.0).view(2 * BATCH, 5) / 60  # two steps an epoch


def fit(root: str, ours: bool, resume: str | None = None, epochs: int = EPOCHS, killed: bool = False) -> Any:
    """Train with ZeRO-2, and save after each epoch; return the losses, and what is left at the end."""
    jobs.import_deepspeed()
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import deepspeed as of_lightning

    from reshard_ckpt.integrations import deepspeed

    if ours:
        deepspeed.install(always=True)
    if killed:
        die_at_commit(f"epoch={SAVED_AFTER}.ckpt")
    losses: list[float] = []
    num = dist.get_world_size()

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0 if resume is None else 5)
            self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / num)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(SAMPLES, batch_size=BATCH // num)

    class OnCpu(of_lightning.DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)  # DeepSpeed wants a number

    config = {
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": BATCH // num,
    }
    saves = pl.callbacks.ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=1, save_on_train_epoch_end=True)
    on_a_cpu = {"CUDAAccelerator": pl.accelerators.CPUAccelerator, "_validate_device_index_selection": lambda devices: None}
    with mock.patch.multiple(of_lightning, **on_a_cpu):
        trainer = pl.Trainer(
            accelerator="cpu", devices=num, strategy=OnCpu(config=config, process_group_backend="gloo"), max_epochs=epochs,
            callbacks=[saves], logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(Small(), ckpt_path=resume)
        except Exception as error:
            if ours:
                raise
            return f"{type(error).__name__}: {error}"
    dist.barrier()
    return losses, {name: (Path(root) / name / "latest").exists() for name in os.listdir(root)}


def test_it_goes_on_at_other_numbers_of_ranks_where_lightning_cannot_and_after_a_kill(tmp_path: Path) -> None:
    stock, _ = on_ranks(fit, 2, str(tmp_path / "stock"), False)[0]
    whole, left = on_ranks(fit, 2, str(tmp_path / "whole"), True)[0]
    assert whole == stock
    assert left == {f"epoch={EPOCHS - 1}.ckpt": True}, "the older are removed, and the last is committed"
    on_ranks(fit, 2, str(tmp_path / "begun"), False, None, SAVED_AFTER)
    name = f"epoch={SAVED_AFTER - 1}.ckpt"
    with pytest.raises(RanksFailed):
        on_ranks(fit, 2, str(tmp_path / "killed"), True, None, EPOCHS, True)
    assert_died_at_commit(tmp_path / "killed" / f"epoch={SAVED_AFTER}.ckpt" / "checkpoint")
    for num in (1, 2, 3):
        for losses, _ in on_ranks(fit, num, str(tmp_path / f"on-{num}"), True, str(tmp_path / "killed" / name)):
            assert losses == pytest.approx(whole[2 * SAVED_AFTER :], rel=1e-5), num
    for num in (1, 3):
        said, *_ = on_ranks(fit, num, str(tmp_path / f"stock-on-{num}"), False, str(tmp_path / "begun" / name))
        assert f"used a DP world size of 2 but the current world size is {num}" in said
