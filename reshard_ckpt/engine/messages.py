"""What do ranks tell each other during a save? Columns as bytes, never pickles.

An *offer* goes to rank 0, an *assignment* comes back, a *receipt* goes to rank 0 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..core.geometry import I64
from ..core.offer import Offer, OfferedValue
from ..core.state import AxisPlacement, Mesh, ValueKind

_ARRAY = 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank does: write these runs of its own rows, in this order; fingerprint these rows."""

    save_id: str
    local: I64
    start: I64
    count: I64
    fingerprint: I64


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a rank wrote and made durable, with its digests file."""

    key: str
    size: int
    digests_key: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank did: its files, the file and byte offset of each write item, and the fingerprints asked for."""

    files: tuple[WrittenFile, ...]
    file: I64
    offset: I64
    fingerprints: NDArray[np.uint64]


def _default(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send {type(value).__name__} to another rank")
    if value.dtype == np.int64 and value.size and int(value.min()) >= 0:
        value = value.astype(np.min_scalar_type(int(value.max())))
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return msgpack.ExtType(_ARRAY, msgpack.packb([little.dtype.str, list(value.shape), little.tobytes()]))


def _ext_hook(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown message part {code}")
    dtype, shape, raw = msgpack.unpackb(data)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


def _pack(fields_by_name: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(fields_by_name, default=_default)
    return packed


def _unpack(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = msgpack.unpackb(data, ext_hook=_ext_hook, use_list=False, strict_map_key=False)
    return message


def _wide(array: NDArray[Any]) -> I64:
    return array.astype(np.int64)


def encode_offer(offer: Offer) -> bytes:
    """An offer as bytes; equal placements are sent once."""
    message = {field.name: getattr(offer, field.name) for field in fields(offer)}
    distinct = {placement: i for i, placement in enumerate(dict.fromkeys(offer.placements))}
    message["placements"] = [[[p.axis, p.kind, p.dim, p.coords] for p in placement] for placement in distinct]
    message["placement"] = np.array([distinct[p] for p in offer.placements], np.int64)
    message["values"] = [[v.name, v.path, int(v.kind), v.data, v.blob] for v in offer.values]
    message["mesh"] = None if offer.mesh is None else [offer.mesh.axes, offer.mesh.sizes]
    return _pack(message)


def decode_offer(data: bytes) -> Offer:
    """The offer that `encode_offer` made."""
    m = _unpack(data)
    distinct = [tuple(AxisPlacement(axis, kind, dim, coords) for axis, kind, dim, coords in p) for p in m["placements"]]
    columns = ("ndim", "shape", "alias", "row_tensor", "row_offsets", "row_lengths", "row_start", "row_count")
    return Offer(
        names=m["names"],
        dtype=m["dtype"],
        kind=m["kind"],
        claim=m["claim"],
        placements=tuple(distinct[i] for i in m["placement"].tolist()),
        values=tuple(OfferedValue(name, path, ValueKind(kind), data, blob) for name, path, kind, data, blob in m["values"]),
        mesh=None if m["mesh"] is None else Mesh(*m["mesh"]),
        **{name: _wide(m[name]) for name in columns},
    )


def encode_assignment(assignment: Assignment) -> bytes:
    """An assignment as bytes."""
    return _pack({field.name: getattr(assignment, field.name) for field in fields(assignment)})


def decode_assignment(data: bytes) -> Assignment:
    """The assignment that `encode_assignment` made."""
    m = _unpack(data)
    return Assignment(m["save_id"], *(_wide(m[name]) for name in ("local", "start", "count", "fingerprint")))


def encode_receipt(receipt: Receipt) -> bytes:
    """A receipt as bytes."""
    files = [[f.key, f.size, f.digests_key, f.digest] for f in receipt.files]
    return _pack({"files": files, "file": receipt.file, "offset": receipt.offset, "fingerprints": receipt.fingerprints})


def decode_receipt(data: bytes) -> Receipt:
    """The receipt that `encode_receipt` made."""
    m = _unpack(data)
    files = tuple(WrittenFile(*file) for file in m["files"])
    return Receipt(files, _wide(m["file"]), _wide(m["offset"]), m["fingerprints"].astype(np.uint64))
