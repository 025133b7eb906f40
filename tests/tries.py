"""How many examples a Hypothesis test tries: a number of its own, which the profile ``long`` multiplies as it does all others."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

_USUAL = 100
"""Examples of a test that says nothing, but for the profile ``long``."""


def examples(number: int, **others: Any) -> settings:
    """Return the settings of a test that usually tries `number` examples."""
    return settings(max_examples=times(number), **others)


def times(number: int) -> int:
    """Return how often a test repeats something that it usually does `number` times."""
    return number * settings.default.max_examples // _USUAL  # type: ignore[union-attr,no-any-return]


def is_long() -> bool:
    """Whether the profile ``long`` is chosen, for tests that try a sample of their cases otherwise."""
    return bool(settings.default.max_examples > _USUAL)  # type: ignore[union-attr]
