"""The Trainer of transformers with DeepSpeed, real ones, after ``install(always=True)``: saves, resumes, rotates."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.families.deepspeed import jobs
from tests.families.kills import assert_died_at_commit, die_at_commit
from tests.launch import RanksFailed, run_ranks

_NEEDED = ("deepspeed", "accelerate", "transformers")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in _NEEDED), reason="needs DeepSpeed and accelerate: make compat-deepspeed"
)
IMPORTS = "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; import deepspeed; from transformers import LlamaForCausalLM, Trainer"
on_ranks = partial(run_ranks, imports=IMPORTS)  # once for all ranks of a job

STEPS, BATCH = 6, 6


def config(stage: int, ranks: int) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }


def trainer_of(root: str, stage: int, **options: Any) -> Any:
    """Make a Trainer of a tiny Llama on fixed samples; each step has the same samples on any number of ranks."""
    jobs.import_deepspeed()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        root, per_device_train_batch_size=BATCH // dist.get_world_size(), max_steps=STEPS, learning_rate=1e-2, logging_steps=1,
        lr_scheduler_type="linear", seed=1, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=2,
        deepspeed=config(stage, dist.get_world_size()), **{"save_strategy": "steps", **options},
    )  # fmt: skip
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape))
    tokens = torch.randint(0, 31, (STEPS * BATCH, 8), generator=torch.Generator().manual_seed(3))
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])


def losses_of(trainer: Any) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def begin(root: str, stage: int, ours: bool, killed: bool = False) -> dict[str, Any]:
    """Train from nothing, with a save each second step; `killed` ends rank 0 before the commit of the last one."""
    from reshard_ckpt.integrations import deepspeed

    jobs.import_deepspeed()
    if ours:
        deepspeed.install(always=True)
    if killed:
        die_at_commit(f"global_step{STEPS}")
    trainer = trainer_of(root, stage, save_total_limit=2)
    trainer.train()
    at_end = {path.name: (path / "latest").exists() for path in Path(root).glob("checkpoint-*")}
    is_ours = type(trainer.model_wrapped.checkpoint_engine).__name__ == "ReshardCheckpointEngine" or any(
        Path(root).glob("checkpoint-*/global_step*/catalog.msgpack")
    )
    return {"losses": losses_of(trainer), "at_end": at_end, "ours": is_ours}


def resume(root: str, stage: int, ours: bool = True) -> dict[int, float] | str:
    """Go on from the newest checkpoint that is whole; return the losses, or what DeepSpeed itself says against it."""
    from reshard_ckpt.integrations import deepspeed

    jobs.import_deepspeed()
    if ours:
        deepspeed.install(always=True)
    trainer = trainer_of(root, stage, save_strategy="no")
    try:
        trainer.train(resume_from_checkpoint=True)
    except Exception as error:
        if ours:
            raise
        return f"{type(error).__name__}: {error}"
    return losses_of(trainer)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_goes_on_at_other_counts_and_stages(stage: int, tmp_path: Path):
    stock = on_ranks(begin, 2, str(tmp_path / "stock"), stage, False)[0]
    ours = on_ranks(begin, 2, str(tmp_path / "ours"), stage, True)[0]
    assert ours["ours"]
    assert ours["losses"] == stock["losses"]
    assert ours["at_end"] == {"checkpoint-4": True, "checkpoint-6": True}, "rotated, and committed before train() returns"
    with pytest.raises(RanksFailed):
        on_ranks(begin, 2, str(tmp_path / "killed"), stage, True, True)
    assert_died_at_commit(tmp_path / "killed" / "checkpoint-6" / "global_step6")
    for ranks, other in ((2, stage), (1, stage % 3 + 1), (3, stage)):
        for losses in on_ranks(resume, ranks, str(tmp_path / "killed"), other):
            assert {step: loss for step, loss in losses.items() if step > 4} == pytest.approx(
                {step: loss for step, loss in stock["losses"].items() if step > 4}, rel=1e-5
            ), (ranks, other)
    states = json.loads((tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())
    assert states["global_step"] == 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stock_folders_go_on_where_deepspeed_itself_cannot(stage: int, tmp_path: Path):
    stock = on_ranks(begin, 2, str(tmp_path), stage, False)[0]
    (tmp_path / "checkpoint-6").rename(tmp_path / "away")
    (same, *_) = on_ranks(resume, 2, str(tmp_path), stage, False)
    assert same == stock["losses"]
    for ranks in (1, 3):
        losses = on_ranks(resume, ranks, str(tmp_path), stage)[0]
        assert losses[6] == pytest.approx(stock["losses"][6], rel=1e-5)
        said, *others = on_ranks(resume, ranks, str(tmp_path), stage, False)
        assert f"used a DP world size of 2 but the current world size is {ranks}" in said
        assert all(isinstance(also, str) for also in others)
