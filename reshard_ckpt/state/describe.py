"""The last pass over the rows of a state: each tensor or value gets a spec under a unique name; and the saved form of paths.

The path of a row is the keys that lead to it in the state. A dict is saved as its values, each with its path, so only the saved
keys can show the class of the dict. A key of a plain dict is saved as it is. A key of another dict is saved as a dict of that
class with one entry: ``OrderedDict({"a": 2})`` is the third key of an `OrderedDict`. A load that finds no dict in its place makes
one of that class, with its keys in their order.

A name belongs to one source, the item of the state that the row came from. The same name again from that source is a replica on
this rank (two pipeline stages that hold one tensor); from another source it is a collision. A tensor that lies exactly where an
earlier one does becomes its alias.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import torch

from ..core.catalog.model import Catalog
from ..core.catalog.names import STATE
from ..core.catalog.specs import Ints, Mesh, Piece, Placement, StateLink, TensorSpec, ValueKind, ValueSpec
from ..core.report import check_text
from ..core.trees import Path, name_of
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import LayoutError, NameCollisionError, UnsupportedError
from ..format.columns import MAX_COLUMNS, dtype_code
from ..format.value_decode import FACTORIES
from ..format.values import decode_path, encode_path, encode_value, is_wrapped, keys_of
from .entries import Entry, Kind, Opaque
from .layouts import Layout

_KINDS = (OrderedDict, Counter, defaultdict)


class Index(int):
    """A key of a path that is an index into a list or tuple. (If a dict has an int as its key, the path has a plain int.)"""


class Unwrapped(str):
    """A key of a path into a dict of tensors, without the parts that wrappers add. `key` is the key that the dict itself has."""

    key: str

    @classmethod
    def of(cls, name: str, key: str) -> Unwrapped:
        step = cls(name)
        step.key = key
        return step


def path_keys(path: Path) -> list[Any]:
    """Convert a path to its saved keys. An index of a list becomes a tuple; a key that is such a tuple is put into another one.

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
            saved.append((step,) if kind is tuple and is_wrapped(step) else step)
    return saved


def own_key(step: Any) -> Any:
    """Return the key by which a container has the next step of a path. The path leaves out the parts that wrappers add."""
    return step.key if isinstance(step, Unwrapped) else step


def saved_path(keys: tuple[Any, ...]) -> Path:
    """Convert saved keys to the path that they were made from; the inverse of `path_keys`."""
    return tuple(key if not is_wrapped(key) else Index(key[0]) if type(key[0]) is int else key[0] for key in keys)


def paths_of_values(catalog: Catalog) -> dict[str, Path]:
    """Map the name of each value in a catalog to its path in the state."""
    return {entry.name: saved_path(decode_path(entry.path)) for entry in catalog.values_table}


def link_in_dict(path: Path, optimizers: set[str]) -> StateLink | None:
    """Return the link to a parameter for a path to state in a state dict that `optimizers` names; None for any other path."""
    for i in range(len(path) - 3, -1, -1):
        if path[i] == STATE and name_of(path[:i]) in optimizers:
            return StateLink(name_of(path[:i]), str(path[i + 1]), name_of(path[i + 2 :]))
    return None


