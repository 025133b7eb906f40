"""What rank 0 makes of all offers, against dicts of who holds what; and what it asks of whom."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from math import prod
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, Piece, Replication, TensorSpec, ValueKind, ValueSpec, box_piece
from reshard_ckpt.core.planning.save_plan import SavePlan, plan_save
from reshard_ckpt.engine.saving.agreement import Leader, PlanCache
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.messages import decode_assignment, decode_metadata, encode_assignments, encode_metadata
from reshard_ckpt.errors import UsageError
from reshard_ckpt.format.files import digest128
from reshard_ckpt.format.values import encode_value
from tests.layouts import layouts, shapes
from tests.tries import examples

Run = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


def key(name: str, shape: tuple[int, ...], piece: Piece) -> Run:
    hollow = prod(shape) == 0
    offsets, lengths = ((0,) * len(shape), shape) if hollow else (piece.offsets, piece.lengths)
    return name, offsets, lengths, 0 if hollow else piece.start, piece.count


@st.composite
def jobs(draw: st.DrawFn) -> list[list[TensorSpec]]:
    """What each rank holds of a few tensors; ranks that hold nothing of one may leave out its name, so their lists differ."""
    ranks = draw(st.integers(1, 6))
    held: list[list[TensorSpec]] = [[] for _ in range(ranks)]
    for i in range(draw(st.integers(1, 4))):
        shape = draw(shapes())
        layout = draw(layouts(shape, ranks))
        leave_out = draw(st.booleans())
        for rank in range(ranks):
            if layout.pieces[rank] or not (leave_out and prod(shape)):
                held[rank].append(TensorSpec(f"t{i}", "F32", shape, layout.pieces[rank], layout.replication))
    return held


def plan_of(held: list[list[TensorSpec]], *, splits: bool = True, mesh: Mesh | None = None) -> SavePlan:
    sent = [
        encode_metadata(describe_local([(spec, torch.empty(0)) for spec in specs], (), mesh, rank).local_metadata)
        for rank, specs in enumerate(held)
    ]
    tensors, rows, _ = zip(*sent, strict=True)
    return plan_save(decode_metadata(tensors, rows), splits=splits)


PLAIN, DECLARED, BUFFER = Replication


@pytest.mark.parametrize(
    ("kinds", "splits", "writers"),
    [
        ((DECLARED, DECLARED), True, [0, 1]),
        ((DECLARED, DECLARED), False, [1]),
        ((DECLARED, PLAIN), True, [1]),
        ((PLAIN, PLAIN), True, [1]),
        ((BUFFER, BUFFER), True, [0]),
    ],
)
def test_only_declared_replicas_are_split_and_the_lowest_rank_writes_a_buffer(
    kinds: tuple[Replication, Replication], splits: bool, writers: list[int]
) -> None:
    def held(name: str, size: int, kind: Replication) -> TensorSpec:
        return TensorSpec(name, "F32", (size,), (box_piece((0,), (size,), 0, (1,)),), kind)

    own = held("own", 1000, PLAIN)  # so that rank 1 has less to write
    plan = plan_of([[own, held("w", 1 << 19, kinds[0])], [held("w", 1 << 19, kinds[1])]], splits=splits)
    assert sorted({*plan.rank[plan.tensor == plan.tables.names.index("w")].tolist()}) == writers


@pytest.mark.parametrize("size", [2, 3])
def test_an_alias_lies_as_its_tensor_does_and_a_mesh_of_another_size_gives_no_placements(size: int) -> None:
    halves = [TensorSpec("w", "F32", (4,), (box_piece((at,), (2,), 0, (1,)),), PLAIN) for at in (0, 2)]
    plan = plan_of([[half, TensorSpec("tied", "F32", (4,), (), alias_of="w")] for half in halves], mesh=Mesh(("tp",), (size,)))
    assert plan.placements == (((AxisPlacement("tp", "shard", 0, turn=0),),) if size == 2 else ())
    assert plan.catalog.tensors.placement.tolist() == [0 if size == 2 else -1] * 2


@given(jobs())
@examples(200)
def test_the_plan_has_each_run_once_by_ranks_that_hold_it(held: list[list[TensorSpec]]) -> None:
    holders: dict[Run, list[tuple[int, int]]] = defaultdict(list)
    rows_of: list[list[Run]] = []
    for rank, specs in enumerate(held):
        pieces = [
            (spec, piece)
            for spec in specs
            for piece in spec.pieces or ([box_piece((0,) * len(spec.shape), spec.shape, 0, ())] if not prod(spec.shape) else [])
        ]
        rows_of.append([key(spec.name, spec.shape, piece) for spec, piece in pieces])
        for local, ((spec, piece), run) in enumerate(zip(pieces, rows_of[rank], strict=True)):
            if piece.count or not prod(spec.shape):
                holders[run].append((rank, local))
    plan = plan_of(held)
    assert list(plan.tables.names) == sorted({spec.name for specs in held for spec in specs})
    written: dict[Run, list[tuple[int, int]]] = defaultdict(list)
    fingerprinted = []
    for rank, data in enumerate(encode_assignments(plan)):
        assignment = decode_assignment(data, "id")
        for local, start, count in assignment.items.rows():
            written[rows_of[rank][local]].append((start, count))
            assert rank in {r for r, _ in holders[rows_of[rank][local]]}
        for local, start, count in assignment.checks.rows():
            fingerprinted.append((rank, local))
            assert rows_of[rank][local][3:] == (start, count)
    assert written.keys() == holders.keys()
    for (_, _, _, start, count), parts in written.items():
        at = start
        for begin, num in sorted(parts):
            assert begin == at
            at += num
        assert at == start + count
    shared = [who for run, who in holders.items() if len(who) > 1 and run[4]]
    assert sorted(fingerprinted) == sorted(row for who in shared for row in who)
    groups = defaultdict(list)
    for group, rank, local in zip(plan.checks.group, plan.checks.rank, plan.checks.local, strict=True):
        groups[int(group)].append((int(rank), int(local)))
    assert sorted(groups.values()) == sorted(sorted(who) for who in shared)


def test_offers_of_wide_and_of_narrow_numbers_and_shapes_mix() -> None:
    far = 1 << 40
    specs = [
        [TensorSpec("far", "F32", (2 * far,), (box_piece((0,), (far,), 0, (1,)),), Replication.DECLARED)],
        [
            TensorSpec("far", "F32", (2 * far,), (box_piece((far,), (far,), 0, (1,)),), Replication.DECLARED),
            TensorSpec("cube", "F32", (2, 2, 2), (box_piece((0, 0, 0), (2, 2, 2), 0, (4, 2, 1)),), Replication.DECLARED),
        ],
        [TensorSpec("cube", "F32", (2, 2, 2), (box_piece((0, 0, 0), (2, 2, 2), 0, (4, 2, 1)),), Replication.DECLARED)],
    ]
    plan = plan_of(specs)
    assert plan.tables.names == ("cube", "far")
    item, offsets = plan.catalog.item, plan.catalog.boxes.offsets[plan.catalog.box]
    columns = (plan.tensor[item], plan.rank[item], offsets, plan.catalog.count)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [(0, 2, [0, 0, 0], 8), (1, 0, [0, 0, 0], far), (1, 1, [0, 0, far], far)]


class Rank:
    """One rank's side of the agreement, by hand."""

    def __init__(self, rank: int, tensors: list[TensorSpec], step: int, note: str, metadata: Any = None) -> None:
        values = [
            ValueSpec("step", b"", ValueKind.PLAIN, encode_value(step, "step")),
            ValueSpec("rng", b"", ValueKind.PER_RANK, encode_value(note, "rng")),
        ]
        local_metadata = encode_metadata(
            describe_local([(spec, torch.empty(0)) for spec in tensors], values, None, rank).local_metadata
        )
        self.parts = (*local_metadata, encode_value(metadata, "metadata"))

    def state(self, plan_id: bytes = bytes(16)) -> bytes:
        return b"".join((*map(digest128, self.parts), plan_id))


