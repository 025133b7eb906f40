"""A live reshard in one process: memory that changes between the runs of a kept one, and memory that both sides share."""

from __future__ import annotations

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.layouts import values_of

SHAPE = (6, 9)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def strided(number: int) -> dict[str, torch.Tensor]:
    """One tensor, by how it lies in memory."""
    whole = values_of(SHAPE, "F32", number)
    wide = torch.zeros(SHAPE[0], 2 * SHAPE[1])
    wide[:, 3 : 3 + SHAPE[1]] = whole
    apart = torch.zeros(2 * SHAPE[0], SHAPE[1])
    apart[1::2] = whole
    return {
        "in order": whole,
        "transposed": whole.t().contiguous().t(),
        "columns of a wider one": wide[:, 3 : 3 + SHAPE[1]],
        "every second row": apart[1::2],
    }


@pytest.mark.parametrize("staged", [False, True])
def test_a_kept_reshard_follows_memory_that_lies_in_another_order(staged: bool):
    src, dst = {"w": strided(0)["in order"]}, {"w": torch.zeros(SHAPE)}
    push = checkpoint.LiveReshard(src, dst, staged=staged)
    for number, (held, wanted) in enumerate((a, b) for a in strided(0) for b in strided(0)):
        src["w"], dst["w"] = strided(number + 1)[held], strided(0)[wanted]
        push.run()
        assert same(dst["w"], values_of(SHAPE, "F32", number + 1)), (held, wanted)


def test_torch_2_6_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    into = torch.zeros(SHAPE)
    checkpoint.reshard_live({"w": values_of(SHAPE, "F32", 1)}, {"w": into})
    assert same(into, values_of(SHAPE, "F32", 1))


@pytest.mark.parametrize("staged", [False, True])
def test_memory_that_source_and_destination_share_is_left_alone(staged: bool):
    shared, other, into = values_of(SHAPE, "F32", 1), values_of(SHAPE, "F32", 2), torch.zeros(SHAPE)
    before = shared.clone()
    checkpoint.reshard_live({"shared": shared, "other": other}, {"shared": shared, "other": into}, staged=staged)
    assert same(shared, before)
    assert same(into, other)
