"""The plan of an offline reshard: from a catalog alone, plan the save that a job on the new mesh would have made.

1. `core.planning.target_placement` places each tensor on the new mesh. `core.planning.target_pieces` lists the pieces that each
   new rank would have captured.
2. The planner of saves (`core.planning.save_plan`) divides replicas over the new ranks, as it would in that job.
3. The writer of saves lays out the files of each new rank (`lay_out_members`), so a new rank gets the files that it would have
   written itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core.catalog.model import Catalog, ValueEntry
from ...core.catalog.placements import Box
from ...core.catalog.specs import ITEM_BYTES, AxisPlacement, Mesh, Replication, TensorSpec, ValueKind, blob_name
from ...core.planning.local_metadata import tensor_columns
from ...core.planning.save_plan import SavePlan, plan_save
from ...core.planning.target_pieces import TargetRows, as_job_metadata, target_rows
from ...core.planning.target_placement import TargetPlacement, TargetTopology, place
from ...format.shard_file import Member, make_member
from ..loading.stream import Run
from ..saving.write import FileLayout, lay_out_members
from .write_order import Item


class Choice(NamedTuple):
    """The part of a checkpoint to reshard: names of tensors and of values, and the new dtypes of converted tensors by name."""

    tensors: Sequence[str]
    values: Sequence[str]
    dtypes: Mapping[str, str]


class ByteSource(NamedTuple):
    """The source of a tensor of the result: a tensor's index in the old catalog, and the dtype to convert to, if any."""

    tensor: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The plan of an offline reshard, the same on every process: which new rank would hold and write which rows.

    Attributes
    ----------
    catalog
        The old catalog.
    plan
        The rows that each new rank writes.
    values
        The values of the new catalog.
    mesh
        The mesh of the new ranks.
    specs
        The tensors of the result, and then its blobs (the bytes of large values).
    placed
        The placement of each tensor of `specs` on the new mesh; blobs have none.
    sources
        For each of `specs`, the tensor of the old catalog that its bytes come from.
    held
        The rows that all new ranks would hold, in order of rank.
    boxes
        The boxes to which the rows of `held` refer.
    """

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
        """Lay out the files that a rank of the new mesh would have written."""
        return lay_out_members([self._member(*item) for item in self._items(rank)], save_id, rank)

    def _items(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the write items of a new rank: the tensor's number in the plan, a row of `held`, first element, and count."""
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
        """List the write items of a new rank, in the order in which they lie in its files."""
        out = []
        for tensor, row, start, count in self._items(rank):
            index = int(self.held.tensor[row])
            source, each = self.sources[index], ITEM_BYTES[self.specs[index].dtype]
            run = Run(source.tensor, *self.boxes[int(self.held.box[row])], start, count, source.dtype)
            out.append(Item((-each, tensor), run, each))
        return out


def plan_reshard(catalog: Catalog, choice: Choice, topology: TargetTopology) -> ReshardPlan:
    """Plan the save of every rank of the new mesh.

    Raise `UsageError` if the catalog and the rules of `topology` do not determine the new placement of some tensor.
    """
    placed = place(catalog, choice.tensors, topology)
    specs, sources = _tensors(catalog, choice, placed)
    tensors = len(specs)
    chosen = set(choice.values)
    entries = [value for value in catalog.values_table if value.name in chosen]
    holders: dict[int, Sequence[int]] = {}
    blobs_of: dict[str, list[str]] = {value.name: [] for value in entries}
    for value in entries:
        for which, blob in enumerate(value.blobs):
            own = value.kind is ValueKind.PER_RANK
            # A `PerRank` value has one blob for each old rank. With as many new ranks, blob i goes to rank i; with more or fewer,
            # blobs are spread evenly over the new ranks.
            new_rank = which * topology.mesh.size // len(value.blobs)
            holders[len(specs)] = [new_rank] if own else range(topology.mesh.size)
            name = blob_name(value.name, which if own else None)
            blobs_of[value.name].append(name)
            specs.append(TensorSpec(name, "U8", catalog.shape(blob), (), Replication.PLAIN))
            sources.append(ByteSource(blob, None))
    names = [spec.name for spec in specs]
    shapes = [spec.shape for spec in specs]
    held, boxes = target_rows(shapes, [placed[name] for name in names[:tensors]], names[:tensors], topology.mesh, holders)
    offered = tensor_columns(specs, len(specs) - tensors, topology.mesh)
    plan = plan_save(as_job_metadata(offered, held, boxes, topology.mesh.size))
    # All replicas are written from the same source bytes, so no replicas are compared.
    plan = replace(plan, checks=plan.checks.take(slice(0)))
    index = {name: i for i, name in enumerate(plan.tables.names)}
    values = tuple(replace(value, blobs=tuple(index[name] for name in blobs_of[value.name])) for value in entries)
    where = tuple(placed[name] for name in names[:tensors])
    return ReshardPlan(catalog, plan, values, topology.mesh, tuple(specs), where, tuple(sources), held, boxes)


def _tensors(
    catalog: Catalog, choice: Choice, placed: Mapping[str, TargetPlacement]
) -> tuple[list[TensorSpec], list[ByteSource]]:
    """Return the specs of the result's tensors, and their sources.

    Names that shared bytes (aliases) share them again, if their new dtypes are equal.
    """
    first: dict[tuple[int, str], str] = {}  # the name that owns the bytes, by old tensor and new dtype
    # Owners of bytes come before their aliases, so that the owner is the main name if it is chosen too.
    ordered = sorted(choice.tensors, key=lambda name: catalog.source(catalog.index(name)) != catalog.index(name))
    links = catalog.links()
    specs, sources = [], []
    for name in ordered:
        index = catalog.index(name)
        saved = catalog.dtype(index)
        dtype = choice.dtypes.get(name, saved)
        main = first.setdefault((catalog.source(index), dtype), name)
        alias = None if main == name else main
        shape, declared = catalog.shape(index), _declared(placed[main])
        specs.append(TensorSpec(name, dtype, shape, (), Replication.DECLARED, declared, alias, links.get(name)))
        sources.append(ByteSource(index, None if dtype == saved else dtype))
    return specs, sources


def _declared(placed: TargetPlacement) -> tuple[AxisPlacement, ...]:
    """Return the placements on mesh axes that a job would declare for a tensor, without those on resident axes.

    There are none for a tensor that is flat on an axis or that follows another tensor. The pieces of each rank show these cases
    already.
    """
    if placed.follows is not None or placed.flat_axis is not None:
        return ()
    return tuple(p for p in placed.axes if p.kind not in ("flat", "resident"))
