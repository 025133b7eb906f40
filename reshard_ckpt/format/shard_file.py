"""Shard files: stock safetensors, in which the name of a member has the name of a tensor and the position of a part in it.

1. A tensor that is whole in the file is stored under its own name, so a one-process checkpoint opens with any safetensors tool.
2. A box is stored as ``<escaped name>@[0:4,8:16]``, a begin and an end for each dim.
3. A run of a box that is not a box itself is stored flat, as ``<escaped name>@[0:4,8:16]#[5:17]``, counted in the box's elements.
4. The bytes of a value are stored as ``<escaped name>@[value]``, and a value of rank 3's own as ``<escaped name>@[value,3]``.

A whole tensor takes form 2 if its own name looks like one of these forms. The catalog alone defines a checkpoint: names in files
serve people and other tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple
from urllib.parse import unquote

from ..core.catalog.specs import ITEM_BYTES, Ints, escape, unravel
from ..errors import CorruptError, UnsupportedError, UsageError

ALIGNMENT = 64
"""The data of a file begin at a multiple of this many bytes. So all members are aligned in a mapped file if the members with the
largest elements come first."""

MAX_HEADER_BYTES = 100_000_000
"""The largest JSON header of a file, in bytes, that safetensors accepts."""

METADATA = "__metadata__"

_LENGTH_BYTES = 8
_OPAQUE = "@[torch.save]"
_FOREIGN_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


class Member(NamedTuple):
    """One tensor in a shard file (a *member*), by its name there. It may hold only a part of a saved tensor."""

    name: str
    dtype: str
    shape: Ints
    num_bytes: int


class Header(NamedTuple):
    """The parsed header of a safetensors file. Members are sorted by offset.

    `offsets` has the first byte of each member, counted from the beginning of the file.
    """

    members: tuple[Member, ...]
    offsets: Ints
    metadata: dict[str, str]
    num_bytes: int


def sub_box(offsets: Ints, lengths: Ints, start: int, count: int) -> tuple[Ints, Ints] | None:
    """Return the box, in global coordinates, that a run (`start`, `count`) of a box consists of; None if the run is not a box.

    >>> sub_box((10, 0), (4, 8), 8, 16)
    ((11, 0), (2, 8))
    >>> sub_box((10, 0), (4, 8), 3, 16) is None
    True
    """
    if count == 0:
        return (offsets, lengths) if 0 in lengths else None
    inner = 1
    for dim in reversed(range(len(lengths))):
        outer = inner * lengths[dim]
        block, begin = divmod(start, outer)
        if begin + count <= outer:  # dim is the innermost one for which the run lies at one index of all dims before it
            if begin % inner or count % inner:
                return None
            at = (*unravel(block, lengths[:dim]), begin // inner) + (0,) * (len(lengths) - dim - 1)
            size = (1,) * dim + (count // inner, *lengths[dim + 1 :])
            return tuple(o + a for o, a in zip(offsets, at, strict=True)), size
        inner = outer
    return offsets, lengths


def make_member(name: str, dtype: str, shape: Ints, offsets: Ints, lengths: Ints, start: int, count: int) -> Member:
    """Make the member that holds the run ``[start, start + count)`` of a box: with its dims if the run is a box, else flat.

    >>> make_member("w", "U8", (4, 8), (0, 0), (4, 8), 0, 32).name
    'w'
    >>> make_member("w", "U8", (4, 8), (0, 4), (4, 4), 4, 8).name
    'w@[1:3,4:8]'
    >>> make_member("w", "U8", (4, 8), (0, 4), (4, 4), 5, 8).name
    'w@[0:4,4:8]#[5:13]'
    """
    num_bytes = count * ITEM_BYTES[dtype]
    box = sub_box(offsets, lengths, start, count)
    if box is None:
        run = f"{escape(name)}@[{_box_text(offsets, lengths)}]#[{start}:{start + count}]"
        return Member(run, dtype, (count,), num_bytes)
    if box[1] == shape and "@[" not in name and name != METADATA:
        return Member(name, dtype, shape, num_bytes)
    return Member(f"{escape(name)}@[{_box_text(*box)}]", dtype, box[1], num_bytes)


def _box_text(offsets: Ints, lengths: Ints) -> str:
    return ",".join(f"{offset}:{offset + length}" for offset, length in zip(offsets, lengths, strict=True))


def opaque_name(value_name: str) -> str:
    """Return the member name for a value that another program encoded and whose bytes this library does not decode.

    >>> opaque_name("extra.rng")
    'extra.rng@[torch.save]'
    """
    return f"{escape(value_name)}{_OPAQUE}"


def opaque_value(blob: str) -> str | None:
    """Return the name of the value that a member holds, if `opaque_name` made the member's name; else None."""
    return unquote(blob.removesuffix(_OPAQUE)) if blob.endswith(_OPAQUE) else None


