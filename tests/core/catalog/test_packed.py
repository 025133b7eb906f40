"""Rows in 8 and 4 bits, against an oracle that packs one element at a time."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.packed import BITS, PACKABLE, PackedRows, pack, packed_size, unpack

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
finite = st.floats(-6e4, 6e4, width=16)


def packed_one_by_one(row: list[float], bits: int) -> tuple[bytes, list[float]]:
    """Pack one row, element by element; return its bytes, and the float32 values that they stand for."""
    f32 = np.float32
    low, most = f32(min(row) + 0.0), 2**bits - 1  # never -0.0
    scale = f32(f32(max(row) + 0.0) - low) / f32(most)
    codes = [0 if scale == 0 else min(max(round(float(f32(f32(x) - low) / scale)), 0), most) for x in row]
    if bits == 4:
        padded = [*codes, 0] if len(codes) % 2 else codes
        data = bytes(a | b << 4 for a, b in zip(padded[::2], padded[1::2], strict=True))
    else:
        data = bytes(codes)
    return struct.pack("<ff", low, scale) + data, [float(f32(f32(code) * scale) + low) for code in codes]


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, int, list[list[float]]]:
    dtype, bits = draw(st.sampled_from(PACKABLE)), draw(st.sampled_from(BITS))
    width = draw(st.integers(9, 20))
    return dtype, bits, draw(st.lists(st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=5))


@given(tables())
@example(("F32", 8, [[-0.0 if i == at else 0.0 for i in range(17)] for at in range(17)]))
@example(("F32", 8, [[0.0 if i == at else -0.0 for i in range(17)] for at in range(17)]))
def test_rows_are_packed_as_one_element_at_a_time(table: tuple[str, int, list[list[float]]]):
    dtype, bits, values = table
    plain = torch.tensor(values).to(TORCH[dtype])
    rows = PackedRows(0, len(values), len(values[0]), dtype, bits)
    packed, decoded = pack(rows, plain.view(torch.uint8).numpy().tobytes())
    expected = [packed_one_by_one(row, bits) for row in plain.float().tolist()]
    assert packed == b"".join(data for data, _ in expected)
    assert packed_size(rows.end, [rows]) == len(packed)
    wanted = torch.tensor([row for _, row in expected], dtype=torch.float32).to(TORCH[dtype])
    assert decoded == unpack(rows, packed) == wanted.view(torch.uint8).numpy().tobytes()
    spread = plain.float().amax(1) - plain.float().amin(1)
    off = (torch.frombuffer(bytearray(decoded), dtype=TORCH[dtype]).view(plain.shape).float() - plain.float()).abs()
    rounding = plain.float().abs().amax(1) * torch.finfo(TORCH[dtype]).eps
    assert (off <= (spread / (2**bits - 1) * 0.501 + rounding)[:, None]).all()


@pytest.mark.parametrize(
    "rows", [(0, 1, 4, "F32", 3), (0, 1, 4, "I32", 8), (-1, 1, 9, "F32", 8), (0, 0, 9, "F32", 8), (0, 1, 2, "F32", 8)]
)
def test_tables_that_no_writer_makes_are_told(rows: tuple[int, int, int, str, int]):
    assert not PackedRows(*rows).is_sound()
