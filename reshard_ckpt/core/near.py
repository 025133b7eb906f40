"""Suggestions for wrong names: the known name that was probably meant, found in one pass over a hundred thousand names.

Two names are near if they differ in one step between dots and these two steps are alike, or if one has one step more than the
other. Numbers are never alike, because another layer is not meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from operator import ne

Steps = tuple[str, ...]

ALIKE = 0.6
"""The least similarity of two steps that are alike, from 0 to 1."""

MAX_COMPARED = 300_000
"""The most pairs of names that are compared in all; if most names share half of their steps, some pairs are skipped."""


def nearest(wrong: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Find the nearest known name for each wrong name; wrong names without a near one are left out.

    >>> nearest(["model.layer.1.weight", "layers.1.weight", "step"], ["model.layers.0.weight", "model.layers.1.weight", "extra"])
    {'model.layer.1.weight': 'model.layers.1.weight', 'layers.1.weight': 'model.layers.1.weight'}
    """
    # Two names with one difference share the first half of their steps or the last half, so only such names are compared.
    # by_half: the wrong names with these steps at the beginning (a positive length) or at the end (a negative one).
    by_half: dict[tuple[int, Steps], list[Steps]] = {}
    for name in wrong:
        steps = tuple(name.split("."))
        half = (len(steps) - 1) // 2 or len(steps) - 1
        for key in {(half, steps[:half]), (-half, steps[len(steps) - half :])}:
            by_half.setdefault(key, []).append(steps)
    halves = {half for half, _ in by_half}
    found: dict[str, tuple[float, str]] = {}
    left = MAX_COMPARED
    for other in known:
        theirs = tuple(other.split("."))
        for half in halves:
            # A positive half is that many steps at the beginning, a negative one that many at the end.
            near = by_half.get((half, theirs[:half] if half >= 0 else theirs[half:]), [])
            left -= len(near)
            for steps in near if left > 0 else ():
                score, name = _likeness(steps, theirs), ".".join(steps)
                if score >= ALIKE and score > found.get(name, (0.0, ""))[0]:
                    found[name] = score, other
    return {name: other for name, (_, other) in found.items()}


def _likeness(ours: Steps, theirs: Steps) -> float:
    """Rate the similarity of two names, from 0 to 1."""
    short, long = sorted((ours, theirs), key=len)
    if len(long) == len(short) + 1:
        return 0.9 if any(long[:i] + long[i + 1 :] == short for i in range(len(long))) else 0.0
    if len(long) != len(short) or sum(map(ne, ours, theirs)) != 1:
        return 0.0
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    if any(step.isdigit() for step in differing[0]):
        return 0.0
    return SequenceMatcher(None, *differing[0], autojunk=False).ratio()
