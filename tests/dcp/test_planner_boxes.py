"""Boxes of any number of DCP's ranks to boxes of any other, through the writer and the reader, without processes."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from reshard_ckpt import checkpoint
from reshard_ckpt.dcp import ReshardReader, ReshardWriter
from reshard_ckpt.errors import LayoutError, UnsupportedError
from tests.dcp.on_ranks import same_bytes
from tests.layouts import values_of
from tests.tries import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]


def region(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


class Boxes(DefaultSavePlanner):
    """A planner whose rank holds some boxes of one tensor, told apart by where they begin."""

    def __init__(self, whole: torch.Tensor, boxes: list[Box]) -> None:
        super().__init__()
        self.whole, self.boxes = whole, boxes

    def plan(self) -> SavePlan:
        properties = TensorProperties(dtype=self.whole.dtype)
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex("w", offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)), properties, self.whole.size()
                    ),
                )
                for offsets, lengths in self.boxes
            ]
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        box = next(b for b in self.boxes if b[0] == tuple(write_item.index.offset))
        # Not contiguous, as a view of a larger tensor is not.
        return region(self.whole, box).clone().t().contiguous().t() if self.whole.ndim == 2 else region(self.whole, box)


class Wanted(DefaultLoadPlanner):
    """A planner whose rank wants some boxes, each in a tensor of its own."""

    def __init__(self, whole: torch.Tensor, boxes: list[Box]) -> None:
        super().__init__()
        self.boxes = boxes
        self.tensors = [torch.zeros(box[1], dtype=whole.dtype) for box in boxes]
        self.committed = 0

    def plan(self, metadata: Metadata) -> LoadPlan:
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in self.boxes]
        return LoadPlan(create_read_items_for_chunk_list("w", metadata.state_dict_metadata["w"], chunks))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        at = self.boxes.index(next(b for b in self.boxes if b[0] == tuple(read_item.dest_index.offset)))
        begin = tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.tensors[at][begin]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed += 1


def save(path: Path, whole: torch.Tensor, ranks: list[list[Box]]) -> None:
    """Every rank's part of a save in turn, as DCP calls it."""
    planners = [Boxes(whole, boxes) for boxes in ranks]
    writers = [ReshardWriter(path) for _ in ranks]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0)
    plans = [writer.prepare_local_plan(planner.plan()) for writer, planner in zip(writers, planners, strict=True)]
    plans = writers[0].prepare_global_plan(plans)
    results = [w.write_data(plan, planner).value() for w, plan, planner in zip(writers, plans, planners, strict=True)]
    chunks = [item.tensor_data.chunk for plan in plans for item in plan.items]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), chunks)})
    writers[0].finish(metadata, results)


def load(path: Path, whole: torch.Tensor, ranks: list[list[Box]]) -> list[Wanted]:
    planners = [Wanted(whole, boxes) for boxes in ranks]
    for planner in planners:
        reader = ReshardReader(path)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, False)
        plan = reader.prepare_local_plan(planner.plan(metadata))
        reader.read_data(plan, planner).wait()
        assert planner.committed == len(plan.items)
    return planners


def rows(shape: tuple[int, ...], num: int) -> list[list[Box]]:
    """One box a rank, as ``torch.chunk`` cuts the first dim; the last ranks may have none."""
    sizes = [chunk.numel() for chunk in torch.arange(shape[0]).chunk(num)]
    starts = [0, *accumulate(sizes)]
    boxes: list[list[Box]] = [
        [((start, *(0,) * (len(shape) - 1)), (n, *shape[1:]))] for start, n in zip(starts, sizes, strict=False)
    ]
    return boxes + [[] for _ in range(num - len(boxes))]


@pytest.mark.parametrize(("saving", "loading"), [(8, 4), (4, 8), (4, 3), (3, 4), (8, 1), (1, 8)])
def test_even_and_uneven_rows_between_numbers_of_ranks(tmp_path: Path, saving: int, loading: int):
    whole = values_of((19, 5), "F32", saving)
    save(tmp_path, whole, rows(whole.shape, saving))
    catalog = checkpoint.catalog(tmp_path)
    boxes = {(shard.offsets, shard.lengths) for shard in catalog.tensor("w").shards}
    assert boxes == {box for boxes in rows(whole.shape, saving) for box in boxes}
    assert catalog.tensor("w").placement is None
    for planner, wanted in zip(load(tmp_path, whole, rows(whole.shape, loading)), rows(whole.shape, loading), strict=True):
        assert all(same_bytes(t, region(whole, box)) for t, box in zip(planner.tensors, wanted, strict=True))
    assert checkpoint.verify(tmp_path).ok


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Box]]:
    """The boxes of a random grid, dealt out to some ranks."""
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(pairwise(e)) for e in edges]
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*spans)]
    ranks: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 8)))]
    for box in boxes:
        ranks[draw(st.integers(0, len(ranks) - 1))].append(box)
    return ranks


