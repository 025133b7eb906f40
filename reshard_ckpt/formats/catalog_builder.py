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
from ..core.geometry.runs import I64
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


def build_catalog(
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
    index = {tensor.name: i for i, tensor in enumerate(ordered)}
    _check_names([tensor.name for tensor in ordered] + [value.name for value in values], where)
    width = max((len(tensor.shape) for tensor in ordered), default=1) or 1
    parts = [part for tensor in ordered for part in tensor.parts]
    offsets = _padded([part.offsets for part in parts], width, 0)
    lengths = _padded([part.lengths for part in parts], width, 1)
    # box: the number of each part's box; first: of each box, a part that has it
    box, first = group_ids(np.hstack([offsets, lengths]))
    catalog = Catalog(
        save_id=format,
        created_s=0.0,  # so that copies of one checkpoint, on the disks of several nodes, have one catalog
        mesh=None,
        metadata=metadata,
        tensors_table=TensorTable(
            names=tuple(tensor.name for tensor in ordered),
            dtype=np.array([CODES.index(tensor.dtype) for tensor in ordered], np.uint8),
            kind=np.full(len(ordered), TensorKind.TENSOR, np.uint8),
            ndim=_column([len(tensor.shape) for tensor in ordered]),
            shape=_padded([tensor.shape for tensor in ordered], width, 1),
            alias=_column([-1 if tensor.alias_of is None else index[tensor.alias_of] for tensor in ordered]),
            placement=np.full(len(ordered), -1, np.int64),
            row_start=_column(np.cumsum([0, *(len(tensor.parts) for tensor in ordered)])),
            **link_columns([tensor.name for tensor in ordered], [tensor.link for tensor in ordered], index),
        ),
        placements=(),
        boxes=BoxTable(offsets[first], lengths[first]),
        rows=RowTable(
            box,
            _column([part.start for part in parts]),
            _column([part.num_elements for part in parts]),
            _column([part.file for part in parts]),
            _column([part.offset for part in parts]),
        ),
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


def _column(values: Any) -> I64:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise CorruptError("a size or an offset is over 2⁶³; use another checkpoint") from None


def _padded(rows: Sequence[Ints], width: int, fill: int) -> I64:
    padded = [(fill,) * (width - len(row)) + tuple(row) for row in rows]
    return _column(padded).reshape(len(rows), width)
