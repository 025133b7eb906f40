"""A check that few of the keys that come from a file have the same hash.

Python salts the hashes of text and bytes, but numbers and tuples of numbers have the same hash in every process. The hash of an
integer is its remainder modulo 2^61 - 1, so a hostile file can spell any number of keys with one hash, and putting n of these
into a dict or a set takes n² comparisons. Here the hashes are sorted before any table is made of the keys, which takes n log n
always.

Honest keys rarely share a hash: -1 and -2 do, and powers of two whose exponents differ by 61.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np

MAX_ALIKE = 64
"""The most keys of one dict or set that may have the same hash. Comparing all pairs of them takes about as long as decoding."""

_SALTED = frozenset({str, bytes})


def too_many_alike(keys: Collection[Hashable]) -> bool:
    """Tell whether more than `MAX_ALIKE` of these keys have the same hash.

    >>> too_many_alike(range(1000)), too_many_alike([i * (2**61 - 1) for i in range(1000)])
    (False, True)
    """
    if len(keys) <= MAX_ALIKE:
        return False
    hashes = np.array([hash(key) for key in keys if type(key) not in _SALTED], np.int64)
    # Sorted, more than MAX_ALIKE equal hashes show as two equal ones at this distance.
    hashes.sort()
    return bool((hashes[MAX_ALIKE:] == hashes[:-MAX_ALIKE]).any())