@examples(40)
@given(data=st.data())
def test_any_grid_to_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["F32", "BF16", "U8", "F64", "I16"]))
    whole = values_of(shape, dtype, prod(shape))
    path = tmp_path_factory.mktemp("grid")
    save(path, whole, data.draw(grids(shape)))
    assert same_bytes(checkpoint.read(path)["w"], whole)
    for planner in load(path, whole, data.draw(grids(shape))):
        for tensor, box in zip(planner.tensors, planner.boxes, strict=True):
            assert same_bytes(tensor, region(whole, box))


@pytest.mark.parametrize(
    ("boxes", "what"),
    [
        ([[((0, 0), (2, 4))]], r"no rank holds \[2:4, 0:4\]"),
        ([[((0, 0), (3, 4))], [((2, 0), (2, 4))]], "overlap"),
    ],
    ids=["hole", "overlap"],
)
def test_boxes_that_do_not_tile_are_no_checkpoint(tmp_path: Path, boxes: list[list[Box]], what: str):
    old = values_of((4, 4), "F32", 1)
    save(tmp_path, old, [[((0, 0), (4, 4))]])
    with pytest.raises(LayoutError, match=what):
        save(tmp_path, values_of((4, 4), "F32", 2), boxes)
    assert same_bytes(checkpoint.read(tmp_path)["w"], old)


def test_a_local_tensor_that_is_not_what_the_plan_says_is_refused(tmp_path: Path):
    class Lying(Boxes):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return super().resolve_data(write_item)[:1]

    writer, planner = ReshardWriter(tmp_path), Lying(values_of((4, 4), "F32", 1), [((0, 0), (4, 4))])
    (plan,) = writer.prepare_global_plan([planner.plan()])
    with pytest.raises(LayoutError, match=r"w: DCP's plan says F32 \(4, 4\).*the local tensor is F32 \(1, 4\)"):
        writer.write_data(plan, planner)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_ranks_that_do_not_agree_are_refused(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="use_collectives"):
        ReshardWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UnsupportedError, match="not one that this writer prepared"):
        ReshardWriter(tmp_path).write_data(SavePlan([]), DefaultSavePlanner())


def test_what_was_planned_but_not_written_is_found(tmp_path: Path):
    whole = values_of((4, 4), "F32", 1)
    writer, planner = ReshardWriter(tmp_path), Boxes(whole, [((0, 0), (4, 4))])
    (plan,) = writer.prepare_global_plan([planner.plan()])
    results = [writer.write_data(plan, planner).value()]
    described = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), [])
    with pytest.raises(LayoutError, match="other: in DCP's metadata, but no rank wrote it"):
        writer.finish(Metadata({"w": described, "other": described}), results)


def test_one_plan_used_again_writes_another_save(tmp_path: Path):
    """What a planner that keeps its plans does; a rank that keeps one may meet ranks that do not."""
    whole = values_of((4, 4), "F32", 1)
    halves = [[((0, 0), (2, 4))], [((2, 0), (2, 4))]]
    planners = [Boxes(whole, boxes) for boxes in halves]
    first = ReshardWriter(tmp_path)
    kept = first.prepare_global_plan([planner.plan() for planner in planners])
    for number in range(3):
        writer = ReshardWriter(tmp_path)
        fresh = writer.prepare_global_plan([planner.plan() for planner in planners])
        plans = [kept[0], fresh[1]] if number else kept
        results = [writer.write_data(plan, planner).value() for plan, planner in zip(plans, planners, strict=True)]
        chunks = [item.tensor_data.chunk for plan in plans for item in plan.items]
        writer.finish(Metadata({"w": TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), chunks)}), results)
        assert checkpoint.verify(tmp_path).ok
        assert same_bytes(checkpoint.read(tmp_path)["w"], whole)
        # What the save before wrote is gone, whatever its folder was called.
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2
