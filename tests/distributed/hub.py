"""A Llama as the hub has it, cut over tensor- and data-parallel ranks; importing this imports the model, once for all ranks.

What one process does before and after is rank 0's: so no other process needs to import the model, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

from reshard_ckpt import checkpoint
from tests.distributed.test_foreign import whole
from tests.tries import is_long

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
LAYOUTS = ("tp", "fsdp", "fsdp×tp")


def llama(seed: int, *, tied: bool = False) -> Any:
    """A tiny Llama, with odd sizes and random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


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


def write_folders(folder: Path) -> None:
    """Write a Llama, tied and not, as the hub does, as a torch file, and as a folder of DCP."""
    for tied in (False, True):
        model = llama(1, tied=tied)
        model.save_pretrained(folder / f"hf-{tied}", max_shard_size="20kB")
        assert len(list((folder / f"hf-{tied}").glob("*.safetensors"))) > 1
        torch.save({"model": model.state_dict()}, folder / f"{tied}.pt")
        checkpoint.convert(folder / f"{tied}.pt", folder / f"dcp-{tied}", to="dcp")


def check_the_way_back(folder: Path) -> None:
    """Convert what the ranks saved to the hub's form, and compare what transformers makes of it."""
    for tied in (False, True):
        reference = llama(1, tied=tied)
        checkpoint.convert(folder / f"back-{tied}", folder / f"out-{tied}", max_shard_size="20kB")
        reference.config.save_pretrained(folder / f"out-{tied}")
        again, info = LlamaForCausalLM.from_pretrained(folder / f"out-{tied}", output_loading_info=True)
        assert not info["missing_keys"], info
        assert not info["unexpected_keys"], info
        assert torch.equal(logits(again), logits(reference))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        # And once more from the folder itself, whose config goes along.
        checkpoint.convert(folder / f"out-{tied}", folder / f"half-{tied}", cast={"*": "bfloat16"})
        half = LlamaForCausalLM.from_pretrained(folder / f"half-{tied}", dtype=torch.bfloat16)
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half.parameters(), reference.parameters(), strict=True))


def check_the_exports(folder: Path) -> None:
    """Load the exports of each layout by their folders alone."""
    for tied in (False, True):
        reference = llama(1, tied=tied)
        for step in range(3):
            path = folder / f"run-{tied}" / f"step_{step}" / "safetensors"
            again, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(info[found] for found in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            assert type(again) is LlamaForCausalLM
            assert again.config.architectures == ["LlamaForCausalLM"]
            assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
            assert torch.equal(logits(again), logits(reference))


def hub_job(folder: str) -> list[Any]:
    """Load each of the folders, tied and not into another layout, and save it from there; what came out wrong, each time."""
    if dist.get_rank() == 0:
        write_folders(Path(folder))
    dist.barrier()
    seen: list[Any] = []
    for tied in (False, True):
        reference = llama(1, tied=tied)
        for number, path in enumerate((f"{folder}/hf-{tied}", f"{folder}/{tied}.pt", f"{folder}/dcp-{tied}")):
            for layout in LAYOUTS if is_long() else [LAYOUTS[(number + tied) % 3]]:
                model = cut(llama(2, tied=tied), layout)
                report = checkpoint.load(path, {"model": model})
                total = sum(p.numel() * p.element_size() for p in reference.parameters())
                wanted = dict(reference.named_parameters())
                wrong = [name for name, p in model.named_parameters() if not torch.equal(whole(p.detach()), wanted[name])]
                seen.append((wrong, report.problems, report.num_bytes < total))
        checkpoint.save(f"{folder}/back-{tied}", {"model": model})
        with checkpoint.Manager(f"{folder}/run-{tied}", also="safetensors") as manager:
            for step, layout in enumerate(LAYOUTS):
                model = cut(llama(1, tied=tied), layout)
                manager.async_save(step, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    if dist.get_rank() == 0:
        check_the_way_back(Path(folder))
        check_the_exports(Path(folder))
    dist.barrier()  # nobody leaves while another still works
    return seen
