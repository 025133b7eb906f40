"""The classes and calls that a pickle of ``torch.save`` may name, and the values that they become; no code runs.

1. `read_pickle` makes stand-ins for the classes that the pickle names. A pickle may name any class, but call only those in a
   list: plain data of numpy and torch, and members of enums of Megatron, DeepSpeed and their companions.
2. `PlainValues` converts the stand-ins to values. A ``Namespace`` becomes a dict. An instance of any other class, and a member of
   an enum, becomes a `Named`: the name of its class and its plain state.
3. Tensors are copied out of their records of the zip. The size of the file limits the size of the whole value.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from ..core.trees import MAX_ALIKE, too_many_alike
from ..format.objects import Named
from ..format.value_decode import MAX_DEPTH, NUMPY_DTYPE
from .pickle_reader import Opaque, PicklingError, StandInClass, StandInFunction, StandInObject, Table
from .tensors import ENCODED, SIZE, TENSOR_TABLE, PickledDTensor, PickledTensor, SavedStorage

NAMESPACE = ("argparse", "Namespace")
NAMESPACE_TAG = "__class__"
"""The key that marks a dict which was an ``argparse.Namespace``. The value at this key is the name of that class."""

_ENUMS = re.compile(r"(megatron|deepspeed|transformer_engine|nvidia_resiliency_ext|nemo|torch)(\.\w+)*")
"""Modules whose classes a pickle may call with one value: this is how pickles refer to members of enums. No call is made."""

_MIN_NODES = 1 << 12
"""The number of parts that an object may have in addition to one for each byte of its file."""

_VIEWS = 4
"""The most bytes of tensors that are copied for each byte of a file; more than 1, because tensors may be views of one storage."""


def may_be_called(module: str) -> bool:
    """Return whether a pickle may call the classes of a module with one value, which is how it refers to members of enums."""
    return _ENUMS.fullmatch(module) is not None


def _instance(kind: str) -> Callable[..., StandInObject]:
    """Return a function that keeps its arguments in an object; `PlainValues` converts them when the object's state is known."""

    def make(*arguments: Any) -> StandInObject:
        return _Called(StandInClass(kind), arguments)

    return make


class _Called(StandInObject):
    __slots__ = ("arguments",)

    def __init__(self, kind: StandInClass, arguments: tuple[Any, ...]) -> None:
        super().__init__(kind)
        self.arguments = arguments

    def take(self, items: list[Any]) -> None:
        if self.kind.name == "deque":  # made empty, and then filled
            self.state = self.state or []
            self.state += items
        elif self.kind.name == "set" and self.arguments and type(self.arguments[0]) is list:
            self.arguments[0].extend(items)
        else:
            super().take(items)


def _a_dict(first: Any = None) -> dict[Any, Any]:
    """Return a plain dict for a ``Counter``, which pickles call with its items, or a ``defaultdict``, called with its factory."""
    return first if isinstance(first, dict) else {}


_BUILTINS, _MULTIARRAY = ("builtins", "__builtin__"), ("numpy.core.multiarray", "numpy._core.multiarray")
_KEPT = [
    ("set", "set", _BUILTINS),
    ("frozenset", "frozenset", _BUILTINS),
    ("complex", "complex", _BUILTINS),
    ("deque", "deque", ["collections"]),
    ("numpy.dtype", "dtype", ["numpy"]),
    ("numpy.ndarray", "ndarray", ["numpy"]),
    ("numpy.ndarray", "_reconstruct", _MULTIARRAY),
    ("numpy.scalar", "scalar", _MULTIARRAY),
    ("torch.device", "device", ["torch"]),
]
"""Calls in a pickle whose arguments are kept in a stand-in: its kind, the called name, and the modules that have the name."""
_KINDS = frozenset(kind for kind, _, _ in _KEPT)


def _wrapper(*arguments: Any) -> Any:
    raise ValueError("a tensor that wraps others, without its attributes")


_WRAPPER = StandInFunction("_rebuild_wrapper_subclass", _wrapper)


