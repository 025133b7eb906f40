"""A check of pickles before torch reads them: too many integers chosen to have the same hash are refused.

``torch.load`` makes dicts of whatever keys a file holds, and keys of one hash make a dict slow. Only integers of 61 bits and more
collide with each other. A pickle spells these with one operation, LONG1, and few files have many. Tuples of smaller numbers are
not checked.
"""

from __future__ import annotations

import pickletools

from ..core.hashing import MAX_ALIKE, too_many_alike
from ..errors import CorruptError

SMALL_BYTES = 4096
"""Files up to this size are too small to do harm."""

_LONG1 = b"\x8a"


def refuse_hash_collisions(pickled: bytes, name: str) -> None:
    """Refuse a pickle that has too many integers of one hash.

    Raises
    ------
    CorruptError
        It does; or it is no pickle.
    """
    try:
        large = _large(pickled)
    except (ValueError, OverflowError) as error:
        raise CorruptError(f"{name}: holds no pickle ({error}); use another copy") from None
    if too_many_alike(large):
        raise CorruptError(f"{name}: more than {MAX_ALIKE} of its numbers have the same hash; use another copy")


def _large(pickled: bytes) -> list[int]:
    """List the distinct integers of eight bytes and more."""
    if pickled.count(_LONG1) <= MAX_ALIKE:
        return []
    found = (argument for code, argument, _ in pickletools.genops(pickled) if code.code == _LONG1.decode("latin-1"))
    large = (number for number in found if isinstance(number, int) and abs(number) >= 2**60)
    # Keyed by bytes, whose hash is salted: a dict of the numbers themselves would be slow.
    distinct = {number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True): number for number in large}
    return list(distinct.values())
