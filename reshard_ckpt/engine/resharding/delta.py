"""Live reshards again and again: only runs of elements that changed since the last one cross.

The owner of a part keeps a copy of the elements that it sent last, its snapshot. One exchange has three steps (`traffics`):

1. Claims: each taker sends each of its owners the digest of the elements that it has now of the parts of that owner.
2. Sizes: an owner compares that with the digest of its snapshots. If they differ, the taker gets its parts whole: in a first
   exchange, after a failed one, or if the taker's tensors were changed or replaced. Else it gets the runs that changed. The owner
   sends the size of its message of each round.
3. The messages. A message is whole if its runs would be larger.

The changed elements of a part are encoded in one of two ways, whichever is smaller:

- Runs: pairs of a gap and a length, in elements, and the new elements. A number too large for its bytes is split into several
  pairs.
- Single elements, which cost less where changes are scattered: the gap before each one. The largest number says that so many
  elements are unchanged, and that no changed one follows.

Numbers have 1, 2 or 4 bytes, whichever is smallest in all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from ...core.geometry.runs import I64, ranges
from ..common.rounds import Traffic
from ..loading.ties import INTS
from .live import LiveMover

_HEAD = struct.Struct("<BI")
"""The head of an encoded part: the bytes of each number, with `_SINGLE` if these are gaps alone, and how many numbers follow."""

_SINGLE = 0x80

_DIGEST_BYTES = 16
_WIDTHS = (1, 2, 4)


def encode_runs(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    """Encode the runs of elements in which two 1-D arrays of one dtype differ.

    >>> old, new = np.zeros(1000, np.int16), np.zeros(1000, np.int16)
    >>> new[600:604] = 7
    >>> data = encode_runs(old, new)
    >>> apply = old.copy()
    >>> for at, elements in decoded_runs(data, np.int16): apply[at] = elements
    >>> len(data), bool((apply == new).all())
    (17, True)
    """
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return _HEAD.pack(1, 0)
    # first[i]: a run begins at changed element i. start, end: the runs; gap, length: the same as distances.
    # A gap of one element costs no more to send than another pair.
    singles = _encode_singles(changed, new)
    first = np.concatenate([[True], np.diff(changed) > 2])
    start, end = changed[first], np.concatenate([changed[:-1][first[1:]], changed[-1:]]) + 1
    gap, length = start - np.concatenate([[0], end[:-1]]), end - start
    if len(singles) < _HEAD.size + 2 * len(start) + int(length.sum()) * new.itemsize:  # less than pairs of one byte each
        return singles
    _, inside = ranges(length)
    elements = new[np.repeat(start, length) + inside]
    width = min(_WIDTHS, key=lambda w: w * int(_num_pairs(gap, length, w).sum()))
    limit = (1 << 8 * width) - 1
    owner, number = ranges(_num_pairs(gap, length, width))
    # Pairs of a run: (limit, 0) until the rest of the gap fits, then the length in parts of at most `limit`.
    before = gap[owner] // limit
    gaps = np.where(number < before, limit, np.where(number == before, gap[owner] % limit, 0))
    lengths = np.clip(length[owner] - (number - before) * limit, 0, limit) * (number >= before)
    numbers = np.column_stack([gaps, lengths]).astype(f"<u{width}")
    runs = _HEAD.pack(width, numbers.size) + numbers.tobytes() + elements.tobytes()
    return min(runs, singles, key=len)


def _encode_singles(changed: I64, new: np.ndarray[Any, Any]) -> bytes:
    """Encode the elements at some indices, each with the gap before it."""
    gap = np.diff(changed, prepend=-1) - 1
    width = min(_WIDTHS, key=lambda w: w * (len(gap) + int((gap // ((1 << 8 * w) - 1)).sum())))
    limit = (1 << 8 * width) - 1
    # numbers: the limit as often as it fits into a gap, then the rest of the gap, which is smaller
    ends = np.cumsum(gap // limit + 1)
    numbers = np.full(int(ends[-1]), limit, f"<u{width}")
    numbers[ends - 1] = gap % limit
    return _HEAD.pack(width | _SINGLE, len(numbers)) + numbers.tobytes() + new[changed].tobytes()


def _num_pairs(gap: I64, length: I64, width: int) -> I64:
    limit = (1 << 8 * width) - 1
    pairs: I64 = gap // limit + -(-length // limit)
    return pairs


def decoded_runs(data: Any, dtype: Any) -> Iterator[tuple[I64, np.ndarray[Any, Any]]]:
    """Yield the indices and the elements of each encoded part, from one part after the other in `data`."""
    at = 0
    while at < len(data):
        form, num = _HEAD.unpack_from(data, at)
        width = form & ~_SINGLE
        numbers = np.frombuffer(data, f"<u{width}", num, at + _HEAD.size).astype(np.int64)
        at += _HEAD.size + width * num
        if form & _SINGLE:
            after = np.cumsum(numbers)[numbers != (1 << 8 * width) - 1]
            index = after + np.arange(len(after))
        else:
            gaps, lengths = numbers.reshape(-1, 2).T
            _, inside = ranges(lengths)
            index = np.repeat(np.cumsum(gaps + lengths) - lengths, lengths) + inside
        elements = np.frombuffer(data, dtype, len(index), at)
        at += elements.nbytes
        yield index, elements


class DeltaMover(LiveMover):
    """A `LiveMover` for host memory that sends only changed elements. It keeps a snapshot of each distinct part that it sends."""

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
        self._to = [self._sends.by_peer(number, self._size) for number in rounds]
        self._from_rank = [self._receives.by_peer(number, self._size) for number in rounds]
        self.begin()

    def begin(self) -> None:
        super().begin()
        self._encoded: dict[int, bytes] = {}
        self._sizes_to = np.zeros((self.num_rounds, self._size), np.int64)
        self._sizes_from = np.zeros((self.num_rounds, self._size), np.int64)
        self._claims: dict[int, bytes] = {}
        self.received_bytes = 0

    def finish(self) -> None:
        super().finish()
        self._encoded.clear()

    def traffics(self) -> list[Traffic]:
        """Return the traffic of each step, in order."""
        takers = [any(of_round[rank] for of_round in self._to) for rank in range(self._size)]
        owners = [any(of_round[rank] for of_round in self._from_rank) for rank in range(self._size)]
        sizes = 8 * self.num_rounds
        claims = _Small(_sized(owners, _DIGEST_BYTES), _sized(takers, _DIGEST_BYTES), self._claim, self._hear_claim)
        return [claims, _Small(_sized(takers, sizes), _sized(owners, sizes), self._size_for, self._hear_sizes), self]

    def _claim(self, owner: int) -> bytes:
        """Return the digest of this rank's present elements of the parts that come from a rank."""
        digest = xxhash.xxh3_128()
        for of_round in self._from_rank:
            for i in of_round[owner]:
                digest.update(_raw(self._wanted.region(self._into, i), self._wire[i]).numpy().data)
        return digest.digest()

    def _hear_claim(self, taker: int, data: bytes) -> None:
        self.received_bytes += len(data)
        self._claims[taker] = data

    def _size_for(self, taker: int) -> bytes:
        """Compare the parts for a rank with their snapshots, and return the sizes of its messages."""
        is_known = self._claims.pop(taker) == self._digests.get(taker)
        digest = xxhash.xxh3_128()
        for number, of_round in enumerate(self._to):
            whole, runs = 0, 0
            for i in of_round[taker]:
                same = self._same[i]
                if same not in self._encoded:
                    new = _raw(self._held.region(self._from, same), self._wire[same]).clone()
                    old = self._snapshots.get(same)
                    self._encoded[same] = b"" if old is None else encode_runs(old.numpy(), new.numpy())
                    self._snapshots[same] = new
                digest.update(self._snapshots[same].numpy().data)
                whole, runs = whole + int(self._bytes[i]), runs + len(self._encoded[same])
            self._sizes_to[number, taker] = runs if is_known and runs < whole else whole
        self._digests[taker] = digest.digest()
        data: bytes = self._sizes_to[:, taker].astype("<i8").tobytes()
        return data

    def _hear_sizes(self, owner: int, data: bytes) -> None:
        self._sizes_from[:, owner] = np.frombuffer(data, "<i8")
        self.received_bytes += len(data) + int(self._sizes_from[:, owner].sum())

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
                ends = np.cumsum(self._bytes[parts]).tolist()
                for i, end in zip(parts, ends, strict=True):
                    elements = message[end - int(self._bytes[i]) : end].clone().view(self._wire[i])
                    into = self._wanted.region(self._into, i)
                    into.copy_(elements.view(into.shape))
            else:
                self._apply(parts, message)

    def _apply(self, parts: Sequence[int], message: torch.Tensor) -> None:
        """Write the runs of some parts, which are one message, into their places."""
        left = memoryview(message.numpy().tobytes())
        for i in parts:
            into, wire = self._wanted.region(self._into, i), self._wire[i]
            index, elements = next(decoded_runs(left, INTS_NUMPY[wire.itemsize]))
            form, num = _HEAD.unpack_from(left)
            left = left[_HEAD.size + (form & ~_SINGLE) * num + elements.nbytes :]
            if not len(index):
                continue
            raw = _raw(into, wire)  # the elements themselves, or a copy where they are strided, on a device, or of another dtype
            raw[torch.from_numpy(index)] = torch.from_numpy(elements.copy())
            if raw.data_ptr() != into.data_ptr():
                into.copy_(raw.view(wire).view(into.shape))


INTS_NUMPY = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _raw(part: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """View the elements of a part in host memory as a 1-D tensor of integers; it is a copy where a view is impossible."""
    flat = part.detach().to("cpu", wire).contiguous().reshape(-1)
    return flat.view(INTS[wire.itemsize])


def _sized(chosen: Sequence[bool], num_bytes: int) -> list[int]:
    return [num_bytes if one else 0 for one in chosen]


class _Small:
    """A traffic of one round and of small messages, whose sizes are known beforehand."""

    num_rounds = 1

    def __init__(
        self, sent: list[int], received: list[int], say: Callable[[int], bytes], hear: Callable[[int, bytes], None]
    ) -> None:
        self._sent, self._received, self._say, self._hear = sent, received, say, hear

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        return self._sent, self._received

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        for rank, size in enumerate(self._sent):
            if size:
                data = torch.frombuffer(bytearray(self._say(rank)), dtype=torch.uint8)
                out[rank][starts[rank] : starts[rank] + size] = data

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        for rank, size in enumerate(self._received):
            if size:
                self._hear(rank, data[rank][starts[rank] : starts[rank] + size].numpy().tobytes())