def row_shard(rank: int, num_ranks: int) -> TensorSpec:
    return TensorSpec("w", "F32", (num_ranks, 4), (box_piece((rank, 0), (1, 4), 0, (4, 1)),), Replication.DECLARED)


def test_equal_parts_are_asked_of_one_rank_and_only_the_rank_s_own_rng_sets_rows_apart() -> None:
    ranks = [Rank(r, [row_shard(r, 5)], 7, "x" * 10) for r in range(5)]
    leader = Leader([r.state() for r in ranks], PlanCache())
    # All have the same tensors and values, though each has a state of random numbers of its own; rank 0 has them itself.
    assert leader.answer.asked.tolist() == [[False] * 5, [False, True, True, True, True], [False] * 5, [False] * 5]
    asked = leader.answer.asked.T
    sent = [msgpack.packb([p if a else None for p, a in zip(r.parts, asked[i], strict=True)]) for i, r in enumerate(ranks)]
    leader.take_parts(ranks[0].parts, sent)
    assert len(leader.assignments()) == 5
    assert [v.name for v in leader.values] == ["step", "rng"]
    assert [leader.plan.tables.names[i] for i in leader.values[1].blobs] == [f"rng@[value,{r}]" for r in range(5)]


@pytest.mark.parametrize("change", ["values", "rows", "blob size", "order of ranks", "number of ranks"])
def test_a_kept_plan_serves_new_values_and_nothing_else_that_is_new(change: str) -> None:
    cache = PlanCache()
    ranks = [Rank(r, [row_shard(r, 4)], 1, "x") for r in range(4)]
    first = Leader([r.state() for r in ranks], cache)
    first.take_parts(ranks[0].parts, [msgpack.packb(list(r.parts)) for r in ranks])
    plan_id = first.answer.plan_id
    later = [Rank(r, [row_shard(r, 4)], 2, "x") for r in range(4)]
    if change == "rows":
        later[2] = Rank(2, [row_shard(3, 4)], 2, "x")
    elif change == "blob size":
        later[2] = Rank(2, [row_shard(2, 4)], 2, "xx")
    elif change == "order of ranks":
        later[1], later[2] = later[2], later[1]
    elif change == "number of ranks":
        later.pop()
    # Each rank still has its assignment from the first plan, and says so.
    leader = Leader([r.state(plan_id) for r in later], cache)
    if change == "values":
        assert leader.answer.plan_id == plan_id
        assert not leader.answer.asked.any()
        assert not leader.answer.assigns
        leader.take_parts(later[0].parts, None)
        assert leader.plan is first.plan
        assert leader.values[0].data == encode_value(2, "step")
    else:
        assert leader.answer.plan_id != plan_id
        assert leader.answer.assigns
        assert leader.answer.asked[1].any()


