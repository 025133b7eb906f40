"""Boxes of any grid to the boxes of DCP's ranks, through the reader, without processes."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.dcp import ReshardReader, ReshardWriter
from reshard_ckpt.errors import UnsupportedError
from tests.dcp.on_ranks import same_bytes
from tests.layouts import values_of
from tests.tries import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]


def region(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


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
    """Save a tensor in these boxes."""
    pieces = [(offsets, offsets, lengths) for boxes in ranks for offsets, lengths in boxes]
    checkpoint.save(path, {"w": LocalShard(whole, whole.shape, pieces=pieces)})


def load(
    path: Path, whole: torch.Tensor, ranks: list[list[Box]], chunks: list[ChunkStorageMetadata] | None = None
) -> list[Wanted]:
    planners = [Wanted(whole, boxes) for boxes in ranks]
    for planner in planners:
        reader = ReshardReader(path)
        metadata = reader.read_metadata()
        if chunks is not None:
            metadata.state_dict_metadata["w"].chunks = chunks
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
    for planner, wanted in zip(load(tmp_path, whole, rows(whole.shape, loading)), rows(whole.shape, loading), strict=True):
        assert all(same_bytes(t, region(whole, box)) for t, box in zip(planner.tensors, wanted, strict=True))
    assert checkpoint.verify(tmp_path).ok


def test_a_plan_may_count_from_the_chunks_of_another_readers_metadata(tmp_path: Path):
    whole, wanted = values_of((7, 5), "F32", 1), rows((7, 5), 2)
    save(tmp_path, whole, [[((0, 0), (7, 5))]])
    chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for boxes in rows((7, 5), 3) for box in boxes]
    for planner, boxes in zip(load(tmp_path, whole, wanted, chunks), wanted, strict=True):
        assert all(same_bytes(t, region(whole, box)) for t, box in zip(planner.tensors, boxes, strict=True))


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


def test_ranks_that_do_not_agree_are_refused(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="use_collectives"):
        ReshardWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UnsupportedError, match="not one that this writer prepared"):
        ReshardWriter(tmp_path).write_data(SavePlan([]), DefaultSavePlanner())
