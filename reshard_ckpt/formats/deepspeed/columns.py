"""A catalog over foreign files, collected as columns: a folder of a thousand ranks has millions of rows.

Tensors, boxes and files are numbered as they come; rows come as whole arrays. `CatalogColumns.catalog` sorts the tensors by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core.catalog.links import link_columns
from ...core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from ...core.catalog.specs import Ints, StateLink, ValueKind
from ...core.geometry.dtypes import CODES
from ...core.geometry.runs import I64, pad_rows
from ...errors import CheckpointError, CorruptError
from ...format.catalog_check import problems
from ...format.torch_dtypes import TORCH_DTYPES
from ...format.values import encode_path, encode_value
from ..catalog_builder import foreign_file

Numbers = I64 | int


class CatalogColumns:
    """What a catalog is made of, on its way to one.

    Parameters
    ----------
    format
        The name of the format, which stands for the save id that there is none of.
    where
        What the checkpoint is called in messages.
    """

    def __init__(self, format: str, where: str) -> None:
        self.where = where
        self.unreadable: dict[str, CheckpointError] = {}
        self._format = format
        self._files: dict[str, int] = {}
        self._file_sizes: list[int] = []
        self._tensors: dict[str, int] = {}
        self._dtypes: list[str] = []
        self._shapes: list[Ints] = []
        self._links: list[StateLink | None] = []
        self._aliases: dict[str, str] = {}
        self._boxes: dict[tuple[Ints, Ints], int] = {}
        self._rows: list[tuple[I64, ...]] = []
        self._values: dict[str, ValueEntry] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors so far."""
        return tuple(self._tensors)

    def shapes(self) -> dict[str, Ints]:
        """Return the shapes of the tensors so far, by name."""
        return {name: self._shapes[number] for name, number in self._tensors.items()}

    def place(self, name: str, element: int) -> tuple[str, int, torch.dtype] | None:
        """Return the file and the byte at which an element of a tensor lies, as far as it lies in runs of the whole tensor."""
        wanted, dtype = self._tensors[name], TORCH_DTYPES[self._dtypes[self._tensors[name]]]
        whole = self._boxes.get(((0,) * len(self._shapes[wanted]), self._shapes[wanted]), -1)
        for tensor, box, start, count, file, offset in self._rows:
            for i in np.flatnonzero((tensor == wanted) & (box == whole) & (start <= element) & (element < start + count)):
                return list(self._files)[file[i]], int(offset[i] + (element - start[i]) * dtype.itemsize), dtype
        return None

    def file(self, key: str, size: int) -> int:
        """Return the number of a file."""
        if key not in self._files:
            self._files[key] = len(self._files)
            self._file_sizes.append(size)
        return self._files[key]

    def tensor(self, name: str, dtype: str, shape: Ints, link: StateLink | None = None) -> int:
        """Return the number of a tensor.

        Raises
        ------
        CorruptError
            It was there before, with another dtype or shape.
        """
        number = self._tensors.setdefault(name, len(self._dtypes))
        if number == len(self._dtypes):
            self._dtypes.append(dtype)
            self._shapes.append(shape)
            self._links.append(link)
        elif (self._dtypes[number], self._shapes[number]) != (dtype, shape):
            raise CorruptError(
                f"{self.where}: {name} is {self._dtypes[number]} of shape {self._shapes[number]} in one file and {dtype} of "
                f"shape {shape} in another; files of several saves may be mixed, so use another checkpoint"
            )
        return number

    def alias(self, name: str, of: str) -> None:
        """Say that a tensor is another one, under a second name."""
        self._aliases[name] = of

    def box(self, offsets: Ints, lengths: Ints) -> int:
        """Return the number of a box."""
        return self._boxes.setdefault((offsets, lengths), len(self._boxes))

    def rows(self, tensor: Numbers, box: Numbers, start: Numbers, count: Numbers, file: int, offset: Numbers) -> None:
        """Add rows: runs of boxes that lie in a file. One number stands for as many of it."""
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(c, np.int64)) for c in (tensor, box, start, count, file, offset))
        )
        self._rows.append(tuple(columns))

    def value(self, path: Sequence[Any], value: Any, kind: ValueKind = ValueKind.PLAIN, link: StateLink | None = None) -> None:
        """Add a value at a path of the state; one that is no plain value becomes unreadable by name."""
        name = ".".join(str(key[0]) if isinstance(key, tuple) else str(key) for key in path)
        try:
            self._values[name] = ValueEntry(name, encode_path(path), kind, encode_value(value, name), link=link)
        except CheckpointError as error:
            self.unreadable[name] = error

    def catalog(self) -> Catalog:
        """Build the catalog.

        Raises
        ------
        CorruptError
            Tensors do not fit into their files, or break another rule of catalogs.
        """
        for name, of in self._aliases.items():
            if of in self._tensors:
                source = self._tensors[of]
                self.tensor(name, self._dtypes[source], self._shapes[source])
        names = sorted(self._tensors)
        index = {name: i for i, name in enumerate(names)}
        order = np.array([self._tensors[name] for name in names], np.int64)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        width = max((len(shape) for shape in self._shapes), default=1) or 1
        shapes = [self._shapes[i] for i in order]
        tensor, *rows = (np.concatenate(c) for c in zip(*self._rows, strict=True)) if self._rows else [np.zeros(0, np.int64)] * 6
        tensor = place[tensor]
        sorting = np.argsort(tensor, kind="stable")
        catalog = Catalog(
            save_id=self._format,
            created_s=0.0,  # so that copies of one checkpoint, on the disks of several nodes, have one catalog
            mesh=None,
            metadata=None,
            tensors_table=TensorTable(
                names=tuple(names),
                dtype=np.array([CODES.index(self._dtypes[i]) for i in order], np.uint8),
                kind=np.full(len(order), TensorKind.TENSOR, np.uint8),
                ndim=np.array([len(shape) for shape in shapes], np.int64),
                shape=pad_rows(shapes, width, 1),
                alias=self._alias_column(names, index),
                placement=np.full(len(order), -1, np.int64),
                row_start=np.searchsorted(tensor[sorting], np.arange(len(order) + 1)).astype(np.int64),
                **link_columns(names, [self._links[i] for i in order], index),
            ),
            placements=(),
            boxes=BoxTable(pad_rows([o for o, _ in self._boxes], width, 0), pad_rows([n for _, n in self._boxes], width, 1)),
            rows=RowTable(*(column[sorting] for column in rows)),
            files=tuple(self._file_entries()),
            values_table=tuple(self._values[name] for name in sorted(self._values)),
            unreadable=self.unreadable,
        )
        for problem in problems(catalog):
            raise CorruptError(f"{self.where}: {problem}; use another checkpoint")
        return catalog

    def _alias_column(self, names: Sequence[str], index: Mapping[str, int]) -> I64:
        return np.array([index.get(self._aliases.get(name, ""), -1) for name in names], np.int64)

    def _file_entries(self) -> Iterable[FileEntry]:
        return (foreign_file(key, size, self._format) for key, size in zip(self._files, self._file_sizes, strict=True))
