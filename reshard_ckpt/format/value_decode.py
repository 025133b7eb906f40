"""Decoding plain values: the reading half of `values`.

Every part of an encoded value is checked before an object is made of it. A wrong part raises a `CorruptError`, or a builtin error
that `decode_value` turns into one.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ..core.trees import MAX_ALIKE, too_many_alike
from ..errors import CorruptError
from .objects import rebuilt

MAX_DEPTH = 64
"""How deep containers may nest. One container takes up to three levels of msgpack, which stops at a few hundred levels."""

_MAX_DIMS = 64
"""The most dims of an array: numpy's own limit."""

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})

FACTORIES: dict[str, type] = {t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""The factories that a saved ``collections.defaultdict`` may have, by name."""

NUMPY_DTYPE = re.compile(r"[<>|](b1|i[1248]|u[1248]|f[248]|c8|c16|S[1-9]\d{0,8}|U[1-9]\d{0,8}|[mM]8(\[\d{0,9}[A-Za-z]+\])?)")


def decode_node(node: Any, depth: int) -> Any:
    """Decode one node of msgpack's output, and all nodes below it. Containers may nest `depth` levels further."""
    kind = type(node)
    if kind in _LEAVES:
        return node
    if depth < 0:
        raise CorruptError(f"a value is nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return decode_each(node, depth - 1)
    if kind is dict and len(node) == 1:
        ((tag, body),) = node.items()
        decoder = _DECODERS.get(tag)
        if type(tag) is str and tag.startswith("torch."):
            from .torch_values import DECODERS  # a catalog is read without torch, which takes seconds to import

            decoder = DECODERS.get(tag)
        if decoder is not None:
            return decoder(body, depth - 1)
        raise CorruptError(f"the kind of value {tag!r:.80} is unknown: damaged, or written by a newer version")
    raise CorruptError("a value is not of the form that this version writes")


def decode_each(nodes: list[Any], depth: int) -> list[Any]:
    # Lists may be long, and most have only leaves, which this decodes without a call for each.
    if _LEAVES.issuperset(map(type, nodes)):
        return nodes
    return [node if type(node) in _LEAVES else decode_node(node, depth) for node in nodes]


def typed(body: Any, *kinds: type | None) -> tuple[Any, ...]:
    """Check that a list has exactly one item of each of these types, in order, and return the items. None allows any type."""
    if type(body) is not list or len(body) != len(kinds):
        raise CorruptError("a value has another number of parts than its kind")
    if any(kind not in (None, type(item)) for kind, item in zip(kinds, body, strict=True)):
        raise CorruptError("a part of a value has another type than its kind has there")
    return tuple(body)


def typed_item(body: Any, kind: type) -> Any:
    """Check that an encoded value is of exactly this type, and return it."""
    return typed([body], kind)[0]


def _decode_items(body: Any, depth: int) -> list[Any]:
    return decode_each(typed_item(body, list), depth)


def _decode_pairs(body: Any, depth: int) -> list[tuple[Any, Any]]:
    pairs = typed_item(body, list)
    if not {list}.issuperset(map(type, pairs)) or not {2}.issuperset(map(len, pairs)):
        raise CorruptError("an entry of a dict is not a pair of a key and a value")
    keys = decode_each([key for key, _ in pairs], depth)
    _check_hashes(keys)
    if len(set(keys)) != len(keys):
        raise CorruptError("a dict holds a key twice")
    return list(zip(keys, decode_each([item for _, item in pairs], depth), strict=True))


def _decode_elements(body: Any, depth: int) -> list[Any]:
    items = _decode_items(body, depth)
    _check_hashes(items)
    return items


def _check_hashes(keys: list[Any]) -> None:
    if too_many_alike(keys):
        raise CorruptError(f"more than {MAX_ALIKE} keys have the same hash, which no writer lets happen")


def decode_shape(shape: list[Any], item_bytes: int, data: bytes) -> tuple[int, ...]:
    """Check that `data` has exactly the bytes of an array of this shape with elements of `item_bytes`, and return the shape."""
    if len(shape) > _MAX_DIMS or any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise CorruptError(f"shape {shape!r:.80} is not a shape")
    if prod(shape) * item_bytes != len(data):
        raise CorruptError(f"shape {shape!r:.80} does not describe {len(data)} bytes")
    return tuple(shape)


def _numpy_dtype(code: str) -> np.dtype[Any]:
    if NUMPY_DTYPE.fullmatch(code) is None or np.dtype(code).str != code:
        raise CorruptError(f"numpy dtype {code!r:.80} is not one that is saved")
    return np.dtype(code)


def _numpy_array(code: str, shape: list[Any], data: bytes) -> np.ndarray[Any, Any]:
    dtype = _numpy_dtype(code)
    array: np.ndarray[Any, Any] = np.ndarray(decode_shape(shape, dtype.itemsize, data), dtype, bytearray(data))
    if dtype.kind == "b" and data.strip(b"\0\1"):
        raise CorruptError("a bool is neither 0 nor 1")
    if dtype.kind == "U" and np.frombuffer(data, dtype.str[0] + "u4").max(initial=0) > sys.maxunicode:
        raise CorruptError("text holds a number that is not a code point")
    return array


def _decode_numpy_scalar(body: Any, depth: int) -> Any:
    code, data = typed(body, str, bytes)
    return _numpy_array(code, [], data)[()]


def may_be_attribute(name: Any) -> bool:
    """Tell whether a saved OrderedDict may have an attribute of this name: none that Python or the class gives a meaning to."""
    return type(name) is str and not name.startswith("__") and not hasattr(collections.OrderedDict, name)


def _decode_ordered_dict(body: Any, depth: int) -> Any:
    pairs, attributes = typed(body, None, None)
    value, named = collections.OrderedDict(_decode_pairs(pairs, depth)), dict(_decode_pairs(attributes, depth))
    if not all(map(may_be_attribute, named)):
        raise CorruptError("an attribute of an OrderedDict has a name that no writer lets it have")
    vars(value).update(named)
    return value


def _decode_defaultdict(body: Any, depth: int) -> Any:
    name, pairs = typed(body, None, None)
    if name is not None and name not in FACTORIES:
        raise CorruptError("the factory of a defaultdict is not one that is saved")
    return collections.defaultdict(None if name is None else FACTORIES[name], _decode_pairs(pairs, depth))


def _decode_object(body: Any, depth: int) -> Any:
    module, name, node = typed(body, str, str, None)
    return rebuilt(module, name, decode_node(node, depth))


def _decode_deque(body: Any, depth: int) -> Any:
    length, items = typed(body, None, None)
    return collections.deque(_decode_items(items, depth), None if length is None else typed_item(length, int))


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda body, depth: int.from_bytes(typed_item(body, bytes), "little", signed=True),
    "complex": lambda body, depth: complex(*typed(body, float, float)),
    "tuple": lambda body, depth: tuple(_decode_items(body, depth)),
    "dict": lambda body, depth: dict(_decode_pairs(body, depth)),
    "set": lambda body, depth: set(_decode_elements(body, depth)),
    "frozenset": lambda body, depth: frozenset(_decode_elements(body, depth)),
    "OrderedDict": lambda body, depth: collections.OrderedDict(_decode_pairs(body, depth)),
    "OrderedDict.attributes": _decode_ordered_dict,
    "Counter": lambda body, depth: collections.Counter(dict(_decode_pairs(body, depth))),
    "defaultdict": _decode_defaultdict,
    "deque": _decode_deque,
    "object": _decode_object,
    "numpy.ndarray": lambda body, depth: _numpy_array(*typed(body, str, list, bytes)),
    "numpy.scalar": _decode_numpy_scalar,
    "numpy.str": lambda body, depth: np.str_(typed_item(body, str)),
    "numpy.bytes": lambda body, depth: np.bytes_(typed_item(body, bytes)),
    "numpy.dtype": lambda body, depth: _numpy_dtype(typed_item(body, str)),
}
