"""Receipts: those of all ranks, decoded as columns, say the same as each of them by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.packed import PackedRows
from reshard_ckpt.core.geometry.columns import columns_of
from reshard_ckpt.engine.saving.messages import Receipt, StoredRuns, WrittenFile, decode_receipts, encode_receipt
from tests.tries import examples

NUMBERS = st.sampled_from([0, 1, 255, 256, 1 << 16, (1 << 32) - 1, 1 << 32, (1 << 63) - 1])


def column(draw: Any, count: int, numbers: st.SearchStrategy[int] = NUMBERS) -> np.ndarray:
    return np.array(draw(st.lists(numbers, min_size=count, max_size=count)), np.int64)


@st.composite
def receipts(draw: Any) -> list[Receipt]:
    """The receipts of a few ranks; those of an incremental save have parts."""
    is_incremental, made = draw(st.booleans()), []
    for rank in range(draw(st.integers(1, 5))):
        num_files, num_items = draw(st.integers(0, 3)), 0 if is_incremental else draw(st.integers(0, 4))
        files = tuple(
            WrittenFile(
                f"s/rank{rank:05d}-{part}.safetensors",
                draw(NUMBERS),
                bytes([rank, part] * 8),
                draw(st.sampled_from([b"", b"h" * 32])),
                draw(st.sampled_from([b"", b"d" * 32])),
                draw(st.sampled_from([(), (PackedRows(0, 2, 8, "F32", 4),)])),
            )
            for part in range(num_files)
        )
        count = draw(st.integers(0, 4))
        parts = StoredRuns(*(column(draw, count) for _ in range(3)), column(draw, count, st.integers(0, 9)), column(draw, count))
        fingerprints = np.array(draw(st.lists(st.sampled_from([0, 7, 2**64 - 1]), max_size=3)), np.uint64)
        file = column(draw, num_items, st.integers(0, max(num_files - 1, 0)))
        record = draw(st.binary(max_size=5))
        made.append(Receipt(files, file, column(draw, num_items), fingerprints, record, parts if is_incremental else None))
    return made


@given(made=receipts())
@examples(200)
def test_the_receipts_of_all_ranks_are_those_of_each_rank(made: list[Receipt]):
    found = decode_receipts([encode_receipt(receipt) for receipt in made])
    num_files = [len(receipt.files) for receipt in made]
    first = [sum(num_files[:rank]) for rank in range(len(made))]
    assert found.files == tuple(file for receipt in made for file in receipt.files)
    assert found.rank.tolist() == [rank for rank, receipt in enumerate(made) for _ in receipt.files]
    assert found.file.tolist() == [first[rank] + file for rank, receipt in enumerate(made) for file in receipt.file.tolist()]
    assert found.offset.tolist() == [offset for receipt in made for offset in receipt.offset.tolist()]
    assert found.fingerprints.tolist() == [number for receipt in made for number in receipt.fingerprints.tolist()]
    assert list(found.records) == [receipt.record for receipt in made]
    if made[0].parts is None:
        assert found.parts is None
        return
    assert found.parts is not None
    rows = []
    for rank, receipt in enumerate(made):
        assert receipt.parts is not None
        for item, start, count, file, offset in receipt.parts.rows():
            shift = sum(num_files) - num_files[rank] if file >= num_files[rank] else first[rank]
            rows.append((rank, item, start, count, file + shift, offset))
    assert list(zip(found.part_rank.tolist(), *(c.tolist() for c in columns_of(found.parts)), strict=True)) == rows


def test_a_receipt_has_few_bytes():
    """Of a rank of thousands, with 75 items in one file: numbers in as few bytes as they need."""
    file = WrittenFile("20260101T000000Z-00000000/rank00003-0.safetensors", 1 << 31, bytes(16))
    items = np.arange(75) * 1_000_000
    data = encode_receipt(Receipt((file,), np.zeros(75, np.int64), items, np.zeros(0, np.uint64), bytes(82)))
    assert len(data) < 75 * (1 + 4) + 82 + 140
