"""The elements of a piece, copied from memory that begins within a storage."""

from __future__ import annotations

import pytest
import torch

from reshard_ckpt.core.catalog.specs import box_piece
from reshard_ckpt.engine.common.tensor_bytes import LocalPiece, chunks, copy_run, empty_bytes


@pytest.mark.parametrize("strides", [(5, 1), (1, 4), (8, 1)], ids=["in order", "transposed", "apart"])
@pytest.mark.parametrize(("start", "count"), [(0, 20), (3, 11), (6, 9)])
def test_any_run_of_a_piece_is_copied_in_the_order_of_its_box(strides: tuple[int, int], start: int, count: int) -> None:
    tensor = torch.arange(50, dtype=torch.int32)[7:]
    local = LocalPiece(tensor, box_piece((0, 0), (4, 5), 3, strides))
    expected = tensor.as_strided((4, 5), strides, 7 + 3).flatten()[start : start + count]
    out = empty_bytes(4 * count)
    copy_run(local, start, count, out)
    assert torch.equal(out.view(torch.int32), expected)
    assert b"".join(map(bytes, chunks(local, start, count, empty_bytes(16)))) == expected.numpy().tobytes()
