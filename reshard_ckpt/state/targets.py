"""Targets of loaded values: give each value of a checkpoint to the part of the state that it belongs to.

*Router*: a value goes to the part with the longest name that leads to its own name. So a value below an object's own tree goes to
that object, and not to the dict around it.

*TreeTarget*: values go into dicts, lists and objects with a state of their own. A value that the checkpoint has and the tree
lacks is added to the dict that it was saved in. A value that fits nowhere is a problem, found before anything changes.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch.optim.lr_scheduler import LRScheduler

from ..core.catalog.names import GROUPS, STATE
from ..core.catalog.param_groups import Groups
from ..core.catalog.problems import COMBINE, Problem, elsewhere, no_place
from ..core.catalog.specs import ValueKind
from ..core.report import plural, type_in_words
from ..core.trees import Path, name_of
from ..errors import MismatchError, UsageError
from .describe import Index, in_order, new_dict, own_key
from .entries import Entry, Kind
from .layouts import RankSet
from .modules import EXTRA_STATE, is_nothing
from .parameters import keep_dtypes
from .shards import PerRank, PerRankValues, Value
from .tensors import TensorLike, is_tensor_like, local_memory
from .walk import Tree, give_state, is_stateful

_MISSING = object()

_OF_SOME_RELEASES = frozenset({"verbose", "_is_initial"})
"""Attributes that an `LRScheduler` has in some releases of torch alone. A checkpoint of another release may lack them; then the
scheduler keeps its own, as with torch's `load_state_dict`. Once it is made, no rate depends on them."""


class ValueTarget(Protocol):
    """A part of the state that takes loaded values: the modules or optimizers under one key, or a tree of dicts and lists."""

    name: str

    @property
    def values(self) -> Sequence[str]:
        """The names of values that this part of the state wants; the checkpoint must have them."""
        ...

    def takes(self, name: str, /) -> bool:
        """Tell whether a value, whose name lies below that of this part, belongs to it and not to the container around it."""
        ...

    def check(self, values: Mapping[str, Any], /) -> list[str]:
        """Check the saved values that belong to this part, before anything changes. Return one line for each problem."""
        ...

    def finish(self, values: Mapping[str, Any], skipped: frozenset[str], /) -> None:
        """Put the values into this part of the state once all tensors are in place; `skipped`: tensors that were not loaded."""
        ...


