"""The demo's model: a small GPT, whole or a stage of it, on one rank or tensor-parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Config:
    vocabulary: int
    dim: int = 96
    num_heads: int = 4
    num_layers: int = 4
    context: int = 64
    init_std: float = 0.06


class Attention(nn.Module):
    """Causal attention; the rows of `qkv` are ordered by head, so that a tensor-parallel rank holds whole heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Layers `first` to `last` of the model: the first stage embeds, the last one predicts.

    Layers keep their number in the whole model, so a tensor has one name on every layout.
    """

    def __init__(self, config: Config, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        self.config = config
        last = config.num_layers if last is None else last
        self.embed = nn.Embedding(config.vocabulary, config.dim) if first == 0 else None
        self.position = nn.Embedding(config.context, config.dim) if first == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(first, last)})
        is_last = last == config.num_layers
        self.norm = nn.LayerNorm(config.dim) if is_last else None
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False) if is_last else None
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard the matrices over the one axis of `mesh`; norms and positions stay whole on every rank."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.qkv": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    here = {name: style for name, style in plan.items() if getattr(model, name.split(".")[0]) is not None}
    parallelize_module(model, mesh, here)
    return model


def param_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, object]]:
    """Split the named parameters into two groups: matrices decay, the rest does not."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, num_tokens: int, *, temperature: float = 0.6) -> Tensor:
    """Continue `tokens`, one sampled token at a time."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.config.context :])[0, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
    return tokens
