"""Encoding plain values without pickle, so that they come back the same.

A value is a tree. Its leaves and lists are msgpack's own; everything else is a map of one entry, ``{tag: body}``
(``docs/format.md``, section 6, lists the tags), so any msgpack reader can walk it.

1. *Encode* goes by exact type. A subclass (a namedtuple) would come back as another type, so it is refused with its place
   in the value; nothing is guessed and nothing is lost. Enums and a few classes of the standard library are `objects`.
2. Identical values give identical bytes: sets are sorted by their elements' bytes, a NaN has one spelling, integers and floats
   keep their types. Dicts keep their order, so two dicts with other orders have other bytes.
3. *Decode* checks depth, lengths, dtypes and shapes before it makes an object of them.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from math import isnan
from typing import Any, NoReturn

import msgpack
import numpy as np

from ..core.report import with_article
from ..core.trees import MAX_ALIKE, too_many_alike
from ..errors import CheckpointError, CorruptError, UnsupportedError
from .objects import is_object, parts_of, plain_key
from .value_decode import FACTORIES, MAX_DEPTH, NUMPY_DTYPE, decode_node, may_be_attribute

MAX_STEPS = 256
"""The most keys on the path to a value in the state: how deep the dicts of a state may nest."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
"""The smallest and largest integers that msgpack has a form for; others are encoded as bytes."""

_NAN = float("nan")
_LEAVES = frozenset({type(None), bool, bytes})
_PLAIN_KEYS = _LEAVES | {str, int, float}
_BASES = (int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)
"""The plain types. A subclass of one is refused with the advice to convert it."""


@dataclass(slots=True)
class _Place:
    """A place inside a value that is being encoded, for messages: the value's name, and the keys that lead to the place."""

    name: str
    parent: _Place | None = None
    step: Any = None
    depth: int = 0

    def child(self, step: Any) -> _Place:
        if self.depth == MAX_DEPTH:
            self.refuse(f"it is nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it")
        return _Place(self.name, self, step, self.depth + 1)

    def refuse(self, why: str) -> NoReturn:
        steps: list[str] = []
        place = self
        while place.parent is not None:
            steps.append(f"[{place.step!r:.80}]")
            place = place.parent
        where = "".join(reversed(steps))
        raise UnsupportedError(f"{self.name}{where if len(where) <= 200 else where[:200] + '…'}: {why}")


def encode_value(value: Any, name: str) -> bytes:
    """Encode a plain value.

    Parameters
    ----------
    value
        None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque,
        defaultdict of a builtin, numpy arrays, scalars and dtypes, torch dtypes, sizes, devices, parameters, dense and sparse
        tensors, members of enums, dates, times, time spans and paths, nested.
    name
        The name of the value in messages.

    Returns
    -------
    bytes
        Identical values have the same bytes, on any rank.

    Raises
    ------
    UnsupportedError
        Something in the value would not come back as it was.

    Examples
    --------
    >>> decode_value(encode_value({"lr": 0.1, 3: (1, 2)}, "extra"))
    {'lr': 0.1, 3: (1, 2)}
    """
    place = _Place(name)
    try:
        packed: bytes = msgpack.packb(_encode(value, place))
    except (ValueError, OverflowError, MemoryError) as error:  # a string above msgpack's 4 GiB, or no memory left
        place.refuse(f"too large for a value ({error}); keep it in the state as a torch tensor")
    return packed


def decode_value(data: bytes | bytearray | memoryview, *, name: str = "value") -> Any:
    """Decode a value that `encode_value` encoded; tensors are on the CPU, arrays and tensors own their memory.

    Raises
    ------
    CorruptError
        The bytes are not an encoded value.
    """
    try:
        return decode_node(msgpack.unpackb(data), MAX_DEPTH)
    except CheckpointError as error:
        raise CorruptError(f"{name}: {error}; use another checkpoint") from None
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError, msgpack.UnpackException) as error:
        raise CorruptError(f"{name}: its {len(data)} bytes are not an encoded value ({error}); use another checkpoint") from error


def is_plain(value: Any) -> bool:
    """Tell whether `encode_value` can encode a value, so that it can be saved without its class."""
    try:
        encode_value(value, "a value")
    except CheckpointError:
        return False
    return True


def encode_path(keys: Sequence[Any], name: str = "") -> bytes:
    """Encode a path: the keys that lead to a value in the state. The keys keep their types. `name` is for messages.

    >>> decode_path(encode_path(["extra", 3, (1, "a")]))
    ('extra', 3, (1, 'a'))
    """
    return encode_value(list(keys), f"{name}: its keys" if name else "path in the state")


