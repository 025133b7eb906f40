"""A small training on a device, and copies of its state by the stream that trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reshard_ckpt import checkpoint


class Net(nn.Module):
    """Where it is normalized, with statistics that every forward changes."""

    def __init__(self, width: int, layers: int, *, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        out: torch.Tensor = self.norm(x)
        return out


class Training:
    """A model, its average and its optimizer, on a device."""

    def __init__(self, device: str, *, width: int = 64, layers: int = 3, plain: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net(width, layers, norm=not plain).to(device)
        self.average = None if plain else copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **(options or {"fused": True}))
        self.data = torch.randn(16, width).to(device)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters() if self.average else (), self.model.parameters(), strict=False):
                mean.lerp_(now, 0.1)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        average = {"average": self.average} if self.average else {}
        return {"model": self.model, **average, "optimizer": self.optimizer}

    def expected(self) -> dict[str, torch.Tensor]:
        """Copy every tensor, by the stream that trains."""
        out = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        if self.average:
            out |= {f"average.{k}": v.clone() for k, v in self.average.state_dict().items()}
        names = {p: n for n, p in self.model.named_parameters()}
        for param, held in self.optimizer.state.items():
            out |= {f"optimizer.state.{names[param]}.{k}": v.clone() for k, v in held.items()}
        return out


def assert_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    read = checkpoint.read(path)
    tensors = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name].cpu())] == []
