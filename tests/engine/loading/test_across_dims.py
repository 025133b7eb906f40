"""What is saved cut along one dim, and wanted cut along another, in memory of any strides: beside slices of the whole tensor.

Files are real ones, and the system gives as little of them at a time as it pleases.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Ints, Piece, TensorSpec, row_major_strides
from reshard_ckpt.core.planning.load_plan import LoadPlan
from reshard_ckpt.core.planning.read_plan import item_spans
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.engine.loading import read
from reshard_ckpt.engine.loading.load import LoadOptions
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.storage.local import LocalStorage
from tests.jobs import load_job, save_job
from tests.tries import examples

WINDOW_BYTES = 2 * BLOCK_BYTES
"""Small, so that rows are cut by many windows, and parts of rows are read."""

CASTS = [("F32", "F32"), ("BF16", "BF16"), ("U8", "U8"), ("I64", "I64"), ("F32", "BF16"), ("BF16", "F32"), ("F32", "F64")]


class Box(NamedTuple):
    """A part of the global tensor."""

    offsets: Ints
    lengths: Ints

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))]

    def piece(self, base: int) -> Piece:
        """Return the whole box as a piece that lies in row-major order from element `base` on."""
        return Piece(self.offsets, self.lengths, 0, prod(self.lengths), base, row_major_strides(self.lengths))


class Case(NamedTuple):
    """A tensor, the boxes that ranks saved, the box that one wants, in memory of this order of dims, with a gap behind rows."""

    shape: Ints
    saved: list[Box]
    wanted: Box
    order: tuple[int, ...]
    gap: int
    dtypes: tuple[str, str]

    @property
    def whole(self) -> torch.Tensor:
        """Values that differ from those of their neighbours along every dim, and are exact in all dtypes."""
        return (torch.arange(prod(self.shape)) * 7 % 251).reshape(self.shape).to(TORCH_DTYPES[self.dtypes[0]])

    @property
    def strides(self) -> Ints:
        lengths = [self.wanted.lengths[dim] for dim in self.order]
        steps = row_major_strides((*lengths[:-1], lengths[-1] + self.gap))
        return tuple(steps[self.order.index(dim)] for dim in range(len(lengths)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, most)) for most in {1: [300_000], 2: [600, 700], 3: [9, 120, 300]}[ndim])
    saved = draw(st.sampled_from(_cuts(draw, shape)))
    wanted = draw(st.sampled_from(draw(st.sampled_from(_cuts(draw, shape)))))
    order = tuple(draw(st.permutations(range(ndim))))
    return Case(shape, saved, wanted, order, draw(st.sampled_from([0, 0, 1, 8])), draw(st.sampled_from(CASTS)))


def _cuts(draw: st.DrawFn, shape: Ints) -> list[list[Box]]:
    """The tensor cut along each of its dims."""
    all_cuts = []
    for dim, size in enumerate(shape):
        marks = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        boxes = []
        for low, high in pairwise(marks):
            offsets, lengths = [0] * len(shape), list(shape)
            offsets[dim], lengths[dim] = low, high - low
            boxes.append(Box(tuple(offsets), tuple(lengths)))
        all_cuts.append(boxes)
    return all_cuts


@contextmanager
def saved(case: Case) -> Iterator[LocalStorage]:
    ranks = []
    for box in case.saved:
        ranks.append([(TensorSpec("t", case.dtypes[0], case.shape, (box.piece(0),)), box.of(case.whole).contiguous())])
    with tempfile.TemporaryDirectory() as folder, LocalStorage(folder) as storage:
        save_job(storage, ranks)
        yield storage


def load_into(storage: LocalStorage, case: Case, *, verify: bool) -> tuple[torch.Tensor, LoadPlan]:
    """Load what is wanted; returns all the memory, of which what is not wanted was -1, or 255."""
    num = 1 + sum((n - 1) * s for n, s in zip(case.wanted.lengths, case.strides, strict=True))
    dtype = TORCH_DTYPES[case.dtypes[1]]
    memory = torch.full((num + 3,), 255 if dtype == torch.uint8 else -1, dtype=dtype)
    piece = Piece(*case.wanted, 0, prod(case.wanted.lengths), 2, case.strides)
    options = LoadOptions(verify=verify, cast=True)
    wanted = TensorSpec("t", case.dtypes[1], case.shape, (piece,))
    resolved, _ = load_job(storage, [(wanted, memory)], options, window_bytes=WINDOW_BYTES)
    return memory, resolved.plan


def expected(case: Case, like: torch.Tensor) -> torch.Tensor:
    memory = torch.full_like(like, 255 if like.dtype == torch.uint8 else -1)
    torch.as_strided(memory, case.wanted.lengths, case.strides, 2)[...] = case.wanted.of(case.whole).to(like.dtype)
    return memory


def short_preadv(most: int) -> object:
    """A `preadv` that reads at most so many bytes, as the system may."""
    whole = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], at: int) -> int:
        left, given = most, []
        for view in views:
            given.append(view[:left])
            left -= len(given[-1])
            if not left:
                break
        return whole(fd, given, at)

    return preadv


@pytest.mark.slow
@given(cases(), st.booleans(), st.sampled_from([0, 1000, 100_000]))
@examples(60, deadline=None)
def test_each_element_comes_to_its_place_and_nothing_else_changes(case: Case, verify: bool, most: int) -> None:
    with saved(case) as storage, patch("os.preadv", short_preadv(most) if most else os.preadv):
        memory, _ = load_into(storage, case, verify=verify)
    assert torch.equal(memory, expected(case, memory))


@given(st.integers(0, 9), st.sampled_from([1, 3, 16]), st.sampled_from(CASTS), st.sampled_from([0, 32, 1 << 40]))
@examples(20, deadline=None)
def test_rows_that_lie_in_several_files_in_turn_come_to_their_places(
    seed: int, width: int, dtypes: tuple[str, str], few: int
) -> None:
    """Thousands of short runs, which are copied at once, one by one, or as the reader finds better."""
    rows = 5000
    case = Case((rows, width), [], Box((0, 0), (rows, width)), (0, 1), 0, dtypes)
    owner = torch.randint(3, (rows,), generator=torch.Generator().manual_seed(seed))
    owner[1000:2000] = 0
    ranks = []
    for rank in range(3):
        mine = (owner == rank).nonzero().flatten().tolist()
        begins = [k for k, n in enumerate(mine) if k == 0 or mine[k - 1] != n - 1]
        pieces = [Box((mine[k], 0), (end - k, width)).piece(k * width) for k, end in pairwise([*begins, len(mine)])]
        ranks.append([(TensorSpec("t", dtypes[0], case.shape, tuple(pieces)), case.whole[owner == rank].contiguous())])
    with tempfile.TemporaryDirectory() as folder, LocalStorage(folder) as storage, patch.object(read, "FEW_COPIES", few - 1):
        save_job(storage, ranks)
        memory, plan = load_into(storage, case, verify=True)
    assert len(plan.src) > 1000
    assert torch.equal(memory, expected(case, memory))


@given(cases(), st.data())
@examples(40, deadline=None)
def test_a_wrong_byte_in_what_is_wanted_is_found_wherever_it_is(case: Case, data: st.DataObject) -> None:
    with saved(case) as storage:
        _, plan = load_into(storage, case, verify=True)
        item = data.draw(st.sampled_from([0, len(plan.src) // 2, len(plan.src) - 1]))
        span = int(item_spans(plan)[item])
        at = int(plan.src[item]) + data.draw(st.sampled_from([0, span // 2, span - 1]))
        path = _file_of(storage, plan, item)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << data.draw(st.integers(0, 7)))]))
        with pytest.raises(CorruptError, match="is damaged in bytes"):
            load_into(storage, case, verify=True)


@given(cases(), st.booleans(), st.data())
@examples(40, deadline=None)
def test_a_file_that_ends_while_it_is_read_is_named(case: Case, verify: bool, data: st.DataObject) -> None:
    with saved(case) as storage:
        _, plan = load_into(storage, case, verify=verify)
        item = data.draw(st.integers(0, len(plan.src) - 1))
        path = _file_of(storage, plan, item)
        end = int(plan.src[item]) + data.draw(st.integers(0, int(item_spans(plan)[item]) - 1))
        read_into = storage.read_into

        def cut_then_read(key: str, offset: int, buffers: Sequence[memoryview]) -> None:
            os.truncate(path, end)  # after sizes were checked
            read_into(key, offset, buffers)

        with patch.object(storage, "read_into", cut_then_read), pytest.raises(CorruptError, match="the file ends after"):
            load_into(storage, case, verify=verify)


def _file_of(storage: LocalStorage, plan: LoadPlan, item: int) -> Path:
    return Path(storage.url) / open_catalog(storage).files[int(plan.file[item])].key


def test_rows_that_are_wanted_as_columns_are_read_in_many_windows() -> None:
    """Rows wanted as columns: three windows of each file at least."""
    rows = [Box((at, 0), (300, 700)) for at in (0, 300)]
    case = Case((600, 700), rows, Box((0, 100), (600, 300)), (1, 0), 0, ("F32", "F32"))
    with saved(case) as storage:
        memory, plan = load_into(storage, case, verify=True)
    assert torch.equal(memory, expected(case, memory))
    windows = set(zip(plan.file.tolist(), plan.window.tolist(), strict=True))
    assert min(Counter(file for file, _ in windows).values()) >= 3
