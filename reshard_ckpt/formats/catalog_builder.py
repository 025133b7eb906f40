"""Building a catalog from a list of foreign tensors: sort them by name, store equal boxes once, and check the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..core.catalog.links import link_columns
from ..core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from ..core.catalog.specs import Ints, StateLink, ValueKind
from ..core.geometry.dtypes import CODES
from ..core.geometry.ordering import group_ids
from ..core.geometry.runs import I64, pad_rows
from ..core.trees import name_of
from ..errors import CheckpointError, CorruptError, NameCollisionError
from ..format.catalog_check import problems
from ..format.links import linked
from ..format.values import encode_path, encode_value
from ..torchfile.bounds import refuse_excess


@dataclass(frozen=True, slots=True)
class FilePart:
    """Where a part of a tensor lies: elements ``[start, start + count)`` of a box, in row-major order, in one file.

    `file` is the number of the file, and `offset` the part's first byte in it. By default, the part is the whole box.
    """

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
    """A tensor of a foreign checkpoint. If it shares the bytes of another one, `alias_of` names that, and it has no parts."""

    name: str
    dtype: str
    shape: Ints
    parts: tuple[FilePart, ...]
    alias_of: str | None = None
    link: StateLink | None = None


def whole(name: str, dtype: str, shape: Ints, file: int, offset: int, link: StateLink | None = None) -> ForeignTensor:
    """Describe a tensor that lies whole, in row-major order, in file number `file` from byte `offset` on."""
    part = FilePart((0,) * len(shape), shape, file, offset)
    return ForeignTensor(name, dtype, shape, (part,) if prod(shape) else (), link=link)


def foreign_file(key: str, size: int, format: str, rank: int = 0) -> FileEntry:
    """Describe a file without checksums; `rank` is the rank that wrote it, if the format tells."""
    return FileEntry(key, size, "", b"", format, rank)


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
        The name of the format. It takes the place of the save id, which foreign checkpoints lack.
    where
        The name of the checkpoint in messages.

    Raises
    ------
    CorruptError
        The tensors do not fit into their files, or break another rule of catalogs.
    UnsupportedError
        The tensors have many times the bytes of their files.
    NameCollisionError
        Two tensors, or a tensor and a value, have one name.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    _check_names([tensor.name for tensor in ordered] + [value.name for value in values], where)
    parts = [part for tensor in ordered for part in tensor.parts]
    width = num_dims(ordered)
    # offsets[p], lengths[p]: box of part p, padded to `width` dims; start[p], count[p]: its run; file[p], offset[p]: its place
    try:
        offsets, lengths = pad_rows([part.offsets for part in parts], width, 0), pad_rows([p.lengths for p in parts], width, 1)
        columns = [[p.start for p in parts], [p.num_elements for p in parts], [p.file for p in parts], [p.offset for p in parts]]
        start, count, file, offset = (np.array(column, np.int64) for column in columns)
    except OverflowError:
        raise CorruptError(f"{where}: a size or an offset is over 2⁶³; use another checkpoint") from None
    # box[p]: number of part p's box, where equal boxes have one number; first[b]: a part with box b
    box, first = group_ids(np.hstack([offsets, lengths]))
    boxes, rows = BoxTable(offsets[first], lengths[first]), RowTable(box, start, count, file, offset)
    num_rows = np.array([len(tensor.parts) for tensor in ordered], np.int64)
    return assemble(ordered, num_rows, boxes, rows, files, values, format=format, where=where, metadata=metadata)


def num_dims(tensors: Sequence[ForeignTensor]) -> int:
    """Return the number of columns that these tensors' boxes need: the most dims of any tensor, and at least 1."""
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
    """Build and check the catalog of tensors that are sorted by name; `num_rows` is the number of rows of each, in that order."""
    names = [tensor.name for tensor in tensors]
    index = {name: i for i, name in enumerate(names)}
    try:
        shape = pad_rows([tensor.shape for tensor in tensors], num_dims(tensors), 1)
    except OverflowError:
        raise CorruptError(f"{where}: a size is over 2⁶³; use another checkpoint") from None
    catalog = Catalog(
        save_id=format,
        created_s=0.0,  # so that copies of one checkpoint on the disks of several nodes have equal catalogs
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
    refuse_excess(catalog, where)
    return catalog


def _check_names(names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _named_twice(name, where)
        seen.add(name)


def _named_twice(name: str, where: str) -> NameCollisionError:
    return NameCollisionError(f"{where}: {name} occurs twice; open the file that has the one you want by its own path")


class CatalogBuilder:
    """Builds the catalog over the files of another library: add the files, then say where the elements of each tensor lie.

    Parameters
    ----------
    format
        The name of the format.
    where
        The URL of the checkpoint, for messages.

    Examples
    --------
    Two files hold the two halves of one tensor:

    >>> builder = CatalogBuilder("halves", "memory://doc")
    >>> builder.tensor("model.w", "F32", (4, 2))
    >>> for number, key in enumerate(["upper.bin", "lower.bin"]):
    ...     file = builder.file(key, size=16)
    ...     builder.piece("model.w", offsets=(2 * number, 0), lengths=(2, 2), file=file, offset=0)
    >>> catalog = builder.finish()
    >>> catalog.names, catalog.shape(0)
    (('model.w',), (4, 2))
    """

    def __init__(self, format: str, where: str) -> None:
        self._format, self._where = format, where
        self._files: list[FileEntry] = []
        self._tensors: dict[str, ForeignTensor] = {}
        self._parts: dict[str, list[FilePart]] = {}
        self._values: list[ValueEntry] = []
        self._unreadable: dict[str, CheckpointError] = {}

    def file(self, key: str, size: int) -> int:
        """Add a file of `size` bytes; return its number, which `piece` takes."""
        self._files.append(foreign_file(key, size, self._format))
        return len(self._files) - 1

    def tensor(self, name: str, dtype: str, shape: Ints, *, link: StateLink | None = None) -> None:
        """Add a tensor: its global shape, and its dtype as safetensors names it, such as ``"BF16"``.

        `link` names the parameter if this is a tensor of an optimizer's state. By default, the link follows from the name.
        """
        self._add(ForeignTensor(name, dtype, shape, (), link=link))

    def piece(
        self, name: str, *, offsets: Ints, lengths: Ints, file: int, offset: int, start: int = 0, count: int | None = None
    ) -> None:
        """Say where a part of a tensor lies: the elements `start` to ``start + count`` of a box, in row-major order.

        Parameters
        ----------
        offsets, lengths
            The box, in global coordinates. By default, the part is all of it.
        file, offset
            The number of the file, and the byte of the part's first element. The others follow without gaps.
        """
        part = FilePart(offsets, lengths, file, offset, start, count)
        if part.num_elements:
            self._parts[name].append(part)

    def alias(self, name: str, of: str) -> None:
        """Add a second name for the tensor `of`, which shares its bytes, as tied weights do."""
        held = self._tensors[of]
        self._add(ForeignTensor(name, held.dtype, held.shape, (), alias_of=of))

    def value(self, path: Sequence[Any], value: Any) -> None:
        """Add a value other than a tensor by its keys in the state: ``("extra", "step")`` gets the name ``extra.step``."""
        name = name_of(path)
        self._values.append(ValueEntry(name, encode_path(list(path)), ValueKind.PLAIN, encode_value(value, name)))

    def unreadable(self, name: str, why: CheckpointError) -> None:
        """Leave out a tensor or a value that cannot be read. A load that wants it raises `why`; other loads succeed."""
        self._unreadable[name] = why

    def finish(self, metadata: Any = None) -> Catalog:
        """Build and check the catalog.

        Raises
        ------
        CorruptError
            Pieces overlap, leave elements out, or lie outside of their files.
        NameCollisionError
            Two tensors, or a tensor and a value, have one name.
        """
        tensors = [replace(tensor, parts=tuple(self._parts[tensor.name])) for tensor in self._tensors.values()]
        values = sorted(self._values, key=lambda value: value.name)
        catalog = linked(foreign_catalog(tensors, self._files, values, format=self._format, metadata=metadata, where=self._where))
        return replace(catalog, unreadable=self._unreadable)

    def _add(self, tensor: ForeignTensor) -> None:
        if tensor.name in self._tensors:
            raise _named_twice(tensor.name, self._where)
        self._tensors[tensor.name], self._parts[tensor.name] = tensor, []
