"""The content of one of Megatron's trees that one rank saves.

1. Lower the tree to tensors, objects and common state (`tree`).
2. Offer all replicas of each tensor, so that the ranks that hold them share the writing. If the replicas of a tensor turn out
   to differ, `capture` runs again and offers the main replica alone.
3. Rank 0 offers the common state. The rank of an object's main replica offers the object. Ranks with another replica only state
   that the object exists, so that `names.check_objects` finds objects without a main replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...plugins.errors import LayoutError, UsageError
from ...plugins.states import Captured, StateBuilder, group_of
from .names import CONTENT_METADATA, Path, replica_name
from .optimizers import lower_tree
from .tree import NOTHING, Node, common_of, entries_of, objects_of
from .values import common_values

_REPLICAS = ("main", "error")


@dataclass
class SavedTree:
    """A tree to be saved, lowered once.

    Attributes
    ----------
    content_metadata
        Saved in the common state, under the key ``content_metadata``.
    replicas
        ``"main"`` saves the main replica of tensors whose replicas differ; ``"error"`` raises.
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
        """Describe the content that this rank saves.

        Parameters
        ----------
        differing
            The names of tensors whose replicas differ. Of these, only main replicas are offered.

        Raises
        ------
        LayoutError
            Replicas differ, and `replicas` is ``"error"``.
        UsageError
            Something in the tree cannot be saved.
        """
        if self._node is None:  # not in the constructor: an error that is raised here is raised on all ranks
            self._node = lower_tree(self.tree, loading=False)
        if differing and self.replicas == "error":
            raise LayoutError(_difference(differing, "correct the replica_id of what is no replica, or pass replicas='main'"))
        builder = StateBuilder()
        for entry in entries_of(self._node):
            # A rank that offers a tensor without pieces takes part in the save, and writes nothing of it.
            builder.tensor(entry.name, entry.shard, offered=entry.main or entry.name not in differing)
        for part in objects_of(self._node):
            if part.main:
                builder.value((part.name,), part.value)
            elif not differing:  # on the second run, the objects have been checked already
                builder.claim(replica_name(part.name))
        for path, value in self._common_values(self._node):
            builder.value(path, value)
        return builder.captured((_difference(differing, "the main replica of each is saved whole"),) if differing else ())

    def _common_values(self, node: Node) -> Iterator[tuple[Path, Any]]:
        if group_of(self.process_group).rank == 0:
            common = common_of(node)
            common = {} if common is NOTHING else common
            if self.content_metadata is not None:
                # "dp_cp_group" is a process group of the running job, so it cannot be saved.
                kept = {key: value for key, value in self.content_metadata.items() if key != "dp_cp_group"}
                common = {**common, CONTENT_METADATA: kept}
            yield from common_values(common)


def _difference(names: frozenset[str], what: str) -> str:
    first, *rest = sorted(names)
    others = f" and {len(rest)} other tensors" if rest else ""
    return f"{first}{others}: replicas differ between ranks; {what}"
