"""Values come back as they were, with their types; what would not is refused by name; hostile bytes are refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import math
import pathlib
import random
import resource
import sys
import types
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from reshard_ckpt.errors import CorruptError, UnsupportedError
from reshard_ckpt.format.torch_values import TENSOR_DTYPES, TORCH_DTYPES
from reshard_ckpt.format.value_decode import MAX_DEPTH
from reshard_ckpt.format.values import decode_path, decode_value, encode_path, encode_value
from tests.tries import examples


class Color(enum.Enum):
    RED = 1
    LATE = datetime.date(2026, 1, 2)
    SPAN = ("a", (1, 2.5))
    LIST = [1, 2]  # noqa: RUF012 - a value that is no key


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ, WRITE, ALL = 1, 2, 3


class Name(str, enum.Enum):
    A = "a"


MINUTES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: datetime.timedelta(minutes=minutes))
ZONES = st.just(datetime.timezone.utc) | MINUTES.map(datetime.timezone)
OBJECTS = (
    st.datetimes(timezones=st.none() | ZONES, allow_imaginary=False).map(lambda when: when.replace(fold=0))
    | st.dates()
    | st.times(timezones=st.none() | ZONES).map(lambda when: when.replace(fold=0))
    | st.timedeltas()
    | ZONES
    | st.sampled_from([pathlib.Path("a/b"), pathlib.Path("/"), pathlib.PurePosixPath("é"), pathlib.PureWindowsPath("C:/a")])
)
MEMBERS = st.sampled_from([*Color, *Level, *Name, *Mode, Mode.ALL, Mode(0)])
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers()
    | OBJECTS,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
NUMPY_DTYPES = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.unsigned_integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | npst.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | npst.datetime64_dtypes()
    | npst.timedelta64_dtypes()
    | npst.byte_string_dtypes(max_len=5)
    | npst.unicode_string_dtypes(max_len=5)
)
ARRAYS = npst.arrays(NUMPY_DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
TENSORS = st.builds(
    lambda array, dtype: torch.from_numpy(array.copy()).to(TORCH_DTYPES[dtype]),
    npst.arrays(np.int8, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    st.sampled_from(sorted(TENSOR_DTYPES - {"complex32"})),  # torch warns that it is experimental
)
VALUES = st.recursive(
    HASHABLE
    | ARRAYS
    | TENSORS
    | MEMBERS
    | ARRAYS.filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0])
    | st.sampled_from([torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1"), np.dtype("<f4"), np.str_("a\0")]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict)
        | st.sets(HASHABLE, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types everywhere, and with every NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, dict):
        attributes = [same(vars(a), vars(b))] if isinstance(a, collections.OrderedDict) else []
        return len(a) == len(b) and all([*attributes, *(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))])
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return sorted(encode_value(x, "") for x in a) == sorted(encode_value(x, "") for x in b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.numel() or torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


@examples(250)
@given(value=VALUES)
@example(value={1: "int", 2.5: "float", (1, 2): "tuple"})
@example(value=[2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**4000])
@example(value=random.Random(0).getstate())
@example(value=np.random.default_rng(0).bit_generator.state)
@example(value=[torch.Size([-1, 3]), torch.Size([1] * 100)])
@example(value=collections.Counter("hello"))
@example(value={"state": torch.nn.Linear(2, 1).state_dict()})  # it has an attribute, `_metadata`
@example(value=collections.defaultdict(list, {"b": [1], "a": []}))
@example(value=[1, 1.0, True, np.int64(1), np.float32(1), 1 + 0j])
def test_values_come_back_as_they_were(value: Any):
    encoded = encode_value(value, "extra")
    decoded = decode_value(encoded)
    assert same(decoded, value)
    assert encode_value(decoded, "extra") == encoded


@given(items=st.sets(HASHABLE, max_size=8), seed=st.integers())
def test_sets_have_one_encoding_whatever_their_history(items: set, seed: int):
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    assert encode_value(set(shuffled), "") == encode_value(items, "")


def test_every_nan_is_one_value():
    nans = [float("nan"), -float("nan"), np.array([0x7FF8000000000001], "u8").view("f8").tolist()[0]]
    assert len({encode_value(nan, "") for nan in nans}) == 1


def test_tensors_come_back_dense_on_the_cpu_with_memory_of_their_own():
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    decoded = decode_value(encode_value(base.t(), "x"))
    assert torch.equal(decoded, base.t())
    assert not decoded.requires_grad
    decoded += 1
    assert torch.equal(decode_value(encode_value(base[:1, 1], "x")), base[:1, 1])  # one element, whose stride is 4
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(decode_value(encode_value(conjugate, "x")), conjugate.resolve_conj())


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls the layouts a beta
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_come_back_with_their_layout(layout: str):
    dense = torch.tensor([[0.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 4.0]])
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=(1, 2) if layout[0] == "b" else None)
    decoded = decode_value(encode_value({"x": [sparse]}, "x"))["x"][0]
    assert decoded.layout is sparse.layout
    assert torch.equal(decoded.to_dense(), dense)
    assert encode_value(decoded, "x") == encode_value(sparse, "x")


def test_sparse_tensors_whose_indices_leave_their_shape_are_refused():
    tag = msgpack.unpackb(encode_value(torch.ones(4).to_sparse(), "x"))
    tag["torch.sparse"][1] = [3]
    with pytest.raises(CorruptError, match="not an encoded value"):
        decode_value(msgpack.packb(tag))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_come_back_as_parameters(requires_grad: bool):
    decoded = decode_value(encode_value(torch.nn.Parameter(torch.ones(2), requires_grad), "x"))
    assert type(decoded) is torch.nn.Parameter
    assert decoded.requires_grad is requires_grad
    assert torch.equal(decoded, torch.ones(2))


NEITHER = np.array([[2, 0, 255], [0, 1, 7]], np.uint8)


@pytest.mark.parametrize(
    "of",
    [
        lambda array: array,
        lambda array: array.T,
        lambda array: array[0, 0],
        lambda array: torch.from_numpy(array.view(np.uint8)).view(torch.bool),
        lambda array: torch.from_numpy(array.view(np.uint8)).view(torch.bool).T,
    ],
)
def test_bools_of_memory_that_nobody_has_set_read_back(of: Any):
    """A reader refuses other bytes than 0 and 1, so a checkpoint with such could not be loaded."""
    wild, tame = of(NEITHER.view(bool)), of(NEITHER != 0)
    assert same(decode_value(encode_value(wild, "")), tame)


def test_arrays_come_back_writable():
    decoded = decode_value(encode_value(np.asfortranarray(np.arange(6).reshape(2, 3)), "x"))
    decoded += 1
    assert decoded.tolist() == [[1, 2, 3], [4, 5, 6]]


LOCAL = enum.Enum("LOCAL", "ONE", module="nowhere")
Point = collections.namedtuple("Point", "x y")


class Opaque:
    pass


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


def with_attribute(name: Any, attribute: Any = 2) -> collections.OrderedDict[str, int]:
    value = collections.OrderedDict(a=1)
    vars(value)[name] = attribute
    return value


def loop() -> list[Any]:
    out: list[Any] = []
    out.append(out)
    return out


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Opaque(), r"extra\.x: a .*Opaque cannot be saved; convert it to plain values, or give it state_dict"),
        (Settings(), r"a .*Settings cannot be saved; save dataclasses\.asdict\(\.\.\.\) of it"),
        ({"a": [0, {"b": LOCAL.ONE}]}, r"extra\.x\['a'\]\[1\]\['b'\]: <LOCAL.ONE: 1> would not come back: .* save plain values"),
        (datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "a time in UTC"),
        (datetime.datetime(2026, 1, 1, fold=1), "would not come back"),
        (datetime.timezone(datetime.timedelta(hours=1), "X"), "would not come back"),
        ({Color.RED: 1, Level.LOW: 2}, "two of its keys have one plain value"),
        ({(pathlib.Path("a"), 1), ("a", 1)}, "two of its keys have one plain value"),
        ({i * (2**61 - 1): 0 for i in range(100)}, "more than 64 of its keys have the same hash"),
        (Point(1, 2), r"_asdict\(\) or tuple"),
        (len, "code is not saved"),
        (collections.defaultdict(Opaque), "builtin factory"),
        (with_attribute("items"), "has the attribute 'items', which .* delete it"),
        (with_attribute("__deepcopy__"), "has the attribute '__deepcopy__'"),
        (with_attribute(3), "has the attribute 3"),
        (with_attribute("hook", len), r"extra\.x\['__dict__'\]\['hook'\]: a builtins.builtin_function"),
        (loop(), "contains itself"),
        (np.array([Opaque()]), "numpy dtype object"),
        (np.longdouble(1), "numpy dtype"),
        (np.zeros(2, "f4,i4"), "numpy dtype"),
        (np.ma.array([1]), r"np\.array"),
        (torch.zeros(2, device="meta"), "meta"),
        ("\ud800", "lone surrogates"),
        (bytearray(b"a"), "plain bytes"),
        (range(3), "plain values"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused_with_its_place(value: Any, message: str):
    with pytest.raises(UnsupportedError, match=message):
        encode_value(value, "extra.x")


def test_text_of_memory_that_nobody_has_set_is_refused():
    for order in "<>":
        with pytest.raises(UnsupportedError, match=r"extra\['a'\]: an array of text holds a number that is not a code point"):
            encode_value({"a": np.array([0x110000], order + "u4").view(order + "U1")}, "extra")


@pytest.mark.filterwarnings("ignore")  # torch warns that its quantization is on its way out
def test_quantized_tensors_are_refused():
    with pytest.raises(UnsupportedError, match="qint8"):
        encode_value(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "x")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: collections.deque([v])])
def test_what_nests_as_deep_as_allowed_reads_back(wrap):
    value: Any = 1
    for _ in range(MAX_DEPTH + 1):
        value = wrap(value)
    assert decode_value(encode_value(value, "x")) == value
    with pytest.raises(UnsupportedError, match="nested deeper than 64 levels"):
        encode_value(wrap(value), "x")


@given(keys=st.lists(HASHABLE, max_size=4))
def test_paths_keep_the_types_of_keys(keys: list[Any]):
    assert same(decode_path(encode_path(keys)), tuple(keys))


def test_decode_path_refuses_what_is_no_path():
    for value in ({"a": 1}, [[1]]):
        with pytest.raises(CorruptError):
            decode_path(encode_value(value, ""))


@pytest.mark.parametrize(
    "node",
    [
        {"pickle": b"cos\nsystem\n(S'true'\ntR."},
        {"tuple": [1], "list": [2]},
        {},
        {"tuple": 1},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": ["ab"]},
        {"dict": [[[], 1]]},
        {"set": [[1]]},
        {"int": 5},
        {"complex": [1, 2]},
        {"defaultdict": ["eval", []]},
        {"defaultdict": [[], []]},
        {"deque": [-1, []]},
        {"deque": ["3", []]},
        {"OrderedDict.attributes": [[]]},
        {"OrderedDict.attributes": [[], [[1, 2]]]},
        {"OrderedDict.attributes": [[], [["items", 2]]]},
        {"OrderedDict.attributes": [[], [["__deepcopy__", 2]]]},
        {"torch.Size": ["a"]},
        {"torch.Size": [2**63]},
        {"torch.device": "nowhere"},
        {"torch.dtype": "__builtins__"},
        {"torch.Tensor": ["float32", [2**62, 4], b""]},
        {"torch.Tensor": ["float32", [0, 2**63], b""]},
        {"torch.Tensor": ["float32", [True], b"abcd"]},
        {"torch.Tensor": ["qint8", [1], b"a"]},
        {"torch.Tensor": ["bool", [1], b"\2"]},
        {"numpy.ndarray": ["|O", [1], b"12345678"]},
        {"numpy.ndarray": ["<f4", [-1], b""]},
        {"numpy.ndarray": ["<f4", [1] * 65, b"abcd"]},
        {"numpy.ndarray": ["<f4", [0, 2**62, 2**62], b""]},
        {"numpy.ndarray": ["|b1", [1], b"\2"]},
        {"numpy.ndarray": ["<U1", [1], b"\xff\xff\xff\xff"]},
        {"numpy.ndarray": ["<M8[x]", [1], b"12345678"]},
        {"numpy.ndarray": ["<S0", [10**9], b""]},
        {"numpy.scalar": ["<f4", b"abc"]},
        {"numpy.dtype": "O"},
        {"object": ["datetime", "date"]},
        {"object": ["datetime", "date", "2026-13-01"]},
        {"object": ["datetime", "date", 5]},
        {"object": ["datetime", "datetime", "20260101T000000"]},
        {"object": ["datetime", "timezone", ""]},
        {"object": ["datetime", "timezone", "+25:00"]},
        {"object": ["datetime", "timedelta", [10**10, 0, 0]]},
        {"object": ["datetime", "timedelta", [0, 0]]},
        {"object": ["datetime", "timedelta", [0, -1, 0]]},
        {"object": ["pathlib", "PurePosixPath", "a//b"]},
        {"object": ["pathlib", "PurePosixPath", 1]},
        {"object": [b"datetime", "date", 5]},
        msgpack.ExtType(1, b"x"),
        msgpack.Timestamp(1),
    ],
    ids=repr,
)
def test_decode_refuses(node: Any):
    with pytest.raises(CorruptError):
        decode_value(msgpack.packb(node))


@pytest.mark.parametrize(
    "make",
    [
        lambda alike: {"dict": [[number, 0] for number in alike]},
        lambda alike: {"set": alike},
        lambda alike: {"frozenset": [{"tuple": [number, 1]} for number in alike]},
        lambda alike: [{"dict": [[{"tuple": ["a", number]}, 0] for number in alike]}],
    ],
    ids=["dict", "set", "tuples", "tuples of text"],
)
def test_keys_that_collide_are_refused_before_they_meet(make: Callable[[list[Any]], Any]):
    """Without a clock: what is refused never gets as far as a table, where each key is compared with all before it."""
    node = make([{"int": (i * (2**61 - 1)).to_bytes(11, "little")} for i in range(1, 5_000)])
    with pytest.raises(CorruptError, match="same hash"):
        decode_value(msgpack.packb(node))


def test_keys_of_good_will_are_no_collisions():
    grid = {(x, y, z): 0 for x in range(-9, 9) for y in range(-9, 9) for z in range(-9, 9)}
    for value in (grid, {2.0**n: n for n in range(-1000, 1000)}, set(range(-10_000, 10_000)), {None: 1, True: 2, -1: 3, -2: 4}):
        assert decode_value(encode_value(value, "x")) == value


def saved_enum(name: str, value: Any, module: str = __name__) -> bytes:
    return msgpack.packb({"object": [module, name, value]})


def test_a_member_comes_back_where_its_class_is_imported_and_as_its_value_elsewhere():
    assert decode_value(encode_value([Color.RED, Mode.READ | Mode.WRITE], "x")) == [Color.RED, Mode.ALL]
    for module, name in (("not.imported", "Color"), (__name__, "Gone"), (__name__, "Opaque"), (__name__, "Color.RED")):
        assert decode_value(saved_enum(name, 1, module)) == 1
    assert decode_value(saved_enum("Color", 7)) == 7
    assert decode_value(saved_enum("Color", True)) is True
    assert decode_value(saved_enum("Mode", 8)) == 8
    assert type(decode_value(saved_enum("Mode", -1))) is int
    assert decode_value(saved_enum("PurePosixPath", "a", "pathlib._local")) == "a"


class Calling(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Calling:
        raise AssertionError("a class was called")


def test_nothing_is_imported_or_called_to_find_a_class(monkeypatch: pytest.MonkeyPatch):
    lazy = types.ModuleType("lazy_module_of_a_test")
    lazy.__getattr__ = lambda name: pytest.fail("an attribute was looked up by running code")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    before = set(sys.modules)
    assert decode_value(saved_enum("Color", 1, lazy.__name__)) == 1
    assert decode_value(saved_enum("Calling", 2)) == 2
    for module, name in (
        ("os", "system"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("this", "s"),
        ("antigravity", "webbrowser"),
    ):
        assert decode_value(saved_enum(name, "true", module)) == "true"
    assert set(sys.modules) == before


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x01\x01", b"\xa1\xff", b"\x91" * 600 + b"\0", b"\x91" * 100_000])
def test_decode_refuses_bytes_that_are_no_msgpack_or_nest_too_deep(data: bytes):
    with pytest.raises(CorruptError, match=r"extra\.x"):
        decode_value(data, name="extra.x")


def test_decode_does_not_reserve_what_a_header_claims():
    replication = b"\xdd\xff\xff\xff\xff"  # an array of 2³² - 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in (replication, replication * 1000, b"\xdd" + (10**6).to_bytes(4, "big") + replication, b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(CorruptError):
            decode_value(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_parsed_arguments_and_buffers_come_back():
    inner = argparse.Namespace(weights=torch.arange(3), level=Level.LOW)
    value = {"args": argparse.Namespace(lr=0.1, inner=inner, dtype=torch.bfloat16), "extra": io.BytesIO(b"state")}
    back = decode_value(encode_value(value, "v"))
    assert type(back["args"]) is argparse.Namespace
    assert torch.equal(back["args"].inner.weights, inner.weights)
    assert (back["args"].lr, back["args"].dtype, back["args"].inner.level) == (0.1, torch.bfloat16, Level.LOW)
    assert back["extra"].read() == b"state"


@pytest.mark.parametrize(("name", "plain"), [("argparse.Namespace", [1]), ("argparse.Namespace", {1: 2}), ("io.BytesIO", "text")])
def test_hostile_arguments_and_buffers_are_refused(name, plain):
    module, _, kind = name.rpartition(".")
    hostile = msgpack.packb({"object": [module, kind, msgpack.unpackb(encode_value(plain, "v"))]})
    with pytest.raises(CorruptError):
        decode_value(hostile)