def decode_path(data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    """Decode a path that `encode_path` encoded; raise `CorruptError` for other bytes."""
    return keys_of(decode_steps(data))


def keys_of(steps: Iterable[Any]) -> tuple[Any, ...]:
    """Return the keys in the steps of a decoded path.

    A step is the key itself; a step into an OrderedDict, Counter or defaultdict is a dict of this kind with the key in it.
    """
    return tuple(next(iter(step)) if isinstance(step, dict) else step for step in steps)


def is_wrapped(key: Any) -> bool:
    """Tell whether a saved key is a tuple around an index of a list, or around a key that looks like such a tuple."""
    return type(key) is tuple and len(key) == 1 and (type(key[0]) is int or is_wrapped(key[0]))


def decode_steps(data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    """Decode a path into steps, which also say into which kind of dict a key leads (`keys_of`).

    Raise `CorruptError` for other bytes.
    """
    steps = decode_value(data, name="path in the state")
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise CorruptError(f"path in the state: not a list of up to {MAX_STEPS} keys; use another checkpoint")
    for step in steps:
        if isinstance(step, dict) and (len(step) != 1 or type(step) is dict or type(next(iter(step.values()))) is not int):
            raise CorruptError("path in the state: a dict where a key belongs; use another checkpoint")
    try:
        hash(keys_of(steps))
    except TypeError as error:
        raise CorruptError(f"path in the state: {error}; use another checkpoint") from error
    return tuple(steps)


def check_keys(paths: Iterable[tuple[Any, ...]]) -> None:
    """Refuse the paths of a checkpoint if too many of their keys have the same hash, which makes dicts slow (see `core.trees`).

    Raise `CorruptError` if more than `MAX_ALIKE` keys have the same hash.
    """
    keys = {encode_value(key, "key"): key for path in paths for key in path if type(key) is not str}
    if too_many_alike(keys.values()):
        raise CorruptError(f"paths in the state: more than {MAX_ALIKE} keys have the same hash; use another checkpoint")


def _encode(value: Any, place: _Place) -> Any:
    encoder = _ENCODERS.get(type(value))
    if encoder is None and "torch" in sys.modules:  # else it is not torch's
        from .torch_values import ENCODERS

        encoder = ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, place)
    if isinstance(value, np.generic):
        return _encode_numpy_scalar(value, place)
    if isinstance(value, np.dtype):
        return {"numpy.dtype": _numpy_dtype_code(value, place)}
    if is_object(value):
        return _encode_object(value, place)
    place.refuse(_advice(value))


def _encode_items(items: Iterable[Any], place: _Place) -> list[Any]:
    return [_encode_item(item, place, index) for index, item in enumerate(items)]


def _encode_item(item: Any, place: _Place, step: Any) -> Any:
    kind = type(item)
    # The quick way for long lists: these are encoded as themselves.
    if kind in _LEAVES or (kind is str and item.isascii()) or (kind is float and not isnan(item)):
        return item
    return item if kind is int and _INT_MIN <= item <= _INT_MAX else _encode(item, place.child(step))


def _encode_object(value: Any, place: _Place) -> Any:
    parts = parts_of(value)
    if parts is None:
        place.refuse(
            f"{value!r:.80} would not come back: its class {type(value).__qualname__} is not found under its name, or its plain "
            "value does not say all of it; save plain values of it, such as .value, or a time in UTC"
        )
    module, name, plain = parts
    return {"object": [module, name, _encode(plain, place.child(name))]}


def _check_keys(keys: Collection[Any], place: _Place) -> None:
    """Refuse keys of a dict or items of a set that a reader would refuse: too many of one hash, or two that are one plain key."""
    if too_many_alike(keys):
        place.refuse(f"more than {MAX_ALIKE} of its keys have the same hash, which would be slow to read; use text as keys")
    if not all(type(key) in _PLAIN_KEYS for key in keys) and len({plain_key(key) for key in keys}) < len(keys):
        place.refuse("two of its keys have one plain value, as members of two enums may; use text as keys")


def _encode_pairs(value: dict[Any, Any], place: _Place) -> list[Any]:
    _check_keys(value, place)
    return [[_encode_item(key, place, key), _encode_item(item, place, key)] for key, item in value.items()]


def _encode_ordered_dict(value: collections.OrderedDict[Any, Any], place: _Place) -> Any:
    """Encode an OrderedDict with its attributes: torch's and tensordict's state dicts have one, ``_metadata``."""
    attributes = vars(value)
    for name in attributes:
        if not may_be_attribute(name):
            place.refuse(f"this OrderedDict has the attribute {name!r:.80}, which is a name of Python or of its class; delete it")
    pairs = _encode_pairs(value, place)
    if not attributes:
        return {"OrderedDict": pairs}
    return {"OrderedDict.attributes": [pairs, _encode_pairs(attributes, place.child("__dict__"))]}


def _encode_int(value: int, place: _Place) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    return {"int": value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)}


