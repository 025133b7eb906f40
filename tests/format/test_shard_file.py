"""Shard files: names tell the part and are read back, headers are what safetensors accepts, hostile ones are refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize as safetensors_deserialize

from reshard_ckpt.core.catalog.specs import CODES, ITEM_BYTES, blob_name
from reshard_ckpt.errors import CorruptError, UnsupportedError, UsageError
from reshard_ckpt.format.shard_file import (
    ALIGNMENT,
    METADATA,
    Member,
    header,
    header_cost,
    header_num_bytes,
    make_member,
    parse_header,
    sub_box,
)
from tests.format.building import NAMES, SHAPES
from tests.tries import examples

_SUFFIX = re.compile(r"@\[(?:(?P<value>value)(?:,(?P<rank>\d+))?|(?P<box>(?:\d+:\d+(?:,\d+:\d+)*)?))\](?:#\[(?P<run>\d+:\d+)\])?")


@dataclass(frozen=True, slots=True)
class MemberKey:
    """A parsed member name; `box` is None for a whole tensor or a value, `run` for a whole box."""

    name: str
    box: tuple[tuple[int, int], ...] | None = None
    run: tuple[int, int] | None = None
    is_value: bool = False
    rank: int | None = None


def parse_member_name(member: str) -> MemberKey:
    """Parse a member name; one without a suffix of the forms in `shard_file` is a whole tensor."""
    at = member.find("@[")
    match = _SUFFIX.fullmatch(member, at) if at >= 0 else None
    if match is None:
        return MemberKey(member)
    name = unquote(member[:at])
    if match["value"]:
        return MemberKey(name, is_value=True, rank=None if match["rank"] is None else int(match["rank"]))
    box = tuple(_interval(part) for part in match["box"].split(",") if part)
    return MemberKey(name, box, None if match["run"] is None else _interval(match["run"]))


def _interval(text: str) -> tuple[int, int]:
    begin, end = text.split(":")
    return int(begin), int(end)


def member_name(name: str, shape, offsets, lengths, start: int, count: int) -> str:
    return make_member(name, "U8", shape, offsets, lengths, start, count).name


NASTY = NAMES | st.text("@[]#%:,0\n\x7f", max_size=10)


@st.composite
def parts(draw):
    """A shape, a box in it, and a run of the box."""
    shape = draw(SHAPES)
    offsets = tuple(draw(st.integers(0, length)) for length in shape)
    lengths = tuple(draw(st.integers(0, length - offset)) for length, offset in zip(shape, offsets, strict=True))
    start = draw(st.integers(0, prod(lengths)))
    return shape, offsets, lengths, start, draw(st.integers(0, prod(lengths) - start))


def elements(offsets, lengths, start, count) -> set[tuple[int, ...]]:
    return set(islice(product(*(range(o, o + n) for o, n in zip(offsets, lengths, strict=True))), start, start + count))


@examples(500)
@given(part=parts())
def test_sub_box_is_the_box_of_a_run_and_none_is_missed(part):
    _, offsets, lengths, start, count = part
    wanted = elements(offsets, lengths, start, count)
    found = sub_box(offsets, lengths, start, count)
    if found is not None:
        assert elements(*found, 0, count) == wanted
        assert prod(found[1]) == count
    elif wanted and lengths:
        spans = [{x[dim] for x in wanted} for dim in range(len(lengths))]
        assert prod(len(span) for span in spans) != count, "these elements are a box"


@examples(500)
@given(name=NASTY, part=parts())
def test_member_names_read_back(name: str, part):
    shape, offsets, lengths, start, count = part
    key = parse_member_name(member_name(name, shape, offsets, lengths, start, count))
    assert key.name == name
    assert not key.is_value
    box = ((0,) * len(shape), shape) if key.box is None else ([b for b, _ in key.box], [e - b for b, e in key.box])
    begin, end = key.run or (0, prod(box[1]))
    assert elements(*box, begin, end - begin) == elements(offsets, lengths, start, count)


@given(name=NASTY, rank=st.none() | st.integers(0, 10**6))
def test_blob_names_read_back(name: str, rank: int | None):
    key = parse_member_name(blob_name(name, rank))
    assert (key.name, key.is_value, key.rank) == (name, True, rank)


def test_whole_tensors_keep_their_own_names():
    for name in ("model.layers.0.weight", "a%b@c", "é", "x@[", "__metadata__"):
        stored = member_name(name, (2, 3), (0, 0), (2, 3), 0, 6)
        assert stored == name or "@[" in name or name == METADATA
    assert member_name(METADATA, (), (), (), 0, 1) == "__metadata__@[]"


@given(name=st.text(max_size=30))
def test_a_name_without_suffix_is_its_own(name: str):
    assert parse_member_name(name).name == name or "@[" in name


MEMBERS = st.lists(
    st.builds(
        lambda name, dtype, shape: make_member(name, dtype, shape, (0,) * len(shape), shape, 0, prod(shape)),
        NAMES,
        st.sampled_from(CODES),
        SHAPES,
    ),
    max_size=6,
    unique_by=lambda member: member.name,
)


@examples(200)
@given(members=MEMBERS, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_headers_read_back_here_and_in_safetensors(members: list[Member], metadata: dict[str, str]):
    members.sort(key=lambda member: -ITEM_BYTES[member.dtype])
    begin = header(members, metadata)
    assert len(begin) % ALIGNMENT == 0
    assert (
        len(begin)
        == header_num_bytes(begin[:8])
        <= 8 + ALIGNMENT + sum(map(header_cost, members)) + 16 + len(json.dumps(metadata))
    )
    data = begin + np.arange(sum(member.num_bytes for member in members)).astype(np.uint8).tobytes()
    parsed = parse_header(data, file_size=len(data))
    offsets = dict(zip(parsed.members, parsed.offsets, strict=True))
    assert offsets.keys() == set(members)
    assert parsed.metadata == metadata
    assert all(offset % ITEM_BYTES[member.dtype] == 0 for member, offset in offsets.items())
    theirs = dict(safetensors_deserialize(data))
    assert theirs.keys() == {member.name for member in members}
    for member, offset in offsets.items():
        assert tuple(theirs[member.name]["shape"]) == member.shape
        assert bytes(theirs[member.name]["data"]) == data[offset : offset + member.num_bytes]


def test_header_refuses_a_name_twice_and_the_reserved_one():
    member = Member("w", "U8", (1,), 1)
    for members in ([member, member], [Member(METADATA, "U8", (1,), 1)]):
        with pytest.raises(UsageError, match="twice in one shard file"):
            header(members, {})


def file_of(table: object, data: bytes = b"") -> bytes:
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[]", "not a JSON object"),
        ("{]", "not JSON"),
        ('{"a": ' + "[" * 100_000, "not JSON"),
        ('{"a": ' + "1" * 10_000 + "}", "not JSON"),
        ('{"a": {}, "a": {}}', "a key occurs twice"),
        ({"a": 1}, "has not exactly"),
        ({"a": {**GOOD, "x": 1}}, "has not exactly"),
        ({"a": {**GOOD, "dtype": "U9"}}, "not one of safetensors"),
        ({"a": {**GOOD, "dtype": ["U8"]}}, "not one of safetensors"),
        ({"a": {**GOOD, "shape": [-2]}}, "shape"),
        ({"a": {**GOOD, "shape": [True]}}, "shape"),
        ({"a": {**GOOD, "shape": [1] * 65}}, "shape"),
        ({"a": {**GOOD, "shape": [2**62, 2**62]}}, "does not fill"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "data_offsets"),
        ({"a": {**GOOD, "data_offsets": [0, 2.0]}}, "data_offsets"),
        ({"a": {**GOOD, "data_offsets": [0, 3]}}, "does not fill"),
        ({"a": {**GOOD, "data_offsets": [1, 3]}}, "begins at byte 1"),
        ({"a": GOOD, "b": GOOD}, "begins at byte 0"),
        ({METADATA: {"a": 1}}, METADATA),
        ({METADATA: []}, METADATA),
    ],
)
def test_parse_header_refuses(table: object, message: str):
    with pytest.raises(CorruptError, match=message):
        parse_header(file_of(table, b"ab"))


def test_parse_header_refuses_a_file_of_another_size():
    data = file_of({"a": GOOD}, b"ab")
    assert parse_header(data, file_size=len(data)).offsets == (len(data) - 2,)
    with pytest.raises(CorruptError, match="3 bytes of data, but its header describes 2"):
        parse_header(data, file_size=len(data) + 1)


def test_parse_header_names_dtypes_that_are_valid_but_not_read():
    with pytest.raises(UnsupportedError, match="F4"):
        parse_header(file_of({"a": {**GOOD, "dtype": "F4", "shape": [4]}}))
