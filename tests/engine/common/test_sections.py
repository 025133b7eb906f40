"""A file that several processes write in sections has the bytes and digests of one that a single process writes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard_ckpt.engine.common import sections
from reshard_ckpt.engine.common.sections import SectionWriter, join, share
from reshard_ckpt.format.files import BlockHasher
from reshard_ckpt.storage import LocalStorage


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "BLOCK_BYTES", 16)
    monkeypatch.setattr(sections, "BlockHasher", lambda: BlockHasher(16))


@given(
    size=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    rest=st.integers(0, 40),
    step=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_sections_cut_anywhere_make_the_file(
    tmp_path_factory: pytest.TempPathFactory, size: int, cuts: list[int], rest: int, step: int, order: random.Random
):
    data = np.random.default_rng(size).bytes(size)
    end = max(size - rest, 0)
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < end}), end]
    spans = [(low, high) for low, high in pairwise(ends) if low < high]
    order.shuffle(spans)
    folder: Path = tmp_path_factory.mktemp("sections")
    storage, done = LocalStorage(folder), []
    for low, high in spans:
        writer = SectionWriter(storage, "a/b", low, high, size)
        for at in range(low, high, step):
            writer.write(data[at : min(at + step, high)])
        begin, until = writer.hashed
        assert writer.is_full
        assert len(writer.digests) == -(-(until - begin) // 16)
        done.append(writer.finish())
    hasher = BlockHasher(16)
    hasher.update(data)
    digests, _ = join(storage, "a/b", size, done, data[end:])
    assert (folder / "a/b").read_bytes() == data
    assert digests == hasher.finish()


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 6))
@example([5, 0], 2)
def test_shares_are_all_parts_in_order_and_nearly_even(sizes: list[int], num: int):
    parts = [share(sizes, rank, num) for rank in range(num)]
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    for part in parts:
        assert abs(sum(sizes[i] for i in part) - sum(sizes) / num) <= max(sizes, default=0) + 1
