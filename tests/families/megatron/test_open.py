"""Flat tensors of up to 0.15: chunks of the stored shape are runs of boxes of the true one."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.errors import CorruptError
from reshard_ckpt.families.megatron.open import unflattened
from reshard_ckpt.formats.dcp.metadata import Chunk, Extent, SavedTensor


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """The shape of a part, how many parts there are along each dim, and where each part is cut once flattened."""
    ndim = draw(st.integers(1, 3))
    part = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    fragments = tuple(draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim)))
    cuts = sorted(draw(st.sets(st.integers(1, prod(part)), max_size=3)) | {0, prod(part)})
    return part, fragments, cuts


@given(cut_tensors())
def test_runs_of_boxes_hold_what_was_flattened(cut: tuple[tuple[int, ...], tuple[int, ...], list[int]]) -> None:
    part, fragments, cuts = cut
    shape = tuple(n * f for n, f in zip(part, fragments, strict=True))
    whole = np.arange(prod(shape)).reshape(shape)
    again = np.full(shape, -1)
    for corner in product(*map(range, fragments)):
        box = tuple(slice(c * n, (c + 1) * n) for c, n in zip(corner, part, strict=True))
        flat = whole[box].reshape(-1)  # as Megatron flattens what a rank holds
        for low, high in pairwise(cuts):
            stored = Chunk((*corner, low), (*(1 for _ in corner), high - low), Extent("file", 0, 0))
            (chunk,) = unflattened(SavedTensor(torch.float32, (*fragments, prod(part)), (stored,)), shape, "x").chunks
            run = chunk.run
            target = tuple(slice(o, o + n) for o, n in zip(run.offsets, run.lengths, strict=True))
            values = again[target].reshape(-1)
            values[run.start : run.start + run.count] = flat[low:high]
            again[target] = values.reshape(run.lengths)
    assert np.array_equal(again, whole)


@pytest.mark.parametrize(
    ("stored", "shape"), [((2, 1, 6), (4, 4)), ((3, 1, 4), (4, 4)), ((2, 8), (4, 4)), ((2, 1, 8), (4, 4, 1)), ((0, 1, 8), (4, 4))]
)
def test_shapes_that_do_not_fit_are_refused(stored: tuple[int, ...], shape: tuple[int, ...]) -> None:
    chunk = Chunk((0,) * len(stored), (*(1 for _ in stored[:-1]), stored[-1]), Extent("file", 0, 0))
    with pytest.raises(CorruptError, match="not a way to cut its true shape"):
        unflattened(SavedTensor(torch.float32, stored, (chunk,)), shape, "x")
