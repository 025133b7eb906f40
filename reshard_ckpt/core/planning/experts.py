"""Experts of a mixture, found by their names, and whole tensors spread over coordinates by size."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def expert_of(name: str) -> tuple[str, int] | None:
    """Find the group of experts, and the number of the expert, that a tensor's name tells; None if it tells no expert.

    >>> expert_of("model.layers.1.experts.5.w1"), expert_of("model.layers.1.w")
    (('model.layers.1.experts', 5), None)
    """
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if parts[i].endswith("experts") and parts[i + 1].isdecimal():
            return ".".join(parts[: i + 1]), int(parts[i + 1])
    return None


def experts_of(names: Sequence[str], num: int) -> dict[str, int]:
    """Map the tensors of experts to coordinates below `num`; the experts of each group are divided evenly, in order."""
    groups: dict[str, set[int]] = {}
    for name in names:
        if (found := expert_of(name)) is not None:
            groups.setdefault(found[0], set()).add(found[1])
    order = {group: {expert: i for i, expert in enumerate(sorted(experts))} for group, experts in groups.items()}
    out = {}
    for name in names:
        if (found := expert_of(name)) is not None:
            of_group = order[found[0]]
            out[name] = of_group[found[1]] * num // len(of_group)
    return out


def spread(sizes: Mapping[Key, int], num: int) -> dict[Key, int]:
    """Map each key to one of `num` places: the largest size first, each to the place with the least so far."""
    loads = [0] * num
    out = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        place = min(range(num), key=lambda i: (loads[i], i))
        loads[place] += sizes[name]
        out[name] = place
    return out
