"""The Trainer of transformers with DeepSpeed, real ones, after ``install(always=True)``: saves, resumes, rotates."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.families.deepspeed import jobs
from tests.launch import run_ranks

_NEEDED = ("deepspeed", "accelerate", "transformers")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in _NEEDED), reason="needs DeepSpeed and accelerate: make compat-deepspeed"
)

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


def begin(root: str, stage: int, ours: bool) -> dict[str, Any]:
    """Train from nothing, with a save each second step."""
    from reshard_ckpt.integrations import deepspeed

    jobs.import_deepspeed()
    if ours:
        deepspeed.install(always=True)
    trainer = trainer_of(root, stage, save_total_limit=2)
    trainer.train()
    at_end = {path.name: (path / "latest").exists() for path in Path(root).glob("checkpoint-*")}
    is_ours = type(trainer.model_wrapped.checkpoint_engine).__name__ == "ReshardCheckpointEngine" or any(
        Path(root).glob("checkpoint-*/global_step*/catalog.msgpack")
    )
    return {"losses": losses_of(trainer), "at_end": at_end, "ours": is_ours}


def resume(root: str, stage: int) -> dict[str, Any]:
    """Go on from the newest checkpoint that is whole."""
    from reshard_ckpt.integrations import deepspeed

    jobs.import_deepspeed()
    deepspeed.install(always=True)
    trainer = trainer_of(root, stage, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    return losses_of(trainer)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_goes_on_at_other_counts_and_stages(stage: int, tmp_path: Path):
    stock = run_ranks(begin, 2, str(tmp_path / "stock"), stage, False)[0]
    ours = run_ranks(begin, 2, str(tmp_path / "ours"), stage, True)[0]
    assert ours["ours"]
    assert ours["losses"] == stock["losses"]
    assert ours["at_end"] == {"checkpoint-4": True, "checkpoint-6": True}, "rotated, and committed before train() returns"
    last = tmp_path / "ours" / "checkpoint-6"
    (last / "latest").unlink()  # as a save that was killed before its commit leaves it
    for ranks, other in ((2, stage), (1, stage % 3 + 1), (3, stage)):
        for losses in run_ranks(resume, ranks, str(tmp_path / "ours"), other):
            assert {step: loss for step, loss in losses.items() if step > 4} == pytest.approx(
                {step: loss for step, loss in stock["losses"].items() if step > 4}, rel=1e-5
            ), (ranks, other)
    states = json.loads((tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())
    assert states["global_step"] == 4


def test_stock_folders_go_on(tmp_path: Path):
    stock = run_ranks(begin, 2, str(tmp_path), 2, False)[0]
    for path in tmp_path.glob("checkpoint-6"):
        path.rename(tmp_path / "away")
    for ranks in (1, 3):
        losses = run_ranks(resume, ranks, str(tmp_path), 2)[0]
        assert losses[6] == pytest.approx(stock["losses"][6], rel=1e-5)
