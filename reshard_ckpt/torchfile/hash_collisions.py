"""A check of pickles before torch loads them: refuse many integers that were chosen to have the same hash.

``torch.load`` makes dicts of any keys in a file, and keys of equal hash make a dict slow. Among integers, only those of 61 bits
and more can collide. A pickle spells these with the operation LONG1, which few files use often. Tuples of smaller numbers can
collide too, and are not checked.
"""

from __future__ import annotations

import pickletools

from ..core.trees import MAX_ALIKE, too_many_alike
from ..errors import CorruptError

SMALL_BYTES = 4096
"""Files up to this size are too small to do harm, and need no check."""

_LONG1 = b"\x8a"


def refuse_hash_collisions(pickled: bytes, name: str) -> None:
    """Refuse a pickle with too many integers of one hash.

    Raises
    ------
    CorruptError
        It has too many; or it cannot be parsed as a pickle.
    """
    try:
        large = _large(pickled)
    except (ValueError, OverflowError) as error:
        raise CorruptError(f"{name}: holds no pickle ({error}); use another copy") from None
    if too_many_alike(large):
        raise CorruptError(f"{name}: more than {MAX_ALIKE} of its numbers have the same hash; use another copy")


def _large(pickled: bytes) -> list[int]:
    """List the distinct integers of 61 bits and more in a pickle; empty if they are too few to do harm."""
    if pickled.count(_LONG1) <= MAX_ALIKE:
        return []
    found = (argument for code, argument, _ in pickletools.genops(pickled) if code.code == _LONG1.decode("latin-1"))
    large = (number for number in found if isinstance(number, int) and abs(number) >= 2**60)
    # Keyed by bytes, whose hash is salted: a dict keyed by the numbers themselves would be slow if they collide.
    distinct = {number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True): number for number in large}
    return list(distinct.values())
