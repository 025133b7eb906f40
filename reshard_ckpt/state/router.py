"""Routing saved values to the parts of the target.

The part whose name is the longest one that leads to the value's: a value below an object's own tree is that object's, and not the
surrounding dict's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol


class ValueTarget(Protocol):
    """Something in the target that takes values: modules, optimizers, a tree of containers."""

    name: str

    @property
    def values(self) -> Sequence[str]:
        """The names of values that it must be given."""
        ...

    def takes(self, name: str, /) -> bool:
        """Whether a value below its name is its own, rather than that of what lies around it."""
        ...

    def check(self, values: Mapping[str, Any], /) -> list[str]:
        """Judge the saved values that lie below it, before anything changes."""
        ...

    def finish(self, values: Mapping[str, Any], skipped: frozenset[str], /) -> None:
        """Take them, after all tensors are in place."""
        ...


class Router:
    """The parts of a target, and the values under its top-level keys."""

    def __init__(self, parts: Sequence[ValueTarget], prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self._parts = parts
        self._by_name: dict[str, list[ValueTarget]] = {}
        for part in parts:
            # Parts come inner before outer; of two with one name, the module or object inside takes the values.
            self._by_name.setdefault(part.name, []).append(part)

    @property
    def values(self) -> tuple[str, ...]:
        """The names of all values that are required."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.values))

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Let each part judge its values."""
        routed = self._route(values)
        return [problem for part in self._parts for problem in part.check(routed.get(id(part), {}))]

    def finish(self, values: Mapping[str, Any], skipped: Iterable[str] = ()) -> None:
        """Let each part take its values."""
        routed, missed = self._route(values), frozenset(skipped)
        for part in self._parts:
            part.finish(routed.get(id(part), {}), missed)

    def _route(self, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The values of each part, by its identity."""
        routed: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            if any(name == p or name.startswith(f"{p}.") for p in self.prefixes):
                routed.setdefault(id(self._part_of(name)), {})[name] = value
        return routed

    def _part_of(self, name: str) -> ValueTarget | None:
        at = name
        while True:
            for part in self._by_name.get(at, ()):
                if part.takes(name):
                    return part
            if not at:
                return None
            at = at.rpartition(".")[0]


class Below:
    """Whether a checkpoint has any name below a given one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._names)

    def __call__(self, name: str) -> bool:
        at = bisect_left(self._sorted, f"{name}.")
        return at < len(self._sorted) and self._sorted[at].startswith(f"{name}.")
