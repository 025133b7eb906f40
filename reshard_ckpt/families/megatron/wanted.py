"""Loading a checkpoint into one of Megatron's trees: the tensors and values that one rank wants, and the resulting tree.

1. Compare the keys of all ranks' trees with those of the checkpoint, if the mode asks for it (`strictness`).
2. Fill tensors in place. If a saved tensor is smaller, and ``allow_shape_mismatch`` is set, the rest becomes zero.
3. Merge the loaded leaves into the saved common state. Optimizer objects receive their part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...plugins import TORCH_DTYPES, Catalog, Ints
from ...plugins.states import Comm, StateBuilder, Target, zero_outside
from .names import COMMON_OBJECT, key_of_object, keys_of_catalog
from .optimizers import lower_tree, unplaced_state
from .runs import NamedShard
from .strictness import Keys, compare_keys
from .tree import NOTHING, Loaded, entries_of, loaded_of, merged, objects_of, problems_of
from .values import check_common_file, common_state


class WantedTree:
    """A tree to load into; after the load, `result` is the tree to return.

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
        self._resized: list[NamedShard] = []
        self._shapes: dict[str, Ints] = {}
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
                self._note(entry, catalog)
        objects = {part.name for part in objects_of(node)} - self.keys.absent
        paths = {name for name in catalog.value_names if is_common(name)} if self._with_common else set()

        def check(values: Mapping[str, Any]) -> list[str]:
            self._common = common_state(catalog, {name: values[name] for name in paths}) if self._with_common else {}
            return [*self._shape_problems(), *unplaced_state(node, catalog), *problems_of(node, self._common)]

        def finish(values: Mapping[str, Any], skipped: Iterable[str]) -> None:
            for entry in self._resized:
                if entry.resizable:
                    zero_outside(entry.shard, self._shapes[entry.name], entry.name)
            loaded = loaded_of(node, self._common, Loaded(values, self.keys.absent))
            self.result = merged(self._common, {} if loaded is NOTHING else loaded)

        return builder.target(sorted(paths | objects), check, finish)

    def _note(self, entry: NamedShard, catalog: Catalog) -> None:
        """Note a tensor whose saved global shape differs from the wanted one."""
        if entry.name in catalog and (saved := catalog.shape(catalog.index(entry.name))) != entry.shard.layout.shape:
            self._shapes[entry.name] = saved
            self._resized.append(entry)

    def _shape_problems(self) -> list[str]:
        return list(
            dict.fromkeys(
                f"{entry.name}: saved with global shape {self._shapes[entry.name]}, wanted {entry.shard.layout.shape}"
                for entry in self._resized
                if not entry.resizable
            )
        )


def is_common(name: str) -> bool:
    """Tell whether the value of this name is common state, rather than an object."""
    return name == COMMON_OBJECT or key_of_object(name) is None


def tensors_of(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Describe the tensors of a checkpoint by key, as tensors on the meta device."""
    key_of = keys_of_catalog(catalog)
    indices = {key_of(name): catalog.index(name) for name in catalog.names}
    return {key: torch.empty(catalog.shape(i), dtype=TORCH_DTYPES[catalog.dtype(i)], device="meta") for key, i in indices.items()}
