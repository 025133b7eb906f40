"""Memory that only the steps of optimizers change: lazy staging may copy it after the call has returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.trees import leaves
from .dtensor import is_dtensor
from .walk import optimizers_of


def optimizers_in(state: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in a state, at any depth, and the optimizers that they wrap, which may be stepped by themselves."""
    return (optimizer for leaf in leaves(state) if isinstance(leaf, Optimizer) for optimizer in optimizers_of(leaf))


def held_back(state: Any) -> tuple[list[Optimizer], list[torch.Tensor]]:
    """Return the optimizers of a state whose steps can be held back, and the local tensors that no other optimizer changes."""
    optimizers = list({id(optimizer): optimizer for optimizer in optimizers_in(state)}.values())
    held = [optimizer for optimizer in optimizers if can_be_held(optimizer)]
    others = [optimizer for optimizer in optimizers if not can_be_held(optimizer)]
    shared = {tensor.untyped_storage().data_ptr() for tensor in owned_tensors(others)}
    return held, [tensor for tensor in owned_tensors(held) if tensor.untyped_storage().data_ptr() not in shared]


def can_be_held(optimizer: Optimizer) -> bool:
    """Tell whether the steps of an optimizer can be held back; compiled steps and steps in a CUDA graph cannot."""
    step = vars(optimizer).get("step", type(optimizer).step)
    compiled = hasattr(step, "_torchdynamo_orig_callable")
    return not compiled and not any(group.get("capturable") for group in optimizer.param_groups)


def owned_tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return the local tensors of the parameters and of the state of optimizers."""
    tensors = [param for o in optimizers for group in o.param_groups for param in group["params"]]
    tensors += [v for o in optimizers for held in o.state.values() if isinstance(held, dict) for v in held.values()]
    with torch.no_grad():  # else `to_local` records each tensor for autograd
        found = [t.to_local() if is_dtensor(t) else t for t in tensors if isinstance(t, torch.Tensor)]
    return list({id(tensor): tensor for tensor in found}.values())
