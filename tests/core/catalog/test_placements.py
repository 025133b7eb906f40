"""The table of kinds of placement: what a kind that another package adds can do, from a DTensor to a reshard by rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.cli.formatting import placement as spell
from reshard_ckpt.core.catalog.placements import KINDS, LocalRegion, PlacementKind, local_region
from reshard_ckpt.core.catalog.specs import AxisPlacement, Ints, Mesh, Replication, TensorSpec
from reshard_ckpt.core.planning.placement_rules import parse_rules
from reshard_ckpt.errors import LayoutError, UnsupportedError, UsageError
from reshard_ckpt.state import dtensor
from reshard_ckpt.storage import open_storage
from tests.jobs import save_job
from tests.layouts import values_of, whole_piece


@dataclass(frozen=True)
class Shares:
    """What a framework of its own might have: each rank holds as many elements of the flattened tensor as its share says."""

    shares: Ints

    def is_partial(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False


def cut(region: LocalRegion, placement: AxisPlacement, num: int, index: int) -> LocalRegion:
    first, length = region.flat or (0, region.num_elements)
    ends = [length * end // sum(placement.coords) for end in accumulate((0, *placement.coords))]
    return replace(region, flat=(first + ends[index], ends[index + 1] - ends[index]))


def parse(axis: str, numbers: Ints, num: int) -> AxisPlacement:
    if len(numbers) != num:
        raise ValueError(f"{len(numbers)} shares for {num} ranks")
    return AxisPlacement(axis, "shares", coords=numbers)


def recognize(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    return AxisPlacement(axis, "shares", coords=placement.shares) if isinstance(placement, Shares) else None


SHARES = PlacementKind(
    name="shares",
    form="shares(share, …)",
    cut=cut,
    parse=parse,
    spell=lambda p: f"shares({':'.join(map(str, p.coords))})",
    flattens=True,
    recognize=recognize,
)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "shares", SHARES)


@pytest.mark.usefixtures("shares")
def test_an_added_kind_is_a_rule_and_a_reshard_cuts_by_it() -> None:
    whole = values_of((4, 6), "I64", 1)
    for url in ("memory://kinds/src", "memory://kinds/dst"):
        storage = open_storage(url)
        storage.delete([key for key, _ in storage.list()])
    spec = TensorSpec("model.w", "I64", (4, 6), (whole_piece((4, 6)),), Replication.DECLARED)
    save_job(open_storage("memory://kinds/src"), [[(spec, whole)]], mesh=Mesh(("dp",), (1,)))
    rules = {"model.w": {"tp": "shard(1)", "dp": "shares(3, 1)"}}
    checkpoint.reshard("memory://kinds/src", "memory://kinds/dst", mesh={"dp": 2, "tp": 2}, rules=rules)
    catalog = checkpoint.catalog("memory://kinds/dst")
    assert catalog.tensor("model.w").placement == (
        AxisPlacement("dp", "shares", coords=(3, 1)),
        AxisPlacement("tp", "shard", 1, turn=0),
    )
    held: dict[int, int] = {}
    for shard in catalog.tensor("model.w").shards:
        held[shard.file.rank] = held.get(shard.file.rank, 0) + shard.count
        assert shard.offsets[1] // 3 == shard.file.rank % 2, "tp cuts columns, whatever comes after"
    assert held == {0: 9, 1: 9, 2: 3, 3: 3}
    assert torch.equal(checkpoint.read("memory://kinds/dst")["model.w"], whole)


@pytest.mark.usefixtures("shares")
def test_an_added_kind_is_recognized_in_a_dtensor_and_cuts_it_flat() -> None:
    placements: Any = (Shares((3, 1)),)
    layout = dtensor.layout_of((4, 6), (6,), dtensor.recognize(placements, (4, 6), ("dp",), (2,), (1,)))
    assert layout.placement == (AxisPlacement("dp", "shares", coords=(3, 1)),)
    (piece,) = layout.pieces(torch.zeros(6))
    assert (piece.offsets, piece.lengths, piece.start, piece.count) == ((0, 0), (4, 6), 18, 6)
    with pytest.raises(LayoutError, match=r"6 elements of \(4, 6\), but the local tensor has \(7,\)"):
        dtensor.layout_of((4, 6), (7,), dtensor.recognize(placements, (4, 6), ("dp",), (2,), (1,)))


def test_a_kind_that_nobody_added_is_refused_by_name_or_spelled_as_it_is() -> None:
    placements: Any = (Shares((1, 1, 2)),)
    with pytest.raises(UnsupportedError, match=r"Shares.* on axis 'dp' is unknown here; pass a LocalShard"):
        dtensor.recognize(placements, (4,), ("dp",), (3,), (0,))
    forms = r"shard\(dim\), replicate, flat, ragged\(unit, …\) or resident"
    with pytest.raises(UsageError, match=rf"'shares\(3, 1\)' is not a placement: write {forms}"):
        parse_rules({"w": {"dp": "shares(3, 1)"}}, Mesh(("dp",), (2,)))
    assert spell([AxisPlacement("dp", "shares", coords=(3, 1))]) == "dp=shares"


@pytest.mark.usefixtures("shares")
def test_an_added_kind_says_what_is_wrong_with_a_rule() -> None:
    with pytest.raises(UsageError, match=r"dp: 'shares\(3\)' is not a placement: 1 shares for 2 ranks"):
        parse_rules({"w": {"dp": "shares(3)"}}, Mesh(("dp",), (2,)))
    assert spell([AxisPlacement("dp", "shares", coords=(3, 1))]) == "dp=shares(3:1)"


def test_flat_cuts_what_the_others_leave_wherever_its_axis_stands() -> None:
    axes = (AxisPlacement("dp", "flat"), AxisPlacement("tp", "shard", 1, turn=0), AxisPlacement("pp", "resident", coords=(1,)))
    region = local_region((2, 6), axes, (2, 2, 2), (1, 0, 1))
    assert list(region.runs()) == [(((0, 0), (2, 3)), 3, 3)]
    assert local_region((2, 6), axes, (2, 2, 2), (1, 0, 0)) is None
