"""`ReshardCheckpointManager` with torchtitan's own containers and loader, beside torchtitan's manager, on the CPU.

torchtitan's Trainer and models need a GPU. The tests do what its ``train`` does: load, then step, wait for staging, and save.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from reshard_ckpt import checkpoint
from tests.families.kills import assert_died_at_commit, die_at_commit
from tests.launch import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="needs torchtitan: make compat-torchtitan")

BATCH, STEPS, AT = 6, 6, 4


class Numbers(torch.utils.data.IterableDataset):
    """The samples of one data-parallel rank, with a place that can be saved."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.taken = rank, size, 0

    def __iter__(self) -> Any:
        while True:
            sample = BATCH * (self.taken // (BATCH // self.size)) + self.rank + self.size * (self.taken % (BATCH // self.size))
            self.taken += 1
            yield torch.sin(torch.arange(5.0) + sample)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class GlobalLoader:
    """A loader whose state does not depend on the rank: all ranks together take the samples of a batch."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        while True:
            first, self.step = self.step * BATCH, self.step + 1
            yield torch.stack([torch.sin(torch.arange(5.0) + first + i) for i in range(rank, BATCH, size)])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Fused(nn.Module):
    """A layer whose state dict has its weight as two, made by a collective, like the fused attention of torchtitan's models."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(5, 7)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for kind in ("weight", "bias"):
            both = state.pop(f"{prefix}both.{kind}")
            both = both.redistribute(both.device_mesh, [Replicate()])
            state[f"{prefix}q.{kind}"], state[f"{prefix}kv.{kind}"] = both[:3].clone(), both[3:].clone()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{half}.{kind}") for half in ("q", "kv")]
            own = getattr(module.both, kind)
            state[f"{prefix}both.{kind}"] = torch.cat(parts).redistribute(own.device_mesh, own.placements)


class Job:
    """The parts of torchtitan's Trainer that its checkpoint manager is given; `ours` chooses the manager."""

    def __init__(self, folder: str, *, ours: bool, real_loader: bool, seed: int = 0, **options: Any) -> None:
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        from reshard_ckpt.integrations.torchtitan import ReshardCheckpointManager

        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        parts: list[nn.Module] = [nn.Sequential(Fused(), nn.GELU(), nn.Linear(7, 3))]
        self.model = parts[0]
        fully_shard(self.model)
        groups = [
            ParamGroupConfig(pattern=r"bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
            ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.1}),
        ]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.loader = (
            ParallelAwareDataloader(Numbers(rank, size), rank, size, batch_size=BATCH // size) if real_loader else GlobalLoader()
        )
        self.step = self.ntokens_seen = 0
        kind = ReshardCheckpointManager if ours else CheckpointManager
        config = kind.Config(enable=True, interval=2, last_save_model_only=False, **options)
        self.checkpointer = config.build(
            dataloader=self.loader,
            model_parts=parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, until: int = STEPS, load_step: int = -1) -> dict[int, float]:
        """Load, and train until a step, as torchtitan's Trainer does; return the losses by step."""
        self.checkpointer.load(step=load_step)
        losses = {}
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            loss = self.model(next(batches)).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.ntokens_seen += BATCH
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[self.step] = float(mean) / dist.get_world_size()
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
        self.checkpointer.close()
        return losses


def train(folder: str, until: int, load_step: int = -1, **options: Any) -> dict[int, float]:
    return Job(folder, **options).train(until, load_step)


def both(folder: str, options: dict[str, Any], more: dict[str, Any] | None = None) -> dict[int, float]:
    """Train to the end, then go on from `AT` in a job with other weights; the losses of the second, where the first agrees."""
    first = train(folder, STEPS, **options)
    second = train(folder, STEPS, AT, seed=5, **options, **(more or {}))
    assert second == {step: loss for step, loss in first.items() if step > AT}
    return second


def begin(folder: str, options: dict[str, Any]) -> dict[int, float]:
    return train(folder, STEPS, **options)


def go_on(folder: str, options: dict[str, Any], load_step: int = AT) -> dict[int, float]:
    return train(folder, STEPS, load_step, seed=5, load_only=True, **options)


def refused(folder: str, options: dict[str, Any]) -> str:
    try:
        go_on(folder, options)
    except BaseException as error:  # as DCP's CheckpointException is
        return f"{type(error).__name__}: {error}"
    return "went on"


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("step-*"))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_it_goes_on_as_torchtitans_own_manager_on_as_many_ranks(mode: str, tmp_path: Path) -> None:
    options = {"real_loader": True, "async_mode": mode}
    stock = run_ranks(both, 2, str(tmp_path / "stock"), {"ours": False, **options})
    ours = run_ranks(both, 2, str(tmp_path / "ours"), {"ours": True, **options})
    assert ours == stock
    assert steps_of(tmp_path / "ours") == ["step-2", "step-4", "step-6"]
    assert checkpoint.inspect(tmp_path / "ours" / "checkpoint" / "step-4").format == "reshard_ckpt"


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_it_goes_on_at_other_numbers_of_ranks_also_from_torchtitans_folders(writer: str, tmp_path: Path) -> None:
    options = {"ours": writer == "ours", "real_loader": False, "async_mode": "async"}
    (losses, *_) = run_ranks(begin, 2, str(tmp_path), options)
    expected = {step: loss for step, loss in losses.items() if step > AT}
    for ranks in (1, 3):
        for found in run_ranks(go_on, ranks, str(tmp_path), {"ours": True, "real_loader": False}):
            assert found == pytest.approx(expected, rel=1e-5)
    if writer == "stock":  # torchtitan's own manager too, where the loader's state does not depend on the rank
        for ranks in (1, 3):
            for found in run_ranks(go_on, ranks, str(tmp_path), {"ours": False, "real_loader": False}):
                assert found == pytest.approx(expected, rel=1e-5)
    (found,) = run_ranks(go_on, 1, str(tmp_path), {"ours": True, "real_loader": False}, -1)
    assert found == {}, "the newest step is the last one, so that nothing is left to train"


