"""Objects in files of ``torch.save`` are read as plain and tagged values, and one that is not read harms no other."""

from __future__ import annotations

import collections
import io
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt.errors import CorruptError, UnsupportedError
from reshard_ckpt.format.objects import Named
from reshard_ckpt.storage import open_storage
from reshard_ckpt.torchfile.archive import FileReader, read_object
from reshard_ckpt.torchfile.object_writer import object_bytes


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.children: list[Any] = []
        self.parent: Settings | None = None


class OwnDict(dict[str, int]):
    pass


class OwnList(list[int]):
    pass


class OwnState:
    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, state: int) -> None:
        pass


Pair = collections.namedtuple("Pair", "a b")


def saved(value: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=protocol)
    return out.getvalue()


PLAIN = [
    b"", b"x", collections.deque([1, 2]), collections.deque([1, 2, 3], 3), collections.deque(), {1, "a", (1, 2)}, np.float64(3),
    {None: 1, True: 2, False: 3, b"k": 4}, frozenset({frozenset(), frozenset({2, "b"})}), set(range(3000)), [set(), set()],
    collections.deque([0.5] * 100, 100), collections.deque([{"a": [1]}] * 100), {1j: 2, frozenset({1}): 3},
    {"state": 2**128 - 1, "inc": -(2**2039)},  # as of numpy's generators, and the largest of pickle's short form
]  # fmt: skip


# By type: a set reads otherwise in a worker that has compiled it than in one that loads it.
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_of_python_and_numpy_are_read(value: Any, protocol: int):
    found = read_object(saved({"a": value, "b": 1}, protocol), "x", tagged=None)
    assert found == {"a": value, "b": 1}
    assert repr(found["a"]) == repr(value) or isinstance(value, set | frozenset)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_class_that_is_not_read_is_named_at_any_protocol(protocol: int):
    with pytest.raises(UnsupportedError, match=r"calls (\w+\.)?bytearray"):
        read_object(saved([bytearray(b"x")], protocol), "x", tagged=None)


ARRAYS = [
    np.array(["2026-01-02T03:04:05", "NaT"], "M8[s]"), np.array([7], "m8[25us]"), np.datetime64("2026", "D"),
    np.timedelta64(5, "ms"), np.array(["a", "bcd"]), np.array([b"a"]), np.float16(2),
]  # fmt: skip


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: value.dtype.str)
@pytest.mark.parametrize("write", [saved, lambda value: object_bytes(value, "x")], ids=["torch", "own"])
def test_the_dtype_of_an_array_comes_back_in_numpy_and_here(value: Any, write: Callable[[Any], bytes]):
    """Without its unit, numpy's time is another one; and numpy crashes if a pickle leaves the unit out."""
    data = write([value, value.dtype])
    for array, dtype in (torch.load(io.BytesIO(data), weights_only=False), read_object(data, "x")):
        assert type(array) is type(value)
        assert dtype == array.dtype == value.dtype
        assert array.tobytes() == value.tobytes()


def test_an_object_is_its_class_and_state_or_refused():
    data = saved({"a": Settings(0.5)})
    assert read_object(data, "x") == {"a": Named(__name__, "Settings", {"rate": 0.5, "children": [], "parent": None})}
    for tagged in (None, "another"):
        with pytest.raises(UnsupportedError, match="needs .*Settings; nothing was executed"):
            read_object(data, "x", tagged=tagged)


def cyclic() -> Settings:
    parent, child = Settings(1), Settings(2)
    parent.children, child.parent = [child, {"a": parent}], parent
    return parent


UNREAD = [cyclic(), OwnDict(a=1), OwnList([1]), Pair(1, 2), uuid.UUID(int=1), OwnState(), {1.5: 2}, {(1, 2): 3}]


@pytest.mark.parametrize("value", UNREAD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("tagged", [None, ""])
def test_an_object_with_more_than_attributes_is_refused_alone(value: Any, tagged: str | None):
    """Its items, arguments or state would be lost."""
    with open_storage("memory://objects") as storage:
        storage.publish("x.pt", saved({"bad": value, "good": [1, b""]}))
        file = FileReader(storage, tagged=tagged).open("x.pt")
    assert file.plain(file.content["good"]) == [1, b""]
    if not isinstance(value, uuid.UUID) or tagged is None:  # which has attributes alone
        with pytest.raises(UnsupportedError, match="nothing was executed"):
            file.plain(file.content["bad"])


def test_a_list_that_contains_itself_and_very_many_cycles_are_refused():
    listed: list[Any] = []
    listed.append(listed)
    for value in (listed, [cyclic() for _ in range(200)]):
        with pytest.raises(CorruptError, match="contains itself"):
            read_object(saved({"a": value}), "x")


ALIKE = [i * (2**61 - 1) for i in range(1, 100)], [complex(-1000003 * i, i) for i in range(1, 100)]


# As keys of a dict, integers of one hash are refused in another way: they are no keys here at all.
@pytest.mark.parametrize("value", [set(ALIKE[0]), frozenset(ALIKE[1]), dict.fromkeys(ALIKE[1])], ids=["set", "frozenset", "dict"])
def test_many_items_or_keys_with_one_hash_are_refused(value: Any):
    assert len(set(map(hash, value))) == 1
    with pytest.raises(CorruptError, match="have the same hash"):
        read_object(saved({"a": value}), "x")


class Reduced:
    """Is pickled as a call of numpy's with any arguments and any state."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_lists_in_place_of_numbers_are_not_multiplied_or_spelled_out():
    """Lists of few bytes that contain each other have a text of exabytes, and a list times a number has any size."""
    doubled: list[Any] = []
    for _ in range(6):
        doubled = [doubled, doubled]
    units = (4, "<", None, None, None, -1, -1, 0, ({}, (b"ms", doubled, 1, 1)))
    array, scalar = np.ones(1).__reduce__()[0], np.float64(1).__reduce__()[0]  # type: ignore[index]
    of_doubled = Reduced(scalar, (Reduced(np.dtype, ("M8", False, True), units), bytes(8)))
    repeated = Reduced(array, (np.ndarray, (0,), b"b"), (1, ([b""], 1 << 27), np.dtype("u1"), False, b"x"))
    for value, error in ((of_doubled, "unsupported format string"), (repeated, "a size that is not a whole number")):
        with pytest.raises(CorruptError, match=error):
            read_object(saved(value), "x")
