"""The last pass: each row becomes the spec of a tensor or of a value, under a unique name.

A name belongs to one source, the item of the state that the row came from. The same name again from that source is a replica on
this rank (two pipeline stages that hold one tensor); from another source it is a collision. A tensor that lies exactly where an
earlier one does becomes its alias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..core.catalog.specs import Ints, Mesh, Piece, Placement, TensorSpec, ValueKind, ValueSpec
from ..core.trees import Path
from ..core.words import check_text
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import LayoutError, NameCollisionError
from ..format.columns import dtype_code
from ..format.values import encode_path, encode_value
from .entries import Entry, Kind
from .layouts import Layout
from .paths import path_keys
from .tensors import memory_of
from .walk import Opaque

_VALUE_KINDS = {
    Kind.VALUE: ValueKind.PLAIN,
    Kind.WHOLE: ValueKind.PLAIN,
    Kind.PER_RANK: ValueKind.PER_RANK,
    Kind.GROUPS: ValueKind.PARAM_GROUPS,
}


class _Place(NamedTuple):
    """The memory of a tensor and its use."""

    device: torch.device
    address: int
    dtype: torch.dtype
    shape: Ints
    pieces: tuple[Piece, ...]


class _Known(NamedTuple):
    """A spec and the values that it follows from besides its name. It holds no memory, so no spec can be reused wrongly."""

    layout: Layout
    dtype: torch.dtype
    strides: Ints
    spec: TensorSpec


_SPECS: dict[str, _Known] = {}
"""The last spec of each name: most saves describe the same tensors as the save before."""

_MAX_SPECS = 1 << 18


@dataclass(slots=True)
class Describer:
    """Describes rows under unique names, and finds tensors that share memory.

    Placements that do not name axes of the job's `mesh` are left out.
    """

    mesh: Mesh | None
    tensors: list[LocalTensor] = field(default_factory=list)
    values: list[ValueSpec] = field(default_factory=list)
    _source: dict[str, str] = field(default_factory=dict)
    """The source of each name."""
    _first: dict[tuple[torch.device, int], list[tuple[_Place, str]]] = field(default_factory=dict)
    _by_name: dict[str, Any] = field(default_factory=dict)
    """The place of each tensor, the bytes of each value."""
    _known_axes: dict[int, tuple[bool, Placement]] = field(default_factory=dict)
    """For each placement by its id: whether it names axes of the mesh. It is held, so that its id stays its own."""

    def add(self, row: Entry, keys_of: Callable[[Path], list[Any]] = path_keys) -> None:
        """Add a row; `keys_of` gives the path of a value as it is saved."""
        if row.kind is Kind.TENSOR:
            self._add_tensor(row)
        else:
            self._add_value(row, keys_of)

    def _add_tensor(self, row: Entry) -> None:
        name, (memory, layout) = row.name, memory_of(row)
        dtype, strides = memory.dtype, memory.stride()
        last = _SPECS.get(name)
        if last is not None and (last.layout is not layout or last.dtype is not dtype or last.strides != strides):
            last = None
        pieces = layout.pieces(memory) if last is None else last.spec.pieces
        place = _Place(memory.device, memory.data_ptr(), dtype, layout.shape, pieces)
        known = self._register(row)
        alias = None
        if known is None:
            self._by_name[name] = place
            if pieces and (first := self._first_at(place, name)) != name:
                alias = first
        elif not isinstance(known, _Place) or (known.dtype, known.shape) != (dtype, layout.shape):
            raise LayoutError(
                f"{name}: two stages on this rank have different tensors of this name, {_kind(known)} and {_kind(place)}; "
                "give them distinct names (nn.Sequential stages both call their first layer 0)"
            )
        placement = layout.placement if self._knows_axes_of(layout.placement) else ()
        if last is not None and (last.spec.alias_of, last.spec.link, last.spec.placement) == (alias, row.link, placement):
            spec = last.spec
        else:
            check_text(name, "a name")
            code = dtype_code(dtype, name)
            spec = TensorSpec(name, code, layout.shape, pieces, layout.replication, placement, alias, row.link)
            if len(_SPECS) >= _MAX_SPECS:
                _SPECS.clear()
            _SPECS[name] = _Known(layout, dtype, strides, spec)
        if known != place:
            self.tensors.append(LocalTensor(spec, memory))

    def _knows_axes_of(self, placement: Placement) -> bool:
        """Tell whether a placement names axes of the job's mesh."""
        # By identity: few placements, each shared by many tensors.
        known = self._known_axes.get(id(placement))
        if known is None:
            axes, mesh = tuple(p.axis for p in placement), self.mesh
            unnamed = axes == tuple(f"axis{i}" for i in range(len(axes)))
            fits = mesh is not None and set(axes) <= set(mesh.axes) and (not unnamed or len(axes) == len(mesh.axes))
            known = self._known_axes[id(placement)] = not axes or fits, placement
        return known[0]

    def _first_at(self, place: _Place, name: str) -> str:
        """Return the name of the first tensor at a place; this name if it is the first."""
        # By address alone: to hash all pieces of every tensor would take longer than all else here.
        near = self._first.setdefault((place.device, place.address), [])
        for other, first in near:
            if other == place:
                return first
        near.append((place, name))
        return name

    def _add_value(self, row: Entry, keys_of: Callable[[Path], list[Any]]) -> None:
        known = self._register(row)
        is_opaque = isinstance(row.value, Opaque)
        data = row.value.data if is_opaque else encode_value(row.value, row.name)
        if known is None:
            self._by_name[row.name] = data
            path, kind = encode_path(keys_of(row.path)), _VALUE_KINDS[row.kind]
            self.values.append(ValueSpec(row.name, path, kind, data, row.link, is_opaque))
        elif known != data:
            raise LayoutError(f"{row.name}: two stages on this rank have different values of this name; give them distinct names")

    def _register(self, row: Entry) -> Any:
        """Return the place or the bytes that are known for a row's name; refuse a name that is from another source."""
        name, source = row.name, row.name if row.source is None else row.source
        other = self._source.setdefault(name, source)
        if other != source:
            raise NameCollisionError(
                f"{name}: both the item {other} and the item {source} have an entry of this name; rename one of the keys"
            )
        return self._by_name.get(name)


def _kind(place: Any) -> str:
    return f"{place.dtype} of shape {place.shape}" if isinstance(place, _Place) else "a value"
