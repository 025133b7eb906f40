"""The plan of an offline reshard: the save that a job of the new topology would have made, planned from a catalog alone.

1. `target_placement` places each tensor on the new mesh, `target_pieces` says which pieces each new rank would have captured.
2. The planner of saves (`save_plan`) divides replicas over the new ranks, as it would in that job.
3. Each new rank's files are laid out by the writer of saves (`lay_out_members`), so they are what that rank would have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.catalog.model import Catalog, ValueEntry
from ...core.catalog.placements import Box
from ...core.catalog.specs import AxisPlacement, Mesh, Replication, TensorSpec, ValueKind, blob_name
from ...core.geometry.dtypes import ITEM_BYTES
from ...core.geometry.runs import I64
from ...core.planning.local_metadata import tensor_columns
from ...core.planning.save_plan import Checks, SavePlan, plan_save
from ...core.planning.target_pieces import TargetRows, as_job_metadata, target_rows
from ...core.planning.target_placement import TargetPlacement, TargetTopology, place
from ...format.shard_file import Member, make_member
from ..loading.stream import Run
from ..saving.write import FileLayout, lay_out_members
from .write_order import Item


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of a checkpoint that is resharded: names of tensors and values, and dtypes of tensors that are converted."""

    tensors: Sequence[str]
    values: Sequence[str]
    dtypes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ByteSource:
    """Where the bytes of a tensor of the result are: the tensor of the catalog, and the dtype to convert it to."""

    tensor: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """A reshard, planned: `specs` are the tensors of the result and then its blobs, `placed` how the tensors lie, `sources` where
    the bytes of all are."""

    catalog: Catalog
    plan: SavePlan
    values: tuple[ValueEntry, ...]
    mesh: Mesh
    specs: tuple[TensorSpec, ...]
    placed: tuple[TargetPlacement, ...]
    sources: tuple[ByteSource, ...]
    held: TargetRows
    boxes: Sequence[Box]

    def layouts(self, rank: int, save_id: str) -> list[FileLayout]:
        """Lay out the files of a new rank."""
        return lay_out_members([self._member(*item) for item in self._items(rank)], save_id, rank)

    def _items(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """List a rank's write items: the tensor's number in the plan, the row of `held`, first element and count."""
        items, first_row = self.plan.items_of(rank), int(np.searchsorted(self.held.rank, rank))
        # `local` counts a rank's own rows; `held` has those of all ranks, in order of rank.
        columns = (
            self.plan.tensor[items],
            first_row + self.plan.local[items],
            self.plan.part_start[items],
            self.plan.part_count[items],
        )
        return zip(*(column.tolist() for column in columns), strict=True)

    def _member(self, _: int, row: int, start: int, count: int) -> Member:
        spec = self.specs[int(self.held.tensor[row])]
        if int(self.held.tensor[row]) >= len(self.placed):  # a blob
            return Member(spec.name, spec.dtype, spec.shape, count)
        return make_member(spec.name, spec.dtype, spec.shape, *self.boxes[int(self.held.box[row])], start, count)

    def items(self, rank: int) -> list[Item]:
        """List a new rank's write items, in the order of its files."""
        out = []
        for tensor, row, start, count in self._items(rank):
            index = int(self.held.tensor[row])
            source, each = self.sources[index], ITEM_BYTES[self.specs[index].dtype]
            run = Run(source.tensor, *self.boxes[int(self.held.box[row])], start, count, source.dtype)
            out.append(Item((-each, tensor), run, each))
        return out


def plan_reshard(catalog: Catalog, choice: Choice, topology: TargetTopology) -> ReshardPlan:
    """Plan what the ranks of the new mesh save.

    Raises
    ------
    UsageError
        The topology cannot be told from the catalog and the rules.
    """
    placed = place(catalog, choice.tensors, topology)
    specs, sources = _tensors(catalog, choice, placed)
    tensors = len(specs)
    chosen = set(choice.values)
    entries = [value for value in catalog.values_table if value.name in chosen]
    holders: dict[int, Sequence[int]] = {}
    for value in entries:
        for which, blob in enumerate(value.blobs):
            own = value.kind is ValueKind.PER_RANK
            # What each rank had of its own goes to the rank of the same number, or evenly to another number of ranks.
            new_rank = which * topology.mesh.size // len(value.blobs)
            holders[len(specs)] = [new_rank] if own else range(topology.mesh.size)
            name = blob_name(value.name, which if own else None)
            specs.append(TensorSpec(name, "U8", catalog.shape(blob), (), Replication.PLAIN))
            sources.append(ByteSource(blob, None))
    names = [spec.name for spec in specs]
    shapes = [spec.shape for spec in specs]
    held, boxes = target_rows(shapes, [placed[name] for name in names[:tensors]], names[:tensors], topology.mesh, holders)
    offered = tensor_columns(specs, len(specs) - tensors, topology.mesh)
    plan = plan_save(as_job_metadata(offered, held, boxes, topology.mesh.size))
    none: I64 = np.zeros(0, np.int64)
    # The replicas are made of the same bytes: there is nothing to compare.
    plan = replace(plan, checks=Checks(none, none, none, none, none, none, np.zeros(0, np.uint8)))
    index = {name: i for i, name in enumerate(plan.tables.names)}
    values = tuple(_value(value, index) for value in entries)
    where = tuple(placed[name] for name in names[:tensors])
    return ReshardPlan(catalog, plan, values, topology.mesh, tuple(specs), where, tuple(sources), held, boxes)


def _tensors(
    catalog: Catalog, choice: Choice, placed: Mapping[str, TargetPlacement]
) -> tuple[list[TensorSpec], list[ByteSource]]:
    """The tensors of the result; names that shared bytes still do, where they have the same dtype."""
    first: dict[tuple[int, str], str] = {}
    ordered = sorted(choice.tensors, key=lambda name: catalog.source(catalog.index(name)) != catalog.index(name))
    specs, sources = [], []
    for name in ordered:
        index = catalog.index(name)
        saved = catalog.dtype(index)
        dtype = choice.dtypes.get(name, saved)
        main = first.setdefault((catalog.source(index), dtype), name)
        alias = None if main == name else main
        shape, declared = catalog.shape(index), _declared(placed[main])
        specs.append(TensorSpec(name, dtype, shape, (), Replication.DECLARED, declared, alias, catalog.link(index)))
        sources.append(ByteSource(index, None if dtype == saved else dtype))
    return specs, sources


def _declared(placed: TargetPlacement) -> tuple[AxisPlacement, ...]:
    """List what a job would declare: nothing of flat state, and nothing of which ranks hold a tensor, as pieces show both."""
    if placed.follows is not None or placed.flat_axis is not None:
        return ()
    return tuple(p for p in placed.axes if p.kind not in ("flat", "resident"))


def _value(value: ValueEntry, index: Mapping[str, int]) -> ValueEntry:
    """The same value, whose blobs are tensors of the result."""
    own = value.kind is ValueKind.PER_RANK
    names = [blob_name(value.name, which if own else None) for which in range(len(value.blobs))]
    return replace(value, blobs=tuple(index[name] for name in names))
