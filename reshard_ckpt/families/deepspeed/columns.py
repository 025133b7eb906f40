"""Adding the parts of parameters that files hold to a catalog: shards of tensor-parallel ranks, and runs in flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ...plugins import CatalogBuilder
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.names import StateLink
from ...plugins.torchfile import PickledTensor, TorchFile
from .names import MASTER, parameter_name, state_link
from .places import Params, Runs
from .shards import Shard


def add_whole(builder: CatalogBuilder, file: TorchFile, name: str, view: PickledTensor, link: StateLink | None = None) -> None:
    """Add a tensor that one file holds whole, with any strides."""
    add_shard(builder, file, name, view, Shard.whole(view.shape), link)


def add_shard(
    builder: CatalogBuilder, file: TorchFile, name: str, view: PickledTensor, shard: Shard, link: StateLink | None = None
) -> None:
    """Add the part of a tensor that one file holds."""
    builder.tensor(name, view.dtype, shard.shape, link=link, again=True)
    first = shard.segments[0] if len(shard.segments) == 1 else None
    if first is not None and first.lengths == view.shape:
        builder.view(name, file, view, first.offsets)
    elif shard.segments and not view.is_row_major:
        raise UnsupportedError(f"{name}: lies in {file.key} with strides {view.strides}; save it contiguous")
    elif shard.segments and 0 not in view.shape:
        at, number = file.at(view), builder.file(file.key, file.size)
        for segment in shard.segments:
            offset = at + segment.at * view.dtype.itemsize
            builder.piece(name, file=number, offset=offset, offsets=segment.offsets, lengths=segment.lengths)


def add_runs(builder: CatalogBuilder, file: TorchFile, names: FlatNames, tensor: PickledTensor, runs: Runs) -> None:
    """Add the runs of parameters that a flat tensor in a file holds."""
    if not tensor.is_row_major:
        raise CorruptError(f"{builder.where}: a flat tensor in {file.key} has strides {tensor.strides}; use another copy")
    if not len(runs.param):
        return
    number, at, each = builder.file(file.key, file.size), file.at(tensor), tensor.dtype.itemsize
    box = names.box[runs.param]
    # plain_ones[r]: whether the parameter of run r is one box, so that the run is a row as it is
    plain_ones = box >= 0
    builder.rows(
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
                inside = builder.box(segment.offsets, segment.lengths)
                offset = at + (place + low - start) * each
                builder.rows(names.tensor[param], inside, low - segment.at, high - low, number, offset)


def place_of(builder: CatalogBuilder, name: str, element: int) -> tuple[str, int] | None:
    """Return the file and the byte of an element of a tensor; None unless it lies in a run of the whole tensor."""
    itemsize = builder.tensors[name].torch_dtype.itemsize
    for part in builder.parts(name):
        if part.lengths == builder.tensors[name].shape and part.start <= element < part.start + part.num_elements:
            return builder.files[part.file].key, part.offset + (element - part.start) * itemsize
    return None


class FlatNames:
    """The tensors of one key of a flat group: for each parameter its tensor's number, and the number of its box, or -1.

    A tensor's number is -1 if the parameter is unreadable. A box's number is -1 if the parameter has several boxes, or no box.
    """

    def __init__(self, builder: CatalogBuilder, params: Params, shards: Sequence[Shard], key: str, dtype: torch.dtype) -> None:
        self.shards = shards
        numbers, boxes = [], []
        for fqn, shard in zip(params.names, shards, strict=True):
            link = None if key == MASTER else state_link(fqn, key)
            name = parameter_name(fqn) if link is None else link.name
            numbers.append(builder.tensor(name, dtype, shard.shape, link=link, again=True) if shard.readable else -1)
            one = shard.segments[0] if len(shard.segments) == 1 else None
            boxes.append(-1 if one is None else builder.box(one.offsets, one.lengths))
        self.tensor, self.box = np.array(numbers, np.int64), np.array(boxes, np.int64)


KnownNames = dict[tuple[Any, str, torch.dtype], FlatNames]
"""The names of tensors by group, key and dtype: they are the same for all ranks."""
