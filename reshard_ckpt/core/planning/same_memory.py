"""Targets that lie in the same memory, wholly or in part.

Two targets that overlap would both be written, and the last one wins. This finds them before anything is read:

1. Every wanted piece is cut into boxes, and a box of elements is one of bytes: its innermost dim are the bytes of an element.
2. Boxes whose ranges of addresses meet form a group. Most targets are alone in theirs.
3. Views of one buffer, such as columns of a matrix, meet in their ranges without sharing a byte. Where all boxes of a group lie
   on one grid of steps, this is seen at once, and the group is none. What is left shares memory, or might.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..geometry.ordering import is_new, running_max
from ..geometry.runs import I64, decompose
from .local_metadata import PieceColumns

MAX_BOXES = 1024
"""Boxes of a group of which each is compared with each; larger groups are taken for such that share memory."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Targets (by index, in order) that may share bytes of the addresses ``[low, high)``."""

    targets: tuple[int, ...]
    low: int
    high: int


def find_shared(wanted: PieceColumns, device: I64, address: I64, item_bytes: I64) -> list[Shared]:
    """The groups of targets that may share memory; what is in none certainly shares nothing.

    Parameters
    ----------
    wanted
        The pieces of all targets; no target has two elements in one place.
    device, address, item_bytes : (targets,)
        A number of the device, the address of the first element there, and the size of an element.
    """
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    target = wanted.tensor[cut.parent]
    strides = wanted.strides[cut.parent]
    each = item_bytes[target]
    low = address[target] + (wanted.base[cut.parent] + (cut.offsets * strides).sum(axis=1)) * each
    lengths = np.hstack([cut.lengths, each[:, None]])
    steps = np.hstack([strides * each[:, None], np.ones_like(each)[:, None]])
    high = low + ((lengths - 1) * steps).sum(axis=1) + 1
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
    """Where, among ranges sorted by device and address, one begins behind all before it."""
    fresh = is_new(device)
    fresh[1:] |= low[1:] >= running_max(high, fresh)[:-1]
    return fresh


def _are_apart(owner: I64, low: I64, lengths: I64, steps: I64) -> bool:
    """Whether boxes of bytes of different owners certainly share none.

    On a grid whose every step is larger than all that the smaller steps reach over, each byte has one place, and boxes share a
    byte just where their places do.
    """
    if len(low) > MAX_BOXES:
        return False
    grid = sorted({1, *steps[lengths > 1].tolist()}, reverse=True)
    rest = low - low.min()
    first, size = (np.empty((len(low), len(grid)), np.int64) for _ in range(2))
    for dim, step in enumerate(grid):
        first[:, dim], rest = np.divmod(rest, step)
        size[:, dim] = 1 + np.where(steps == step, lengths - 1, 0).sum(axis=1)
    reach = (first + size - 1).max(axis=0) * np.array(grid)
    within = np.cumsum(reach[::-1])[::-1]  # of each step and all smaller ones
    if (np.array(grid)[:-1] <= within[1:]).any():
        return False
    last = first + size
    meet = ((first[:, None] < last[None]) & (first[None] < last[:, None])).all(axis=2)
    return not bool((meet & (owner[:, None] != owner[None])).any())
