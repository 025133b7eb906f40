"""A catalog over foreign files, collected as columns: a folder of a thousand ranks has millions of rows.

Tensors, boxes and files are numbered as they come; rows come as whole arrays. `CatalogColumns.catalog` sorts the tensors by name.
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
"""Of a tensor that does not lie in row-major order."""

Numbers = I64 | int


class CatalogColumns:
    """What a catalog is made of, on its way to one; messages call the checkpoint `where`."""

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

    def add_whole(self, file: TorchFile, name: str, view: PickledTensor, link: StateLink | None = None) -> None:
        """Add a tensor that a file has whole, in whatever order its elements lie."""
        self.add_shard(file, name, view, Shard.whole(view.shape), link)

    def add_shard(self, file: TorchFile, name: str, view: PickledTensor, shard: Shard, link: StateLink | None = None) -> None:
        """Add a tensor of which a file has a part."""
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
        """Add the runs of parameters in a flat tensor, which lies in a file."""
        if not tensor.is_row_major:
            raise CorruptError(f"{self.where}: a flat tensor in {file.key} has strides {tensor.strides}; use another copy")
        if not len(runs.param):
            return
        number, at, each = self.file(file.key, file.size), file.at(tensor), tensor.dtype.itemsize
        box = names.box[runs.param]
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
        for param, start, count, place in zip(*others, strict=True):
            for segment in names.shards[param].segments:
                low, high = max(start, segment.at), min(start + count, segment.at + prod(segment.lengths))
                if low < high:
                    inside = self.box(segment.offsets, segment.lengths)
                    offset = at + (place + low - start) * each
                    self.rows(names.tensor[param], inside, low - segment.at, high - low, number, offset)

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
        order = np.array([self._tensors[name] for name in names], np.int64)
        tensors = [
            ForeignTensor(name, self._dtypes[i], self._shapes[i], (), self._aliases.get(name), self._links[i])
            for name, i in zip(names, order.tolist(), strict=True)
        ]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
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
    """The tensors of one key of a flat group: for each parameter the tensor's number, and its one box where it has just one."""

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
"""By group, key and dtype."""
