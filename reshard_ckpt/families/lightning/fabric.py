"""`FabricSaves`: the part of a strategy of Lightning's Fabric that saves and loads checkpoints.

Modules and optimizers of the state are saved as such, under their keys. Each other key is one value, as rank 0 has it. A save
returns once it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...plugins import checkpoint
from ...plugins.errors import UsageError
from ...plugins.names import unwrapped_keys
from .saving import is_ours

_Strategy: Any = object
"""A base class without types: `FabricSaves` calls methods of Fabric's strategy, which stands behind it in the bases of each class
that `strategies.strategy` makes."""


class FabricSaves(_Strategy):  # type: ignore[misc]
    """Saves into this library's format; checkpoints that Fabric wrote load too.

    Parameters
    ----------
    arguments, options
        As for Fabric's own strategy.
    """

    def save_checkpoint(
        self,
        path: Any,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a state. `filter` maps a module's key to a function of a tensor's name and the tensor; False leaves it out."""
        if storage_options is not None:
            raise UsageError("storage_options: are for Lightning's CheckpointIO, which is not used here; leave them out")
        left_out: list[str] = []
        for key, keeps in (filter or {}).items():
            if not isinstance(state[key], nn.Module):
                raise UsageError(f"filter of {key!r}: only the tensors of modules can be filtered; leave it out")
            named = [*state[key].named_parameters(), *state[key].named_buffers()]
            names = unwrapped_keys([name for name, _ in named])
            left_out += [f"{key}.{name}" for name, (_, tensor) in zip(names, named, strict=True) if not keeps(name, tensor)]
        objects, values = _divided(state)
        if self.is_global_zero:
            objects.update({key: checkpoint.Value(value) for key, value in values.items()})
        checkpoint.save(str(self.broadcast(path)), objects, exclude=left_out)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into the modules and optimizers of a state, and set the state's other values from it.

        Return the checkpoint's values for which the state has no key. Without a state, return everything in the checkpoint, with
        whole tensors.
        """
        path = str(self.broadcast(path))
        if isinstance(state, nn.Module | Optimizer) or not is_ours(path):
            content: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
            return content
        catalog = checkpoint.catalog(path)
        if not state:
            found: dict[str, Any] = {}
            for name, value in checkpoint.read(path).items():
                key, _, below = name.partition(".")
                found.setdefault(key, {})[below] = value
            return {key: below[""] if [*below] == [""] else below for key, below in found.items()}
        objects, values = _divided(state)
        loaded = {key: checkpoint.Value(None) for key in values if strict or key in catalog.value_names}
        checkpoint.load(path, {**objects, **loaded}, strict=strict)
        state.update({key: value.value for key, value in loaded.items()})
        others = [name for name in catalog.value_names if "." not in name and name not in state]
        return checkpoint.read(path, others) if others else {}


def _divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a state into its modules and optimizers, and all other values."""
    objects = {key: value for key, value in state.items() if isinstance(value, nn.Module | Optimizer)}
    return objects, {key: value for key, value in state.items() if key not in objects}
