"""Adding content other than flat tensors to a catalog: scalar state of parameters, the groups of the optimizer, and values.

1. An entry of the state, such as the step, is added once for each parameter, because all ranks have the same.
2. Groups are collected from all files, and merged at the end.
3. Other content is a tree; its tensors and values are added by their paths. Unreadable ones are listed with their errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...plugins import CatalogBuilder, ValueKind
from ...plugins.errors import CheckpointError, UnsupportedError
from ...plugins.groups import merge
from ...plugins.names import StateLink, name_of
from ...plugins.torchfile import PickledTensor, TorchFile
from .columns import add_whole
from .names import GROUPS, OPTIMIZER, STATE, state_link
from .places import FlatGroup
from .shards import Shard
from .values import leaves, plain


class StateAdder:
    """Adds state, groups and values to a catalog."""

    def __init__(self, builder: CatalogBuilder) -> None:
        self.builder = builder
        self._groups: list[tuple[str, list[dict[str, Any]]]] = []
        self._known: set[str] = set()

    def shared(self, file: TorchFile, group: FlatGroup, shards: Sequence[Shard]) -> None:
        """Add the values that all parameters of a group share, such as the step, for each of them."""
        for fqn, shard in zip(group.params.names, shards, strict=True):
            for key, value in group.values.items() if shard.readable and (shard.segments or not prod(shard.shape)) else ():
                self.entry(file, state_link(fqn, key), value)

    def entry(self, file: TorchFile, link: StateLink, value: Any) -> None:
        """Add an entry of a parameter's state outside of the flat tensors, unless another rank's file had it."""
        if link.name in self._known:
            return
        self._known.add(link.name)
        if isinstance(value, PickledTensor):
            add_whole(self.builder, file, link.name, value, link)
        else:
            self.builder.value((OPTIMIZER, STATE, link.fqn, *link.key.split(".")), plain(value), link=link)

    def groups(self, file: TorchFile, groups: Sequence[Mapping[str, Any]]) -> None:
        """Collect the groups of a file, with the names of their parameters; `merged_groups` adds them."""
        self._groups.append((file.key, [{key: plain(value) for key, value in group.items()} for group in groups]))

    def merged_groups(self) -> None:
        """Add the groups of all files as one value."""
        if self._groups:
            groups = merge(self._groups, name=f"{OPTIMIZER}.{GROUPS}")
            self.builder.value((OPTIMIZER, GROUPS), groups, ValueKind.PARAM_GROUPS)

    def refuse(self, where: str) -> None:
        """Make the optimizer unreadable, because nothing names its parameters."""
        error = UnsupportedError(
            f"{where} knows the optimizer's parameters by position alone, and neither bytes nor shapes tell which they are; the "
            "module can be read. To have the optimizer, load the folder with DeepSpeed and save it with reshard_ckpt attached"
        )
        for name in (STATE, GROUPS):
            self.builder.unreadable(f"{OPTIMIZER}.{name}", error)

    def tree(self, file: TorchFile, path: tuple[Any, ...], value: Any) -> None:
        """Add the tensors and values of a tree; each that cannot be read becomes unreadable by name."""
        for at, leaf in leaves(value, path):
            name = name_of(step[0] if isinstance(step, tuple) else step for step in at)
            try:
                if isinstance(leaf, PickledTensor):
                    add_whole(self.builder, file, name, leaf)
                elif isinstance(leaf, CheckpointError):
                    raise UnsupportedError(f"{self.builder.where}: {name} {leaf}")
                else:
                    self.builder.value(at, leaf)
            except CheckpointError as error:
                self.builder.unreadable(name, error)
