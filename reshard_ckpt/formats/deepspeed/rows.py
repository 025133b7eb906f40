"""Adding tensors of DeepSpeed's files to a catalog: whole ones, shards of them, and runs of them in flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...core.catalog.specs import StateLink
from ...errors import CorruptError, UnsupportedError
from ...format.torch_dtypes import dtype_code
from ..dcp.chunks import run_lengths, runs_of
from ..dcp.heads import TensorView
from .archive import TorchFile, is_contiguous
from .columns import CatalogColumns
from .layout import MASTER, Params, Runs
from .shards import Shard

MODEL, OPTIMIZER = "model", "optimizer"
MAX_RUNS = 1 << 20
"""Of a tensor that does not lie in row-major order."""


def parameter_name(fqn: str) -> str:
    """Return the name of a parameter or buffer."""
    return f"{MODEL}.{fqn}"


def state_link(fqn: str, key: str) -> StateLink:
    """Link an entry of the optimizer's state to its parameter."""
    return StateLink(OPTIMIZER, fqn, key, parameter_name(fqn))


class TensorAdder:
    """Adds tensors of files to a catalog."""

    def __init__(self, columns: CatalogColumns) -> None:
        self.columns = columns

    def whole(self, file: TorchFile, name: str, view: TensorView, link: StateLink | None = None) -> None:
        """Add a tensor that a file has whole, in whatever order its elements lie."""
        self.shard(file, name, view, Shard.whole(view.shape), link)

    def shard(self, file: TorchFile, name: str, view: TensorView, shard: Shard, link: StateLink | None = None) -> None:
        """Add a tensor of which a file has a part."""
        columns = self.columns
        tensor = columns.tensor(name, dtype_code(view.dtype, name), shard.shape, link)
        if not prod(view.shape) or not shard.segments:
            return
        at, each, number = file.at(view), view.dtype.itemsize, columns.file(file.key, file.size)
        if is_contiguous(view):
            for segment in shard.segments:
                box = columns.box(segment.offsets, segment.lengths)
                columns.rows(tensor, box, 0, prod(segment.lengths), number, at + segment.at * each)
            return
        num = prod(view.shape) // prod(run_lengths(view.shape, view.strides))
        if len(shard.segments) > 1 or shard.segments[0].lengths != view.shape or num > MAX_RUNS:
            raise UnsupportedError(f"{name}: lies in {file.key} with strides {view.strides}; save it contiguous")
        lengths, corners, starts = runs_of(view.shape, view.strides)
        for corner, start in zip((corners + np.array(shard.segments[0].offsets)).tolist(), starts.tolist(), strict=True):
            columns.rows(tensor, columns.box(tuple(corner), lengths), 0, prod(lengths), number, at + start * each)

    def runs(self, file: TorchFile, names: FlatNames, tensor: TensorView, runs: Runs) -> None:
        """Add the runs of parameters in a flat tensor, which lies in a file."""
        if not is_contiguous(tensor):
            raise CorruptError(
                f"{self.columns.where}: a flat tensor in {file.key} has strides {tensor.strides}; use another copy"
            )
        if not len(runs.param):
            return
        number, at, each = self.columns.file(file.key, file.size), file.at(tensor), tensor.dtype.itemsize
        box = names.box[runs.param]
        plain_ones = box >= 0
        self.columns.rows(
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
                    inside = self.columns.box(segment.offsets, segment.lengths)
                    offset = at + (place + low - start) * each
                    self.columns.rows(names.tensor[param], inside, low - segment.at, high - low, number, offset)


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
