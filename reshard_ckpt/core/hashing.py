"""A check that few of the keys that come from a file have the same hash

Python salts the hashes of text and bytes; those of numbers and of tuples of numbers are the same in every process. An integer's
hash is its remainder modulo 2^61 - 1, so a file can spell any number of keys with one hash, and to put n of these into a dict or
a set takes n² comparisons. Here the hashes are sorted before any table is made of them, which takes n log n whatever they are.

A program that writes keys without ill will has few of one hash: -1 and -2 have the same one, and so have powers of two 61 apart.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np

MAX_ALIKE = 64
"""Keys of one dict or set that may have the same hash. All pairs of so many take about as long as decoding them."""

_SALTED = frozenset({str, bytes})


def too_many_alike(keys: Collection[Hashable]) -> bool:
    """Return whether more than `MAX_ALIKE` of these have one hash.

    >>> too_many_alike(range(1000)), too_many_alike([i * (2**61 - 1) for i in range(1000)])
    (False, True)
    """
    if len(keys) <= MAX_ALIKE:
        return False
    hashes = np.array([hash(key) for key in keys if type(key) not in _SALTED], np.int64)
    hashes.sort()
    return bool((hashes[MAX_ALIKE:] == hashes[:-MAX_ALIKE]).any())
