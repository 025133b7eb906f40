"""Fingerprints: sums against an oracle in Python's own numbers, what differs shows, and where samples lie."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import box_piece, row_major_strides
from reshard_ckpt.engine.common.tensor_bytes import LocalPiece, LocalRun
from reshard_ckpt.engine.saving import replicas
from reshard_ckpt.engine.saving.replicas import looked_at, may_be_alike, weighted_sums, with_kind

CPU, MASK, FACTOR = torch.device("cpu"), (1 << 64) - 1, 0x2545F4914F6CDD1D


def whole(tensor: torch.Tensor) -> LocalRun:
    shape = tuple(tensor.shape)
    piece = box_piece((0,) * len(shape), shape, 0, row_major_strides(shape))
    return LocalRun(LocalPiece(tensor, piece), 0, tensor.numel())


def oracle(data: bytes, packed: int = 1 << 20) -> int:
    """Sum up words with the weights of their places in their pack, and packs by Horner's rule."""
    if len(data) > packed:
        last = len(data) - (len(data) % packed or packed)
        return (oracle(data[:last], packed) * FACTOR + oracle(data[last:])) & MASK
    total = 0
    for i, word in enumerate(np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()):
        z = (i + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        total += word * ((z ^ z >> 31) | 1)
    return total & MASK


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.sampled_from([16, 1 << 20]), *[st.integers(0, 8)] * 2)
def test_sums_are_those_of_the_oracle(parts: list[bytes], packed: int, first: int, start: int) -> None:
    runs = []
    for data in parts:  # from `start` on of a tensor that begins at byte `first` of its storage
        run = whole(torch.tensor([7] * (first + start) + list(data), dtype=torch.uint8)[first:])
        runs.append(LocalRun(run.local, start, len(data)))
    with mock.patch.object(replicas, "PACKED_BYTES", packed):
        sums = weighted_sums(runs, CPU)
    assert [total & MASK for total in sums.tolist()] == [oracle(data, packed) for data in parts]


@given(st.integers(0, (1 << 32) - 1))
def test_samples_of_all_shifts_together_are_the_whole_run(shift: int) -> None:
    run = whole(torch.empty(3_000_001, dtype=torch.bfloat16))
    first, here, last = (looked_at(run, s) for s in (0, shift, (1 << 32) - 1))
    assert first[0].start == 0
    assert [a.start <= b.start <= c.start for a, b, c in zip(first, here, last, strict=True)] == [True] * 16
    assert [b.start <= a.start + a.num_elements for a, b in zip(last, first[1:], strict=False)] == [True] * 15
    assert last[-1].start + last[-1].num_elements >= run.num_elements - 1
    assert looked_at(run, None) == [run]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_what_differs_shows(dtype: torch.dtype) -> None:
    values = (torch.arange(999) % 100 + 1).to(dtype)
    one, two, swapped = values.clone(), values.clone(), values.clone()
    one[500] += 1
    two[[7, 8]] *= -1
    swapped[[3, 4]] = values[[4, 3]]
    sums = weighted_sums([whole(t) for t in (values, one, two, swapped, -values, values.clone())], CPU).tolist()
    assert len(set(sums)) == 5
    assert sums[0] == sums[-1]


def test_fingerprints_of_two_kinds_show_no_difference() -> None:
    hashed, summed = (with_kind(np.array([6, 7, 8], np.uint64), summed=kind) for kind in (False, True))
    assert may_be_alike(hashed, summed).all()
    assert may_be_alike(hashed, hashed[::-1].copy()).tolist() == [False, True, False]
