"""Train a LoRA on a Hugging Face folder, and go on with it: ``torchrun --nproc-per-node 2 examples/lora.py``.

The folder has the base weights and nothing of the adapters, so `allow_missing` names those that may be missing there. Only the
adapters and their optimizer are saved: the base stays where it is. Needs ``transformers``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from reshard_ckpt import checkpoint

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
ADAPTERS = ["*.lora_a", "*.lora_b"]


class LoraLinear(nn.Linear):
    """A linear layer plus a product of two small matrices; its weight keeps the name that it has in the base."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def make_model(base: str) -> nn.Module:
    """Load the base from its folder, with new adapters, over all ranks; only the adapters are trained."""
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = checkpoint.load(base, {"model": model}, allow_missing=ADAPTERS)
    assert len(report.kept) == 8, report.kept  # two matrices in two places of two layers
    return model


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    base, adapter = f"{folder}_base", f"{folder}_adapter"
    if dist.get_rank() == 0:  # in earnest: the folder of a repository of the hub
        LlamaForCausalLM(CONFIG).save_pretrained(base)
    dist.barrier()

    # One job: train the adapters, and save them alone.
    torch.manual_seed(0)
    model = make_model(base)
    optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1e-2)
    for _ in range(3):
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(adapter, {"adapter": adapters_of(model), "optimizer": optimizer})

    # Another job: the base from its folder, then the adapters from the checkpoint.
    torch.manual_seed(1)
    resumed = make_model(base)
    its_optimizer = torch.optim.AdamW(adapters_of(resumed).values())
    checkpoint.load(adapter, {"adapter": adapters_of(resumed), "optimizer": its_optimizer})

    # Every tensor is the one that was trained, or that the base has, bit for bit.
    for trained, loaded in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(trained.full_tensor(), loaded.full_tensor())
        for key, value in optimizer.state.get(trained, {}).items():
            assert torch.equal(value.full_tensor(), its_optimizer.state[loaded][key].full_tensor()) if key != "step" else True
    assert its_optimizer.param_groups[0]["lr"] == 1e-2
    if dist.get_rank() == 0:
        size = checkpoint.catalog(adapter).summary()["bytes"]
        print(f"{adapter}: {len(adapters_of(model))} adapters and their optimizer, {size} bytes, resumed bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_lora")
