"""Placements that other packages register: from a DTensor's placement to a catalog, a rule and another layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Shard

from reshard_ckpt import checkpoint, register_placement
from reshard_ckpt.core.catalog.placements import KINDS
from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, TensorSpec
from reshard_ckpt.errors import LayoutError, UnsupportedError, UsageError
from reshard_ckpt.state.dtensor import layout_of
from reshard_ckpt.state.dtensor import recognize as recognize_all
from reshard_ckpt.storage import open_storage
from tests.jobs import save_job
from tests.layouts import addresses, values_of


@dataclass(frozen=True)
class Rows(Placement):
    """So many rows of dim `dim` to each coordinate."""

    dim: int
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        Placement.__init__(self)


def recognize(placement: Any, shape: Sequence[int]) -> tuple[int, Sequence[int]] | None:
    return (placement.dim, placement.rows) if isinstance(placement, Rows) else None


def take(ranges: Sequence[tuple[int, int]], rows: Sequence[int], num: int, index: int) -> list[tuple[int, int]]:
    ((first, _),) = ranges
    return [(first + sum(rows[:index]), rows[index])]


@pytest.fixture
def rows() -> Iterator[None]:
    register_placement("rows", recognize=recognize, cut=take)
    yield
    del KINDS["rows"]


def pieces(placements: tuple[Any, ...], where: tuple[int, ...], local: torch.Tensor) -> Any:
    axes, sizes = ("dp", "tp")[: len(placements)], (3, 2)[: len(placements)]
    return layout_of((6, 4), tuple(local.shape), recognize_all(placements, (6, 4), axes, sizes, where))


@pytest.mark.usefixtures("rows")
def test_what_is_registered_cuts_dtensors_is_recorded_and_is_a_rule() -> None:
    whole = values_of((6, 4), "I64", 2)
    placements: tuple[Any, ...] = (Rows(0, (1, 3, 2)), Shard(1))
    ranks = []
    for dp, (low, high) in enumerate([(0, 1), (1, 4), (4, 6)]):
        for tp in range(2):
            local = whole[low:high, 2 * tp : 2 * tp + 2].contiguous()
            layout = pieces(placements, (dp, tp), local)
            found = {place: int(whole[x]) for piece in layout.pieces(local) for place, x in addresses(piece)}
            assert [found[i] for i in range(len(found))] == local.flatten().tolist()
            spec = TensorSpec("w", "I64", (6, 4), layout.pieces(local), layout.replication, layout.placement)
            ranks.append([(spec, local)])
    for url in ("memory://rows/src", "memory://rows/dst"):
        storage = open_storage(url)
        storage.delete([key for key, _ in storage.list()])
    catalog = save_job(open_storage("memory://rows/src"), ranks, mesh=Mesh(("dp", "tp"), (3, 2)))
    assert catalog.tensor("w").placement == (
        AxisPlacement("dp", "rows", 0, (1, 3, 2), turn=0),
        AxisPlacement("tp", "shard", 1, turn=0),
    )
    ruled = AxisPlacement("dp", "rows", 0, (5, 1))
    for rule, placed in (({}, AxisPlacement("dp", "replicate")), ({"w": {"dp": "rows(0, 5, 1)"}}, ruled)):
        checkpoint.reshard("memory://rows/src", "memory://rows/dst", mesh={"dp": 2}, rules=rule)
        view = checkpoint.catalog("memory://rows/dst").tensor("w")
        assert view.placement == (placed,)
        assert torch.equal(checkpoint.read("memory://rows/dst")["w"], whole)
    assert {shard.file.rank: shard.count for shard in view.shards} == {0: 20, 1: 4}


@pytest.mark.usefixtures("rows")
def test_a_name_is_registered_once_and_is_a_word() -> None:
    register_placement("rows", recognize=recognize, cut=take)
    with pytest.raises(UsageError, match="'rows' is a kind of placement already"):
        register_placement("rows", recognize=recognize, cut=lambda *args: [])
    with pytest.raises(UsageError, match="'shard' is a kind of placement already"):
        register_placement("shard", recognize=recognize, cut=take)
    with pytest.raises(UsageError, match="'two words' is not an identifier"):
        register_placement("two words", recognize=recognize, cut=take)


@pytest.mark.usefixtures("rows")
def test_a_cut_that_leaves_the_tensor_and_a_dim_that_is_none_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rows\(0, 1, 3, 9\): its cut gives coordinate 2 of 3 \[\(4, 9\)\] of \[\(0, 6\)\]"):
        pieces((Rows(0, (1, 3, 9)),), (2,), torch.zeros(9, 4))
    with pytest.raises(LayoutError, match=r"rows was recognized on dim 2; it can be 0 to 1"):
        pieces((Rows(2, (1, 3, 2)),), (0,), torch.zeros(6, 4))
    with pytest.raises(LayoutError, match=r"local shape of \(1, 4\) of \(6, 4\), but the local tensor has \(2, 4\)"):
        pieces((Rows(0, (1, 3, 2)),), (0,), torch.zeros(2, 4))


def test_without_it_the_placement_is_refused_and_a_checkpoint_still_loads() -> None:
    with pytest.raises(UnsupportedError, match=r"Rows.* on axis 'dp' is unknown here"):
        pieces((Rows(0, (1, 3, 2)),), (0,), torch.zeros(1, 4))


class Uneven(Shard):
    """A shard of uneven parts that torch's own ``__eq__`` calls equal to any other of the same dim."""

    rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: tuple[int, ...]) -> Uneven:
        shard = cls(0)
        object.__setattr__(shard, "rows", rows)  # of torch 2.6 they are frozen
        return shard

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(self.dim)


@pytest.fixture
def uneven() -> Iterator[None]:
    register_placement("uneven", recognize=lambda p, shape: (p.dim, p.rows) if isinstance(p, Uneven) else None, cut=take)
    yield
    del KINDS["uneven"]


@pytest.mark.usefixtures("uneven")
def test_placements_that_call_themselves_equal_are_cut_each_in_its_own_way() -> None:
    held = {rows: pieces((Uneven.of(rows),), (1,), torch.zeros(2, 4)).boxes[0].offsets for rows in ((1, 2, 3), (3, 2, 1))}
    assert held == {(1, 2, 3): (1, 0), (3, 2, 1): (3, 0)}


class Equal:
    """A cut that calls itself equal to any other one."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0

    def __call__(self, *args: Any) -> list[tuple[int, int]]:
        return [(self.first, 2)]


@pytest.mark.usefixtures("rows")
def test_a_name_belongs_to_one_function_whatever_that_calls_itself_equal_to() -> None:
    class Owner:
        def cut(self, *args: Any) -> list[tuple[int, int]]:
            return []

    owner, first = Owner(), Equal(0)
    try:
        register_placement("equal", recognize=recognize, cut=first)
        register_placement("equal", recognize=recognize, cut=first)
        with pytest.raises(UsageError, match="'equal' is a kind of placement already"):
            register_placement("equal", recognize=recognize, cut=Equal(2))
        register_placement("method", recognize=recognize, cut=owner.cut)
        register_placement("method", recognize=recognize, cut=owner.cut)
        with pytest.raises(UsageError, match="'method' is a kind of placement already"):
            register_placement("method", recognize=recognize, cut=Owner().cut)
    finally:
        KINDS.pop("equal", None)
        KINDS.pop("method", None)