class Steps:
    """Converts paths in one tree of the state to saved keys, which also record the class of each dict on the way."""

    def __init__(self, path: Path, root: Any) -> None:
        self._above, self._root = len(path), root
        self._positions: dict[int, dict[Any, int]] = {}

    def __call__(self, path: Path) -> list[Any]:
        """Return the saved keys of a path. The class of the tree's root is not recorded, because no load makes a root."""
        steps, node = path_keys(path), self._root
        for at in range(self._above, len(path)):
            key = own_key(path[at])
            if at > self._above and type(node) in _KINDS:
                steps[at] = self._step(node, key, steps[at])
            node = _child(node, key)
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
    """Return the order, as indices, in which a load adds values at these saved paths, so that an `OrderedDict` keeps its order.

    Otherwise the values stay in the given order; entries of one dict are kept together.

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
    """Return an empty dict of the class that a saved key records for its dict."""
    if type(step) is defaultdict:
        return defaultdict(step.default_factory)
    return type(step)() if type(step) in _KINDS else {}


_VALUE_KINDS = {
    Kind.VALUE: ValueKind.PLAIN,
    Kind.WHOLE: ValueKind.PLAIN,
    Kind.PER_RANK: ValueKind.PER_RANK,
    Kind.GROUPS: ValueKind.PARAM_GROUPS,
}


class _Part(NamedTuple):
    """The part of a tensor's spec that equal tensors share, such as the same weight in all layers of a model.

    It refers to no memory, so it stays valid. It keeps `layout` alive, so that no other layout gets the same `id`.

    `extent` is the number of elements from the first one in memory to the last one.
    """

    layout: Layout
    dtype: str
    pieces: tuple[Piece, ...]
    placement: Placement
    extent: int


class _KnownSpecs(NamedTuple):
    """The descriptions of tensors that are cached for one mesh.

    `parts` has the part of a spec that equal tensors share, by the id of the layout, the dtype and the strides. `specs` has the
    last spec of each name, with this part of it.
    """

    parts: dict[tuple[int, torch.dtype, Ints], _Part]
    specs: dict[str, tuple[_Part, TensorSpec]]


_KNOWN: dict[Mesh | None, _KnownSpecs] = {}
"""The specs of tensors on each mesh, reused by the next save, which mostly describes the same tensors."""

_MAX_MESHES = 4

_MAX_PARTS, _MAX_SPECS = 1 << 13, 1 << 18
"""The most shared parts and the most specs that are kept for one mesh."""


class Describer:
    """Makes the specs of a state's tensors and values under unique names, and finds tensors that share memory (aliases).

    If a tensor's placement names axes that the job's `mesh` lacks, its spec has no placement.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.tensors: list[LocalTensor] = []
        self.sources: list[Entry] = []
        """The row of each tensor."""
        self.values: list[ValueSpec] = []
        self._mesh = mesh
        self._rows: dict[str, Entry] = {}
        """The first row of each name."""
        self._data: dict[str, bytes] = {}
        """The bytes of each value."""
        self._at: dict[int, list[Entry]] = {}
        """The rows whose memory begins at an address; each place in memory once."""
        if mesh not in _KNOWN and len(_KNOWN) >= _MAX_MESHES:
            _KNOWN.clear()
        self._known = _KNOWN.setdefault(mesh, _KnownSpecs({}, {}))
        if len(self._known.parts) >= _MAX_PARTS or len(self._known.specs) >= _MAX_SPECS:
            self._known.parts.clear()
            self._known.specs.clear()

    def add(self, rows: Iterable[Entry], keys_of: Callable[[Path], list[Any]] = path_keys) -> None:
        """Add the specs of rows of the state, whose tensors have their memory and layout.

        `keys_of` converts a value's path to saved keys.
        """
        (parts, specs), known_rows, at = self._known, self._rows, self._at
        for row in rows:
            name, memory, layout = row.name, row.memory, row.layout
            if memory is None or layout is None:
                self._add_value(row, keys_of)
                continue
            try:
                part = parts[id(layout), memory.dtype, memory.stride()]
            except KeyError:
                part = self._part(row, memory, layout)
            held, first = memory.untyped_storage().nbytes(), memory.storage_offset()
            address = memory.data_ptr()
            if part.extent and (not address or held < (first + part.extent) * memory.dtype.itemsize):
                raise UnsupportedError(
                    f"{name}: its memory was freed, as FSDP frees gathered parameters; pass the module itself, or a tensor "
                    "that has memory"
                )
            alias = None
            if name in known_rows:
                if self._is_same(row):
                    continue
            else:
                known_rows[name] = row
                # By address alone: to hash all pieces of every tensor would take longer than all else here.
                if address in at:
                    alias = self._first_at(row, at[address]) if part.pieces else None
                elif part.pieces:
                    at[address] = [row]
            of, spec = specs.get(name, (None, None))
            if spec is None or of is not part or spec.alias_of != alias or spec.link != row.link:
                check_text(name, "a name")
                spec = TensorSpec(
                    name, part.dtype, layout.shape, part.pieces, layout.replication, part.placement, alias, row.link
                )
                specs[name] = part, spec
            self.tensors.append(LocalTensor(spec, memory))
            self.sources.append(row)

    def _part(self, row: Entry, memory: torch.Tensor, layout: Layout) -> _Part:
        """Make and cache the part of a tensor's spec that equal tensors share."""
        axes, mesh = tuple(p.axis for p in layout.placement), self._mesh
        unnamed = axes == tuple(f"axis{i}" for i in range(len(axes)))
        # fits: whether the placement names axes of the job's mesh
        fits = mesh is not None and set(axes) <= set(mesh.axes) and (not unnamed or len(axes) == len(mesh.axes))
        shape, strides = memory.shape, memory.stride()
        if len(layout.shape) > MAX_COLUMNS:
            raise UnsupportedError(
                f"{row.name}: has {len(layout.shape)} dims, and a checkpoint holds tensors of up to {MAX_COLUMNS}; save it with "
                "fewer, as tensor.flatten() has"
            )
        extent = 0 if 0 in shape else 1 + sum(map(mul, shape, strides)) - sum(strides)
        pieces = layout.pieces(memory)
        part = _Part(layout, dtype_code(memory.dtype, row.name), pieces, layout.placement if fits else (), extent)
        return self._known.parts.setdefault((id(layout), memory.dtype, memory.stride()), part)

    def _first_at(self, row: Entry, near: list[Entry]) -> str | None:
        """Return the name of the row in `near` with exactly the same memory. Without one, add this row to `near`; return None."""
        for other in near:
            if _place(other) == _place(row):
                return other.name
        near.append(row)
        return None

    def _is_same(self, row: Entry) -> bool:
        """Tell whether a row has exactly the same memory as the earlier row of the same name.

        Raise `LayoutError` if both rows come from the same item of the state, but have different dtypes or shapes.
        """
        earlier = self._checked(row)
        first, second = _place(earlier), _place(row)
        # Compared first: dtype and global shape. With equal ones, rows in different memory are replicas.
        if first is None or second is None or first[2:4] != second[2:4]:
            raise LayoutError(
                f"{row.name}: two stages on this rank have different tensors of this name, {_kind(earlier)} and {_kind(row)}; "
                "give them distinct names (nn.Sequential stages both call their first layer 0)"
            )
        return first == second

    def _add_value(self, row: Entry, keys_of: Callable[[Path], list[Any]]) -> None:
        name, value = row.name, row.value
        is_opaque = isinstance(value, Opaque)
        data = value.data if is_opaque else encode_value(value, name)
        if name not in self._rows:
            self._rows[name], self._data[name] = row, data
            path, kind = encode_path(keys_of(row.path), name), _VALUE_KINDS[row.kind]
            self.values.append(ValueSpec(name, path, kind, data, row.link, is_opaque))
            return
        self._checked(row)
        if self._data.get(name) != data:
            raise LayoutError(f"{name}: two stages on this rank have different values of this name; give them distinct names")

    def _checked(self, row: Entry) -> Entry:
        """Return the earlier row of the same name. Refuse the row if both come from different items of the state."""
        earlier = self._rows[row.name]
        first, second = (row.name if each.source is None else each.source for each in (earlier, row))
        if first != second:
            raise NameCollisionError(
                f"{row.name}: both the item {first} and the item {second} have an entry of this name; rename one of the keys"
            )
        return earlier


def _place(row: Entry) -> tuple[Any, ...] | None:
    """Return device, address, dtype, global shape and pieces of a tensor's row, to compare it with others; None for a value."""
    memory, layout = row.memory, row.layout
    if memory is None or layout is None:
        return None
    return memory.device, memory.data_ptr(), memory.dtype, layout.shape, layout.pieces(memory)


def _kind(row: Entry) -> str:
    return "a value" if row.memory is None or row.layout is None else f"{row.memory.dtype} of shape {row.layout.shape}"
