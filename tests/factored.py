"""A small optimizer whose state has other shapes than its parameters: second moments factored into rows and columns.

Unlike torch's Adafactor it takes DTensors, and its state for them is DTensors too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


class Factored(torch.optim.Optimizer):
    """Scales gradients by the root of the outer product of row and column means of their squares."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                self._update(param, self.state[param], group["lr"], group["decay"])

    def _update(self, param: torch.Tensor, state: dict[str, Any], lr: float, decay: float) -> None:
        square = param.grad * param.grad + 1e-8
        if not state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        if param.ndim < 2:
            _average(state, "square", square, decay)
            scale = state["square"]
        else:
            _average(state, "row", _summed(square.mean(dim=-1)), decay)
            _average(state, "column", _summed(square.mean(dim=-2)), decay)
            row, column = state["row"].unsqueeze(-1), state["column"].unsqueeze(-2)
            scale = row * column / _summed(row.mean())
        param.sub_(lr * param.grad / scale.sqrt())


def _average(state: dict[str, Any], key: str, value: torch.Tensor, decay: float) -> None:
    state[key] = value if key not in state else state[key] * decay + value * (1 - decay)


def _summed(value: torch.Tensor) -> torch.Tensor:
    """The tensor with sums over ranks done."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return value
