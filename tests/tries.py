"""How much a test tries: examples of Hypothesis and pairs of layouts, more of both in the profile ``long``, for nightly runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

from hypothesis import settings

T = TypeVar("T")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
"""Read from the environment, since the ranks of a job load no profile."""
USUAL = 60
"""Examples that `make test` tries at most."""


def is_long() -> bool:
    return PROFILE == "long"


def times(number: int) -> int:
    """Return how often a test repeats something: `number` times, and fifty times as often in a long run."""
    return number * (50 if is_long() else 1)


def examples(number: int, *, usual: int = USUAL, **others: Any) -> settings:
    """Return the settings of a test that draws `number` examples; `make test` draws at most `usual`, fewer where each is slow."""
    return settings(max_examples=min(number, usual) if PROFILE == "fixed" else times(number), **others)


def pairs(layouts: Sequence[T]) -> list[tuple[T, T]]:
    """Return which saved layout is loaded into which: each into itself and the one before, in a long run each into each."""
    return (
        list(product(layouts, layouts))
        if is_long()
        else [(one, to) for i, one in enumerate(layouts) for to in (one, layouts[i - 1])]
    )
