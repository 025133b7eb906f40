"""Paths in the state, and the form in which they are saved.

A dict is saved as its values, each with the keys that lead to it, so only these keys can show the class of the dict. A key of a
plain dict is saved as it is. A key of another dict is saved as a dict of that class with one entry: ``OrderedDict({"a": 2})`` is
the third key of an `OrderedDict`. A load that finds no dict in its place makes one of that class, with its keys in their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.catalog.model import Catalog
from ..core.catalog.names import STATE
from ..core.catalog.specs import StateLink
from ..core.trees import Path, name_of
from ..format.value_decode import FACTORIES
from ..format.values import decode_path, keys_of

_KINDS = (OrderedDict, Counter, defaultdict)


class Index(int):
    """A step of a path into a list or tuple. (A key of a dict that is an int is a plain int.)"""


class Unwrapped(str):
    """A step of a path into a dict of tensors: the key without the parts of wrappers. `key` is the dict's own key."""

    key: str

    @classmethod
    def of(cls, name: str, key: str) -> Unwrapped:
        step = cls(name)
        step.key = key
        return step


def path_keys(path: Path) -> list[Any]:
    """Return a path in its saved form: an index of a list is put in a tuple, and so is a key that looks like such a tuple.

    >>> path_keys(("extra", 7, Index(0), (0,)))
    ['extra', 7, (0,), ((0,),)]
    """
    saved: list[Any] = []
    for step in path:
        kind = type(step)
        if kind is Index:
            saved.append((int(step),))
        elif kind is Unwrapped:
            saved.append(str(step))
        else:
            saved.append((step,) if kind is tuple and _is_wrapped(step) else step)
    return saved


def _is_wrapped(key: Any) -> bool:
    """Tell whether a saved key is the tuple of an index, or a key that was put in a tuple because it looks like one."""
    return type(key) is tuple and len(key) == 1 and (type(key[0]) is int or _is_wrapped(key[0]))


def own_key(step: Any) -> Any:
    """Return the key that a container itself has for a step of a path."""
    return step.key if isinstance(step, Unwrapped) else step


def saved_path(keys: tuple[Any, ...]) -> Path:
    """Make a path of its saved keys, as the inverse of `path_keys`."""
    return tuple(key if not _is_wrapped(key) else Index(key[0]) if type(key[0]) is int else key[0] for key in keys)


def paths_of_values(catalog: Catalog) -> dict[str, Path]:
    """Return the path of each value of a catalog in the state, by its name."""
    return {entry.name: saved_path(decode_path(entry.path)) for entry in catalog.values_table}


def link_in_dict(path: Path, optimizers: set[str]) -> StateLink | None:
    """Return the link of an entry in one of `optimizers`, dicts of the form of an optimizer's ``state_dict()``."""
    for i in range(len(path) - 3, -1, -1) if optimizers else ():
        if path[i] == STATE and name_of(path[:i]) in optimizers:
            return StateLink(name_of(path[:i]), str(path[i + 1]), name_of(path[i + 2 :]))
    return None


class Steps:
    """Gives paths of one tree of the state in their saved form."""

    def __init__(self, path: Path, root: Any) -> None:
        self._above, self._root = len(path), root
        self._positions: dict[int, dict[Any, int]] = {}

    def __call__(self, path: Path) -> list[Any]:
        """Return the saved form of a path. The class of the tree's root does not matter, because no load makes a root."""
        steps, node = path_keys(path), self._root
        for at in range(self._above, len(path)):
            if at > self._above and type(node) in _KINDS:
                steps[at] = self._step(node, path[at], steps[at])
            node = _child(node, path[at])
        return steps

    def _step(self, node: Any, key: Any, saved: Any) -> Any:
        if type(node) is defaultdict:
            factory = node.default_factory
            return defaultdict(factory if factory in FACTORIES.values() else None, {saved: 0})
        if type(node) is Counter:
            return Counter({saved: 0})
        if id(node) not in self._positions:  # the node lives in the state as long as this does
            self._positions[id(node)] = {key: i for i, key in enumerate(node)}
        return OrderedDict({saved: self._positions[id(node)][key]})


def _child(node: Any, key: Any) -> Any:
    if isinstance(node, Mapping):
        return node.get(key)
    # Below a module or an optimizer in a list, the path has steps that no container knows.
    return node[key] if isinstance(node, list | tuple) and isinstance(key, Index) else None


def in_order(paths: Sequence[Sequence[Any]]) -> list[int]:
    """Return the order in which to add values: each dict gets its keys as they come, an `OrderedDict` in the order of its steps.

    >>> in_order([["b", "x"], ["a"], ["b", "y"]])
    [0, 2, 1]
    """
    places: dict[Path, dict[Any, int]] = {}

    def places_of(steps: Sequence[Any]) -> tuple[int, ...]:
        keys, out = keys_of(steps), []
        for at, (key, step) in enumerate(zip(keys, steps, strict=True)):
            known = places.setdefault(keys[:at], {})
            place = known.setdefault(key, len(known))
            out.append(next(iter(step.values())) if type(step) is OrderedDict else place)
        return tuple(out)

    orders = list(map(places_of, paths))
    return sorted(range(len(orders)), key=orders.__getitem__)


def new_dict(step: Any) -> dict[Any, Any]:
    """Return an empty dict of the class that a saved step shows."""
    if type(step) is defaultdict:
        return defaultdict(step.default_factory)
    return type(step)() if type(step) in _KINDS else {}
