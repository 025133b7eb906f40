"""The elements of the tests' Megatron checkpoints: functions of the key of their tensor and their place in it."""

from __future__ import annotations

import zlib
from math import prod

import torch

Ints = tuple[int, ...]


def whole(key: str, shape: Ints, dtype: torch.dtype) -> torch.Tensor:
    """Make the global tensor of a key; numbers of 16 bits are small integers, which they hold exactly."""
    seed = zlib.crc32(key.encode())
    place = torch.arange(prod(shape), dtype=torch.int64).reshape(shape)
    if dtype.itemsize < 4:
        return ((place * 31 + seed) % 251 - 125).to(dtype)
    return ((place * 101 + seed) % 65521).to(dtype) / 8


def box(key: str, shape: Ints, dtype: torch.dtype, offsets: Ints, lengths: Ints) -> torch.Tensor:
    """Cut the part of a global tensor that a rank holds."""
    return whole(key, shape, dtype)[tuple(slice(low, low + n) for low, n in zip(offsets, lengths, strict=True))]
