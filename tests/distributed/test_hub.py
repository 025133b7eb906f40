"""A Llama as the hub has it goes to tensor- and data-parallel ranks, and back again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.launch import run_ranks


@pytest.mark.slow
def test_a_llama_goes_to_any_layout_and_comes_back_with_the_same_logits(tmp_path: Path):
    pytest.importorskip("transformers")
    from tests.distributed.hub import LlamaForCausalLM, hub_job, llama, logits  # not when tests are collected: it takes seconds

    for tied in (False, True):
        model = llama(1, tied=tied)
        model.save_pretrained(tmp_path / f"hf-{tied}", max_shard_size="20kB")
        assert len(list((tmp_path / f"hf-{tied}").glob("*.safetensors"))) > 1
        torch.save({"model": model.state_dict()}, tmp_path / f"{tied}.pt")
        checkpoint.convert(tmp_path / f"{tied}.pt", tmp_path / f"dcp-{tied}", to="dcp")
    for rank in run_ranks(hub_job, 4, str(tmp_path)):
        assert rank == [([], (), True)] * len(rank)
        assert len(rank) == 18
    for tied in (False, True):
        reference = llama(1, tied=tied)
        checkpoint.convert(tmp_path / f"back-{tied}", tmp_path / f"out-{tied}", max_shard_size="20kB")
        reference.config.save_pretrained(tmp_path / f"out-{tied}")
        again, info = LlamaForCausalLM.from_pretrained(tmp_path / f"out-{tied}", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(logits(again), logits(reference))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        # And once more from the folder itself, whose config goes along.
        checkpoint.convert(tmp_path / f"out-{tied}", tmp_path / f"half-{tied}", cast={"*": "bfloat16"})
        half = LlamaForCausalLM.from_pretrained(tmp_path / f"half-{tied}", dtype=torch.bfloat16)
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half.parameters(), reference.parameters(), strict=True))