def test_a_loader_of_other_ranks_is_refused_by_name_and_can_be_left_out(tmp_path: Path) -> None:
    for ours in (True, False):
        run_ranks(begin, 2, str(tmp_path / str(ours)), {"ours": ours, "real_loader": True})
    for ranks, words in ((1, "dp_degree is inconsistent"), (3, "Missing key in checkpoint state_dict: dataloader.dp_rank_2")):
        assert all(
            words in said for said in run_ranks(refused, ranks, str(tmp_path / "False"), {"ours": False, "real_loader": True})
        ), "torchtitan's own manager"
        for said in run_ranks(refused, ranks, str(tmp_path / "True"), {"ours": True, "real_loader": True}):
            assert 'exclude_from_loading=["dataloader"]' in said
            assert f"saved with 2 data-parallel ranks, this job has {ranks}" in said
    without = {"ours": True, "real_loader": True, "exclude_from_loading": ["dataloader"]}
    (found,) = run_ranks(go_on, 1, str(tmp_path / "True"), without)
    assert sorted(found) == [5, 6]


def killed_before_the_commit(folder: str, options: dict[str, Any]) -> None:
    die_at_commit("step-4")
    train(folder, STEPS, **options)


def test_a_kill_between_save_and_commit_leaves_the_step_before(tmp_path: Path) -> None:
    options = {"ours": True, "real_loader": False, "async_mode": "async"}
    with pytest.raises(RanksFailed):
        run_ranks(killed_before_the_commit, 2, str(tmp_path), options)
    assert steps_of(tmp_path) == ["step-2", "step-4"]
    assert_died_at_commit(tmp_path / "checkpoint" / "step-4")
    expected = run_ranks(begin, 2, str(tmp_path / "whole"), options)[0]
    (found,) = run_ranks(go_on, 1, str(tmp_path), options, -1)
    assert found == pytest.approx({step: loss for step, loss in expected.items() if step > 2}, rel=1e-5)


def test_old_steps_go_after_the_commit_and_the_last_is_exported(tmp_path: Path) -> None:
    options = {"ours": True, "real_loader": False, "async_mode": "async", "keep_latest_k": 2}
    run_ranks(begin, 2, str(tmp_path), options)
    assert steps_of(tmp_path) == ["step-4", "step-6"]
    (names,) = run_ranks(exported, 1, str(tmp_path / "model"), options)
    assert names == {f"model.{layer}.{kind}" for layer in ("0.q", "0.kv", "2") for kind in ("weight", "bias")}
    for step in (4, STEPS):
        (loss,) = run_ranks(from_exported, 1, str(tmp_path / "model"), str(tmp_path / f"from-{step}"), step)
        assert loss == "same", step


def exported(folder: str, options: dict[str, Any]) -> set[str]:
    """Save the model alone, in bf16, at the last step."""
    job = Job(folder, **options)
    job.checkpointer.last_save_model_only, job.checkpointer.export_dtype = True, torch.bfloat16
    job.train()
    found = checkpoint.read(Path(folder, "checkpoint", "step-6"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    return set(found)


def from_exported(folder: str, other: str, step: int) -> str:
    """Begin with the weights of a step of another run; the last one is in bf16."""
    job = Job(other, ours=True, real_loader=False, initial_load_path=f"{folder}/checkpoint/step-{step}")
    assert job.checkpointer.load()
    job.checkpointer.close()
    saved = checkpoint.read(Path(folder, "checkpoint", f"step-{step}"))
    own = {f"model.{name}": part.full_tensor() for name, part in job.model.state_dict().items()}
    return "same" if job.step == 0 and all(torch.equal(part, saved[name].float()) for name, part in own.items()) else "other"
