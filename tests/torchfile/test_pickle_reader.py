"""A pickle is read without running it, whatever it holds: against torch's and Python's own writers, and hostile ones by hand."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.errors import CheckpointError, CorruptError, UnsupportedError
from reshard_ckpt.formats.dcp.metadata import TABLE, read_metadata
from reshard_ckpt.torchfile.pickle_reader import StandInObject, read_pickle
from reshard_ckpt.torchfile.pickle_writer import FunctionCall, Global, Instance, pickled
from tests.damage import Calls
from tests.tries import examples

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
_LEAVES = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | _TEXT


def _plain(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner) | st.lists(inner).map(tuple), max_leaves=30
    )


@given(_plain(_LEAVES | st.floats(allow_nan=False)), st.sampled_from([2, 3, 4, 5]))
@examples(80)
def test_plain_data_come_back(value: Any, protocol: int):
    assert read_pickle(pickle.dumps(value, protocol), {}, name="p") == value


@given(_plain(_LEAVES))
@examples(50)
def test_what_is_emitted_is_a_pickle(value: Any):
    assert pickle.loads(pickled(value)) == value


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.system, eval, exec, __import__, open, os.unlink, pickle.loads, print])
def test_nothing_is_called(tmp_path, function: Any, protocol: int):
    there = tmp_path / "there"
    data = pickle.dumps({"a": Calls(function, f"open({str(there)!r}, 'w')" if function is eval else str(there))}, protocol)
    there.write_text("untouched")
    with pytest.raises(UnsupportedError, match=r"names the global \w+\.\w+, which .*nothing was executed"):
        read_metadata(data, name="m")
    assert there.read_text() == "untouched"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch", "nn"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("builtins", "eval"),
        ("", ""),
        ("os\nsystem", "x"),
    ],
)
def test_a_name_that_is_not_listed_is_an_error(module: str, name: str):
    data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
    with pytest.raises(UnsupportedError, match="which such a file does not need"):
        read_metadata(data, name="m")


def test_the_getattr_of_enums_looks_nothing_up():
    kind = Global("torch.distributed.checkpoint.metadata", "Metadata")
    called = pickled(FunctionCall(Global("builtins", "getattr"), (kind, "__init__")))
    assert read_pickle(called, TABLE, name="m") is None


def _text4(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


_DEPTH = 20_000  # of nesting: more than a reader that calls itself comes through
_BOMBS = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\xff.",
    "text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", (1 << 64) - 1) + b"N.",
    "a number of many digits": b"\x80\x02\x8b" + struct.pack("<i", 1 << 28) + b".",
    "doubling tuples": b"\x80\x04N\x94" + b"".join(b"h%c\x94" % 0 for _ in range(2)) + b"\x86\x94" * 1 + b"2\x86\x94" * 60 + b".",
    "doubling tuples by memo": b"\x80\x02N\x85q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b".",
    "a key that is a doubling tuple": b"\x80\x02}N\x85q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"Ns.",
    "nested lists": b"\x80\x02" + b"]" * _DEPTH + b"a" * (_DEPTH - 1) + b".",
    "nested tuples": b"\x80\x02N" + b"\x85" * _DEPTH + b".",
    "nested tuples in a size": b"\x80\x02ctorch\nSize\nN" + b"\x85" * _DEPTH + b"R.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "marks": b"\x80\x02" + b"(" * _DEPTH + b"t" * _DEPTH + b".",
    "no end": b"\x80\x04" + b"N" * 100_000,
    "nothing": b"",
    "stack underflow": b"\x80\x02R.",
    "a size of many": b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 100_000 + b"t\x85R.",
    "text that is none": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "a second state": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b}b.",
    "persistent": b"\x80\x02NQ.",
    "old persistent": b"\x80\x02Pos\n.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "object": b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.",
    "extension": b"\x80\x02\x82\x01.",
    "new with arguments": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN\x85\x81.",
    "call of a class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)R.",
    "call of data": b"\x80\x02N)R.",
    "numbers as keys": b"\x80\x02}K\x01K\x02s.",
}


@pytest.mark.parametrize("name", _BOMBS)
def test_hostile_streams_end_in_an_error_soon_and_small(name: str):
    data = _BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_metadata(data, name="m")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(data) + (1 << 20)


def _metadata(state: Any, storage: Any) -> bytes:
    fields = {"state_dict_metadata": state, "storage_data": storage, "planner_data": {}}
    return pickled(Instance(Global("torch.distributed.checkpoint.metadata", "Metadata"), fields))


FILES = "torch.distributed.checkpoint.filesystem"


def _of(name: str, state: Any, module: str = "torch.distributed.checkpoint.metadata") -> Instance:
    return Instance(Global(module, name), state)


def test_one_list_of_chunks_under_many_names_does_not_multiply():
    """By reference, n names of one list of n chunks are n² chunks in a file of n."""
    module, count = "torch.distributed.checkpoint.metadata", 3000

    def made(name: str) -> bytes:
        return f"c{module}\n{name}\n)\x81}}(".encode("latin-1")

    size = b"ctorch\nSize\nK%c\x85\x85R"
    chunk = made("ChunkStorageMetadata") + _text4("offsets") + size % 0 + _text4("sizes") + size % 0 + b"ub"
    dtype = f"c{module}\nTensorProperties\n)\x81(ctorch\nfloat32\ntb".encode("latin-1")
    chunks = b"](" + chunk + b"q\x00" + b"h\x00" * count + b"eq\x01"
    out = b"\x80\x02" + made("Metadata") + _text4("storage_data") + b"}" + _text4("state_dict_metadata") + b"}("
    for i in range(count):
        fields = _text4("size") + size % 1 + _text4("properties") + dtype + _text4("chunks") + (b"h\x01" if i else chunks)
        out += _text4(f"w{i}") + made("TensorStorageMetadata") + fields + b"ub"
    with pytest.raises(CorruptError, match="more chunks than its bytes can spell"):
        read_metadata(out + b"uub.", name="m")


COLLIDING = [i * (2**61 - 1) for i in range(1, 2_000)]


def test_offsets_that_collide_are_refused_before_they_meet():
    """Without a clock: nothing is a key before all hashes are known to differ."""
    place = _of("_StorageInfo", {"relative_path": "f", "offset": 0, "length": 0}, FILES)
    indices = [
        _of("MetadataIndex", {"fqn": "w", "offset": FunctionCall(Global("torch", "Size"), ((n,),)), "index": 0})
        for n in COLLIDING
    ]
    with pytest.raises(CorruptError, match="64 offsets of w have the same hash"):
        read_metadata(_metadata({}, dict.fromkeys(indices, place)), name="m")


def test_keys_of_paths_that_collide_are_refused_before_they_meet():
    planner = {f"a{i}": ("a", n) for i, n in enumerate(COLLIDING)}
    fields = {"state_dict_metadata": {}, "storage_data": {}, "planner_data": planner}
    with pytest.raises(CorruptError, match="64 keys of its paths have the same hash"):
        read_metadata(pickled(Instance(Global("torch.distributed.checkpoint.metadata", "Metadata"), fields)), name="m")


@pytest.mark.parametrize(
    ("state", "storage", "why"),
    [
        (None, {}, "state_dict_metadata is not a dict"),
        ({}, None, "storage_data is not a dict"),
        ({"w": 3}, {}, "neither a tensor nor a value"),
        ({"w": _of("BytesStorageMetadata", {})}, {}, "'w'"),
        ({"w": _of("TensorStorageMetadata", {})}, {}, "'size'"),
        ({}, {_of("MetadataIndex", {"fqn": 3}): 1}, "without a name"),
        ({}, {_of("MetadataIndex", {"fqn": "w"}): _of("StorageMeta", {})}, "a StorageMeta where a _StorageInfo belongs"),
    ],
)
def test_metadata_of_another_shape_are_an_error(state: Any, storage: Any, why: str):
    with pytest.raises(CorruptError, match=why):
        read_metadata(_metadata(state, storage), name="m")


def test_an_instance_is_a_stand_in():
    made = read_pickle(_metadata({}, {}), TABLE, name="m")
    assert type(made) is StandInObject
    assert made.kind.name == "Metadata"
