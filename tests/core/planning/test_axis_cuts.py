"""Orders and sections that pieces show, against lists of indices that are cut one axis after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.placements import cut_order, local_region, same_placement
from reshard_ckpt.core.catalog.specs import AxisPlacement, Ints, Mesh, Replication, TensorSpec
from reshard_ckpt.core.geometry.columns import group_ids, lex_order
from reshard_ckpt.core.planning.placement import PieceTable, Placement, derive
from tests.jobs import Tensors, save_job
from tests.layouts import pack_boxes, values_of
from tests.topologies import cleared, joined, memory_of
from tests.tries import examples

SRC, DST, BACK = (f"memory://axis_cuts/{name}" for name in ("src", "dst", "back"))


@dataclass(frozen=True)
class Layout:
    """A tensor on a mesh: the dim that each axis cuts (None: replicated), the order of the axes, and the sections of each dim."""

    shape: Ints
    dims: tuple[int | None, ...]
    order: Ints
    sections: tuple[Ints, ...]

    def indices(self, sizes: Ints, where: Ints) -> list[list[int]]:
        """What a rank holds of each dim."""
        out = []
        for dim, size in enumerate(self.shape):
            held, axes = list(range(size)), [a for a in self.order if self.dims[a] == dim]
            for turn, axis in enumerate(axes):
                parts = split(held, self.sections[dim]) if turn == 0 and self.sections[dim] else [held]
                held = [i for part in parts for i in chunk(part, sizes[axis], where[axis])]
            out.append(held)
        return out

    def boxes(self, sizes: Ints, where: Ints) -> list[tuple[Ints, Ints]]:
        ranges = [joined(held) for held in self.indices(sizes, where)]
        return [(tuple(r[0] for r in chosen), tuple(r[1] for r in chosen)) for chosen in product(*ranges)]

    def declared(self, mesh: Mesh) -> Placement:
        kinds = zip(mesh.axes, self.dims, strict=True)
        return tuple(AxisPlacement(axis, "replicate" if dim is None else "shard", dim) for axis, dim in kinds)


def chunk(held: list[int], num: int, index: int) -> list[int]:
    parts = [part.tolist() for part in torch.tensor(held, dtype=torch.int64).chunk(num)]
    return parts[index] if index < len(parts) else []


def split(held: list[int], sizes: Ints) -> list[list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [held[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@st.composite
def layouts(draw: st.DrawFn, num_axes: int) -> Layout:
    ndim = draw(st.integers(1, 2))
    shape, sections = [], []
    for _ in range(ndim):
        # A section of one element is whole on one coordinate, which shows nothing.
        parts = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
        fused = draw(st.booleans()) and len(parts) > 1
        shape.append(sum(parts) if fused else draw(st.integers(9, 20)))
        sections.append(tuple(parts) if fused else ())
    dims = tuple(draw(st.sampled_from([None, *range(ndim)])) for _ in range(num_axes))
    return Layout(tuple(shape), dims, tuple(draw(st.permutations(range(num_axes)))), tuple(sections))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Mesh, list[Layout]]:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return Mesh(tuple("abc"[: len(sizes)]), sizes), draw(st.lists(layouts(len(sizes)), min_size=1, max_size=3))


def pieces_of(mesh: Mesh, tensors: list[Layout]) -> tuple[PieceTable, np.ndarray, np.ndarray]:
    rows = [
        (t, rank, *pad(offsets, 0), *pad(lengths, 1))
        for t, layout in enumerate(tensors)
        for rank in range(mesh.size)
        for offsets, lengths in layout.boxes(mesh.sizes, mesh.coordinates(rank))
    ]
    table = np.array(rows, np.int64)
    box, first = group_ids(table[:, 2:])
    order = lex_order(table[:, 0], box, table[:, 1])
    tensor, rank, box = table[order, 0], table[order, 1], box[order]
    run, _ = group_ids(np.stack([tensor, box], axis=1))
    # `first` numbers the distinct boxes; runs are whole boxes.
    boxes = table[first, 2:]
    return PieceTable(tensor, rank, box, run), boxes[:, :2], boxes[:, 2:]


def pad(values: Ints, fill: int) -> Ints:
    return (fill,) * (2 - len(values)) + values


@given(jobs(), st.booleans())
@examples(300)
def test_what_is_recorded_gives_each_rank_what_it_held(job: tuple[Mesh, list[Layout]], declares: bool) -> None:
    """Sizes are such that no rank is left with nothing, which would make an axis look otherwise."""
    mesh, tensors = job
    holding, offsets, lengths = pieces_of(mesh, tensors)
    shape = np.array([pad(layout.shape, 1) for layout in tensors], np.int64)
    ndim = np.array([len(layout.shape) for layout in tensors], np.int64)
    declared = [layout.declared(mesh) if declares else () for layout in tensors]
    held = {
        (t, rank): [set(of_dim) for of_dim in layout.indices(mesh.sizes, mesh.coordinates(rank))]
        for t, layout in enumerate(tensors)
        for rank in range(mesh.size)
    }
    whole = {t for t in range(len(tensors)) if all(all(held[t, rank]) for rank in range(mesh.size))}
    table = derive(mesh, declared, shape, ndim, holding, offsets, lengths)
    found = [table.placements[i] for i in table.of_tensor.tolist()]
    for t, placement in enumerate(found):
        if not declares and t not in whole:
            continue
        assert all((p.turn is None) == (p.kind != "shard") for p in placement), placement
        for rank in range(mesh.size):
            region = local_region(tensors[t].shape, placement, mesh.sizes, mesh.coordinates(rank))
            assert [{i for a, n in ranges for i in range(a, a + n)} for ranges in region.ranges] == held[t, rank], placement


def save(url: str, mesh: Mesh, tensors: list[Layout]) -> Catalog:
    """What a job of `LocalShard`s saves that say which axis cuts which dim, and nothing more."""
    ranks: list[Tensors] = []
    for rank in range(mesh.size):
        held = []
        for t, layout in enumerate(tensors):
            boxes = layout.boxes(mesh.sizes, mesh.coordinates(rank))
            spec = TensorSpec(
                f"model.w{t}", "F32", layout.shape, pack_boxes(boxes)[0], Replication.DECLARED, layout.declared(mesh)
            )
            held.append((spec, memory_of(values_of(layout.shape, "F32", t), boxes)))
        ranks.append(held)
    return save_job(cleared(url), ranks, mesh=mesh)


def written(catalog: Catalog, name: str) -> dict[int, set[tuple[Ints, Ints]]]:
    out: dict[int, set[tuple[Ints, Ints]]] = {}
    for shard in catalog.tensor(name).shards:
        out.setdefault(shard.file.rank, set()).add((shard.offsets, shard.lengths))
    return out


@given(jobs(), st.data())
@examples(40, usual=20)
def test_a_reshard_there_and_back_cuts_as_before(job: tuple[Mesh, list[Layout]], data: st.DataObject) -> None:
    mesh, tensors = job
    other = tuple(data.draw(st.integers(1, 3)) for _ in mesh.axes)
    before = save(SRC, mesh, tensors)
    cleared(DST), cleared(BACK)
    checkpoint.reshard(SRC, DST, mesh=dict(zip(mesh.axes, other, strict=True)))
    checkpoint.reshard(DST, BACK, mesh=dict(zip(mesh.axes, mesh.sizes, strict=True)))
    there, back = checkpoint.catalog(DST), checkpoint.catalog(BACK)
    for t, layout in enumerate(tensors):
        name = f"model.w{t}"
        assert back.tensor(name).placement == before.tensor(name).placement == there.tensor(name).placement
        assert written(back, name) == written(before, name)
        # Cuts that all fall between sections are recorded without them: w[4] in sections of 2 over 2 x 2 ranks. And another order
        # of axes may cut alike with other sections: (8, 1) over 2 ranks and then 3 is (4, 5) over 3 and then 2.
        cuts = sorted((cut for cut in before.tensor(name).placement or () if cut.dim is not None), key=lambda cut: cut.turn or 0)
        recorded = {dim: [mesh.axes.index(cut.axis) for cut in cuts if cut.dim == dim] for dim in layout.dims if dim is not None}
        shown = recorded == {dim: [a for a in layout.order if layout.dims[a] == dim] for dim in recorded}
        shown &= {cut.dim: cut.sections for cut in cuts if cut.sections} == {
            d: layout.sections[d] for d in recorded if layout.sections[d]
        }
        for rank, boxes in written(there, name).items():
            held = layout.boxes(other, Mesh(mesh.axes, other).coordinates(rank))
            # An axis of one coordinate shows neither its turn nor its sections.
            if shown and all(size > 1 or dim is None for size, dim in zip(mesh.sizes, layout.dims, strict=True)):
                assert all(inside(box, held) for box in boxes), rank
        got = checkpoint.read(BACK)[name]
        assert torch.equal(got.view(torch.uint8), values_of(layout.shape, "F32", t).view(torch.uint8))


def inside(box: tuple[Ints, Ints], others: list[tuple[Ints, Ints]]) -> bool:
    return any(all(a <= o and o + n <= a + m for o, n, a, m in zip(*box, *other, strict=True)) for other in others)


def test_a_placement_that_only_one_of_two_records_is_the_same() -> None:
    known = (AxisPlacement("dp", "shard", 0, turn=1), AxisPlacement("tp", "shard", 0, turn=0, sections=(4, 2)))
    plain = tuple(AxisPlacement(p.axis, p.kind, p.dim) for p in known)
    swapped = (replace(known[0], turn=0), replace(known[1], turn=1))
    assert same_placement(known, plain)
    assert not same_placement(known, swapped)
    assert not same_placement(plain, (plain[0], replace(plain[1], dim=1)))
    assert same_placement(None, None)
    assert not same_placement(known, None)
    assert cut_order(known) == cut_order(plain) == [1, 0]
    assert cut_order(swapped) == [0, 1]
