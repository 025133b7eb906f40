"""Adding the content of files to a catalog: runs in flat tensors, shards, state of parameters, groups, and values from pickles.

1. Tensors are separated from values, and objects of DeepSpeed become dicts (`plain`).
2. A part of a parameter is a shard of a tensor-parallel rank, or runs in flat tensors (`add_shard`, `GroupTensors`).
3. `StateAdder` adds an entry of the state, such as the step, once for each parameter, because all ranks have the same. Groups are
   collected from all files, and merged at the end. Other content is a tree; its tensors and values are added by their paths.
   Unreadable ones are listed with their errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...plugins import CatalogBuilder, ValueKind
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.groups import merge
from ...plugins.names import StateLink, name_of
from ...plugins.torchfile import Named, PickledTensor, TorchFile, attributes_of, class_of
from ...plugins.trees import flatten, map_tree
from .model_parallel import Shard
from .names import GROUPS, MASTER, OPTIMIZER, STATE, parameter_name, state_link
from .places import FlatGroup, Params, Runs

MAX_DEPTH = 64
NOT_VALUES = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "universal_checkpoint_info",
})  # fmt: skip
"""Keys in a file of model states that describe tensors. All others are values of DeepSpeed, or of ``client_state``."""
Path = tuple[Any, ...]


OWN = "deepspeed."
"""The beginning of the module names of DeepSpeed's own classes."""


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a dict, of an object of DeepSpeed, or of a list that holds tensors; None for any other value.

    Each child comes with its key; in a list, the key is a tuple of the index.
    """
    attributes = attributes_of(node) if str(class_of(node)).startswith(OWN) else None
    node = node if attributes is None else attributes
    if isinstance(node, Mapping) and node and all(isinstance(key, str) for key in node):
        return node.items()
    if isinstance(node, list | tuple) and any(isinstance(child, PickledTensor) for child in node):
        return (((i,), child) for i, child in enumerate(node))
    return None


def plain(file: TorchFile, made: Any) -> Any:
    """Convert a value of a file to plain values: an object of DeepSpeed becomes a dict, a member of its enums a number.

    Raise `UnsupportedError` if the value holds an object whose class would have to be imported.
    """

    def without_class(path: Path, node: Any) -> Any:
        return map_tree(without_class, node.plain) if isinstance(node, Named) else node

    return map_tree(without_class, file.plain(made))


def add_whole(builder: CatalogBuilder, file: TorchFile, name: str, view: PickledTensor, link: StateLink | None = None) -> None:
    """Add to the catalog a tensor that lies whole in one file. Its strides may be any."""
    add_shard(builder, file, name, view, Shard.whole(view.shape), link)


def add_shard(
    builder: CatalogBuilder, file: TorchFile, name: str, view: PickledTensor, shard: Shard, link: StateLink | None = None
) -> None:
    """Add to the catalog the part of a tensor that lies in one file, as `shard` describes it."""
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


class GroupTensors:
    """The tensors of one flat group in a catalog, to which the flat tensors of all ranks' files are added.

    Attributes
    ----------
    params, shards
        The parameters of the group, and the part of each that the files of one model-parallel rank hold.
    """

    def __init__(self, builder: CatalogBuilder, params: Params, shards: Sequence[Shard]) -> None:
        self._builder, self.params, self.shards = builder, params, shards
        # By segment, in order of parameters: the index of its parameter, its first element in that parameter's shard, the number
        # of its elements, and the number of its box.
        segments = [
            (i, one.at, prod(one.lengths), builder.box(one.offsets, one.lengths))
            for i, shard in enumerate(shards)
            for one in shard.segments
        ]
        self._param, self._at, self._size, self._box = np.array(segments, np.int64).reshape(-1, 4).T
        self._known: dict[tuple[str, torch.dtype], NDArray[np.int64]] = {}

    def _numbers(self, key: str, dtype: torch.dtype) -> NDArray[np.int64]:
        """Return for each parameter the number of its tensor (the master, or an entry of its state) in the catalog.

        The number is -1 if the parameter is unreadable.
        """
        if (key, dtype) not in self._known:
            numbers = []
            for fqn, shard in zip(self.params.names, self.shards, strict=True):
                link = None if key == MASTER else state_link(fqn, key)
                name = parameter_name(fqn) if link is None else link.name
                numbers.append(self._builder.tensor(name, dtype, shard.shape, link=link, again=True) if shard.readable else -1)
            self._known[key, dtype] = np.array(numbers, np.int64)
        return self._known[key, dtype]

    def add(self, file: TorchFile, key: str, tensor: PickledTensor, runs: Runs) -> None:
        """Add one flat tensor of a file: the runs of all parameters in it. `key` is its key in the state, as ``exp_avg``."""
        numbers = self._numbers(key, tensor.dtype)
        if not tensor.is_row_major:
            raise CorruptError(
                f"{self._builder.where}: a flat tensor in {file.key} has strides {tensor.strides}; use another copy"
            )
        if not len(runs.param):
            return
        number, base, each = self._builder.file(file.key, file.size), file.at(tensor), tensor.dtype.itemsize
        # first[r], last[r]: the segments of run r's parameter; nearly every parameter has one, and one of another rank has none
        first, last = (np.searchsorted(self._param, runs.param, side) for side in ("left", "right"))
        for k in range(int((last - first).max())):
            # here: the runs whose parameters have a segment number k; low, high: the elements of each run in that segment
            here = np.flatnonzero(first + k < last)
            segment, start = first[here] + k, runs.start[here]
            begin = self._at[segment]
            low, high = np.maximum(start, begin), np.minimum(start + runs.count[here], begin + self._size[segment])
            kept = low < high
            columns = (
                numbers[runs.param[here]],
                self._box[segment],
                low - begin,
                high - low,
                np.full(len(here), number),
                base + (runs.at[here] + low - start) * each,
            )
            self._builder.rows(*(column[kept] for column in columns))


class StateAdder:
    """Adds optimizer state, parameter groups and values from files to a catalog."""

    def __init__(self, builder: CatalogBuilder) -> None:
        self.builder = builder
        self._groups: list[tuple[str, list[dict[str, Any]]]] = []
        self._known: set[str] = set()

    def shared(self, file: TorchFile, group: FlatGroup, shards: Sequence[Shard]) -> None:
        """Add the values that all parameters of a flat group share, such as the step: one for each parameter."""
        for fqn, shard in zip(group.params.names, shards, strict=True):
            for key, value in group.values.items() if shard.readable and (shard.segments or not prod(shard.shape)) else ():
                self.entry(file, state_link(fqn, key), value)

    def entry(self, file: TorchFile, link: StateLink, value: Any) -> None:
        """Add a tensor or value of one parameter's state that is not in flat tensors, unless another rank's file had it."""
        if link.name in self._known:
            return
        self._known.add(link.name)
        if isinstance(value, PickledTensor):
            add_whole(self.builder, file, link.name, value, link)
        else:
            self.builder.value((OPTIMIZER, STATE, link.fqn, *link.key.split(".")), plain(file, value), link=link)

    def groups(self, file: TorchFile, groups: Sequence[Mapping[str, Any]]) -> None:
        """Collect the parameter groups of one file, with the names of their parameters; `merged_groups` adds them all."""
        found = [{key: value if key == "params" else plain(file, value) for key, value in group.items()} for group in groups]
        self._groups.append((file.key, found))

    def merged_groups(self) -> None:
        """Add the collected parameter groups of all files to the catalog, as one value."""
        if self._groups:
            groups = merge(self._groups, name=f"{OPTIMIZER}.{GROUPS}")
            self.builder.value((OPTIMIZER, GROUPS), groups, ValueKind.PARAM_GROUPS)

    def refuse(self, where: str) -> None:
        """Make the whole optimizer unreadable, because no file names its parameters; the error names the file in `where`."""
        error = UnsupportedError(
            f"{where} knows the optimizer's parameters by position alone, and neither bytes nor shapes tell which they are; the "
            "module can be read. To have the optimizer, load the folder with DeepSpeed and save it with reshard_ckpt attached"
        )
        for name in (STATE, GROUPS):
            self.builder.unreadable(f"{OPTIMIZER}.{name}", error)

    def tree(self, file: TorchFile, path: tuple[Any, ...], value: Any) -> None:
        """Add the tensors and values of a tree (see `_children`) to the catalog; each that cannot be read becomes unreadable."""
        for at, leaf in flatten(value, _children, path, max_depth=MAX_DEPTH):
            name = name_of(step[0] if isinstance(step, tuple) else step for step in at)
            with self.builder.reading(name):
                if isinstance(leaf, PickledTensor):
                    add_whole(self.builder, file, name, leaf)
                    continue
                try:
                    found = plain(file, leaf)
                except UnsupportedError as error:
                    raise UnsupportedError(f"{name}: {error}") from None
                self.builder.value(at, found)
