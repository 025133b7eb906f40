"""How many examples a Hypothesis test tries: a number of its own, which the profile ``long`` multiplies as it does all others."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

_USUAL = 100
"""Examples of a test that says nothing, but for the profile ``long``."""


def examples(number: int, **others: Any) -> settings:
    """Return the settings of a test that usually tries `number` examples."""
    return settings(max_examples=number * settings.default.max_examples // _USUAL, **others)  # type: ignore[union-attr]
