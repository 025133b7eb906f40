"""The tensors and values of a state, under unique names, and which of the tensors are the same memory.

A name belongs to the item of the state that it came from. The same name again from that item is a replica on this rank (two
pipeline stages that hold one tensor); from another item it is a collision. A tensor that lies exactly where an earlier one does
becomes its alias.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..core.catalog.specs import AxisPlacement, Ints, Mesh, Piece, StateLink, ValueKind, ValueSpec
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import LayoutError, NameCollisionError
from ..format.values import encode_path, encode_value

Placement = tuple[AxisPlacement, ...]


class NamedValue(NamedTuple):
    """A value of the state that is no tensor; `keys` is its path as it is saved."""

    name: str
    keys: list[Any]
    kind: ValueKind
    value: Any
    link: StateLink | None = None


class _Place(NamedTuple):
    """Where a tensor lies, and how."""

    device: torch.device
    address: int
    dtype: torch.dtype
    shape: Ints
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Collector:
    """Gathers tensors and values under unique names, and finds tensors that share memory.

    Placements that do not name axes of the job's `mesh` are left out.
    """

    mesh: Mesh | None
    tensors: list[LocalTensor] = field(default_factory=list)
    values: list[ValueSpec] = field(default_factory=list)
    dtensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The names of tensors that are wanted, and the DTensors that they are the local part of."""
    _source: dict[str, str] = field(default_factory=dict)
    """The name of the item that each name came from."""
    _first: dict[tuple[torch.device, int], list[tuple[_Place, str]]] = field(default_factory=dict)
    _by_name: dict[str, Any] = field(default_factory=dict)
    """The place of each tensor, the bytes of each value."""
    _known_axes: dict[int, bool] = field(default_factory=dict)
    _placements: list[Placement] = field(default_factory=list)

    def add(self, source: str, content: LocalTensor | NamedValue) -> None:
        """Add a tensor or a value of an item; a second one of the same name is a replica on this rank."""
        if isinstance(content, LocalTensor):
            self._add_tensor(source, content)
        else:
            self._add_value(source, content)

    def _add_tensor(self, source: str, tensor: LocalTensor) -> None:
        spec, memory = tensor
        name = spec.name
        place = _Place(memory.device, memory.data_ptr(), memory.dtype, spec.shape, spec.pieces)
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
        self._by_name.setdefault(name, place)
        if not self._knows_axes_of(spec.placement):
            spec = replace(spec, placement=())
        self.tensors.append(tensor if spec is tensor.spec else LocalTensor(spec, memory))

    def _knows_axes_of(self, placement: Placement) -> bool:
        # By identity: few placements, each shared by many tensors, which hold them.
        known = self._known_axes.get(id(placement))
        if known is None:
            known = self._known_axes[id(placement)] = _is_in_terms_of(self.mesh, placement)
            self._placements.append(placement)
        return known

    def _first_at(self, place: _Place, name: str) -> str:
        """Return the name that was first at a place; this one, if none was."""
        # By address alone: to hash all pieces of every tensor would take longer than all else here.
        near = self._first.setdefault((place.device, place.address), [])
        for other, first in near:
            if other == place:
                return first
        near.append((place, name))
        return name

    def _add_value(self, source: str, value: NamedValue) -> None:
        name = value.name
        known = self._register_name(name, source)
        data = encode_value(value.value, name)
        if known is None:
            self._by_name[name] = data
            self.values.append(ValueSpec(name, encode_path(value.keys), value.kind, data, value.link))
        elif known != data:
            raise LayoutError(f"{name}: two stages on this rank have different values of this name; give them distinct names")

    def _register_name(self, name: str, source: str) -> Any:
        """Return what was added under this name from the same item; a name from elsewhere is a collision."""
        other = self._source.setdefault(name, source)
        if other != source:
            raise NameCollisionError(
                f"{name}: both what lies under {other} and what lies under {source} have this name; rename one of the keys"
            )
        return self._by_name.get(name)


def _is_in_terms_of(mesh: Mesh | None, placement: Placement) -> bool:
    """Tell whether a placement names axes of the job's mesh."""
    axes = tuple(p.axis for p in placement)
    if not axes:
        return True
    unnamed = axes == tuple(f"axis{i}" for i in range(len(axes)))
    return mesh is not None and set(axes) <= set(mesh.axes) and (not unnamed or len(axes) == len(mesh.axes))


def _kind(place: Any) -> str:
    return f"{place.dtype} of shape {place.shape}" if isinstance(place, _Place) else "a value"
