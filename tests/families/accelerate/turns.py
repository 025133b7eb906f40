"""Several runs of Accelerate in one job: a start of ranks, with the imports of Accelerate, takes longer than what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_turn(calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Call each function with its arguments on this rank, each as if it were the first to use Accelerate; return the results."""
    from accelerate.state import AcceleratorState, GradientState

    found = []
    for function, *arguments in calls:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        found.append(function(*arguments))
    return found
