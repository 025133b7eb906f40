"""Building a catalog from a list of foreign tensors: sorted by name, boxes shared, and checked as every catalog is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..core.catalog.links import link_columns
from ..core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from ..core.catalog.specs import Ints, StateLink
from ..core.geometry.dtypes import CODES
from ..core.geometry.ordering import group_ids
from ..core.geometry.runs import I64, pad_rows
from ..errors import CorruptError, NameCollisionError
from ..format.catalog_check import problems


@dataclass(frozen=True, slots=True)
class FilePart:
    """A run of a box of a tensor, in row-major order, in file number `file` from byte `offset` on; by default the whole box."""

    offsets: Ints
    lengths: Ints
    file: int
    offset: int
    start: int = 0
    count: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.lengths) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of a foreign checkpoint; `alias_of` names another whose bytes it shares, and it then has no parts."""

    name: str
    dtype: str
    shape: Ints
    parts: tuple[FilePart, ...]
    alias_of: str | None = None
    link: StateLink | None = None


def whole(name: str, dtype: str, shape: Ints, file: int, offset: int, link: StateLink | None = None) -> ForeignTensor:
    """Describe a tensor that lies whole, in row-major order, at one place."""
    part = FilePart((0,) * len(shape), shape, file, offset)
    return ForeignTensor(name, dtype, shape, (part,) if prod(shape) else (), link=link)


def foreign_file(key: str, size: int, format: str) -> FileEntry:
    """Describe a file that has no checksums."""
    return FileEntry(key, size, "", b"", format, 0)


def foreign_catalog(
    tensors: Iterable[ForeignTensor],
    files: Sequence[FileEntry],
    values: Sequence[ValueEntry] = (),
    *,
    format: str,
    metadata: Any = None,
    where: str,
) -> Catalog:
    """Build the catalog of foreign tensors.

    Parameters
    ----------
    format
        The name of the format, which stands for the save id that there is none of.
    where
        What the checkpoint is called in messages.

    Raises
    ------
    CorruptError
        The tensors do not fit into their files, or break another rule of catalogs.
    NameCollisionError
        Two tensors, or a tensor and a value, have one name.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    _check_names([tensor.name for tensor in ordered] + [value.name for value in values], where)
    parts = [part for tensor in ordered for part in tensor.parts]
    width = num_dims(ordered)
    try:
        offsets, lengths = pad_rows([part.offsets for part in parts], width, 0), pad_rows([p.lengths for p in parts], width, 1)
        columns = [[p.start for p in parts], [p.num_elements for p in parts], [p.file for p in parts], [p.offset for p in parts]]
        start, count, file, offset = (np.array(column, np.int64) for column in columns)
    except OverflowError:
        raise CorruptError(f"{where}: a size or an offset is over 2⁶³; use another checkpoint") from None
    # box: the number of each part's box; first: of each box, a part that has it
    box, first = group_ids(np.hstack([offsets, lengths]))
    boxes, rows = BoxTable(offsets[first], lengths[first]), RowTable(box, start, count, file, offset)
    num_rows = np.array([len(tensor.parts) for tensor in ordered], np.int64)
    return assemble(ordered, num_rows, boxes, rows, files, values, format=format, where=where, metadata=metadata)


def num_dims(tensors: Sequence[ForeignTensor]) -> int:
    """Return the width of the columns of a catalog of these tensors."""
    return max((len(tensor.shape) for tensor in tensors), default=1) or 1


def assemble(
    tensors: Sequence[ForeignTensor],
    num_rows: I64,
    boxes: BoxTable,
    rows: RowTable,
    files: Iterable[FileEntry],
    values: Iterable[ValueEntry],
    *,
    format: str,
    where: str,
    metadata: Any = None,
) -> Catalog:
    """Build and check the catalog of tensors in order of name, each of which has as many of the rows as `num_rows` says."""
    names = [tensor.name for tensor in tensors]
    index = {name: i for i, name in enumerate(names)}
    try:
        shape = pad_rows([tensor.shape for tensor in tensors], num_dims(tensors), 1)
    except OverflowError:
        raise CorruptError(f"{where}: a size is over 2⁶³; use another checkpoint") from None
    catalog = Catalog(
        save_id=format,
        created_s=0.0,  # so that copies of one checkpoint, on the disks of several nodes, have one catalog
        mesh=None,
        metadata=metadata,
        tensors_table=TensorTable(
            names=tuple(names),
            dtype=np.array([CODES.index(tensor.dtype) for tensor in tensors], np.uint8),
            kind=np.full(len(tensors), TensorKind.TENSOR, np.uint8),
            ndim=np.array([len(tensor.shape) for tensor in tensors], np.int64),
            shape=shape,
            alias=np.array([-1 if tensor.alias_of is None else index.get(tensor.alias_of, -1) for tensor in tensors], np.int64),
            placement=np.full(len(tensors), -1, np.int64),
            row_start=np.append(0, np.cumsum(num_rows)),
            **link_columns(names, [tensor.link for tensor in tensors], index),
        ),
        placements=(),
        boxes=boxes,
        rows=rows,
        files=tuple(files),
        values_table=tuple(values),
    )
    for problem in problems(catalog):
        raise CorruptError(f"{where}: {problem}; use another checkpoint")
    return catalog


def _check_names(names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise NameCollisionError(f"{where}: {name} occurs twice; open the file that has the one you want by its own path")
        seen.add(name)
