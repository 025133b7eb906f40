"""Differences between two values: dicts and lists are walked together, down to the parts that differ.

Two values are identical if their encoded bytes are, as in a catalog: a NaN equals itself, and 3 differs from 3.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch

from ..format.values import encode_value

MAX_LEAVES = 16
"""The most differences that are listed for one value; with more, the whole value is listed as one."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value, or a part of a value, that differs.

    Attributes
    ----------
    name
        The name of the value.
    where
        The part, as a Python expression behind the value: ``[0]['lr']``; empty for the whole value.
    a, b
        The value or part in the first checkpoint, and in the second.
    by, relative
        For numbers, ``b - a`` and ``|b - a| / max(|a|, |b|)``; for numpy arrays and tensors of one shape, the largest absolute
        and the largest relative difference of an element. None for other types, and if a number is NaN or infinite.
    """

    name: str
    where: str
    a: Any
    b: Any
    by: float | int | None = None
    relative: float | None = None


def value_changes(name: str, a: Any, b: Any) -> list[ValueChange]:
    """List the differences between two values of one name.

    >>> [(c.where, c.a, c.b, c.by) for c in value_changes("x", {"lr": 1, "n": [1, 2]}, {"lr": 1, "n": [1, 5]})]
    [("['n'][1]", 2, 5, 3)]
    """
    if is_identical(a, b):
        return []
    leaves = list(_leaves(a, b, ""))
    if len(leaves) > MAX_LEAVES:
        leaves = [("", a, b)]
    return [ValueChange(name, where, x, y, *_difference(x, y)) for where, x, y in leaves]


def is_identical(a: Any, b: Any) -> bool:
    """Tell whether two values are identical."""
    return encode_value(a, "a value") == encode_value(b, "a value")


def _leaves(a: Any, b: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the smallest parts that differ, as their expression and both sides."""
    if type(a) is type(b) and isinstance(a, dict) and list(a) == list(b):
        parts = [(f"{where}[{key!r}]", a[key], b[key]) for key in a]
    elif type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        parts = [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        parts = []
    differing = [part for part in parts if not is_identical(part[1], part[2])]
    # The parts are equal, or there are none, so this value itself is the smallest part that differs.
    if not differing:
        yield where, a, b
    for at, x, y in differing:
        yield from _leaves(x, y, at)


def _difference(a: Any, b: Any) -> tuple[float | int | None, float | None]:
    """Return absolute and relative difference of two numbers, arrays or tensors; None, None for other types and if not finite."""
    if all(isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_complex() for x in (a, b)):
        a, b = (x.detach().to(torch.float64).numpy() for x in (a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _array_difference(a, b)
    if not all(isinstance(x, int | float | np.number) and not isinstance(x, bool) for x in (a, b)):
        return None, None
    x, y = (n.item() if isinstance(n, np.number) else n for n in (a, b))
    if isinstance(x, complex) or isinstance(y, complex):
        return None, None
    largest = max(abs(x), abs(y))
    try:
        relative = float(abs(y - x) / largest) if largest else 0.0
    except OverflowError:  # a float, and an integer beyond all floats
        return None, None
    return (y - x, relative) if isfinite(relative) else (None, None)


def _array_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | None, float | None]:
    """Return the largest absolute and the largest relative difference of the elements of two arrays."""
    if a.shape != b.shape or a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf" or not a.size:
        return None, None
    x, y = (side.astype(np.float64) for side in (a, b))
    apart, largest = np.abs(y - x), np.maximum(np.abs(x), np.abs(y))
    if not np.isfinite(apart).all():
        return None, None
    return float(apart.max()), float((apart / np.where(largest > 0, largest, 1)).max())