class Router:
    """Gives each value of a checkpoint to the part of the state with the longest name that leads to the value's name.

    `prefixes` are the top-level keys of the state; values elsewhere are ignored.
    """

    def __init__(self, parts: Sequence[ValueTarget], prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self._parts = parts
        self._by_name: dict[str, list[ValueTarget]] = {}
        for part in parts:
            # Parts come inner before outer; of two with one name, the module or object inside takes the values.
            self._by_name.setdefault(part.name, []).append(part)

    @property
    def values(self) -> tuple[str, ...]:
        """The names of all values that the checkpoint must have."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.values))

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Let each part of the state check the values that belong to it; return the lines about all problems."""
        routed = self._route(values)
        return [problem for part in self._parts for problem in part.check(routed.get(id(part), {}))]

    def finish(self, values: Mapping[str, Any], skipped: Iterable[str] = ()) -> None:
        """Let each part of the state take the values that belong to it; `skipped` are names of tensors that were not loaded."""
        routed, missed = self._route(values), frozenset(skipped)
        for part in self._parts:
            part.finish(routed.get(id(part), {}), missed)

    def _route(self, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Find the part of the state that takes each value, by the value's name; return ``{id(part): {name: value}}``."""
        routed: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            if not any(name == p or name.startswith(f"{p}.") for p in self.prefixes):
                continue
            at = name
            part = None
            while part is None:
                part = next((each for each in self._by_name.get(at, ()) if each.takes(name)), None)
                if not at:
                    break
                at = at.rpartition(".")[0]
            routed.setdefault(id(part), {})[name] = value
        return routed


class Prefixes:
    """A set of saved names in which to look up whether any of them lies below a given name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._names)

    def include(self, name: str) -> bool:
        """Tell whether any of the names lies below this one (begins with it and a dot)."""
        at = bisect_left(self._sorted, f"{name}.")
        return at < len(self._sorted) and self._sorted[at].startswith(f"{name}.")


class ValueOrigin(NamedTuple):
    """Where a saved value lies in the state: its path, its kind, and its saved keys, which also record the class of each dict."""

    path: Path
    kind: ValueKind
    steps: tuple[Any, ...]


class TreeTarget:
    """One tree of dicts and lists in the state, as the target of loaded values.

    Parameters
    ----------
    tree
        The tree, as the walk over the state has found it.
    saved
        Where each value of the checkpoint lies in the state, by name.
    has_below
        Takes a name, and returns whether the checkpoint has anything below it.
    group
        The ranks that load.
    adds
        Whether values that the tree lacks are added to it, or ignored.
    """

    def __init__(
        self, tree: Tree, saved: Mapping[str, ValueOrigin], has_below: Callable[[str], bool], group: RankSet, *, adds: bool = True
    ) -> None:
        self.name = name_of(tree.path)
        self._tree = tree
        self._saved = saved
        self._has_below = has_below
        self._group = group
        self._adds = adds
        self._root = tree.root
        self._updates: list[tuple[Path, Any]] = []
        self._added: list[tuple[ValueOrigin, Any]] = []
        self._held: list[tuple[PerRank | Value, Any]] = []
        self._slots = {row.name: row for row in tree.rows if row.kind in (Kind.VALUE, Kind.WHOLE, Kind.PER_RANK, Kind.GROUPS)}
        self._tensors = {row.name for row in tree.rows if row.kind is Kind.TENSOR}
        self.values = tuple(name for name, row in self._slots.items() if name in saved or self._needs(row))
        for name, row in self._slots.items():
            for node in self._nodes(row.path)[:-1]:
                if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
                    raise UsageError(f"{name}: {type_in_words(node)} cannot take a loaded value; pass a dict")
        makers: dict[Path, bool] = {}
        for row in tree.rows:
            if row.kind is Kind.TENSOR:
                above = row.path[:-1]
                if above not in makers:
                    makers[above] = any(map(_may_make, self._nodes(above)))
                if makers[above]:
                    self._check_kept(row.name, row.path)

    @cached_property
    def _module_names(self) -> Prefixes:
        """The names of tensors and of extra state in this tree. They begin with the names of the modules that this rank has."""
        return Prefixes((*self._tensors, *(name for name in self._slots if EXTRA_STATE in name)))

    def _nodes(self, path: Path) -> list[Any]:
        """Return the nodes of the tree along a path: its root first, and the node at the path last."""
        nodes = [self._root]
        for key in self._relative(path):
            nodes.append(_child(nodes[-1], key))
        return nodes

    def _check_kept(self, name: str, path: Path) -> None:
        """Refuse a tensor from a mapping that returns another tensor at each access: the loaded bytes would be lost."""
        *above, first = self._nodes(path)
        again = self._nodes(path)[-1]
        if is_tensor_like(first) and is_tensor_like(again) and _address(first, name) != _address(again, name):
            raise UsageError(
                f"{name}: {type_in_words(next(filter(_may_make, above)))} that gives another tensor each time it is asked cannot "
                "be loaded into; pass a dict of the tensors themselves"
            )

    def _needs(self, row: Entry) -> bool:
        """Tell whether the checkpoint lacks the value of a row, which is not saved under its name."""
        if isinstance(self._tree.owner, LRScheduler) and row.path[-1] in _OF_SOME_RELEASES:
            return False
        # Nothing under this name, where the checkpoint has something below it: that is added here, or other ranks take it.
        is_empty = row.kind is Kind.VALUE and is_nothing(row.value) and (self._has_below(row.name) or self._is_state(row.name))
        return not is_empty or not (self._adds or isinstance(row.value, Mapping))

    def _is_state(self, name: str) -> bool:
        """Tell whether an optimizer's state dict by FQN has its state under this name.

        If it is empty, as that of plain SGD, no save of the optimizer itself has this name.
        """
        groups = self._slots.get(f"{name.removesuffix(STATE)}{GROUPS}")
        return groups is not None and groups.kind is Kind.GROUPS

    def takes(self, name: str) -> bool:
        return True

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Collect the changes that these values make to the tree. Return one line for each value that does not fit."""
        self._updates, self._added, self._held = [], [], []
        return [problem for name, value in values.items() for problem in self._judge(name, value)]

    def _judge(self, name: str, value: Any) -> list[str]:
        """Collect the change that one value makes. Return a line for each problem if it does not fit."""
        row = self._slots.get(name)
        if row is not None and row.kind is Kind.GROUPS:
            return self._take_groups(row, name, value)
        if row is not None and row.kind is Kind.PER_RANK:
            problem = self._take_per_rank(row.value, name, value)
        elif row is not None:
            problem = self._take(row, name, value)
        elif is_nothing(value) and self._has_below(name):
            return []  # some rank had nothing here, and others saved something below this name
        else:
            problem = self._add(name, value)
        return [] if problem is None else [problem]

    def _relative(self, path: Path) -> Path:
        return path[len(self._tree.path) :]

    def _take(self, row: Entry, name: str, value: Any) -> str | None:
        kind = self._saved[name].kind
        if kind == ValueKind.PER_RANK:
            return f"{name}: saved as a value of each rank, wanted as one for all; pass PerRank(value) in the state"
        if kind == ValueKind.PARAM_GROUPS:
            return f"{name}: saved as the groups of an optimizer, wanted as a plain value; pass the optimizer under this key"
        if row.kind is Kind.WHOLE:
            self._held.append((row.value, value))
        else:
            self._updates.append((self._relative(row.path), value))
        return None

    def _take_per_rank(self, holder: PerRank, name: str, value: Any) -> str | None:
        if not isinstance(value, PerRankValues):
            return f"{name}: saved as one value for all ranks, wanted as PerRank; pass the plain value in the state"
        num_saved, rank, size = len(value.values), self._group.rank, self._group.size
        if num_saved != size and holder.combine is None:
            what = (
                f"saved by {plural(num_saved, 'rank')}, wanted on {size}; pass PerRank(value, combine=...) to say what becomes "
                "of the saved values"
            )
            return Problem(name, what, COMBINE)
        if rank in value.lost:
            return None
        own = value.values[rank] if num_saved == size else holder.combined(value.values, rank, size)
        self._held.append((holder, own))
        return None

    def _take_groups(self, row: Entry, name: str, value: Any) -> list[str]:
        if self._saved[name].kind != ValueKind.PARAM_GROUPS:
            return [f"{name}: saved as a plain value, wanted as the groups of an optimizer; save the optimizer under this key"]
        selections = Groups(value).select_all([group["params"] for group in row.value], name=name, targets=row.value)
        problems: list[str] = []
        for i, selection in enumerate(selections):
            problems += selection.problems
            for key, hyperparameter in selection.hyperparameters.items():
                self._updates.append((self._relative((*row.path, i, key)), copy.deepcopy(hyperparameter)))
        return problems

    def _add(self, name: str, value: Any) -> str | None:
        """Plan to add a value that the tree lacks to the dict that it was saved in.

        Return a line about the problem if it does not fit, or if other ranks have to take it. Without `adds`, pass it over.
        """
        saved = self._saved[name]
        if name in self._tensors:
            return f"{name}: saved as a value, wanted as a tensor; pass a plain value under this key"
        if not self._adds:
            return None
        alone = self._group.size == 1
        if self._lacks_module_of(name) or (not alone and (self._is_elsewhere(saved.path) or self._lacks_optimizer_of(name))):
            return elsewhere(name)
        if saved.kind == ValueKind.PARAM_GROUPS or not self._fits(saved.path):
            return no_place(name, "state")
        if saved.kind == ValueKind.PER_RANK:
            saved_values, value = value, PerRank(None)
            if (problem := self._take_per_rank(value, name, saved_values)) is not None:
                return problem
        self._added.append((saved, value))
        return None

    def _lacks_module_of(self, name: str) -> bool:
        """Tell whether a value is extra state of a module that has neither tensors nor extra state in this tree."""
        module, dot, _ = f"{name}.".partition(f".{EXTRA_STATE}.")
        return bool(dot) and module.startswith(self.name) and not self._module_names.include(module)

    def _is_elsewhere(self, path: Path, *, with_dicts: bool = False) -> bool:
        """Tell whether a path leads through None or an empty list, which may stand for a stage or optimizer of other ranks.

        With `with_dicts`, an empty dict may stand for one too.
        """
        node = self._root
        for key in self._relative(path):
            if not isinstance(node, Mapping):
                return node is not _MISSING and _is_absent(node)
            if with_dicts and not node:
                return True
            node = node.get(key, _MISSING)
        return False

    @cached_property
    def _saved_groups(self) -> dict[str, Path]:
        found = ((name.removesuffix(GROUPS), of) for name, of in self._saved.items() if of.kind == ValueKind.PARAM_GROUPS)
        return {optimizer: of.path for optimizer, of in found}

    def _lacks_optimizer_of(self, name: str) -> bool:
        """Tell whether a value is of an optimizer that is an empty dict here.

        Torch gives an empty dict to all ranks but one that gathers a full state dict.
        """
        return any(
            name.startswith((f"{optimizer}{GROUPS}", f"{optimizer}{STATE}.")) and self._is_elsewhere(path, with_dicts=True)
            for optimizer, path in self._saved_groups.items()
        )

    def _fits(self, path: Path) -> bool:
        """Tell whether a value can be added at a path: dicts along it exist or can be made; lists cannot be made."""
        if name_of(path[: len(self._tree.path)]) != self.name:
            return False
        node = self._root
        # Once a step is missing, all later steps are too.
        for key in self._relative(path):
            if isinstance(key, Index) or not (_is_absent(node) or isinstance(node, MutableMapping)):
                return False
            node = _MISSING if _is_absent(node) else node.get(key, _MISSING)
        return node is _MISSING

    def finish(self, values: Mapping[str, Any], skipped: frozenset[str]) -> None:
        """Make the changes that `check` has collected. If the tree is the state of an object, give it back to the object."""
        for path, value in self._updates:
            self._root = _put(self._root, path, value, path)
        for i in in_order([saved.steps for saved, _ in self._added]):
            saved, value = self._added[i]
            self._root = _put(self._root, self._relative(saved.path), value, self._relative(saved.steps))
        for holder, value in self._held:
            if is_stateful(holder.value):
                give_state(holder.value, value)
            else:
                holder.value = value
        if self._tree.sink is not None:
            try:
                self._tree.sink(self._root)
                for optimizer, given in self._tree.given:
                    keep_dtypes(optimizer, given)
            except Exception as error:
                raise MismatchError(f"{self.name}: load_state_dict refused the loaded state: {error}") from error


def _is_absent(node: Any) -> bool:
    """Tell whether a node of a tree is missing, None, or an empty list or tuple, in whose place a dict can be made."""
    return node is _MISSING or (isinstance(node, list | tuple | None) and not node)


def _may_make(node: Any) -> bool:
    """Tell whether a container is a mapping other than a dict, so that it may make a new object at each access."""
    return isinstance(node, Mapping) and not isinstance(node, dict)


def _address(value: TensorLike, name: str) -> int:
    return local_memory(value, name)[0].data_ptr()


def _put(node: Any, path: Path, value: Any, steps: Path) -> Any:
    """Set the value at a path below a node, and return the node. A tuple cannot be changed: return a changed copy of it.

    Missing dicts are made, of the class that the saved keys (`steps`) record.
    """
    if not path:
        return value
    if not isinstance(node, MutableMapping) and _is_absent(node):
        node = new_dict(steps[0])
    key, rest = own_key(path[0]), path[1:]
    if isinstance(node, MutableMapping):
        node[key] = _put(node.get(key, _MISSING), rest, value, steps[1:])
        return node
    items = list(node)
    items[key] = _put(items[key], rest, value, steps[1:])
    if isinstance(node, list):
        node[key] = items[key]
        return node
    return type(node)._make(items) if hasattr(node, "_make") else type(node)(items)


def _child(node: Any, key: Any) -> Any:
    """Return the child of a container under a key.

    For a tensor that consists of other tensors, it is the inner tensor of that name.
    """
    return getattr(node, key) if is_tensor_like(node) else node[own_key(key)]
