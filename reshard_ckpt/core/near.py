"""The known name that a wrong one was probably meant as, found in one pass over a hundred thousand.

Two names are near if they differ in one step between dots, which is alike in both, or if one has one step more than the other.
Numbers are never alike: another layer is not meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from operator import ne

Steps = tuple[str, ...]

ALIKE = 0.6
"""How much of two steps is the same, at least, from 0 to 1."""

MAX_COMPARED = 300_000
"""Pairs of names compared in all: where most names have half of their steps in common, not all are looked at."""


def nearest(wrong: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Find the nearest known name for each wrong one that is near any.

    >>> nearest(["model.layer.1.weight", "layers.1.weight", "step"], ["model.layers.0.weight", "model.layers.1.weight", "extra"])
    {'model.layer.1.weight': 'model.layers.1.weight', 'layers.1.weight': 'model.layers.1.weight'}
    """
    # One difference leaves about half of the steps as they are, before it or behind it: only such names are compared.
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
            near = by_half.get((half, theirs[:half] if half >= 0 else theirs[half:]), [])
            left -= len(near)
            for steps in near if left > 0 else ():
                score, name = _likeness(steps, theirs), ".".join(steps)
                if score >= ALIKE and score > found.get(name, (0.0, ""))[0]:
                    found[name] = score, other
    return {name: other for name, (_, other) in found.items()}


def _likeness(ours: Steps, theirs: Steps) -> float:
    """Rate how much two names are the same, from 0 to 1."""
    short, long = sorted((ours, theirs), key=len)
    if len(long) == len(short) + 1:
        return 0.9 if any(long[:i] + long[i + 1 :] == short for i in range(len(long))) else 0.0
    if len(long) != len(short) or sum(map(ne, ours, theirs)) != 1:
        return 0.0
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    if any(step.isdigit() for step in differing[0]):
        return 0.0
    return SequenceMatcher(None, *differing[0], autojunk=False).ratio()
