"""Which ranges of one dim are left, after mesh axes have cut it in turn? As ``torch.chunk`` cuts, also uneven sizes.

What a rank holds of a dim is a list of ranges ``(first, length)``, in the order in which they lie in its local tensor: one where
plain shards are cut, several where sections of the dim (fused QKV) are cut each on its own, or groups (strided placements).
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]


def chunk(ranges: Sequence[Range], num: int, index: int) -> list[Range]:
    """The part of the concatenated ranges that ``torch.chunk`` into `num` gives to coordinate `index`.

    >>> chunk([(0, 5), (10, 5)], 4, 1), chunk([(0, 5)], 4, 3)
    ([(3, 2), (10, 1)], [])
    """
    total = sum(length for _, length in ranges)
    step = -(-total // num)
    return narrow(ranges, min(index * step, total), min((index + 1) * step, total))


def narrow(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Elements ``[start, stop)`` of the concatenated ranges."""
    out, position = [], 0
    for first, length in ranges:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            out.append((first + low - position, high - low))
        position += length
    return out


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same, where a range that begins at the end of the one before it is one with it.

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
