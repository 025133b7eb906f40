"""Collecting a catalog over foreign files as columns, because a folder of a thousand ranks has millions of rows.

Tensors, boxes and files get numbers in the order in which they are added. Rows are added as whole arrays.
`CatalogColumns.catalog` sorts the tensors by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from ...core.catalog.model import BoxTable, Catalog, RowTable, ValueEntry
from ...core.catalog.specs import Ints, StateLink, ValueKind
from ...core.geometry.runs import I64, pad_rows
from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...format.torch_dtypes import TORCH_DTYPES, dtype_code
from ...format.values import encode_path, encode_value
from ...formats.catalog_builder import ForeignTensor, assemble, foreign_file, num_dims
from ...formats.dcp.chunks import run_lengths, runs_of
from ...torchfile.archive import TorchFile
from ...torchfile.bounds import FileBudget
from ...torchfile.tensors import PickledTensor
from .layout import MASTER, Params, Runs, parameter_name, state_link
from .shards import Shard

NAME = "deepspeed"
MAX_RUNS = 1 << 20
"""The most runs that one tensor outside of row-major order may have."""

Numbers = I64 | int


class CatalogColumns:
    """The parts of a catalog before it is built; `where` is the name of the checkpoint in messages."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.unreadable: dict[str, CheckpointError] = {}
        self._files: dict[str, int] = {}
        self._file_sizes: list[int] = []
        self._tensors: dict[str, int] = {}
        self._dtypes: list[str] = []
        self._shapes: list[Ints] = []
        self._links: list[StateLink | None] = []
        self._aliases: dict[str, str] = {}
        self._boxes: dict[tuple[Ints, Ints], int] = {}
        self._rows: list[tuple[I64, ...]] = []
        self._budget = FileBudget()
        self._values: dict[str, ValueEntry] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors that were added."""
        return tuple(self._tensors)

    def shapes(self) -> dict[str, Ints]:
        """Return the shapes of all tensors that were added, by name."""
        return {name: self._shapes[number] for name, number in self._tensors.items()}

    def place(self, name: str, element: int) -> tuple[str, int, torch.dtype] | None:
        """Return the file, the byte and the dtype of an element of a tensor; None unless it lies in a run of the whole tensor."""
        wanted, dtype = self._tensors[name], TORCH_DTYPES[self._dtypes[self._tensors[name]]]
        whole = self._boxes.get(((0,) * len(self._shapes[wanted]), self._shapes[wanted]), -1)
        for tensor, box, start, count, file, offset in self._rows:
            for i in np.flatnonzero((tensor == wanted) & (box == whole) & (start <= element) & (element < start + count)):
                return list(self._files)[file[i]], int(offset[i] + (element - start[i]) * dtype.itemsize), dtype
        return None

    def file(self, key: str, size: int) -> int:
        """Add a file, unless it is there; return its number."""
        if key not in self._files:
            self._files[key] = len(self._files)
            self._file_sizes.append(size)
        return self._files[key]

    def tensor(self, name: str, dtype: str, shape: Ints, link: StateLink | None = None) -> int:
        """Add a tensor, unless it is there; return its number.

        Raises
        ------
        CorruptError
            The tensor is there with another dtype or shape.
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
        """Add a second name of the tensor `of`."""
        self._aliases[name] = of

    def box(self, offsets: Ints, lengths: Ints) -> int:
        """Add a box, unless it is there; return its number."""
        return self._boxes.setdefault((offsets, lengths), len(self._boxes))

    def rows(self, tensor: Numbers, box: Numbers, start: Numbers, count: Numbers, file: int, offset: Numbers) -> None:
        """Add rows: runs of boxes, each with its place in one file. The arguments are broadcast against each other."""
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(c, np.int64)) for c in (tensor, box, start, count, file, offset))
        )
        self._rows.append(tuple(columns))

    def add_whole(self, file: TorchFile, name: str, view: PickledTensor, link: StateLink | None = None) -> None:
        """Add a tensor that one file holds whole, with any strides."""
        self.add_shard(file, name, view, Shard.whole(view.shape), link)

    def add_shard(self, file: TorchFile, name: str, view: PickledTensor, shard: Shard, link: StateLink | None = None) -> None:
        """Add the part of a tensor that one file holds."""
        tensor = self.tensor(name, dtype_code(view.dtype, name), shard.shape, link)
        if not prod(view.shape) or not shard.segments:
            return
        at, each, number = file.at(view), view.dtype.itemsize, self.file(file.key, file.size)
        self._budget.spend(file.key, file.size, prod(view.shape) * each, f"{self.where}: {name}")
        if view.is_row_major:
            for segment in shard.segments:
                box = self.box(segment.offsets, segment.lengths)
                self.rows(tensor, box, 0, prod(segment.lengths), number, at + segment.at * each)
            return
        num = prod(view.shape) // prod(run_lengths(view.shape, view.strides))
        if len(shard.segments) > 1 or shard.segments[0].lengths != view.shape or num > MAX_RUNS:
            raise UnsupportedError(f"{name}: lies in {file.key} with strides {view.strides}; save it contiguous")
        lengths, corners, starts = runs_of(view.shape, view.strides)
        for corner, start in zip((corners + np.array(shard.segments[0].offsets)).tolist(), starts.tolist(), strict=True):
            self.rows(tensor, self.box(tuple(corner), lengths), 0, prod(lengths), number, at + start * each)

    def add_runs(self, file: TorchFile, names: FlatNames, tensor: PickledTensor, runs: Runs) -> None:
        """Add the runs of parameters that a flat tensor in a file holds."""
        if not tensor.is_row_major:
            raise CorruptError(f"{self.where}: a flat tensor in {file.key} has strides {tensor.strides}; use another copy")
        if not len(runs.param):
            return
        number, at, each = self.file(file.key, file.size), file.at(tensor), tensor.dtype.itemsize
        box = names.box[runs.param]
        # plain_ones[r]: whether the parameter of run r is one box, so that the run is a row as it is
        plain_ones = box >= 0
        self.rows(
            names.tensor[runs.param][plain_ones],
            box[plain_ones],
            runs.start[plain_ones],
            runs.count[plain_ones],
            number,
            at + runs.at[plain_ones] * each,
        )
        others = (column[~plain_ones].tolist() for column in (runs.param, runs.start, runs.count, runs.at))
        # The others have several boxes: cut each run where a box ends.
        for param, start, count, place in zip(*others, strict=True):
            for segment in names.shards[param].segments:
                low, high = max(start, segment.at), min(start + count, segment.at + prod(segment.lengths))
                if low < high:
                    inside = self.box(segment.offsets, segment.lengths)
                    offset = at + (place + low - start) * each
                    self.rows(names.tensor[param], inside, low - segment.at, high - low, number, offset)

    def value(self, path: Sequence[Any], value: Any, kind: ValueKind = ValueKind.PLAIN, link: StateLink | None = None) -> None:
        """Add a value at a path of the state. If it cannot be encoded, it becomes unreadable under its name."""
        name = ".".join(str(key[0]) if isinstance(key, tuple) else str(key) for key in path)
        try:
            self._values[name] = ValueEntry(name, encode_path(path), kind, encode_value(value, name), link=link)
        except CheckpointError as error:
            self.unreadable[name] = error

    def catalog(self) -> Catalog:
        """Build the catalog, with tensors sorted by name.

        Raises
        ------
        CorruptError
            A tensor does not fit into its file, or breaks another rule of catalogs.
        """
        for name, of in self._aliases.items():
            if of in self._tensors:
                source = self._tensors[of]
                self.tensor(name, self._dtypes[source], self._shapes[source])
        names = sorted(self._tensors)
        # order[k]: number of the k-th tensor by name; place[n]: where tensor number n comes by name
        order = np.array([self._tensors[name] for name in names], np.int64)
        tensors = [
            ForeignTensor(name, self._dtypes[i], self._shapes[i], (), self._aliases.get(name), self._links[i])
            for name, i in zip(names, order.tolist(), strict=True)
        ]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        # tensor[r]: number of the tensor of row r; sorting: the rows in order of their tensors' names
        tensor, *rows = (np.concatenate(c) for c in zip(*self._rows, strict=True)) if self._rows else [np.zeros(0, np.int64)] * 6
        sorting, width = np.argsort(place[tensor], kind="stable"), num_dims(tensors)
        catalog = assemble(
            tensors,
            np.bincount(place[tensor], minlength=len(order)),
            BoxTable(pad_rows([o for o, _ in self._boxes], width, 0), pad_rows([n for _, n in self._boxes], width, 1)),
            RowTable(*(column[sorting] for column in rows)),
            (foreign_file(key, size, NAME) for key, size in zip(self._files, self._file_sizes, strict=True)),
            (self._values[name] for name in sorted(self._values)),
            format=NAME,
            where=self.where,
        )
        return replace(catalog, unreadable=self.unreadable)


class FlatNames:
    """The tensors of one key of a flat group: for each parameter its tensor's number, and the number of its box, or -1.

    A tensor's number is -1 if the parameter is unreadable. A box's number is -1 if the parameter has several boxes, or no box.
    """

    def __init__(self, columns: CatalogColumns, params: Params, shards: Sequence[Shard], key: str, dtype: str) -> None:
        self.shards = shards
        numbers, boxes = [], []
        for fqn, shard in zip(params.names, shards, strict=True):
            link = None if key == MASTER else state_link(fqn, key)
            name = parameter_name(fqn) if link is None else link.name
            numbers.append(columns.tensor(name, dtype, shard.shape, link) if shard.readable else -1)
            one = shard.segments[0] if len(shard.segments) == 1 else None
            boxes.append(-1 if one is None else columns.box(one.offsets, one.lengths))
        self.tensor, self.box = np.array(numbers, np.int64), np.array(boxes, np.int64)


KnownNames = dict[tuple[Any, str, str], FlatNames]
"""The names of tensors by group, key and dtype: they are the same for all ranks."""
