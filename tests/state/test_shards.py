"""Declared shards: their pieces against the data, and what they refuse."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Replication
from reshard_ckpt.errors import CheckpointError, LayoutError, UsageError
from reshard_ckpt.state import Captured, FlatShard, LocalShard, LocalTensor, PerRank, capture
from reshard_ckpt.state.shards import Shards
from tests.helpers import fill, load, position_values, save


def captured(shard) -> Captured:
    return capture({"t": shard})


def whole(*shards) -> torch.Tensor:
    return save([captured(shard) for shard in shards]).tensors["t"]


def emptied(shard_of, local: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """A local tensor like `local`, filled from the whole one through a shard's pieces."""
    memory = torch.full_like(local, -1)
    (entry,) = captured(shard_of(memory)).tensors
    fill(LocalTensor(entry.spec, memory), full)
    return memory


def test_fused_gate_and_up_projection_are_put_together_from_two_tp_ranks():
    full = position_values((8, 3))
    gate, up = full[:4], full[4:]
    shards = []
    for rank in range(2):
        local = torch.cat([gate[2 * rank : 2 * rank + 2], up[2 * rank : 2 * rank + 2]])
        pieces = [((0, 0), (2 * rank, 0), (2, 3)), ((2, 0), (4 + 2 * rank, 0), (2, 3))]
        shards.append(LocalShard(local, (8, 3), pieces=pieces))
        assert torch.equal(emptied(lambda t, p=pieces: LocalShard(t, (8, 3), pieces=p), local, full), local)
    assert torch.equal(whole(*shards), full)
    assert {e.spec.replication for s in shards for e in captured(s).tensors} == {Replication.DECLARED}


def test_a_transposed_local_tensor_is_read_by_its_strides():
    full = position_values((4, 6))
    left, right = full[:, :2].T.contiguous().T, full[:, 2:]
    assert not left.is_contiguous()
    assert torch.equal(whole(LocalShard(left, (4, 6), (0, 0)), LocalShard(right, (4, 6), (0, 2))), full)


def test_what_no_piece_covers_in_the_local_tensor_is_padding():
    full = position_values((3,))
    local = torch.tensor([*full.tolist(), 99.0])
    shard = LocalShard(local, (3,), pieces=[((0,), (0,), (3,))])
    assert torch.equal(whole(shard), full)
    assert emptied(lambda t: LocalShard(t, (3,), pieces=[((0,), (0,), (3,))]), local, full).tolist() == [*full.tolist(), -1]


