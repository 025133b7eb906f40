"""RaggedShard placements: every split of small shapes against lists of positions, and random ones saved, loaded and resharded."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from reshard_ckpt import checkpoint
from reshard_ckpt.cli.formatting import placement as spell
from reshard_ckpt.core.catalog.specs import AxisPlacement, Ints, Mesh, TensorSpec
from reshard_ckpt.errors import LayoutError, UnsupportedError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.state import dtensor
from reshard_ckpt.state.layouts import Layout
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.protocol import Storage
from tests.jobs import Tensors, load_job, save_job
from tests.layouts import addresses, layouts, spec_of, values_of
from tests.ragged import Ragged, StridedRagged, cut, splits
from tests.tries import examples

AXES, SIZES = ("fsdp", "tp"), (4, 2)
COORDINATES = list(product(range(4), range(2)))


def layout_of(shape: Ints, placements: tuple[Any, ...], where: Ints, local_shape: Ints, sizes: Ints = SIZES) -> Layout:
    return dtensor.layout_of(shape, local_shape, dtensor.recognize(placements, shape, AXES[: len(sizes)], sizes, where))


def positions(shape: Ints) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def beside(shape: Ints, dims: Ints) -> list[tuple[Any, int]]:
    """What may stand on the other axis, and how many units there are where each is one element of the leading dims."""
    left = [(Replicate(), shape)]
    left += [(Shard(d), (*shape[:d], shape[d] // 2, *shape[d + 1 :])) for d in range(min(2, len(shape))) if shape[d] % 2 == 0]
    return [(other, prod(local[: len(dims)])) for other, local in left]


def layouts_of(shape: Ints) -> list[tuple[Any, Any]]:
    """Every RaggedShard over 4 ranks, beside everything on the other axis."""
    out: list[tuple[Any, Any]] = []
    for num in range(len(shape) + 1):
        dims = tuple(range(num))
        for other, units in beside(shape, dims):
            every = splits(units, 4) if dims else [tuple(int(i == k) for i in range(4)) for k in range(4)]
            out += [(Ragged(dims, split), other) for split in every]
    return out


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 3), (3, 4), (2, 2, 2)])
def test_every_split_holds_what_its_units_say(shape: Ints) -> None:
    whole = positions(shape)
    cases = layouts_of(shape)
    assert len(cases) > 10
    for placements in cases:
        for where in COORDINATES:
            expected = cut(whole, placements, SIZES, where)
            layout = layout_of(shape, placements, where, tuple(expected.shape))
            found = {place: int(whole[x]) for piece in layout.pieces(expected) for place, x in addresses(piece)}
            assert [found[i] for i in range(len(found))] == expected.tolist(), (placements, where)


def test_a_strided_one_says_that_the_later_axes_cut_first_as_they_do() -> None:
    units = (3, 0, 2, 1)
    placement = Ragged((0,), units), Shard(0)
    strided = StridedRagged((0,), units, 2), Shard(0)
    for where in COORDINATES:
        local = cut(positions((12, 5)), placement, SIZES, where)
        assert layout_of((12, 5), strided, where, tuple(local.shape)) == layout_of((12, 5), placement, where, tuple(local.shape))


@pytest.mark.parametrize(
    ("shape", "placements", "local", "error", "says"),
    [
        ((4, 6), (Ragged((1,), (1, 1, 1, 1)), Replicate()), (6,), UnsupportedError, r"flattens dims \(1,\) of shape \(4, 6\)"),
        ((4,), (Ragged((0, 1), (1, 1, 1, 1)), Replicate()), (1,), UnsupportedError, r"dims \(0, 1\) of shape \(4,\)"),
        ((4, 6), (Ragged((0,), (1, 2, 1)), Replicate()), (6,), LayoutError, r"has 3 numbers of units for 4 coordinates"),
        ((4, 6), (Ragged((0,), (0, 0, 0, 0)), Replicate()), (0,), LayoutError, r"units are whole numbers, not all 0"),
        ((4, 6), (Ragged((0,), (2, -1, 1, 1)), Replicate()), (6,), LayoutError, r"units are whole numbers, not all 0"),
        ((4, 6), (Ragged((), (1, 0, 1, 0)), Replicate()), (6,), LayoutError, r"without dims one coordinate has all"),
        ((4, 6), (Ragged((0,), (2, 1, 1, 1)), Replicate()), (9,), LayoutError, r"divides 24 elements by 5 units"),
        ((4, 6), (Ragged((0,), (1, 1, 1, 1)), Replicate()), (7,), LayoutError, r"6 elements of \(4, 6\), but .* has \(7,\)"),
        (
            (4, 6),
            (StridedRagged((0,), (1, 1, 1, 1), 4), Shard(0)),
            (3,),
            LayoutError,
            r"split factor 4, but later .* into 2;",
        ),
        ((4, 6), (Ragged((0,), (1, 1, 1, 1)), Ragged((0,), (1, 1))), (3,), UnsupportedError, r"flattened on several axes"),
        ((4, 6), (Ragged((0,), (1, 1, 1, 1)), Shard(3)), (3,), LayoutError, r"on axis 'tp' cuts dim 3, which shape \(4, 6\)"),
        ((), (Replicate(), Shard(0)), (), LayoutError, r"cuts dim 0, which shape \(\) does not have"),
    ],
)
def test_what_is_no_known_ragged_shard_is_refused(
    shape: Ints, placements: tuple[Any, ...], local: Ints, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        layout_of(shape, placements, (0, 0), local)


@st.composite
def ragged_layouts(draw: st.DrawFn, shape: Ints) -> tuple[Any, ...]:
    dims = tuple(range(draw(st.integers(0, len(shape)))))
    other, units = draw(st.sampled_from(beside(shape, dims)))
    if not dims or not units:
        return Ragged((), draw(st.sampled_from([(1, 0, 0, 0), (0, 0, 3, 0)]))), other
    ends = sorted(draw(st.lists(st.integers(0, units), min_size=3, max_size=3)))
    return Ragged(dims, tuple(b - a for a, b in zip([0, *ends], [*ends, units], strict=True))), other


def held(shape: Ints, placements: tuple[Any, ...], whole: torch.Tensor, *, empty: bool = False) -> list[Tensors]:
    """What each of 8 ranks holds; `empty`, before it is loaded."""
    out = []
    for where in COORDINATES:
        local = cut(whole, placements, SIZES, where)
        layout = layout_of(shape, placements, where, tuple(local.shape))
        spec = TensorSpec("model.w", "I64", shape, layout.pieces(local), layout.replication, layout.placement)
        out.append([(spec, torch.full_like(local, -1) if empty else local)])
    return out


def fresh(name: str) -> Storage:
    storage = open_storage(f"memory://ragged/{name}")
    storage.delete([key for key, _ in storage.list()])
    return storage


@examples(40)
@given(st.data(), st.sampled_from([(8,), (6, 4), (4, 6), (2, 3, 4), (4, 2, 1, 3)]))
def test_ragged_tensors_load_onto_each_other_and_onto_any_layout(data: st.DataObject, shape: Ints) -> None:
    src, dst = data.draw(ragged_layouts(shape)), data.draw(ragged_layouts(shape))
    plain = data.draw(layouts(shape, 3))
    whole, storage = values_of(shape, "I64", 3), fresh("any")
    catalog = save_job(storage, held(shape, src, whole), mesh=Mesh(AXES, SIZES))
    assert catalog.tensor("model.w").placement[0] == AxisPlacement(
        "fsdp", "ragged", len(src[0].dims) - 1 if src[0].dims else None, src[0].local_units
    )
    assert decode_catalog(encode_catalog(catalog)).placements == catalog.placements
    assert torch.equal(checkpoint.read("memory://ragged/any")["model.w"], whole)
    for tensors, wanted in zip(held(shape, dst, whole, empty=True), held(shape, dst, whole), strict=True):
        load_job(storage, tensors, saved=catalog)
        assert torch.equal(tensors[0][1], wanted[0][1])
    for rank in range(3):
        spec, memory = spec_of(plain, rank, "model.w", "I64"), torch.full((plain.memory[rank],), -1)
        load_job(storage, [(spec, memory)], saved=catalog)
        assert all(memory[place] == whole[x] for piece in spec.pieces for place, x in addresses(piece))


@examples(15)
@given(st.data(), st.sampled_from([{"fsdp": 4, "tp": 2}, {"fsdp": 3}, {"fsdp": 2, "tp": 2}, {"tp": 2}, {"fsdp": 5, "tp": 1}]))
def test_an_offline_reshard_keeps_units_whole_and_every_value(data: st.DataObject, mesh: dict[str, int]) -> None:
    shape = (4, 6)
    placements, whole = data.draw(ragged_layouts(shape)), values_of(shape, "I64", 5)
    save_job(fresh("src"), held(shape, placements, whole), mesh=Mesh(AXES, SIZES))
    fresh("dst")
    checkpoint.reshard("memory://ragged/src", "memory://ragged/dst", mesh=mesh)
    assert torch.equal(checkpoint.read("memory://ragged/dst")["model.w"], whole)
    found = {p.axis: p for p in checkpoint.catalog("memory://ragged/dst").tensor("model.w").placement or ()}
    units = placements[0].local_units
    if mesh.get("fsdp") == 4:
        assert found["fsdp"].coords == units
    elif "fsdp" in mesh and sum(map(bool, units)) > 1:
        assert found["fsdp"].kind == "ragged"
        assert sum(found["fsdp"].coords) == sum(units)
        assert max(found["fsdp"].coords) - min(found["fsdp"].coords) <= 1


def test_a_rule_places_a_tensor_ragged() -> None:
    whole = values_of((4, 6), "I64", 7)
    save_job(fresh("plain"), held((4, 6), (Replicate(), Shard(0)), whole), mesh=Mesh(AXES, SIZES))
    fresh("ruled")
    rules = {"model.w": {"fsdp": "ragged(3, 0, 1)"}}
    checkpoint.reshard("memory://ragged/plain", "memory://ragged/ruled", mesh={"fsdp": 3}, rules=rules)
    view = checkpoint.catalog("memory://ragged/ruled").tensor("model.w")
    assert {shard.file.rank: shard.count for shard in view.shards} == {0: 18, 2: 6}
    assert spell(view.placement) == "fsdp=ragged(0-1; 3+0+1)"
    assert torch.equal(checkpoint.read("memory://ragged/ruled")["model.w"], whole)
