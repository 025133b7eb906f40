"""Ranges of one dim, cut by one mesh axis after another as ``torch.chunk`` cuts, including uneven sizes.

A rank's part of a dim is a list of ranges ``(first, length)``, in the order in which they lie in its local tensor. Plain shards
have one range. There are several if sections of the dim (fused QKV) are cut each on its own, or groups (strided placements).
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]


def chunk(ranges: Sequence[Range], num: int, index: int) -> list[Range]:
    """Cut the concatenated ranges as ``torch.chunk`` into `num` parts; returns the part of coordinate `index`.

    >>> chunk([(0, 5), (10, 5)], 4, 1), chunk([(0, 5)], 4, 3)
    ([(3, 2), (10, 1)], [])
    """
    total = sum(length for _, length in ranges)
    step = -(-total // num)
    return narrow(ranges, min(index * step, total), min((index + 1) * step, total))


def narrow(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Return elements ``[start, stop)`` of the concatenated ranges."""
    out: list[Range] = []
    position = 0
    for first, length in ranges:
        low = max(start, position)
        high = min(stop, position + length)
        if low < high:
            out.append((first + low - position, high - low))
        position += length
    return out


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Merge each range with the one before it if it begins where that one ends.

    >>> joined([(0, 2), (2, 3), (7, 1)])
    [(0, 5), (7, 1)]
    """
    out: list[Range] = []
    for first, length in ranges:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return out