@st.composite
def flat_cases(draw: st.DrawFn):
    """A tensor, boxes of it that tile it along one dim, and where to cut their concatenation."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    marks = sorted(draw(st.sets(st.integers(1, shape[dim]), max_size=3)) | {0, shape[dim]})
    boxes = []
    for low, high in pairwise(marks):
        offsets, lengths = [0] * len(shape), list(shape)
        offsets[dim], lengths[dim] = low, high - low
        boxes.append((tuple(offsets), tuple(lengths)))
    boxes = draw(st.permutations(boxes))
    cuts = sorted(draw(st.lists(st.integers(0, prod(shape)), max_size=4)))
    return shape, boxes, [0, *cuts, prod(shape)]


@given(flat_cases(), st.integers(1, 3))
def test_flat_ranges_of_boxes_put_the_tensor_together_and_take_it_apart(case, stride):
    shape, boxes, cuts = case
    full = position_values(shape)
    parts = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    flat = torch.cat(parts)
    shards = []
    for start, stop in pairwise(cuts):
        local = torch.full(((stop - start) * stride,), -7.0)[::stride]
        local.copy_(flat[start:stop])
        shards.append(FlatShard(local, shape, start, pieces=boxes))
        assert torch.equal(emptied(lambda t, s=start: FlatShard(t, shape, s, pieces=boxes), local, full), local)
    assert torch.equal(whole(*shards), full)


def test_a_flat_range_crosses_boxes_without_a_whole_tensor():
    # A tensor far larger than memory: only the run of four elements exists.
    (entry,) = captured(FlatShard(torch.zeros(4), (2**20, 2**20), 2**40 - 4)).tensors
    (piece,) = entry.spec.pieces
    assert (piece.start, piece.count, piece.base) == (2**40 - 4, 4, -(2**40 - 4))


@st.composite
def _cut_tensors(draw):
    """A local shape, boxes that tile it, and where each lies in a global tensor of one dim more; and where runs begin."""
    local_shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(local_shape) - 1))
    cuts = sorted({0, local_shape[dim], *draw(st.lists(st.integers(0, local_shape[dim]), max_size=2))})
    boxes = []
    for number, (low, high) in enumerate(pairwise(cuts)):
        at = tuple(low if d == dim else 0 for d in range(len(local_shape)))
        lengths = tuple(high - low if d == dim else n for d, n in enumerate(local_shape))
        boxes.append(((0, *at), (number, *(0,) * len(at)), (1, *lengths)))
    total = prod(local_shape)
    starts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=4))})
    return local_shape, boxes, starts


@given(_cut_tensors(), st.sampled_from([1, 2]))
def test_runs_of_a_flattened_tensor_whose_boxes_lie_apart(case, stride):
    local_shape, boxes, starts = case
    shape = (len(boxes), *(max(lengths[d + 1] for _, _, lengths in boxes) for d in range(len(local_shape))))
    full, local = position_values(shape), torch.zeros(local_shape)
    for at, offsets, lengths in boxes:
        inside = tuple(slice(o, o + n) for o, n in zip(at[1:], lengths[1:], strict=True))
        local[inside] = full[offsets[0]][tuple(slice(0, n) for n in lengths[1:])]

    def shard(memory, start):
        return FlatShard(memory[::stride], shape, start, pieces=boxes, local_shape=(1, *local_shape))

    flat = torch.zeros(local.numel() * stride)
    flat[::stride] = local.flatten()
    for start, stop in pairwise(starts):
        memory = flat[start * stride : stop * stride].clone()
        (entry,) = captured(shard(memory, start)).tensors
        emptied_memory = torch.full_like(memory, -1)
        (wanted,) = captured(shard(emptied_memory, start)).tensors
        fill(LocalTensor(wanted.spec, wanted.memory), full)
        assert torch.equal(emptied_memory[::stride], memory[::stride])
        assert sum(piece.count for piece in entry.spec.pieces) == stop - start


def test_several_local_tensors_are_parts_of_one():
    full = position_values((4, 2, 3))
    first = Shards(LocalShard(full[i][None], (4, 2, 3), (i, 0, 0)) for i in (0, 3))
    second = Shards([LocalShard(full[1:2], (4, 2, 3), (1, 0, 0)), FlatShard(full[2].flatten(), (4, 2, 3), 12)])
    assert torch.equal(whole(first, second), full)
    memories = [torch.zeros(2, 3), torch.zeros(2, 3)]
    wanted = Shards(LocalShard(m[None], (4, 2, 3), (i, 0, 0)) for m, i in zip(memories, (2, 1), strict=True))
    load(save([captured(first), captured(second)]), {"t": wanted})
    assert torch.equal(torch.stack(memories), full[[2, 1]])


def test_parts_of_different_tensors_are_refused():
    with pytest.raises(LayoutError, match=r"\(2, 3\) and \(3, 2\)"):
        Shards([LocalShard(torch.zeros(2, 3), (2, 3), (0, 0)), LocalShard(torch.zeros(3, 2), (3, 2), (0, 0))])
    with pytest.raises(LayoutError, match="no part at all"):
        Shards([])
    with pytest.raises(UsageError, match="got a Tensor"):
        Shards([torch.zeros(2)])


def test_an_empty_shard_still_tells_the_global_shape():
    for shard in (FlatShard(torch.zeros(0), (4, 3), 12), LocalShard(torch.zeros(0, 3), (4, 3), (4, 0))):
        (entry,) = captured(shard).tensors
        assert (entry.spec.shape, entry.spec.pieces) == ((4, 3), ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: LocalShard(t, (4, 2), (3, 0)), r"dim 0 ends at 3 \+ 2 = 5, past the size 4"),
        (lambda t: LocalShard(t, (4,), (0,)), r"2 dims \(2, 2\), but global_shape=\(4,\) has 1; give both"),
        (lambda t: LocalShard(t, (4, 2), (0,)), r"do not have the 2 dims"),
        (lambda t: LocalShard(t, (4, 2), (-1, 0)), r"negative"),
        (lambda t: LocalShard(t, (4, 2)), r"either offsets or pieces"),
        (lambda t: LocalShard(t, (4, 2), (0, 0), pieces=[]), r"either offsets or pieces"),
        (lambda t: LocalShard(t, (4, 2), (0, "x")), r"wanted integers"),
        (lambda t: LocalShard(t, (4, 2), pieces=[((0, 0), (0, 0))]), r"wanted \(local_offsets, offsets, lengths\)"),
        (lambda t: LocalShard(t, (4, 2), pieces=[((1, 0), (0, 0), (2, 2))]), r"in the local tensor: dim 0 ends at 1 \+ 2 = 3"),
        (
            lambda t: LocalShard(t, (4, 2), pieces=[((0, 0), (0, 0), (1, 2)), ((1, 0), (0, 1), (1, 1))]),
            r"in the global tensor, pieces 0 and 1 overlap",
        ),
        (
            lambda t: LocalShard(t, (4, 2), pieces=[((0, 0), (0, 0), (2, 2)), ((1, 0), (2, 0), (1, 2))]),
            r"in the local tensor, pieces 0 and 1 overlap",
        ),
        (lambda t: LocalShard([1], (1,), (0,)), r"wanted a torch.Tensor, got list"),
        (lambda t: FlatShard(t, (4, 2), 5), r"start 5 \+ 4 elements ends at 9, past the 8 elements"),
        (lambda t: FlatShard(t, (4, 2), -1), r"negative"),
        (lambda t: FlatShard(t.T, (4, 2), 0), r"is not flat"),
        (lambda t: FlatShard(t, (4, 2), 0, pieces=[((0, 0), (2, 3))]), r"dim 1 ends at 0 \+ 3 = 3"),
        (lambda t: FlatShard(t, (4, 2), 0, pieces=[((0, 0), (4, 2)), ((3, 0), (1, 1))]), r"pieces 0 and 1 overlap"),
        (
            lambda t: FlatShard(t, (4, 2), 0, pieces=[((0, 0), (0, 2)), ((0, 0), (4, 2)), ((3, 0), (1, 1))]),
            r"pieces 1 and 2 overlap",
        ),
        (lambda t: LocalShard(t[0, 0], (), pieces=[((), (), ()), ((), (), ())]), r"pieces 0 and 1 overlap"),
        (lambda t: FlatShard(t, (4, 2), 0, local_shape=(4, 2)), r"local_shape without pieces; give the pieces"),
        (lambda t: LocalShard(t, (2**70, 2), (0, 0)), r"LocalShard: global_shape \(1180.*, 2\) of torch.float32 is over"),
        (lambda t: LocalShard(t, (2**31, 2**31), (0, 0)), r"is over 4611686018427387904 bytes"),
        (lambda t: FlatShard(t, (0, 2**63), 0), r"FlatShard: global_shape \(0, 9223372036854775808\)"),
        (lambda t: FlatShard(t, (4, 2), 0, pieces=[(0, 0, 4)]), r"wanted \(offsets, lengths\)"),
    ],
)
def test_a_shard_that_cannot_be_is_refused_when_it_is_declared(make, message):
    with pytest.raises(CheckpointError, match=message):
        make(torch.zeros(2, 2))


def test_overlapping_errors_are_layout_errors():
    with pytest.raises(LayoutError):
        LocalShard(torch.zeros(3), (2,), (0,))


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        (sum, 6),
        (max, 3),
        (lambda values: values[0], 1),
        (lambda values, rank, size: (values, rank, size), ([1, 2, 3], 1, 2)),
        (lambda *args: len(args), 3),
    ],
)
def test_combine_takes_the_values_or_the_values_with_rank_and_size(combine, expected):
    saved = save([capture({"x": PerRank(v)}) for v in (1, 2, 3)])
    state = {"x": PerRank(0, combine=combine)}
    load(saved, state, rank=1, size=2)
    assert state["x"].value == expected


@pytest.mark.parametrize("combine", [lambda: 0, lambda a, b: 0, 3])
def test_combine_that_cannot_be_called_is_refused_at_once(combine):
    with pytest.raises(UsageError):
        PerRank(0, combine=combine)