def test_a_rank_without_its_assignment_is_sent_it_alone() -> None:
    cache = PlanCache()
    ranks = [Rank(r, [row_shard(r, 3)], 1, "x") for r in range(3)]
    first = Leader([r.state() for r in ranks], cache)
    first.take_parts(ranks[0].parts, [msgpack.packb(list(r.parts)) for r in ranks])
    plan_id = first.answer.plan_id
    again = Leader([r.state(plan_id if i != 1 else bytes(16)) for i, r in enumerate(ranks)], cache)
    again.take_parts(ranks[0].parts, None)
    sent = again.assignments()
    assert [bool(data) for data in sent] == [False, True, False]
    resent, before = (decode_assignment(data, "id").items for data in (sent[1], first.assignments()[1]))
    assert list(resent.rows()) == list(before.rows())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            {"metric": 0.5, "lr": 1},
            {"metric": 0.75, "lr": 1},
            "metric= differs between ranks: rank 0 passed 0.5, rank 1 passed 0.75",
        ),
        ({"run": "a"}, {"run": "b"}, "metadata= of 'run' differs between ranks: rank 0 passed 'a', rank 1 passed 'b'"),
        ({"run": "a"}, None, "metadata= of 'run' differs between ranks: rank 0 passed 'a', rank 1 passed None"),
        ({"metric": 0.5}, None, "metric= differs between ranks: rank 0 passed 0.5, rank 1 passed None"),
        (["a"], None, r"metadata= differs between ranks: rank 0 passed \['a'\], rank 1 passed None"),
        ({"a": 1, "b": float("nan")}, {"b": float("nan"), "a": 1}, None),
    ],
)
def test_metadata_that_differ_are_named_with_both_values(first: Any, second: Any, said: str | None) -> None:
    cache = PlanCache()
    for _ in range(2):  # with a new plan, and with one that was kept
        ranks = [Rank(r, [row_shard(r, 3)], 7, "x", metadata) for r, metadata in enumerate((first, second, first))]
        leader = Leader([r.state() for r in ranks], cache)
        asked = leader.answer.asked.T
        assert not asked[2].any() or asked[2].tolist() == [False, True, False, False]
        sent = [msgpack.packb([p if a else None for p, a in zip(r.parts, asked[i], strict=True)]) for i, r in enumerate(ranks)]
        with pytest.raises(UsageError, match=said) if said else nullcontext():
            leader.take_parts(ranks[0].parts, sent)
