"""A state that a family describes itself: what lies outside of a smaller saved shape becomes zero, and claims are no values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.checkpoint.saving import save_captured
from reshard_ckpt.errors import LayoutError
from reshard_ckpt.state.state_builder import StateBuilder, zero_outside
from tests.reliability.ranks import jobs

SHAPE = (5, 4)


def kept(saved: tuple[int, int]) -> torch.Tensor:
    """The whole tensor, with zeros outside of a shape."""
    whole = torch.arange(1.0, 21.0).reshape(SHAPE)
    inside = torch.zeros(SHAPE)
    inside[: saved[0], : saved[1]] = whole[: saved[0], : saved[1]]
    return inside


@given(st.tuples(st.integers(0, 6), st.integers(0, 5)), st.integers(0, 4), st.integers(0, 3))
def test_elements_outside_of_a_smaller_shape_become_zero_in_a_box(saved: tuple[int, int], low: int, left: int) -> None:
    box = torch.arange(1.0, 21.0).reshape(SHAPE)[low:, left:].clone()
    zero_outside(LocalShard(box, SHAPE, (low, left)), saved, "w")
    assert torch.equal(box, kept(saved)[low:, left:])


@given(st.tuples(st.integers(0, 6), st.integers(0, 5)), st.integers(0, 19), st.integers(1, 20))
def test_elements_outside_of_a_smaller_shape_become_zero_in_a_run(saved: tuple[int, int], start: int, count: int) -> None:
    run = torch.arange(1.0, 21.0)[start : start + count].clone()
    zero_outside(FlatShard(run, SHAPE, start), saved, "w")
    assert torch.equal(run, kept(saved).reshape(-1)[start : start + count])


def test_claims_are_checked_and_not_saved(tmp_path) -> None:
    def capture(differing: frozenset[str] = frozenset()):
        builder = StateBuilder()
        builder.tensor("model.w", LocalShard(torch.ones(2), (2,), (0,)))
        builder.value(("extra", "step"), 7)
        builder.claim("rng/of_rank_1")
        return builder.captured()

    seen = []
    save_captured(tmp_path / "step", capture, check_names=lambda names, claims: seen.append((names, claims)))
    assert seen == [(["extra.step"], ["rng/of_rank_1"])]
    assert sorted(checkpoint.read(tmp_path / "step")) == ["extra.step", "model.w"]

    def refuse(names: list[str], claims: list[str]) -> None:
        raise LayoutError(f"{claims[0]} has no main replica")

    with pytest.raises(LayoutError, match="rng/of_rank_1 has no main replica"):
        save_captured(tmp_path / "other", capture, check_names=refuse)


def test_claims_are_not_saved_if_replicas_differ_either(tmp_path) -> None:
    def save(rank: int) -> None:
        def capture(differing: frozenset[str] = frozenset()):
            builder = StateBuilder()
            tensor = torch.full((2,), float(rank))
            builder.tensor("model.w", LocalShard(tensor, (2,), (0,)), offered=not differing or rank == 0)
            builder.claim("rng/of_rank_1")
            return builder.captured()

        save_captured(tmp_path, capture)

    with jobs() as make:
        assert make(2).run(save) == [None, None]
    assert {name: value.tolist() for name, value in checkpoint.read(tmp_path).items()} == {"model.w": [0.0, 0.0]}
