"""The content of one of Megatron's trees that one rank saves, or wants to load.

*Saving* (`SavedTree`):

1. Lower the tree to tensors, objects and common state (`tree`).
2. Offer all replicas of each tensor, so that the ranks that hold them share the writing. If the replicas of a tensor turn out
   to differ, `capture` runs again and offers the main replica alone.
3. Rank 0 offers the common state. The rank of an object's main replica offers the object. Ranks with another replica only state
   that the object exists, so that `names.check_objects` finds objects without a main replica.

*Loading* (`WantedTree`):

1. Compare the keys of all ranks' trees with those of the checkpoint, if Megatron's `StrictHandling` asks for it. An *unexpected*
   key is in the tree but not in the checkpoint; a *missing* key is in the checkpoint but in no tree. In the default mode, an
   unexpected key makes the load itself fail. In all other modes, the ranks compare their keys before the load (`compare_keys`).
2. Fill tensors in place. If a saved tensor is smaller, and ``allow_shape_mismatch`` is set, the rest becomes zero.
3. Merge the loaded leaves into the saved common state. Optimizer objects receive their part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...plugins import TORCH_DTYPES, Catalog, Ints
from ...plugins.errors import LayoutError, MismatchError, UnsupportedError, UsageError, summarize
from ...plugins.states import Captured, Comm, StateBuilder, Target, group_of, merge_of_all, zero_outside
from .names import COMMON_OBJECT, CONTENT_METADATA, checkpoint_key, key_of_object, keys_of_catalog, replica_name
from .optimizers import lower_tree, unplaced_state
from .places import NamedShard
from .tree import NOTHING, Loaded, Node, common_of, entries_of, loaded_of, merged, objects_of, problems_of
from .values import check_common_file, common_state, common_values

_REPLICAS = ("main", "error")


@dataclass
class SavedTree:
    """One of Megatron's trees to be saved, lowered once to shards, objects and common state.

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
        """Describe the tensors and values of the tree that this rank saves.

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
            raise LayoutError(_difference(differing, "correct the replica_id of distinct tensors, or pass replicas='main'"))
        builder = StateBuilder()
        for entry in entries_of(self._node):
            # A rank that offers a tensor without pieces takes part in the save, and writes nothing of it.
            builder.tensor(entry.name, entry.shard, offered=entry.main or entry.name not in differing)
        for part in objects_of(self._node):
            if part.main:
                builder.value((part.name,), part.value)
            elif not differing:  # on the second run, the objects have been checked already
                builder.claim(replica_name(part.name))
        if group_of(self.process_group).rank == 0:
            common = common_of(self._node)
            common = {} if common is NOTHING else common
            if self.content_metadata is not None:
                # "dp_cp_group" is a process group of the running job, so it cannot be saved.
                kept = {key: value for key, value in self.content_metadata.items() if key != "dp_cp_group"}
                common = {**common, CONTENT_METADATA: kept}
            for path, value in common_values(common):
                builder.value(path, value)
        return builder.captured((_difference(differing, "the main replica of each is saved whole"),) if differing else ())


def _difference(names: frozenset[str], advice: str) -> str:
    """Return a message that names the tensors whose replicas differ, and ends with `advice`."""
    first, *rest = sorted(names)
    others = f" and {len(rest)} other tensors" if rest else ""
    return f"{first}{others}: replicas differ between ranks; {advice}"


_log = logging.getLogger(__name__)
MODES = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)


def parse_mode(strict: Any) -> str:
    """Return Megatron's `StrictHandling` as its string value; strings are accepted too."""
    mode = getattr(strict, "value", strict)
    if mode not in MODES:
        raise UsageError(f"strict={strict!r}: pass a StrictHandling, or one of {', '.join(map(repr, MODES))}")
    return str(mode)


