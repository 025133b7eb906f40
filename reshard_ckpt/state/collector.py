"""Collects the tensors and values of a state under unique names, and finds those that share memory.

A name belongs to the item of the state that it came from. The same name again from that item is a replica on this rank (two
pipeline stages that hold one tensor); from another item it is a collision. A tensor that lies exactly where an earlier one does
becomes its alias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..core.catalog.specs import Ints, Piece, StateLink, ValueKind, ValueSpec
from ..core.words import check_text
from ..errors import LayoutError, NameCollisionError
from ..format.values import encode_path, encode_value
from .entries import NamedTensor
from .scan import Path, name_of, path_keys
from .tensors import LocalTensor


class _Place(NamedTuple):
    """Where a tensor lies, and how."""

    device: torch.device
    address: int
    dtype: torch.dtype
    shape: Ints
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Collector:
    """Gathers entries and values under unique names, and finds those that share memory."""

    entries: list[NamedTensor] = field(default_factory=list)
    values: list[ValueSpec] = field(default_factory=list)
    steps: Callable[[Path], list[Any]] = path_keys
    """What is saved of the path of a value."""
    _seen: dict[str, Path] = field(default_factory=dict)
    _first: dict[tuple[torch.device, int], list[tuple[_Place, str]]] = field(default_factory=dict)
    _by_name: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, source: Path, leaf: LocalTensor, link: StateLink | None = None) -> None:
        """Add a tensor; a second one of the same source and name is a replica on this rank."""
        spec = leaf.spec(name)
        place = _Place(leaf.memory.device, leaf.memory.data_ptr(), leaf.memory.dtype, spec.shape, spec.pieces)
        known = self._register_name(name, source)
        if known is not None:
            if not isinstance(known, _Place) or (known.dtype, known.shape) != (place.dtype, place.shape):
                raise LayoutError(
                    f"{name}: two stages on this rank have different tensors of this name, {_kind(known)} and {_kind(place)}; "
                    "give them distinct names (nn.Sequential stages both call their first layer 0)"
                )
            if known == place:
                return
        elif spec.pieces and (first := self._first_at(place, name)) != name:
            spec = replace(spec, alias_of=first)
        if link is not None:
            spec = replace(spec, link=link)
        self._by_name.setdefault(name, place)
        self.entries.append(NamedTensor(spec, leaf.memory))

    def _first_at(self, place: _Place, name: str) -> str:
        """The name that was first at a place; this one, if none was."""
        # By address alone: to hash all pieces of every tensor would take longer than all else here.
        near = self._first.setdefault((place.device, place.address), [])
        for other, first in near:
            if other == place:
                return first
        near.append((place, name))
        return name

    def add_value(self, path: Path, source: Path, kind: ValueKind, value: Any, link: StateLink | None = None) -> None:
        name = name_of(path)
        check_text(name, "a name")
        data = encode_value(value, name)
        known = self._register_name(name, source)
        if known is None:
            self._by_name[name] = data
            self.values.append(ValueSpec(name, encode_path(self.steps(path)), kind, data, link))
        elif known != data:
            raise LayoutError(f"{name}: two stages on this rank have different values of this name; give them distinct names")

    def _register_name(self, name: str, source: Path) -> Any:
        """What was added under this name from the same source; a name from elsewhere is a collision."""
        check_text(name, "a name")
        other = self._seen.setdefault(name, source)
        if other != source:
            raise NameCollisionError(
                f"{name}: both what lies under {name_of(other)} and what lies under {name_of(source)} have this name; rename "
                "one of the keys"
            )
        return self._by_name.get(name)


def _kind(place: Any) -> str:
    return f"{place.dtype} of shape {place.shape}" if isinstance(place, _Place) else "a value"
