"""Names of rows, and the last pass: each row becomes the spec of a tensor or of a value, under a unique name.

The path of a row is the keys that lead to it. A dict is saved as its values, each with its path, so only the keys can show the
class of the dict. A key of a plain dict is saved as it is. A key of another dict is saved as a dict of that class with one entry:
``OrderedDict({"a": 2})`` is the third key of an `OrderedDict`. A load that finds no dict in its place makes one of that class,
with its keys in their order.

A name belongs to one source, the item of the state that the row came from. The same name again from that source is a replica on
this rank (two pipeline stages that hold one tensor); from another source it is a collision. A tensor that lies exactly where an
earlier one does becomes its alias.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..core.catalog.model import Catalog
from ..core.catalog.names import STATE
from ..core.catalog.specs import Ints, Mesh, Piece, Placement, StateLink, TensorSpec, ValueKind, ValueSpec
from ..core.report import check_text
from ..core.trees import Path, name_of
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import LayoutError, NameCollisionError
from ..format.columns import dtype_code
from ..format.value_decode import FACTORIES
from ..format.values import decode_path, encode_path, encode_value, keys_of
from .entries import Entry, Kind, Opaque
from .layouts import Layout
from .tensors import memory_of

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
    """Return an empty dict of the class of the dict that a saved path leads through; `step` is its part of the path."""
    if type(step) is defaultdict:
        return defaultdict(step.default_factory)
    return type(step)() if type(step) in _KINDS else {}


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
        name, (memory, layout, *_) = row.name, memory_of(row)
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