def _encode_float(value: float, place: _Place) -> float:
    return _NAN if isnan(value) else value  # all NaNs are one value: their sign and payload depend on the processor


def _encode_str(value: str, place: _Place) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            place.refuse(
                "a str with lone surrogates is not valid text; rename a key; save a value as bytes, e.g. os.fsencode(value)"
            )
    return value


def _encode_set(value: set[Any] | frozenset[Any], place: _Place) -> Any:
    _check_keys(value, place)
    child = place.child(...)
    return {type(value).__name__: sorted((_encode(item, child) for item in value), key=msgpack.packb)}


def _encode_defaultdict(value: collections.defaultdict[Any, Any], place: _Place) -> Any:
    factory = value.default_factory
    label = None if factory is None else getattr(factory, "__name__", "")
    if label is not None and FACTORIES.get(label) is not factory:
        place.refuse(f"a defaultdict is saved only with a builtin factory ({', '.join(FACTORIES)}); convert it with dict(...)")
    return {"defaultdict": [label, _encode_pairs(value, place)]}


def _numpy_dtype_code(dtype: np.dtype[Any], place: _Place) -> str:
    code: str = dtype.str
    if NUMPY_DTYPE.fullmatch(code) is None or np.dtype(code) != dtype:
        place.refuse(
            f"numpy dtype {dtype} cannot be saved; convert it to bool, integer, float, complex, text, bytes or datetime64"
        )
    return code


def _array_bytes(value: np.ndarray[Any, Any], place: _Place) -> bytes:
    """Return the bytes of an array. Uninitialized memory may hold invalid bools, which are mended, or text, which is refused."""
    if value.dtype.kind == "b":
        value = value.view(np.uint8) != 0
    data = value.tobytes()
    if value.dtype.kind == "U" and np.frombuffer(data, value.dtype.str[0] + "u4").max(initial=0) > sys.maxunicode:
        place.refuse("an array of text holds a number that is not a code point; fill all of it")
    return data


def _encode_numpy_scalar(value: np.generic, place: _Place) -> Any:
    if isinstance(value, np.str_):  # str.__str__, because arrays and numpy's own __str__ drop NULs at the end
        return {"numpy.str": _encode_str(str.__str__(value), place)}
    if isinstance(value, np.bytes_):
        return {"numpy.bytes": bytes(value)}
    return {"numpy.scalar": [_numpy_dtype_code(value.dtype, place), _array_bytes(np.asarray(value), place)]}


def _advice(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        hint = "save ._asdict() or tuple(...)"
    elif is_dataclass(value) and not isinstance(value, type):
        hint = "save dataclasses.asdict(...) of it, or give it state_dict() and load_state_dict()"
    elif isinstance(value, np.ndarray):
        hint = "save np.array(...) of it"
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        hint = "put it in the state where the library sees it, or save a plain tensor"
    elif callable(value):
        hint = "code is not saved; save its name, and set it up again in the program"
    elif base := next((base for base in _BASES if isinstance(value, base)), None):
        hint = f"its type would be lost; convert it to a plain {'bytes' if base is bytearray else base.__name__}"
    else:
        hint = "convert it to plain values, or give it state_dict() and load_state_dict()"
    return f"{with_article(kind)} cannot be saved; {hint}"


_Encoder = Callable[[Any, _Place], Any]
_ENCODERS: dict[type, _Encoder] = {
    type(None): lambda value, place: value,
    bool: lambda value, place: value,
    bytes: lambda value, place: value,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value, place: {"complex": [_encode_float(value.real, place), _encode_float(value.imag, place)]},
    str: _encode_str,
    list: _encode_items,
    tuple: lambda value, place: {"tuple": _encode_items(value, place)},
    dict: lambda value, place: {"dict": _encode_pairs(value, place)},
    set: _encode_set,
    frozenset: _encode_set,
    collections.OrderedDict: _encode_ordered_dict,
    collections.Counter: lambda value, place: {"Counter": _encode_pairs(value, place)},
    collections.defaultdict: _encode_defaultdict,
    collections.deque: lambda value, place: {"deque": [value.maxlen, _encode_items(value, place)]},
    np.ndarray: lambda value, place: {
        "numpy.ndarray": [_numpy_dtype_code(value.dtype, place), list(value.shape), _array_bytes(value, place)]
    },
}
