"""The steps to a value in the state, as they are saved, and the dicts on the way, as they are made again

A dict is saved as its values, each with the keys that lead to it, so its class shows only there. Where the dict is no plain one,
the step is a dict of that class with this one key: ``OrderedDict({"a": 2})`` is the third key of an `OrderedDict`. A load that
finds no dict in its place makes one of that class, with the keys of an `OrderedDict` in their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..format.value_decode import FACTORIES
from .scan import Index, Path, path_keys

_KINDS = (OrderedDict, Counter, defaultdict)


class Steps:
    """The steps of one tree of the state that is being saved."""

    def __init__(self, path: Path, root: Any) -> None:
        self._above, self._root = len(path), root
        self._positions: dict[int, dict[Any, int]] = {}

    def __call__(self, path: Path) -> list[Any]:
        """What is saved of a path; the tree's own root is never made again, so its class does not matter."""
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
    # What is below a module or an optimizer of a list has steps that no container knows.
    return node[key] if isinstance(node, list | tuple) and isinstance(key, Index) else None


def order_of(steps: Sequence[Any]) -> tuple[int, ...]:
    """By which values that are added are sorted, so that the keys of an `OrderedDict` come in their order."""
    return tuple(next(iter(step.values())) if type(step) is OrderedDict else 0 for step in steps)


def new_dict(step: Any) -> dict[Any, Any]:
    """An empty dict of the class that a step is into."""
    if type(step) is defaultdict:
        return defaultdict(step.default_factory)
    return type(step)() if type(step) in _KINDS else {}
