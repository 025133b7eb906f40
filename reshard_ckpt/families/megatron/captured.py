"""What one rank has to save of one of Megatron's trees.

1. The tree is lowered to entries, objects and common state.
2. All replicas of a tensor are offered, so that their ranks share the writing. Of a tensor whose replicas are found to differ,
   the main one is offered alone.
3. Rank 0 offers the common state, the main replica of each object that object. The others say that it is there, so that one of
   which no rank has a main replica is missed (`sharded_names.checked_objects`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.catalog.specs import ValueKind
from ...engine.common.tensor_bytes import LocalTensor
from ...errors import LayoutError, UsageError
from ...state.collector import Collector, NamedValue
from ...state.entries import Captured
from ...state.mesh import group_of
from ...state.tensors import local_memory
from .optimizers import lower_tree
from .sharded_names import CONTENT_METADATA, common_values, replica_mark
from .tree import NOTHING, Node, common_of, entries_of, objects_of

_REPLICAS = ("main", "error")


@dataclass
class SavedTree:
    """A tree to be saved.

    Attributes
    ----------
    content_metadata
        Kept in the common state, under this name.
    replicas
        What happens to tensors whose replicas differ: ``"main"`` or ``"error"``.
    process_group
        The ranks that save together.
    """

    tree: dict[str, Any]
    content_metadata: Mapping[str, Any] | None = None
    replicas: str = "main"
    process_group: Any = None
    _node: Node | None = None

    def __post_init__(self) -> None:
        if self.replicas not in _REPLICAS:
            raise UsageError(f"replicas={self.replicas!r}: pass one of {', '.join(map(repr, _REPLICAS))}")

    def capture(self, differing: frozenset[str] = frozenset()) -> Captured:
        """Describe what this rank has to save; of tensors whose replicas differ, the main one alone.

        Raises
        ------
        LayoutError
            Replicas differ, where this is to be an error.
        UsageError
            Something in the tree cannot be saved.
        """
        if self._node is None:  # here, where what it raises is raised on all ranks
            self._node = lower_tree(self.tree, loading=False)
        if differing and self.replicas == "error":
            raise LayoutError(_difference(differing, "correct the replica_id of what is no replica, or pass replicas='main'"))
        out = Collector(None)
        with torch.no_grad():
            for entry in entries_of(self._node):
                local = local_memory(entry.shard, entry.name).named(entry.name)
                left_out = entry.name in differing and not entry.main
                out.add("", LocalTensor(replace(local.spec, pieces=()), local.memory) if left_out else local)
        for part in objects_of(self._node):
            if part.main:
                out.add("", NamedValue(part.name, [part.name], ValueKind.PLAIN, part.value))
            elif not differing:  # else they have been checked
                out.add("", replica_mark(part.name))
        for value in self._common_values(self._node):
            out.add("", value)
        said = (_difference(differing, "the main replica of each is saved whole"),) if differing else ()
        return Captured(tuple(out.tensors), tuple(out.values), None, said)

    def _common_values(self, node: Node) -> Iterator[NamedValue]:
        if group_of(self.process_group).rank == 0:
            common = common_of(node)
            common = {} if common is NOTHING else common
            if self.content_metadata is not None:
                # Its process group is for the job that runs.
                kept = {key: value for key, value in self.content_metadata.items() if key != "dp_cp_group"}
                common = {**common, CONTENT_METADATA: kept}
            yield from common_values(common)


def _difference(names: frozenset[str], what: str) -> str:
    first, *rest = sorted(names)
    others = f" and {len(rest)} other tensors" if rest else ""
    return f"{first}{others}: replicas differ between ranks; {what}"
