"""Targets that share memory, wholly or in part.

Two targets that overlap would both be written, and the last one would win. This finds them before anything is read:

1. Cut every wanted piece into boxes, and describe each box in bytes: one more, innermost, dim has the bytes of an element.
2. Group boxes whose address ranges meet. Most targets are alone in their group.
3. Views of one buffer, such as columns of a matrix, have address ranges that meet although they share no byte. If all boxes of a
   group lie on one grid of steps, the grid shows that, and the group is dropped. Targets of the remaining groups share memory, or
   might.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..geometry.columns import is_new, running_max
from ..geometry.runs import I64, decompose
from .local_metadata import PieceColumns

MAX_BOXES = 1024
"""The most boxes of a group that are compared with each other; the targets of a larger group count as sharing memory."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Targets (by index, in order) that may share bytes of the addresses ``[low, high)``."""

    targets: tuple[int, ...]
    low: int
    high: int


def find_shared(wanted: PieceColumns, device: I64, address: I64, item_bytes: I64) -> list[Shared]:
    """Find the groups of targets that may share memory; a target in no group certainly shares none.

    Parameters
    ----------
    wanted
        The pieces of all targets; no target has two elements at one address.
    device, address, item_bytes : (targets,)
        A number for the device, the address of the first element there, and the size of an element in bytes.
    """
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    target = wanted.tensor[cut.parent]
    strides = wanted.strides[cut.parent]
    each = item_bytes[target]
    # Row i is box i from here on. low, high: its addresses; lengths, steps: its dims in bytes, the last one within an element.
    low = address[target] + (wanted.base[cut.parent] + (cut.offsets * strides).sum(axis=1)) * each
    lengths = np.hstack([cut.lengths, each[:, None]])
    steps = np.hstack([strides * each[:, None], np.ones_like(each)[:, None]])
    high = low + ((lengths - 1) * steps).sum(axis=1) + 1
    # Boxes by device and address; each group is order[begin[g] : end[g]].
    order = np.lexsort((low, device[target]))
    groups = _meeting(device[target][order], low[order], high[order])
    begin = np.flatnonzero(groups)
    end = np.append(begin[1:], len(order))[: len(begin)]
    out = []
    for i in np.flatnonzero(end - begin > 1).tolist():
        boxes = order[begin[i] : end[i]]
        owners = np.unique(target[boxes])
        if len(owners) > 1 and not _are_apart(target[boxes], low[boxes], lengths[boxes], steps[boxes]):
            out.append(Shared(tuple(owners.tolist()), int(low[boxes].min()), int(high[boxes].max())))
    return out


def _meeting(device: I64, low: I64, high: I64) -> NDArray[np.bool_]:
    """Mark the ranges, sorted by device and address, that begin behind the ends of all ranges before them."""
    fresh = is_new(device)
    fresh[1:] |= low[1:] >= running_max(high, fresh)[:-1]
    return fresh


def _are_apart(owner: I64, low: I64, lengths: I64, steps: I64) -> bool:
    """Tell whether boxes of different owners certainly share no byte.

    Addresses are written as digits on the grid of all steps. If every step is larger than the reach of all smaller steps
    together, each byte has one sequence of digits, and boxes share a byte exactly if their ranges of digits meet on every dim.
    """
    if len(low) > MAX_BOXES:
        return False
    grid = sorted({1, *steps[lengths > 1].tolist()}, reverse=True)
    # first[i], size[i]: for each step of the grid, the digit at which box i begins, and the number of digits that it covers.
    rest = low - low.min()
    first, size = (np.empty((len(low), len(grid)), np.int64) for _ in range(2))
    for dim, step in enumerate(grid):
        first[:, dim], rest = np.divmod(rest, step)
        size[:, dim] = 1 + np.where(steps == step, lengths - 1, 0).sum(axis=1)
    # reach: the largest offset that each step contributes; within: the sum over a step and all smaller ones.
    reach = (first + size - 1).max(axis=0) * np.array(grid)
    within = np.cumsum(reach[::-1])[::-1]  # of each step and all smaller ones
    if (np.array(grid)[:-1] <= within[1:]).any():
        return False
    # meet[i, j]: boxes i and j share a byte.
    last = first + size
    meet = ((first[:, None] < last[None]) & (first[None] < last[:, None])).all(axis=2)
    return not bool((meet & (owner[:, None] != owner[None])).any())
