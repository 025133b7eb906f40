"""Build the catalog of a save that has been written: sort the rows by tensor, and share equal boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ..catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorDescriptions, TensorTable, ValueEntry
from ..geometry.columns import group_ids, lex_order
from ..geometry.runs import I64
from .merge import MergedTables
from .save_plan import SavePlan


def build_catalog(
    plan: SavePlan,
    file: I64,
    offset: I64,
    *,
    files: Sequence[FileEntry],
    values: Sequence[ValueEntry],
    save_id: str,
    created_s: float,
    metadata: Any,
) -> Catalog:
    """Build the catalog of a save whose bytes are all written.

    Parameters
    ----------
    file, offset
        Where each write item of the plan lies: the index of its file, and bytes from the beginning of that file.
    """
    # box[i]: the distinct box of write item i; order: the items by tensor, box and start, which is the order of rows.
    box, first = group_ids(np.hstack([plan.offsets, plan.lengths]))
    order = lex_order(plan.tensor, box, plan.start)
    return Catalog(
        save_id=save_id,
        created_s=created_s,
        mesh=plan.mesh,
        metadata=metadata,
        tensors_table=tensor_table(plan.tables, plan.placement, plan.tensor[order]),
        placements=plan.placements,
        boxes=BoxTable(plan.offsets.take(first, axis=0), plan.lengths.take(first, axis=0)),
        rows=RowTable(box[order], plan.start[order], plan.count[order], file[order], offset[order]),
        files=tuple(files),
        values_table=tuple(values),
    )


def tensor_table(tables: MergedTables, placement: I64, tensor: I64) -> TensorTable:
    """Build the catalog's table of tensors from merged tensors.

    Parameters
    ----------
    placement
        The index of each tensor's placement, or -1.
    tensor
        The tensor of each row; ascending.
    """
    described = {field.name: getattr(tables, field.name) for field in fields(TensorDescriptions)}
    row_start = np.searchsorted(tensor, np.arange(len(tables.names) + 1)).astype(np.int64)
    return TensorTable(**described, placement=placement, row_start=row_start)
