"""A Llama as the hub has it, cut over tensor- and data-parallel ranks, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint
from tests.distributed.test_foreign import wrong_in
from tests.launch import run_ranks

transformers = pytest.importorskip("transformers")

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def llama(seed: int, *, tied: bool = False) -> Any:
    """A tiny Llama, with odd sizes and random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(2, 6)).logits


def cut(model: Any, layout: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if "tp" in layout:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    if "fsdp" in layout:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def hub_job(folder: str) -> list[Any]:
    seen: list[Any] = []
    for tied in (False, True):
        reference = llama(1, tied=tied)
        for path in (f"{folder}/hf-{tied}", f"{folder}/{tied}.pt", f"{folder}/dcp-{tied}"):
            for layout in ("tp", "fsdp", "fsdp×tp"):
                model = cut(llama(2, tied=tied), layout)
                report = checkpoint.load(path, {"model": model})
                total = sum(p.numel() * p.element_size() for p in reference.parameters())
                seen.append((wrong_in(model, reference), report.problems, report.num_bytes < total))
        checkpoint.save(f"{folder}/back-{tied}", {"model": model})
    return seen


@pytest.mark.slow
def test_a_llama_goes_to_any_layout_and_comes_back_with_the_same_logits(tmp_path: Path):
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
        again, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"out-{tied}", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(logits(again), logits(reference))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        # And once more from the folder itself, whose config goes along.
        checkpoint.convert(tmp_path / f"out-{tied}", tmp_path / f"half-{tied}", cast={"*": "bfloat16"})
        half = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"half-{tied}", dtype=torch.bfloat16)
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half.parameters(), reference.parameters(), strict=True))
