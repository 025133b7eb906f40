"""Repeated live reshards that send only the elements which have changed since the last one.

The rank that sends a part (a box of a tensor), its owner, keeps a copy of the elements that it sent last: its snapshot. One
exchange has three steps; `DeltaMover.agree` makes the first two, each one swap of small messages:

1. Claims: each rank that receives parts, a taker, sends each of their owners a digest of its present elements of these parts.
2. Sizes: an owner compares the claim with the digest of its snapshots. If they differ, the taker gets its parts whole: in a first
   exchange, after a failed one, or if the taker's tensors were changed or replaced. Else it gets the runs that changed. The owner
   sends the size of its message of each round.
3. The messages. A message is whole if its runs would be larger.

The changed elements of a part are encoded as gaps, compressed by zlib, and the elements themselves. A gap is the number of
unchanged elements before a changed one. Within a run of changed elements all gaps are 0, so a run costs little more than its
elements.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from ...comm import Exchange
from ...core.geometry.runs import I64
from ..loading.ties import INTS
from .live import LiveMover

_HEAD = struct.Struct("<I")
"""Head of an encoded part: the number of bytes of its compressed gaps."""

_FAR = 255
"""A gap with this value stands for so many unchanged elements that are not followed by a changed one."""


def encode_changes(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    """Encode the elements of `new` that differ from the elements of `old`; both are 1-D arrays of one dtype.

    >>> old, new = np.zeros(1000, np.int16), np.zeros(1000, np.int16)
    >>> new[600:604] = 7
    >>> data = encode_changes(old, new)
    >>> index, elements, size = decode_changes(data, np.int16)
    >>> index.tolist(), elements.tolist(), size == len(data)
    ([600, 601, 602, 603], [7, 7, 7, 7], True)
    """
    changed = np.flatnonzero(old != new)
    gap = np.diff(changed, prepend=-1) - 1
    # gaps: `_FAR` as often as it fits into a gap, then the rest of the gap, which is smaller. ends[i]: where gap i ends in them
    ends = np.cumsum(gap // _FAR + 1)
    gaps = np.full(ends[-1] if len(ends) else 0, _FAR, np.uint8)
    gaps[ends - 1] = gap % _FAR
    packed = zlib.compress(gaps.data, 1)
    return _HEAD.pack(len(packed)) + packed + new[changed].tobytes()


def decode_changes(data: Any, dtype: Any) -> tuple[I64, np.ndarray[Any, Any], int]:
    """Decode the changes of one box, which `data` begins with.

    Return the indices of the changed elements in the box, their new values, and the number of bytes that were decoded.
    """
    at = _HEAD.size + _HEAD.unpack_from(data)[0]
    gaps = np.frombuffer(zlib.decompress(data[_HEAD.size : at]), np.uint8)
    is_changed = gaps != _FAR
    index = (np.cumsum(gaps, dtype=np.int64) + np.cumsum(is_changed) - 1)[is_changed]
    elements = np.frombuffer(data, dtype, len(index), at)
    return index, elements, at + elements.nbytes


class DeltaMover(LiveMover):
    """A `LiveMover` for host memory that sends only changed elements. It keeps a copy of each distinct part that it last sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._snapshots: dict[int, torch.Tensor] = {}
        self._digests: dict[int, bytes] = {}
        owner_row, _, offsets, lengths = self._places
        boxes = np.column_stack([owner_row, offsets, lengths])
        # _same[i]: the first part that is sent from the same elements in the same dtype as part i
        keys = [(*box, wire) for box, wire in zip(boxes.tolist(), self._wire, strict=True)]
        first: dict[Any, int] = {}
        self._same = [first.setdefault(key, i) for i, key in enumerate(keys)]
        rounds = range(self.num_rounds)
        # _to[number][rank]: the parts that go to a rank in a round, in their order; _from_rank: the parts that come from it
        self._to = [self._sends.by_peer(number) for number in rounds]
        self._from_rank = [self._receives.by_peer(number) for number in rounds]
        self.begin()

    def begin(self) -> None:
        super().begin()
        self._encoded: dict[int, bytes] = {}
        self._sizes_to = np.zeros((self.num_rounds, self._size), np.int64)
        self._sizes_from = np.zeros((self.num_rounds, self._size), np.int64)
        self.received_bytes = 0

    def finish(self) -> None:
        super().finish()
        self._encoded.clear()

    def agree(self, exchange: Exchange, attempt: Callable[[Callable[[], None]], None]) -> None:
        """Exchange the claims, and then the sizes of the messages of all rounds. Collective: two swaps.

        A rank that has failed sends empty messages.
        """
        claims, sizes = ([b""] * self._size for _ in range(2))

        def claim() -> None:
            claims[:] = map(self._claim, range(self._size))

        def compare() -> None:
            sizes[:] = map(self._sizes_for, range(self._size), came)

        attempt(claim)
        came = exchange.swap(claims)
        attempt(compare)
        found = exchange.swap(sizes)
        for owner, data in enumerate(found):
            if data:
                self._sizes_from[:, owner] = np.frombuffer(data, "<i8")
        self.received_bytes = sum(map(len, (*came, *found))) + int(self._sizes_from.sum())

    def _claim(self, owner: int) -> bytes:
        """Return the digest of the elements that this rank now has in the parts which it takes from the rank `owner`, if any."""
        parts = [i for of_round in self._from_rank for i in of_round[owner]]
        digest = xxhash.xxh3_128()
        for i in parts:
            digest.update(_raw(self._wanted.region(self._into, i), self._wire[i]).numpy().data)
        return digest.digest() if parts else b""

    def _sizes_for(self, taker: int, claim: bytes) -> bytes:
        """Compare the parts for the rank `taker` with their snapshots, and return the sizes of its messages, encoded."""
        if not any(of_round[taker] for of_round in self._to):
            return b""
        is_known = claim == self._digests.get(taker)
        digest = xxhash.xxh3_128()
        for number, of_round in enumerate(self._to):
            whole, runs = 0, 0
            for i in of_round[taker]:
                first = self._same[i]
                if first not in self._encoded:
                    new = _raw(self._held.region(self._from, first), self._wire[first]).clone()
                    old = self._snapshots.get(first)
                    self._encoded[first] = b"" if old is None else encode_changes(old.numpy(), new.numpy())
                    self._snapshots[first] = new
                digest.update(self._snapshots[first].numpy().data)
                whole, runs = whole + int(self._bytes[i]), runs + len(self._encoded[first])
            self._sizes_to[number, taker] = runs if is_known and runs < whole else whole
        self._digests[taker] = digest.digest()
        data: bytes = self._sizes_to[:, taker].astype("<i8").tobytes()
        return data

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        return self._sizes_to[number].tolist(), self._sizes_from[number].tolist()

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        for taker, parts in enumerate(self._to[number]):
            is_whole = self._sizes_to[number, taker] == self._bytes[parts].sum()
            at = starts[taker]
            for i in parts:
                snapshot = self._snapshots[self._same[i]].numpy()
                data = snapshot.view(np.uint8) if is_whole else np.frombuffer(self._encoded[self._same[i]], np.uint8)
                out[taker][at : at + len(data)] = torch.from_numpy(data.copy() if not data.flags.writeable else data)
                at += len(data)

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        if number == 0:
            self.copy_own()
        self._done.add(number)
        for owner, parts in enumerate(self._from_rank[number]):
            size, at = int(self._sizes_from[number, owner]), starts[owner]
            message = data[owner][at : at + size]
            if size == self._bytes[parts].sum():
                for i, part in zip(parts, torch.split(message, self._bytes[parts].tolist()), strict=True):
                    into = self._wanted.region(self._into, i)
                    into.copy_(part.clone().view(self._wire[i]).view(into.shape))
            else:
                self._apply(parts, message)

    def _apply(self, parts: Sequence[int], message: torch.Tensor) -> None:
        """Decode a message of changed elements, and write them into the memory of the parts in it."""
        left = memoryview(message.numpy().tobytes())
        for i in parts:
            into, wire = self._wanted.region(self._into, i), self._wire[i]
            index, elements, size = decode_changes(left, f"i{wire.itemsize}")
            left = left[size:]
            if not len(index):
                continue
            raw = _raw(into, wire)  # the elements themselves, or a copy where they are strided, on a device, or of another dtype
            raw[torch.from_numpy(index)] = torch.from_numpy(elements.copy())
            if raw.data_ptr() != into.data_ptr():
                into.copy_(raw.view(wire).view(into.shape))


def _raw(part: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return a part's elements in dtype `wire` on the host, as 1-D integers of the same bits: a view if possible, else a copy."""
    flat = part.detach().to("cpu", wire).contiguous().reshape(-1)
    return flat.view(INTS[wire.itemsize])
