"""From a carried-out save plan to the catalog: sort the rows by tensor, share equal boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorTable, ValueEntry
from ..geometry.ordering import group_ids, lex_order
from ..geometry.runs import I64
from .save_plan import SavePlan


@dataclass(frozen=True, slots=True)
class WrittenItems:
    """Where each write item of the plan went: index of its file, and bytes from that file's beginning."""

    file: I64
    offset: I64


def build_catalog(
    plan: SavePlan,
    written: WrittenItems,
    *,
    files: Sequence[FileEntry],
    values: Sequence[ValueEntry],
    save_id: str,
    created_s: float,
    metadata: Any,
) -> Catalog:
    """The catalog of a save whose bytes are all written."""
    tables = plan.tables
    box, first = group_ids(np.hstack([plan.offsets, plan.lengths]))
    order = lex_order(plan.tensor, box, plan.start)
    return Catalog(
        save_id=save_id,
        created_s=created_s,
        mesh=plan.mesh,
        metadata=metadata,
        tensors_table=TensorTable(
            names=tables.names,
            dtype=tables.dtype,
            kind=tables.kind,
            ndim=tables.ndim,
            shape=tables.shape,
            alias=tables.alias,
            placement=plan.placement,
            row_start=np.searchsorted(plan.tensor[order], np.arange(len(tables.names) + 1)).astype(np.int64),
            optimizer=tables.optimizer,
            key=tables.key,
            parameter=tables.parameter,
        ),
        placements=plan.placements,
        boxes=BoxTable(plan.offsets.take(first, axis=0), plan.lengths.take(first, axis=0)),
        rows=RowTable(box[order], plan.start[order], plan.count[order], written.file[order], written.offset[order]),
        files=tuple(files),
        values_table=tuple(values),
    )
