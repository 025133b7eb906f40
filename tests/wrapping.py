"""Optimizers whose ``state_dict`` is their own, as libraries write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer


class Momentum(Optimizer):
    """As Muon is: momentum alone, in float32 whatever the parameter is in."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p, dtype=torch.float32))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.add_(buffer.to(p.dtype), alpha=-group["lr"])


class Delegating(Optimizer):
    """A simple wrapper, as for logging or clipping: all but its name is the inner one's."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Counting(Delegating):
    """A wrapper with something of its own to keep: a number, and a slow copy of each parameter."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.count = 0
        self.total = torch.zeros(3)

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        self.total += torch.tensor([1.0, 2.0, 3.0])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.count, self.total = state_dict["count"], state_dict["total"]


class Combined(Optimizer):
    """Matrices to one optimizer, all else to another; their state dicts nested, as dicts or in a list."""

    def __init__(self, model: nn.Module, *, as_list: bool = False) -> None:
        params = list(model.parameters())
        super().__init__(params, {})
        self.parts = {
            "momentum": Momentum(p for p in params if p.ndim == 2),
            "adamw": torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
        }
        self.as_list = as_list

    def step(self, closure: Any = None) -> None:
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        found = {name: part.state_dict() for name, part in self.parts.items()}
        return {"parts": list(found.values())} if self.as_list else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = dict(zip(self.parts, state_dict["parts"], strict=True)) if self.as_list else state_dict
        for name, part in self.parts.items():
            part.load_state_dict(found[name])


class Scaled(torch.optim.AdamW):
    """Keeps its moments scaled, and says them unscaled: what it says is no tensor that it holds."""

    SCALE = 8.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._scale(1 / self.SCALE)
        super().step()
        self._scale(self.SCALE)

    def _scale(self, by: float) -> None:
        for state in self.state.values():
            state["exp_avg"].mul_(by)

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        state = {i: {**entry, "exp_avg": entry["exp_avg"] / self.SCALE} for i, entry in said["state"].items()}
        return {"state": state, "param_groups": list(said["param_groups"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._scale(self.SCALE)


class Container(Optimizer, Stateful):
    """As torchtitan's: an optimizer for each part of the model; one flattened state dict, by parameter."""

    def __init__(self, model_parts: list[nn.Module], **options: Any) -> None:
        self.model_parts = model_parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), **options) for part in model_parts]
        Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], options)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found = [get_optimizer_state_dict(m, o, options=options) for m, o in zip(self.model_parts, self.optimizers, strict=True)]
        return {key: value for part in found for key, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, state_dict, options=options)
