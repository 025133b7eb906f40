"""The Trainer of transformers with FSDP1 and FSDP2, a real one: saves in the background, resumes on other numbers of ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UsageError
from reshard_ckpt.families.accelerate.background import Background
from reshard_ckpt.integrations.accelerate import background_saves
from tests.families.accelerate.turns import in_turn
from tests.launch import RanksFailed, run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
STEPS, BATCH, SAVED = 6, 6, 4


def fit(
    root: str, version: int, resume: bool = False, killed: bool = False, limit: int = 2, kind: str = "SHARDED_STATE_DICT"
) -> Any:
    """Train a tiny Llama on fixed samples; return the losses by step, and the newest whole checkpoint."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, trainer

    from reshard_ckpt.engine.saving import commit
    from reshard_ckpt.integrations import accelerate

    warnings.simplefilter("ignore")
    accelerate.install()

    class OnCpu(Trainer):
        """The Trainer, which by itself ignores FSDP on a CPU."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=version, state_dict_type=kind, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
            )
            fsdp = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin, "device": torch.device("cpu")}
            self.accelerator.state._shared_state.update(fsdp)
            PartialState._shared_state.update(fsdp)
            self.is_fsdp_enabled = True

    arguments = TrainingArguments(
        root, per_device_train_batch_size=BATCH // dist.get_world_size(), max_steps=STEPS, learning_rate=1e-2, logging_steps=1,
        lr_scheduler_type="linear", seed=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=2,
        save_total_limit=limit,
    )  # fmt: skip
    torch.manual_seed(5 if resume else 0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape))
    tokens = torch.randint(0, 31, (STEPS * BATCH, 8), generator=torch.Generator().manual_seed(3))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    made = OnCpu(model, arguments, train_dataset=samples, callbacks=[accelerate.background_saves()])
    publish = commit.publish

    def killing(storage: Any, *arguments: Any, **options: Any) -> Any:
        if f"checkpoint-{STEPS}/optimizer_0" in storage.url:
            os._exit(9)
        return publish(storage, *arguments, **options)

    with mock.patch.object(commit, "publish", killing) if killed else mock.MagicMock():
        made.train(resume_from_checkpoint=resume)
    wrapped: Any = made.model_wrapped
    assert isinstance(wrapped, FullyShardedDataParallel) if version == 1 else isinstance(next(wrapped.parameters()), DTensor)
    losses = {line["step"]: line["loss"] for line in made.state.log_history if "loss" in line}
    return losses, trainer.get_last_checkpoint(root)


@pytest.mark.slow
def test_runs_go_on_at_other_numbers_of_ranks_and_under_the_other_fsdp(tmp_path: Path) -> None:
    """One that was killed while it committed, and one with full state dicts, by Accelerate's own functions."""
    imports = "from transformers import LlamaForCausalLM, Trainer"  # which take each rank a second otherwise
    full = (False, 3, "FULL_STATE_DICT")
    calls = [(fit, str(tmp_path / "whole"), 2), (fit, str(tmp_path / "full"), 2, False, *full)]
    ((whole, newest), (whole_full, _)), *_ = run_ranks(in_turn, 2, calls, imports=imports)
    assert newest == str(tmp_path / "whole" / f"checkpoint-{STEPS}")
    shutil.rmtree(tmp_path / "full" / f"checkpoint-{STEPS}")
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= set(os.listdir(tmp_path / "full" / f"checkpoint-{SAVED}"))
    with pytest.raises(RanksFailed):
        run_ranks(fit, 2, str(tmp_path / "killed"), 2, False, True, imports=imports)
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    # The removal of the first one runs in the background.
    assert left - {"checkpoint-2"} == {f"checkpoint-{step}" for step in (SAVED, STEPS)}
    for num in (1, 3):
        shutil.copytree(tmp_path / "killed", tmp_path / f"on-{num}")
    # On from the newest whole one.
    calls = [(fit, str(tmp_path / "on-1"), 2, True), (fit, str(tmp_path / "full"), 2, True, *full)]
    ((on_1, _), (on_1_full, _)), *_ = run_ranks(in_turn, 1, calls, imports=imports)
    (on_3, _), *_ = run_ranks(fit, 3, str(tmp_path / "on-3"), 1, True, imports=imports)
    for losses, expected in ((on_1, whole), (on_1_full, whole_full), (on_3, whole)):
        assert [losses[step] for step in (5, 6)] == pytest.approx([expected[step] for step in (5, 6)], rel=1e-5)


def test_a_limit_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="save_total_limit=1"):
        background_saves().on_train_begin(SimpleNamespace(save_total_limit=1), None, None)


def test_all_background_saves_are_waited_for_and_the_first_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [mock.Mock(), mock.Mock(), mock.Mock()]
    handles[0].result.side_effect = UsageError("the first")
    handles[1].result.side_effect = UsageError("the second")
    background = Background()
    background.is_on = True
    monkeypatch.setattr(checkpoint, "async_save", lambda *_, **__: handles[len(background._saves)])
    for _ in handles:
        background.save(str(tmp_path), {})
    with pytest.raises(UsageError, match="the first"):
        background.wait()
    assert [handle.result.call_count for handle in handles] == [1, 1, 1]
    background.wait()  # nothing is left
