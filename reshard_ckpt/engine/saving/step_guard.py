"""How is a step of an optimizer held back until what it changes is copied? By its own step hook, which is waited in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...errors import UsageError


class StepGuard:
    """Holds every step of some optimizers back until what they change is copied."""

    def __init__(self, optimizers: Sequence[Optimizer], wait: Callable[[], None]) -> None:
        self._wait = wait
        self._steps = [(optimizer, _steps_of(optimizer)) for optimizer in optimizers]
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def _before_step(self, *_: Any) -> None:
        self._wait()

    def close(self) -> None:
        """All is copied: let go, and make sure that no step slipped through.

        Raises
        ------
        UsageError
            An optimizer stepped without its hook, so what was copied may be a mixture.
        """
        try:
            # The hooks stay until this is known: a step that comes now must still wait, or it would count as one that slipped.
            slipped = [optimizer for optimizer, steps in self._steps if _steps_of(optimizer) != steps]
        finally:
            for hook in self._hooks:
                hook.remove()
        if slipped:
            raise UsageError(
                f"{type(slipped[0]).__name__} made a step while the state was copied, past the hook that holds steps back (a "
                "compiled or captured step?); this save is given up, use staging='eager'"
            )


def _steps_of(optimizer: Optimizer) -> tuple[float, ...]:
    """How many steps the parameters' states count, where they say."""
    counts = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    return tuple(float(c) for c in counts if isinstance(c, int | float) or (torch.is_tensor(c) and c.device.type == "cpu"))