def _rebuilt(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor without the Python attributes that it was saved with.

    Those of a DTensor are kept in a `PickledDTensor`: they say which part of the global tensor this one is.
    """
    if type(arguments) is not tuple or not isinstance(kind, StandInClass):
        raise ValueError("a tensor of a kind that is unknown")
    if make is _WRAPPER and kind.name.endswith(":DTensor") and len(arguments) > 2:
        # The state of a class with slots is a pair: its dict or None, and its slots.
        state = next((each for each in (state if isinstance(state, tuple) else (state,)) if isinstance(each, dict)), {})
        return PickledDTensor(SIZE.make(arguments[2]), state.get("_local_tensor"), state.get("_spec"))
    if make is _WRAPPER or not isinstance(make, StandInFunction):
        return Opaque(kind.name)
    return make.make(*arguments)


_CALLED: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER,
    ("torch._tensor", "_rebuild_from_type_v2"): StandInFunction("_rebuild_from_type_v2", _rebuilt),
    ("_codecs", "encode"): ENCODED,
    **{(module, "bytes"): StandInFunction("bytes", lambda: b"") for module in _BUILTINS},
    **{("collections", kind): StandInFunction(kind, _a_dict) for kind in ("Counter", "defaultdict")},
    ("torch", "Size"): StandInFunction("torch.Size", lambda *values: torch.Size(SIZE.make(*values))),
    **{(module, name): StandInFunction(kind, _instance(kind)) for kind, name, modules in _KEPT for module in modules},
}
_TABLE: Table = {**TENSOR_TABLE, **_CALLED}


class Globals(dict[tuple[str, str], Any]):
    """The stand-in of every class and function that a pickle names: the one in `_TABLE`, or else the stand-in of a class.

    A pickle that calls such a class makes an `Opaque`, which `PlainValues` refuses if it is converted; of a module that
    `may_be_called` allows, it makes a stand-in with the arguments.
    """

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key in _TABLE:
            found = _TABLE[key]
        else:
            name = f"{key[0]:.100}:{key[1]:.100}"
            found = StandInClass(name, _instance(name) if may_be_called(key[0]) else None)
        self[key] = found
        return found


def _dotted(made: StandInClass | Opaque) -> str:
    return made.name.replace(":", ".")


def _hashed(items: list[Any]) -> list[Any]:
    """Return the keys of a dict or the items of a set as they are; raise `ValueError` if their hashes would make it slow."""
    if too_many_alike(items):
        raise ValueError(f"more than {MAX_ALIKE} keys of a dict, or items of a set, have the same hash")
    return items


class PlainValues:
    """Converts stand-ins to plain and tagged values, no larger together than a file of `num_bytes` can describe.

    It counts the parts of the values: references to one list are counted, and copied, each time.

    Parameters
    ----------
    stored
        Returns the bytes of a storage by its key.
    num_bytes
        The size of the file.
    tagged
        The beginning of the names of modules whose objects become tagged values; ``""`` for all modules, None for no module.
        Other objects are refused.
    """

    def __init__(self, stored: Callable[[str], bytes], num_bytes: int, tagged: str | None) -> None:
        self._stored, self._tagged = stored, tagged
        self._left, self._bytes_left = num_bytes + _MIN_NODES, _VIEWS * num_bytes

    def of(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """Convert a stand-in to a value.

        A `PicklingError` means that the value is refused, any other error that the file is damaged.
        """
        self._left -= 1 + (len(value) // 8 if isinstance(value, str | bytes) else 0)
        if self._left < 0:
            raise ValueError("its parts are repeated more often than its bytes can spell")
        if depth < 0:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        # Stand-ins before containers; `torch.Size` before tuple, because it is one.
        if isinstance(value, StandInObject):
            return self._object(value, depth)
        if isinstance(value, PickledTensor):
            return self._tensor(value)
        if isinstance(value, StandInClass | StandInFunction):
            return self._named(value.name, None)
        if isinstance(value, dict):
            keys = _hashed([self.of(key, depth - 1) for key in value])
            return dict(zip(keys, [self.of(item, depth - 1) for item in value.values()], strict=True))
        if isinstance(value, list):
            return [self.of(item, depth - 1) for item in value]
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            return tuple(self.of(item, depth - 1) for item in value)
        if isinstance(value, SavedStorage):
            raise ValueError("a storage without a tensor")
        if isinstance(value, PickledDTensor):
            raise PicklingError("holds a DTensor")
        if isinstance(value, Opaque):
            raise PicklingError(f"calls {_dotted(value)}, which such a file does not need")
        return value

    def _named(self, kind: str, value: Any) -> Named:
        """Return a `Named` value: the class ``module:name`` in `kind`, and the plain value of the object of that class.

        Raises `PicklingError` for a class outside of the modules that the caller allows.
        """
        module, colon, name = kind.partition(":")
        if not colon or self._tagged is None or not module.startswith(self._tagged):
            raise PicklingError(f"needs {kind.replace(':', '.')}")
        return Named(module, name, value)

    def _object(self, made: StandInObject, depth: int) -> Any:
        arguments = made.arguments if isinstance(made, _Called) else ()
        if isinstance(made.state, Opaque):
            raise PicklingError(f"has a {_dotted(made.kind)} with items of its own")
        if made.kind.name in _KINDS:
            return self._made(made.kind.name, arguments, made.state, depth - 1)
        name = _dotted(made.kind)
        # A call of a name outside of `_KINDS` can only be a member of an enum: one argument, no state.
        if isinstance(made, _Called):
            if len(arguments) != 1 or made.state is not None:
                raise PicklingError(f"calls {name} with {len(arguments)} arguments, which no enum takes")
            value = self.of(arguments[0], depth - 1)
            if value is None or isinstance(value, dict | tuple):
                raise PicklingError(f"has a member of {name} that is {value!r:.60}")
            return self._named(made.kind.name, value)
        found = self._named(made.kind.name, self.of({} if made.state is None else made.state, depth - 1))
        return {**found.plain, NAMESPACE_TAG: made.kind.name} if made.kind.name == ":".join(NAMESPACE) else found

    def _tensor(self, view: PickledTensor) -> torch.Tensor:
        data = self._stored(view.storage.key)
        if 0 in view.shape:
            return torch.empty(view.shape, dtype=view.dtype, device="cpu")
        self._bytes_left -= prod(view.shape) * view.dtype.itemsize  # strides of 0 may claim far more bytes than are stored
        if len(data) < view.storage.num_bytes or not view.is_within(len(data)) or self._bytes_left < 0:
            raise ValueError(f"a tensor of shape {view.shape} reaches beyond its {len(data)} bytes")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: len(data) // view.dtype.itemsize * view.dtype.itemsize]
        return flat.view(view.dtype).as_strided(view.shape, view.strides, view.offset).clone()

    def _made(self, kind: str, arguments: tuple[Any, ...], state: Any, depth: int) -> Any:
        """Make the value that a call in a pickle stands for, from its kept arguments and state; `kind` is one of `_KEPT`."""
        match kind:
            case "set":
                return set(_hashed(self._elements(arguments, depth)))
            case "frozenset":
                return frozenset(_hashed(self._elements(arguments, depth)))
            case "complex":
                return complex(*arguments)
            case "deque":
                items = self._elements(() if state is None else (state,), depth)
                return collections.deque(items, *(a for a in arguments[1:] if type(a) is int))
            case "numpy.dtype":
                return self._dtype(arguments, state)
            case "numpy.ndarray":
                return self._array(state)
            case "numpy.scalar":
                dtype, data = arguments
                return np.frombuffer(data, self._dtype(dtype.arguments, dtype.state), 1)[0]
        return torch.device(*arguments)

    def _elements(self, arguments: tuple[Any, ...], depth: int) -> list[Any]:
        (items,) = arguments or ([],)
        if not isinstance(items, list | tuple):
            raise ValueError("a collection of something else than a list")
        return [self.of(item, depth) for item in items]

    def _dtype(self, arguments: tuple[Any, ...], state: Any) -> np.dtype[Any]:
        code, order = arguments[0], state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
        if not isinstance(code, str) or order not in ("<", ">", "|", "="):
            raise ValueError("a dtype of numpy without a code")
        if code in ("M8", "m8"):  # a time or a time span: the last part of the state has its unit
            unit, count, *_ = state[8][1]
            code = f"{code}[{count:d}{unit.decode()}]"  # as a number: a few lists that contain each other may have a huge text
        found: np.dtype[Any] = np.dtype(code)
        if order == ">":
            found = found.newbyteorder(">")
        if NUMPY_DTYPE.fullmatch(found.str) is None:
            raise PicklingError(f"holds numpy's dtype {found}")
        return found

    def _array(self, state: Any) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes) or not isinstance(dtype, _Called) or not isinstance(shape, tuple):
            raise PicklingError("holds an array of objects")
        kind = self._dtype(dtype.arguments, dtype.state)
        if prod(SIZE.make(shape)) * kind.itemsize != len(data):
            raise ValueError("an array whose bytes are not as many as its shape wants")
        found: np.ndarray[Any, Any] = np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C").copy()
        return found
