"""How does a value that is no tensor of the state become bytes, and come back the same, without pickle?

A value is a tree. Its leaves and lists are msgpack's own; everything else is a map of one entry, ``{tag: body}``
(``docs/format.md``, section 6, lists the tags), so any msgpack reader can walk it.

1. *Encode* goes by exact type. A subclass (an enum, a namedtuple) would come back as something else, so it is refused with the
   place where it sits; nothing is guessed and nothing is lost.
2. Identical values give identical bytes: sets are sorted by their elements' bytes, a NaN has one spelling, integers and floats
   keep their types. Dicts keep their order, which therefore counts.
3. *Decode* trusts nothing: depth, lengths, dtypes and shapes are checked before anything is made of them.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, prod
from typing import Any, NoReturn

import msgpack
import numpy as np
import torch

from ..errors import CheckpointError, CorruptError, UnsupportedError

MAX_DEPTH = 64
"""How deep containers may nest; msgpack itself stops at a few hundred levels, of which one container takes up to three."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_NAN = float("nan")
_MAX_DIMS = 64
_NATIVE = frozenset({type(None), bool, int, bytes})
_FACTORIES: dict[str, type] = {t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)}

_NUMPY_DTYPE = re.compile(r"[<>|](b1|i[1248]|u[1248]|f[248]|c8|c16|S[1-9]\d{0,8}|U[1-9]\d{0,8}|[mM]8(\[\d{0,9}[A-Za-z]+\])?)")
_TORCH_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# Quantized, sub-byte and raw-bits dtypes are left out: their elements are not plain bytes that a copy carries over.
_TENSOR_DTYPES = frozenset(
    name for name in _TORCH_DTYPES if re.fullmatch(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8_e\w+|complex\d+", name)
)


@dataclass(slots=True)
class _Place:
    """Where in the value the encoder is; made for containers only, read for messages only."""

    name: str
    parent: _Place | None = None
    step: str = ""
    depth: int = 0

    def child(self, step: str) -> _Place:
        if self.depth == MAX_DEPTH:
            self.refuse(f"it is nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it")
        return _Place(self.name, self, step, self.depth + 1)

    def refuse(self, why: str) -> NoReturn:
        steps: list[str] = []
        place: _Place | None = self
        while place is not None:
            steps.append(place.step)
            place = place.parent
        where = "".join(reversed(steps))
        raise UnsupportedError(f"{self.name}{where if len(where) <= 200 else where[:200] + '…'}: {why}")


def encode_value(value: Any, name: str) -> bytes:
    """Encode a plain value.

    Parameters
    ----------
    value
        None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque,
        defaultdict of a builtin, numpy arrays, scalars and dtypes, torch dtypes, sizes, devices and dense tensors, nested.
    name
        What the value is called in messages.

    Returns
    -------
    bytes
        The same for every identical value, on any rank.

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
    except (ValueError, OverflowError, MemoryError) as error:  # over msgpack's 4 GiB for one string, or out of memory
        place.refuse(f"too large for a value ({error}); keep it in the state as a torch tensor")
    return packed


def decode_value(data: bytes | bytearray | memoryview, *, name: str = "value") -> Any:
    """Decode what `encode_value` made; tensors are on the CPU, arrays and tensors own their memory.

    Raises
    ------
    CorruptError
        The bytes are no encoded value.
    """
    try:
        return _decode(msgpack.unpackb(data), MAX_DEPTH)
    except CheckpointError as error:
        raise CorruptError(f"{name}: {error}; use another checkpoint") from None
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError, msgpack.UnpackException) as error:
        raise CorruptError(f"{name}: its {len(data)} bytes are no encoded value ({error}); use another checkpoint") from error


def encode_path(keys: Sequence[Any]) -> bytes:
    """Encode the keys that lead to a value in the state; they keep their types.

    >>> decode_path(encode_path(["extra", 3, (1, "a")]))
    ('extra', 3, (1, 'a'))
    """
    return encode_value(list(keys), "path in the state")


def decode_path(data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    """Decode what `encode_path` made; CorruptError for anything else."""
    keys = decode_value(data, name="path in the state")
    if not isinstance(keys, list):
        raise CorruptError(f"path in the state: a {type(keys).__name__} where a list of keys belongs; use another checkpoint")
    try:
        hash(tuple(keys))
    except TypeError as error:
        raise CorruptError(f"path in the state: {error}; use another checkpoint") from error
    return tuple(keys)


# --- encoding ----------------------------------------------------------------------------------------------------


def _encode(value: Any, place: _Place) -> Any:
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, place)
    if isinstance(value, np.generic):
        return _encode_numpy_scalar(value, place)
    if isinstance(value, np.dtype):
        return {"numpy.dtype": _numpy_dtype_code(value, place)}
    place.refuse(_advice(value))


def _encode_items(items: Iterable[Any], place: _Place) -> list[Any]:
    return [_encode_item(item, place, index) for index, item in enumerate(items)]


def _encode_item(item: Any, place: _Place, step: Any) -> Any:
    kind = type(item)
    if kind is int and _INT_MIN <= item <= _INT_MAX:  # the short way for what long lists are made of
        return item
    return _encode(item, place.child(f"[{step!r:.80}]"))


def _encode_pairs(value: dict[Any, Any], place: _Place) -> list[Any]:
    return [[_encode_item(key, place, key), _encode_item(item, place, key)] for key, item in value.items()]


def _encode_int(value: int, place: _Place) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    return {"int": value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)}


def _encode_float(value: float, place: _Place) -> float:
    return _NAN if isnan(value) else value  # NaNs of either sign and any payload are one value, whatever the processor made


def _encode_complex(value: complex, place: _Place) -> Any:
    return {"complex": [_encode_float(value.real, place), _encode_float(value.imag, place)]}


def _encode_str(value: str, place: _Place) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            place.refuse("a str with lone surrogates is no valid text; save bytes, e.g. os.fsencode(value)")
    return value


def _encode_set(value: set[Any] | frozenset[Any], place: _Place) -> Any:
    child = place.child("{…}")
    return {type(value).__name__: sorted((_encode(item, child) for item in value), key=msgpack.packb)}


def _encode_defaultdict(value: collections.defaultdict[Any, Any], place: _Place) -> Any:
    factory = value.default_factory
    label = None if factory is None else getattr(factory, "__name__", "")
    if label is not None and _FACTORIES.get(label) is not factory:
        place.refuse(f"a defaultdict is saved only with a builtin factory ({', '.join(_FACTORIES)}); convert it with dict(...)")
    return {"defaultdict": [label, _encode_pairs(value, place)]}


def _encode_deque(value: collections.deque[Any], place: _Place) -> Any:
    return {"deque": [value.maxlen, _encode_items(value, place)]}


def _numpy_dtype_code(dtype: np.dtype[Any], place: _Place) -> str:
    if _NUMPY_DTYPE.fullmatch(dtype.str) is None or np.dtype(dtype.str) != dtype:
        place.refuse(
            f"numpy dtype {dtype} cannot be saved; convert it to bool, integer, float, complex, text, bytes or datetime64"
        )
    return dtype.str


def _encode_array(value: np.ndarray[Any, Any], place: _Place) -> Any:
    return {"numpy.ndarray": [_numpy_dtype_code(value.dtype, place), list(value.shape), value.tobytes()]}


def _encode_numpy_scalar(value: np.generic, place: _Place) -> Any:
    if isinstance(value, np.str_):  # through an array, or numpy's own __str__, text and bytes would lose the NULs at their end
        return {"numpy.str": _encode_str(str.__str__(value), place)}
    if isinstance(value, np.bytes_):
        return {"numpy.bytes": bytes(value)}
    return {"numpy.scalar": [_numpy_dtype_code(value.dtype, place), value.tobytes()]}


def _encode_tensor(value: torch.Tensor, place: _Place) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or value.is_meta or name not in _TENSOR_DTYPES:
        place.refuse(
            f"a {value.layout} tensor of {value.dtype} on {value.device} cannot be saved in a value; make it dense, with data"
        )
    flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return {"torch.Tensor": [name, list(value.shape), flat.view(torch.uint8).numpy().tobytes()]}


def _advice(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        hint = "save ._asdict() or tuple(...)"
    elif isinstance(value, np.ndarray):
        hint = "save np.array(...) of it"
    elif isinstance(value, torch.Tensor):
        hint = "put it in the state where the library sees it, or save a plain tensor"
    elif callable(value):
        hint = "code is not saved; save its name, and set it up again in the program"
    elif isinstance(value, (int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)):
        hint = f"its type would be lost; convert it to a plain {_plain_base(value)}"
    else:
        hint = "convert it to plain values, or give it state_dict() and load_state_dict()"
    return f"a {kind} cannot be saved; {hint}"


def _plain_base(value: Any) -> str:
    bases = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)
    base = next(b for b in bases if isinstance(value, b))
    return "bytes" if base is bytearray else base.__name__


_Encoder = Callable[[Any, _Place], Any]
_ENCODERS: dict[type, _Encoder] = {
    type(None): lambda value, place: value,
    bool: lambda value, place: value,
    bytes: lambda value, place: value,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    list: _encode_items,
    tuple: lambda value, place: {"tuple": _encode_items(value, place)},
    dict: lambda value, place: {"dict": _encode_pairs(value, place)},
    set: _encode_set,
    frozenset: _encode_set,
    collections.OrderedDict: lambda value, place: {"OrderedDict": _encode_pairs(value, place)},
    collections.Counter: lambda value, place: {"Counter": _encode_pairs(value, place)},
    collections.defaultdict: _encode_defaultdict,
    collections.deque: _encode_deque,
    np.ndarray: _encode_array,
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    torch.dtype: lambda value, place: {"torch.dtype": str(value).removeprefix("torch.")},
    torch.Size: lambda value, place: {"torch.Size": list(value)},
    torch.device: lambda value, place: {"torch.device": str(value)},
}


# --- decoding ----------------------------------------------------------------------------------------------------


def _decode(node: Any, depth: int) -> Any:
    kind = type(node)
    if kind in _NATIVE or kind is float or kind is str:
        return node
    if depth < 0:
        raise CorruptError(f"a value is nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return [_decode(item, depth - 1) for item in node]
    if kind is dict and len(node) == 1:
        ((tag, body),) = node.items()
        if tag in _DECODERS:
            return _DECODERS[tag](body, depth - 1)
        raise CorruptError(f"the kind of value {tag!r:.80} is unknown: damaged, or written by a newer version")
    raise CorruptError("a value is not of the form that this version writes")


def _typed(body: Any, *kinds: type) -> tuple[Any, ...]:
    """The items of a fixed-length list, each of exactly the type wanted."""
    if type(body) is not list or [type(item) for item in body] != list(kinds):
        raise CorruptError("a value's parts are not what its kind has")
    return tuple(body)


def _one(body: Any, kind: type) -> Any:
    return _typed([body], kind)[0]


def _decode_items(body: Any, depth: int) -> list[Any]:
    return [_decode(item, depth) for item in _one(body, list)]


def _decode_pairs(body: Any, depth: int) -> list[tuple[Any, Any]]:
    pairs = [(_decode(key, depth), _decode(item, depth)) for key, item in _one(body, list)]
    if len(dict(pairs)) != len(pairs):
        raise CorruptError("a dict holds a key twice")
    return pairs


def _decode_shape(shape: list[Any], item_bytes: int, data: bytes) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMS or any(type(length) is not int or length < 0 for length in shape):
        raise CorruptError(f"shape {shape!r:.80} is no shape")
    if prod(shape) * item_bytes != len(data):
        raise CorruptError(f"shape {shape!r:.80} does not describe {len(data)} bytes")
    return tuple(shape)


def _numpy_dtype(code: str) -> np.dtype[Any]:
    if _NUMPY_DTYPE.fullmatch(code) is None or np.dtype(code).str != code:
        raise CorruptError(f"numpy dtype {code!r:.80} is none that is saved")
    return np.dtype(code)


def _numpy_array(code: str, shape: list[Any], data: bytes) -> np.ndarray[Any, Any]:
    dtype = _numpy_dtype(code)
    array: np.ndarray[Any, Any] = np.ndarray(_decode_shape(shape, dtype.itemsize, data), dtype, bytearray(data))
    if dtype.kind == "b" and data.strip(b"\0\1"):
        raise CorruptError("a bool is neither 0 nor 1")
    if dtype.kind == "U":
        points = np.frombuffer(data, dtype.str[0] + "u4")
        if points.size and points.max() > 0x10FFFF:
            raise CorruptError("text holds what is no code point")
    return array


def _decode_array(body: Any, depth: int) -> np.ndarray[Any, Any]:
    return _numpy_array(*_typed(body, str, list, bytes))


def _decode_numpy_scalar(body: Any, depth: int) -> Any:
    code, data = _typed(body, str, bytes)
    return _numpy_array(code, [], data)[()]


def _decode_tensor(body: Any, depth: int) -> torch.Tensor:
    name, shape, data = _typed(body, str, list, bytes)
    if name not in _TENSOR_DTYPES:
        raise CorruptError(f"torch dtype {name!r:.80} is none that this torch can load into a tensor")
    dtype = _TORCH_DTYPES[name]
    checked = _decode_shape(shape, dtype.itemsize, data)
    if dtype is torch.bool and data.strip(b"\0\1"):
        raise CorruptError("a bool is neither 0 nor 1")
    if not data:
        return torch.empty(checked, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(checked)


def _decode_torch_dtype(body: Any, depth: int) -> torch.dtype:
    name = _one(body, str)
    if name not in _TORCH_DTYPES:
        raise CorruptError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return _TORCH_DTYPES[name]


def _decode_defaultdict(body: Any, depth: int) -> Any:
    if type(body) is not list or len(body) != 2 or (body[0] is not None and body[0] not in _FACTORIES):
        raise CorruptError("a defaultdict's factory is none that is saved")
    factory = None if body[0] is None else _FACTORIES[body[0]]
    return collections.defaultdict(factory, _decode_pairs(body[1], depth))


def _decode_deque(body: Any, depth: int) -> Any:
    if type(body) is not list or len(body) != 2 or type(body[0]) not in (type(None), int):
        raise CorruptError("a deque's length is no integer")
    return collections.deque(_decode_items(body[1], depth), body[0])


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda body, depth: int.from_bytes(_one(body, bytes), "little", signed=True),
    "complex": lambda body, depth: complex(*_typed(body, float, float)),
    "tuple": lambda body, depth: tuple(_decode_items(body, depth)),
    "dict": lambda body, depth: dict(_decode_pairs(body, depth)),
    "set": lambda body, depth: set(_decode_items(body, depth)),
    "frozenset": lambda body, depth: frozenset(_decode_items(body, depth)),
    "OrderedDict": lambda body, depth: collections.OrderedDict(_decode_pairs(body, depth)),
    "Counter": lambda body, depth: collections.Counter(dict(_decode_pairs(body, depth))),
    "defaultdict": _decode_defaultdict,
    "deque": _decode_deque,
    "numpy.ndarray": _decode_array,
    "numpy.scalar": _decode_numpy_scalar,
    "numpy.str": lambda body, depth: np.str_(_one(body, str)),
    "numpy.bytes": lambda body, depth: np.bytes_(_one(body, bytes)),
    "numpy.dtype": lambda body, depth: _numpy_dtype(_one(body, str)),
    "torch.Tensor": _decode_tensor,
    "torch.dtype": _decode_torch_dtype,
    "torch.Size": lambda body, depth: torch.Size(_one(body, list)),
    "torch.device": lambda body, depth: torch.device(_one(body, str)),
}