def check_strategy(name: str, strategy: Any) -> None:
    """Refuse a strategy other than those of Megatron that this library replaces.

    Raises
    ------
    UnsupportedError
        The strategy would write or read other files.
    """
    if strategy is None or (isinstance(strategy, tuple) and strategy[:1] in (("torch_dist",), ("torch",))):
        return
    replaced = ("TorchDist", "TorchCommon", "FullyParallel")
    if any(kind.__name__.startswith(replaced) and kind.__module__.startswith("megatron.") for kind in type(strategy).__mro__):
        return
    raise UnsupportedError(
        f"{name}={strategy!r}: only Megatron's strategies for torch_dist are replaced; leave it out, or call "
        "megatron.core.dist_checkpointing"
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that the checkpoint and the trees do not both have.

    Missing keys are in the checkpoint and in no rank's tree; unexpected keys are in this rank's tree and not in the checkpoint.
    """

    missing: frozenset[str]
    unexpected: frozenset[str]
    absent: frozenset[str]
    """The names of those tensors and objects of this rank whose keys are unexpected."""


def saved_keys(catalog: Catalog) -> frozenset[str]:
    """Return the keys of a checkpoint's tensors and objects, without the common state."""
    objects = (key_of_object(name) for name in catalog.value_names if name != COMMON_OBJECT)
    return frozenset((*map(checkpoint_key, catalog.names), *(key for key in objects if key is not None)))


def compare_keys(comm: Comm, catalog: Catalog, node: Node, mode: str) -> Keys:
    """Compare the keys of all ranks' trees with those of the checkpoint. Collective.

    Raises
    ------
    MismatchError
        The keys differ, and the mode asks for an error; all ranks raise the same one.
    """
    names = {entry.name: entry.name for entry in entries_of(node)}
    names |= {part.name: key_of_object(part.name) or part.name for part in objects_of(node)}
    own, saved = frozenset(names.values()), saved_keys(catalog)
    # Two collectives, on every rank: gather the keys on rank 0, and broadcast their union.
    wanted = frozenset(merge_of_all(comm, sorted(own), lambda keys: sorted({key for of_rank in keys for key in of_rank})))
    missing = saved - wanted if mode.endswith("_all") else frozenset()
    # From here on, all ranks have the same `wanted` and `missing`, so all raise the same error.
    lines = [f"{key}: not in the checkpoint" for key in sorted(wanted - saved)]
    lines += [f"{key}: in the checkpoint, but in no rank's tree" for key in sorted(missing)]
    if lines and mode.startswith("raise"):
        raise MismatchError(summarize(lines, "load with strict='return_all' to load what is in both"), lines)
    if lines and mode.startswith("log") and comm.rank == 0:
        _log.warning("%s", summarize(lines, "they are left out"))
    absent = frozenset(name for name, key in names.items() if key not in saved)
    return Keys(missing, own - saved, absent)


class WantedTree:
    """One of Megatron's trees to load into; after the load, `result` is the tree to return.

    Parameters
    ----------
    mode
        The value of a `StrictHandling`.
    folder
        The folder of the checkpoint.
    with_common
        Whether `result` includes the saved common state.
    """

    def __init__(self, tree: dict[str, Any], mode: str, folder: str, *, with_common: bool = True) -> None:
        self._tree, self._mode, self._folder, self._with_common = tree, mode, folder, with_common
        self._resized: list[tuple[NamedShard, Ints]] = []  # tensors whose saved global shape is another one, with that shape
        self._common: dict[Any, Any] = {}
        self.keys = Keys(frozenset(), frozenset(), frozenset())
        self.result: Any = None

    def prepare(self, catalog: Catalog, comm: Comm) -> Target:
        """Describe the tensors and values that this rank wants from a checkpoint. Collective.

        Raises
        ------
        UsageError
            Something in the tree cannot be loaded into.
        MismatchError
            The tree and the checkpoint have different keys, and the mode makes this an error.
        CorruptError
            Megatron itself has read ``common.pt``, and that file belongs to another save.
        """
        # Collectives: `compare_keys` gathers and broadcasts, unless the mode is the default. All else is local.
        if not self._with_common and comm.rank == 0:
            check_common_file(catalog, self._folder)
        node = lower_tree(self._tree, loading=True)
        if self._mode != "assume_ok_unexpected":
            self.keys = compare_keys(comm, catalog, node, self._mode)
        builder = StateBuilder()
        for entry in entries_of(node):
            if entry.name not in self.keys.absent:
                builder.tensor(entry.name, entry.shard, written=True)
                if entry.name in catalog and (saved := catalog.shape(catalog.index(entry.name))) != entry.shard.layout.shape:
                    self._resized.append((entry, saved))
        objects = {part.name for part in objects_of(node)} - self.keys.absent
        paths = {name for name in catalog.value_names if is_common(name)} if self._with_common else set()

        def check(values: Mapping[str, Any]) -> list[str]:
            self._common = common_state(catalog, {name: values[name] for name in paths}) if self._with_common else {}
            shapes = (
                f"{entry.name}: saved with global shape {saved}, wanted {entry.shard.layout.shape}"
                for entry, saved in self._resized
                if not entry.resizable
            )
            return [*dict.fromkeys(shapes), *unplaced_state(node, catalog), *problems_of(node, self._common)]

        def finish(values: Mapping[str, Any], skipped: Iterable[str]) -> None:
            for entry, saved in self._resized:
                if entry.resizable:
                    zero_outside(entry.shard, saved, entry.name)
            loaded = loaded_of(node, self._common, Loaded(values, self.keys.absent))
            self.result = merged(self._common, {} if loaded is NOTHING else loaded)

        return builder.target(sorted(paths | objects), check, finish)


def is_common(name: str) -> bool:
    """Tell by its name whether a value belongs to the common state; if not, it is an object."""
    return name == COMMON_OBJECT or key_of_object(name) is None


def tensors_of(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by Megatron's key, on the meta device: without data, for their shapes and dtypes."""
    key_of = keys_of_catalog(catalog)
    indices = {key_of(name): catalog.index(name) for name in catalog.names}
    return {key: torch.empty(catalog.shape(i), dtype=TORCH_DTYPES[catalog.dtype(i)], device="meta") for key, i in indices.items()}
