"""Selection of some tensors and values of a catalog, over the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..geometry.runs import ranges
from .model import Catalog, RowTable
from .specs import CODES


def select_entries(catalog: Catalog, tensors: Sequence[str], values: Sequence[str]) -> Catalog:
    """Return the catalog with only these tensors, sorted by name even if names were changed, and with these values.

    If a selected tensor is an alias of one that is not selected, it takes over the rows, and other selected aliases of the same
    bytes become its aliases.
    """
    table, chosen = catalog.tensors_table, frozenset(values)
    kept = [value for value in catalog.values_table if value.name in chosen]
    wanted = {*map(catalog.index, tensors), *(blob for value in kept for blob in value.blobs)}
    # taken: the old index of each new entry; source: the old index of the tensor that has its bytes.
    taken = np.array(sorted(wanted, key=table.names.__getitem__), np.int64)
    source = np.where(table.alias >= 0, table.alias, np.arange(len(table.names)))[taken]
    # Entries by their source. First of each group comes the source itself if it was selected, else the first of its aliases.
    order = np.lexsort((taken, taken != source, source))
    first = np.concatenate([[True], source[order][1:] != source[order][:-1]]) if len(order) else np.zeros(0, bool)
    # leader[i]: the new index of the first entry that shares the bytes of entry i; alias: the same, -1 for the leader itself.
    leader = np.empty(len(taken), np.int64)
    leader[order] = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    alias = np.where(leader == np.arange(len(taken)), -1, leader)
    # counts[i]: rows of entry i; an alias has none of its own. row: the old index of each new row.
    counts = np.where(alias < 0, np.diff(table.row_start)[source], 0)
    owner, step = ranges(counts)
    row = table.row_start[source[owner]] + step
    place = {int(old): new for new, old in enumerate(taken.tolist())}
    rows = catalog.rows
    return replace(
        catalog,
        tensors_table=replace(
            table,
            names=tuple(table.names[i] for i in taken.tolist()),
            dtype=table.dtype[taken],
            kind=table.kind[taken],
            ndim=table.ndim[taken],
            shape=table.shape[taken],
            alias=alias,
            placement=table.placement[taken],
            row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            optimizer=table.optimizer[taken],
            key=table.key[taken],
            parameter=np.array([place.get(old, -1) for old in table.parameter[taken].tolist()], np.int64),
        ),
        rows=RowTable(rows.box[row], rows.start[row], rows.count[row], rows.file[row], rows.offset[row]),
        values_table=tuple(replace(value, blobs=tuple(place[blob] for blob in value.blobs)) for value in kept),
        unreadable={},
    )


def retyped(catalog: Catalog, dtypes: Mapping[str, str]) -> Catalog:
    """Return the catalog as it will be once these tensors are converted; tensors that then differ in dtype share no bytes.

    Its rows are still those of the bytes before: it describes the result, and cannot be read from.
    """
    table = catalog.tensors_table
    dtype = table.dtype.copy()
    for name, code in dtypes.items():
        dtype[catalog.index(name)] = CODES.index(code)
    # shares[t]: tensor t is an alias, and still has the dtype of the tensor that holds its bytes.
    shares = (table.alias >= 0) & (dtype == dtype[np.maximum(table.alias, 0)])
    return replace(catalog, tensors_table=replace(table, dtype=dtype, alias=np.where(shares, table.alias, -1)))
