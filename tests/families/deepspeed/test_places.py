"""The runs of flat tensors, held against the concatenation and the stripes that they describe."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.errors import CorruptError, UnsupportedError
from reshard_ckpt.families.deepspeed.model_parallel import FlatBox, Parallel, Shard, TensorParallel
from reshard_ckpt.families.deepspeed.pipeline import _is_cast
from reshard_ckpt.families.deepspeed.places import Params, Runs, open_state, packed_length, packed_runs, striped_runs
from reshard_ckpt.plugins import CatalogBuilder, Part, open_storage

GROUPS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=6)


def params_of(group: list[tuple[int, int, int]]) -> Params:
    return Params.of({f"p{i}": (rows, columns) for i, (rows, columns, _) in enumerate(group)}, [gap for *_, gap in group])


def held(params: Params, runs: Runs, length: int) -> np.ndarray:
    """A flat tensor that has, for each element of a parameter, ``1000 · parameter + element``; -1 elsewhere."""
    out = np.full(length, -1)
    for param, start, count, at in zip(runs.param, runs.start, runs.count, runs.at, strict=True):
        assert (out[at : at + count] == -1).all()
        out[at : at + count] = 1000 * param + np.arange(start, start + count)
    return out


@given(GROUPS, st.integers(1, 5))
def test_packed_runs_are_the_concatenation_cut_evenly(group: list[tuple[int, int, int]], num_ranks: int) -> None:
    params = params_of(group)
    flat = np.concatenate([np.append(1000 * i + np.arange(r * c), [-1] * gap) for i, (r, c, gap) in enumerate(group)])
    length = packed_length(params, num_ranks)
    padded = np.append(flat, [-1] * (length * num_ranks - len(flat)))
    assert length % 2 == 0
    assert length * num_ranks - len(flat) < 2 * num_ranks
    for rank in range(num_ranks):
        expected = padded[rank * length : (rank + 1) * length]
        assert (held(params, packed_runs(params, num_ranks, rank), length) == expected).all()


@given(GROUPS, st.integers(1, 5))
def test_striped_runs_put_together_are_each_parameter(group: list[tuple[int, int, int]], num_ranks: int) -> None:
    params = params_of(group)
    stripes = [-(-rows * columns // num_ranks) for rows, columns, _ in group]
    ranks = [held(params, striped_runs(params, num_ranks, rank), sum(stripes)) for rank in range(num_ranks)]
    at = 0
    for i, (stripe, (rows, columns, _)) in enumerate(zip(stripes, group, strict=True)):
        whole = np.concatenate([of_rank[at : at + stripe] for of_rank in ranks])
        assert (whole[: rows * columns] == 1000 * i + np.arange(rows * columns)).all()
        assert (whole[rows * columns :] == -1).all()
        at += stripe


def _zero(master: int, **more: object) -> dict[str, object]:
    base = {"state": {0: {"exp_avg": np.zeros(master)}}, "param_groups": [{"lr": 1, "params": [0]}]}
    return {"partition_count": [2], "single_partition_of_fp32_groups": [np.zeros(master)], "base_optimizer_state": base, **more}


def test_flat_tensors_of_another_size_are_refused() -> None:
    shapes = [Params.of({"a": (5,), "b": (2, 3)})]
    assert open_state(shapes, _zero(6), 0, "x").groups[0].runs.end == 6
    with pytest.raises(CorruptError, match=r"master weights have shape \(8,\), but 6 to 6 elements"):
        open_state(shapes, _zero(8), 0, "x")
    with pytest.raises(CorruptError, match="partition_count is 2, but it is the file of rank 2"):
        open_state(shapes, _zero(6), 2, "x")
    state = _zero(6)
    state["base_optimizer_state"]["state"][0]["worker_error"] = np.zeros(99)  # type: ignore[index]
    with pytest.raises(UnsupportedError, match=r"its state worker_error has shape \(99,\)"):
        open_state(shapes, state, 0, "x")


def _map(**of_param: object) -> TensorParallel:
    return TensorParallel({"affine_map": {"version": 1, "params": {r"^l\.w$": of_param}}})


def test_columns_of_a_shard_are_a_segment_for_each_row() -> None:
    piece = {"shape": [2, 2], "source": [2, [4, 1]], "dest": [0, [3, 1]], "locations": [1]}
    found = _map(logical_shape=[2, 4], ranks={1: {"shard_shape": [2, 3], "pieces": [piece]}}).shard("l.w", 1, [(2, 2), (2, 3)])
    assert found == Shard((2, 4), (FlatBox(0, (0, 2), (1, 2)), FlatBox(3, (1, 2), (1, 2))))


def test_scaled_and_undescribed_shards_are_refused() -> None:
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5}
    parallel = _map(logical_shape=[4], ranks={0: {"shard_shape": [4], "pieces": [piece]}})
    with pytest.raises(UnsupportedError, match=r"hold it times 0.5"):
        parallel.shard("l.w", 0, [(4,), (4,)])
    live = Parallel.__new__(Parallel)
    live._map, live._known, live._rank, live._shapes = parallel, {}, 0, [{"l.w": (4,)}] * 2
    with pytest.raises(UnsupportedError, match=r"hold it times 0.5; detach\(engine\)"):  # it is saved with this library already
        live.shard("l.w", (4,))
    with pytest.raises(UnsupportedError, match="Megatron-DeepSpeed"):
        TensorParallel({"tp_replicated_parameter_patterns": [r".*norm.*"]})
    with pytest.raises(UnsupportedError, match="version 2"):
        TensorParallel({"affine_map": {"version": 2}})


@pytest.mark.parametrize(
    ("parts", "first", "is_cast"),
    [
        ([((0, 0), (4, 5), 0, 13), ((0, 0), (4, 5), 13, 7)], 0, True),  # two runs of the whole tensor, one after the other
        ([((0, 0), (4, 5), 0, 13), ((0, 0), (4, 5), 13, 7)], 1, False),
        ([((0, 0), (4, 5), 0, 13)], 0, False),
        ([((0, 0), (2, 5), 0, 10), ((2, 0), (2, 5), 0, 10)], 0, False),  # boxes
    ],
)
def test_a_tied_layer_is_compared_with_runs_of_master_weights(parts: list[Any], first: int, is_cast: bool) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    builder, masters = CatalogBuilder("deepspeed", storage.url), torch.arange(20.0)
    storage.publish("f", masters.numpy().tobytes())
    number, begin, listed = builder.file("f", 80), 0, []
    for offsets, lengths, start, count in parts:
        listed.append(Part(offsets, lengths, number, begin * 4, start, count))
        begin += count
    builder.tensor("w", torch.float32, (4, 5), listed)
    saved = (masters + first).bfloat16()
    layer = SimpleNamespace(
        view=SimpleNamespace(shape=(4, 5), is_row_major=True, dtype=torch.bfloat16),
        file=SimpleNamespace(elements=lambda view, at, count: saved[at : at + count]),
    )
    assert _is_cast(builder, storage, cast(Any, layer), "w") == is_cast