def header_cost(member: Member) -> int:
    """Return an upper bound of the bytes that one member takes in a file's header; `MAX_HEADER_BYTES` limits the sum."""
    return len(json.dumps(member.name, ensure_ascii=False).encode()) + 21 * (len(member.shape) + 2) + 64


def header(members: Sequence[Member], metadata: Mapping[str, str], alignment: int = ALIGNMENT) -> bytes:
    """Encode the header of a shard file. The data of the members follow it without gaps.

    Raise `UsageError` if two members have one name, or the header is larger than safetensors reads.

    Parameters
    ----------
    members
        In the order of their data. Sort them by the size of their elements, the largest first, so that each is aligned.
    metadata
        Text that any safetensors tool shows.
    alignment
        The header is padded with spaces to a multiple of this many bytes.
    """
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for member in members:
        if member.name in table or member.name == METADATA:
            raise UsageError(f"{member.name}: twice in one shard file; give each tensor a name of its own")
        table[member.name] = {"dtype": member.dtype, "shape": member.shape, "data_offsets": (at, at + member.num_bytes)}
        at += member.num_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // alignment) * alignment - _LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise UsageError(f"a shard file's header of {padded} bytes is over the {MAX_HEADER_BYTES} of safetensors; use more files")
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def header_num_bytes(data: bytes | memoryview, *, name: str = "shard file") -> int:
    """Return the size in bytes of a file's header, length field included, from the first 8 bytes of the file."""
    if len(data) < _LENGTH_BYTES:
        raise CorruptError(f"{name}: {len(data)} bytes, too short for safetensors; use another checkpoint")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CorruptError(f"{name}: a header of {length} bytes is not allowed in safetensors; use another checkpoint")
    return _LENGTH_BYTES + length


def parse_header(data: bytes | memoryview, *, file_size: int | None = None, name: str = "shard file") -> Header:
    """Read the header of a safetensors file; `data` begins with the file and holds at least its header.

    Raise `CorruptError` if the header breaks a rule of safetensors, or does not describe a file of `file_size` bytes. Raise
    `UnsupportedError` if a member has a dtype that this library does not know.
    """
    end = header_num_bytes(data, name=name)
    if len(data) < end:
        raise CorruptError(f"{name}: ends after {len(data)} bytes, within its header of {end}; use another checkpoint")
    try:
        table = json.loads(bytes(data[_LENGTH_BYTES:end]).decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{name}: its header is not JSON of safetensors ({error}); use another checkpoint") from error
    if not isinstance(table, dict):
        raise CorruptError(f"{name}: its header is not a JSON object; use another checkpoint")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise CorruptError(f"{name}: its {METADATA} is not a map of text to text; use another checkpoint")
    placed = sorted((_member(key, entry, name) for key, entry in table.items()), key=lambda item: (item[0], item[1].num_bytes))
    expected = 0
    for at, member in placed:
        if at != expected:
            raise CorruptError(
                f"{name}: {member.name!r:.200} begins at byte {at} of the data, not {expected}; use another checkpoint"
            )
        expected += member.num_bytes
    if file_size is not None and file_size - end != expected:
        raise CorruptError(
            f"{name}: {file_size - end} bytes of data, but its header describes {expected}; use another checkpoint"
        )
    return Header(tuple(m for _, m in placed), tuple(end + at for at, _ in placed), metadata, end)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the pairs of a JSON object. Raise a `ValueError` if a key occurs twice; `json` would take the last."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _member(key: str, entry: Any, name: str) -> tuple[int, Member]:
    """Parse one entry of the header. Return the offset of its data from the end of the header, and the member."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"{name}: {key!r:.200} has not exactly dtype, shape and data_offsets; use another checkpoint")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is str and dtype in _FOREIGN_DTYPES:
        raise UnsupportedError(
            f"{name}: {key!r:.200} is of dtype {dtype}, which is not read yet; convert it to one of {[*ITEM_BYTES]}"
        )
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise CorruptError(f"{name}: {key!r:.200} is of dtype {dtype!r:.80}, not one of safetensors; use another checkpoint")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > 64:
        raise CorruptError(f"{name}: {key!r:.200} has shape {shape!r:.80}, which is not a shape; use another checkpoint")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)):
        raise CorruptError(f"{name}: {key!r:.200} has data_offsets {span!r:.80}, which are not offsets; use another checkpoint")
    num_bytes = prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != num_bytes:
        raise CorruptError(
            f"{name}: {key!r:.200} of shape {shape} and dtype {dtype} does not fill bytes {span}; use another checkpoint"
        )
    return span[0], Member(key, dtype, tuple(shape), num_bytes)
