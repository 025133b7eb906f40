"""Digests do not depend on how the bytes arrive, and a digests file that does not fit its shard file is refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format.files import (
    ALLOWED_BLOCK_BYTES,
    BLOCK_BYTES,
    BlockHasher,
    decode_digests,
    digest128,
    digests_file_bytes,
    encode_digests,
)
from tests.tries import examples

DATA = np.random.default_rng(0).integers(0, 256, 5 * ALLOWED_BLOCK_BYTES[0] + 17, np.uint8).tobytes()


def naive(data: bytes, block_bytes: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]


@examples(60)
@given(
    size=st.integers(0, len(DATA)),
    cuts=st.lists(st.integers(0, len(DATA)), max_size=6),
    block_bytes=st.sampled_from(ALLOWED_BLOCK_BYTES),
)
def test_digests_do_not_depend_on_the_sizes_of_writes(size: int, cuts: list[int], block_bytes: int):
    hasher = BlockHasher(block_bytes)
    bounds = [0, *sorted(min(cut, size) for cut in cuts), size]
    for begin, end in pairwise(bounds):
        hasher.update(memoryview(DATA)[begin:end])
    assert hasher.num_bytes == size
    digests = decode_digests(hasher.finish(), size)
    assert digests.block_bytes == block_bytes
    assert digests.values.tolist() == naive(DATA[:size], block_bytes)


def test_hasher_takes_arrays_of_any_dtype_and_shape():
    array = np.arange(3 * 40_000, dtype=np.float32).reshape(3, 40_000)
    hasher = BlockHasher()
    for part in (array, np.empty((0, 4)), np.array(2.5)):
        hasher.update(part)
    data = array.tobytes() + np.array(2.5).tobytes()
    assert decode_digests(hasher.finish(), len(data)).values.tolist() == naive(data, BLOCK_BYTES)


def test_digests_file_has_the_documented_bytes():
    data = b"abc"
    encoded = encode_digests([xxhash.xxh3_64_intdigest(data)], 65536, 3)
    assert encoded == b"RSHDIGST" + struct.pack("<IIQ", 1, 65536, 3) + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    assert len(encoded) == digests_file_bytes(3, 65536)
    assert digest128(data) == xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[:10], "less than a header"),
        (lambda d: b"X" + d[1:], "no digests file"),
        (lambda d: d[:8] + struct.pack("<I", 2) + d[12:], "newer version"),
        (lambda d: d[:12] + struct.pack("<I", 1) + d[16:], "blocks of 1 bytes"),
        (lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:], "describes a file of"),
        (lambda d: d[:-1], "need"),
        (lambda d: d + b"\0", "need"),
    ],
)
def test_decode_refuses_what_does_not_fit(damage, message: str):
    encoded = encode_digests([1, 2], BLOCK_BYTES, BLOCK_BYTES + 1)
    with pytest.raises(CorruptError, match=message):
        decode_digests(damage(encoded), BLOCK_BYTES + 1, name="s1/rank00000-0.digests")
