"""One rank's side of an exchange of tensor regions between ranks: pack own regions into messages, unpack those of other ranks.

One *part* is a strided box of memory on two ranks: the rank that owns the elements packs the box into a message, and the rank
that takes them unpacks it. `Mover` does so round by round (`engine.common.rounds`). The memory may be live tensors, or windows
of files that the owner has read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ...comm import Exchange
from ...core.catalog.specs import Ints
from ...core.geometry.columns import ColumnTable, lex_order
from ...core.geometry.runs import I64, Mask
from ...core.planning.exchange import OWN
from .tensor_bytes import RAW, count_up, memory_bytes, region

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
View = torch.Tensor | Array

LARGE_BYTES = 64 << 10
"""Boxes of at least this size are copied by torch, which uses many threads. Smaller ones are copied by numpy, whose calls have
less overhead."""

MAX_VIEWS = 1 << 18
"""The most parts for which the torch or numpy views of their memory are cached from one exchange to the next."""


@dataclass(frozen=True, slots=True)
class Transfers(ColumnTable):
    """One row for each part of an exchange: its round, the rank that sends it, the rank that takes it, and its bytes."""

    round: I64
    owner: I64
    taker: I64
    num_bytes: I64


class Boxes(NamedTuple):
    """Boxes of elements in this rank's memory, one for each part of an exchange.

    `row` is the index of the local tensor that holds the box, or -1 if the box is on another rank. `first` is the box's first
    element, counted from the beginning of that tensor. `lengths` and `strides` are in elements, one number for each dim.
    """

    row: list[int]
    first: list[int]
    lengths: list[Ints]
    strides: list[Ints]

    @classmethod
    def of(cls, row: I64, first: I64, lengths: I64, strides: I64) -> Boxes:
        """Make boxes from arrays of shape (boxes,) and (boxes, D). They become lists, whose single elements are read faster."""
        return cls(row.tolist(), first.tolist(), list(map(tuple, lengths.tolist())), list(map(tuple, strides.tolist())))


class Memories:
    """Makes views of boxes in some local tensors of this rank."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._bytes: dict[int, memoryview] = {}
        self._seen_raw: dict[int, torch.Tensor] = {}

    def region(self, boxes: Boxes, i: int) -> torch.Tensor:
        """View the i-th box as a strided torch tensor."""
        return region(self.tensors[boxes.row[i]], boxes.first[i], boxes.lengths[i], boxes.strides[i])

    def view(self, boxes: Boxes, i: int, wire: torch.dtype) -> View:
        """View the i-th box of memory.

        A small box in host memory, of dtype `wire`, is viewed as a numpy array of raw elements, any other one as a tensor.
        """
        tensor, each = self.tensors[boxes.row[i]], wire.itemsize
        if tensor.device.type != "cpu" or tensor.dtype != wire or prod(boxes.lengths[i]) * each >= LARGE_BYTES:
            return self.region(boxes, i)
        key = id(tensor)
        if key not in self._bytes:
            self._bytes[key], self._seen_raw[key] = memory_bytes(tensor), tensor
        strides = tuple(stride * each for stride in boxes.strides[i])
        raw: Array = np.ndarray(boxes.lengths[i], RAW[each], self._bytes[key], boxes.first[i] * each, strides)
        return raw

    def count_up(self) -> None:
        """Increase the version counters of all tensors viewed as numpy arrays: torch has not seen the writes through these."""
        count_up(self._seen_raw.values())


def _in_buffer(buffer: torch.Tensor, at: int, lengths: Ints, wire: torch.dtype, like: View) -> View:
    """View a part's elements in a message buffer, from byte `at` on, as a numpy array or a tensor: whichever `like` is."""
    if isinstance(like, np.ndarray):
        raw: Array = np.ndarray(lengths, RAW[wire.itemsize], buffer.numpy().data, at)
        return raw
    num = int(np.prod(lengths, dtype=np.int64)) * wire.itemsize
    return buffer[at : at + num].view(wire).view(lengths)


def _copy(into: View, source: View) -> None:
    """Copy between two views of the same kind; tensors may differ in dtype and device."""
    if isinstance(into, torch.Tensor):
        into.copy_(source)  # type: ignore[arg-type]
    else:
        np.copyto(into, source)


class Mover:
    """Packs the parts that this rank sends, unpacks the parts that it takes, and copies the parts that stay on this rank.

    `Rounds` calls `agree` once, and then `sizes`, `pack` and `unpack` for each round.

    Parameters
    ----------
    rank, size
        This rank, and the number of ranks.
    num_rounds
        The number of rounds of the whole exchange, the same on all ranks.
    transfers
        The parts that this rank sends, or takes from others or from itself. Both ends of a message list its parts in one order.
    wire
        The dtype in which each part travels.
    keeps_views
        Whether the views of memory are kept for the next exchange.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        num_rounds: int,
        transfers: Transfers,
        wire: Sequence[torch.dtype],
        *,
        keeps_views: bool = True,
    ) -> None:
        self._size, self.num_rounds, self._wire, self._bytes = size, num_rounds, wire, transfers.num_bytes
        # out[i], into[i]: whether this rank sends, or gets, part i; both, if it takes the part from itself
        out, into = transfers.owner == rank, transfers.taker == rank
        self._own = np.flatnonzero(out & into)
        self._sends = _Schedule(transfers, out & ~into, transfers.taker, size)
        self._receives = _Schedule(transfers, into & ~out, transfers.owner, size)
        self._views: dict[tuple[Hashable, ...], list[tuple[View, View]]] = {}
        self._keeps = keeps_views and len(wire) <= MAX_VIEWS
        self.received_bytes = int(self._bytes[into & ~out].sum())
        self._done: set[int] = set()
        """The rounds that have written, at least in part, into `wanted`; `OWN` stands for the parts that a rank takes from
        itself."""

    def bind(self, held: Memories, sent: Boxes, wanted: Memories, taken: Boxes) -> None:
        """Set the memory of the next exchanges.

        If this rank sends part i, it packs box i of `sent` in the tensors `held`; if it takes part i, it unpacks it into box i of
        `taken` in the tensors `wanted`.
        """
        self._views.clear()
        self._held, self._from, self._wanted, self._into = held, sent, wanted, taken

    def begin(self) -> None:
        """Begin a new exchange: forget which tensors the last one has overwritten."""
        self._done.clear()

    def changed(self) -> set[int]:
        """Return the indices of the tensors in `wanted` that this exchange has overwritten, wholly or in part.

        Valid after a failure too.
        """
        received = (i for number in self._done for i in self._receives.rows(number).tolist())
        own = self._own.tolist() if OWN in self._done else []
        return {self._into.row[i] for i in (*own, *received)}

    def finish(self) -> None:
        """Tell torch's autograd which tensors were written through numpy views.

        Call it after the last round, also after a failure.
        """
        if self._done:
            self._wanted.count_up()

    def copy_own(self) -> None:
        """Copy the parts that stay on this rank from their source memory to their target memory, without a message."""
        self._done.add(OWN)
        for into, source in self._pairs(("own",), self._own_pairs):
            _copy(into, source)

    def _own_pairs(self) -> list[tuple[View, View]]:
        pairs = []
        for i in self._own.tolist():
            source, into = self._held.view(self._from, i, self._wire[i]), self._wanted.view(self._into, i, self._wire[i])
            if type(source) is not type(into):  # only one is a numpy view: the other is on a device, or of another dtype
                source, into = self._held.region(self._from, i), self._wanted.region(self._into, i)
            pairs.append((into, source))
        return pairs

    def _pairs(self, key: tuple[Hashable, ...], make: Callable[[], list[tuple[View, View]]]) -> list[tuple[View, View]]:
        """Return the pairs of views that are cached under `key`.

        If there are none, make them. Cache them, unless this mover keeps no views or has more than `MAX_VIEWS` parts.
        """
        pairs = self._views.get(key)
        if pairs is None:
            pairs = make()
            if self._keeps:
                self._views[key] = pairs
        return pairs

    def agree(self, exchange: Exchange, attempt: Callable[[Callable[[], None]], None]) -> None:
        """Exchange facts that ranks need before the first message: none here, but a subclass may have some. Collective.

        `attempt` calls a function and keeps its error (`Rounds.attempt`).
        """

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return how many bytes this rank sends to each rank in a round, and how many it receives from each."""
        return self._sends.sizes(number), self._receives.sizes(number)

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Copy this rank's parts of a round into messages: those for rank r into ``out[r]`` from byte ``starts[r]`` on.

        The messages have the parts in the order in which rank r unpacks them.
        """
        for source, into in self._with_messages(self._sends, self._held, self._from, number, out, starts):
            _copy(into, source)

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Copy the received parts of a round into place: those of rank r from ``data[r]``, from byte ``starts[r]`` on."""
        if number == 0:
            self.copy_own()  # only now: the first message has shown that no rank failed before the exchange
        self._done.add(number)  # before the copies: if one fails, its rows may be half overwritten
        for into, source in self._with_messages(self._receives, self._wanted, self._into, number, data, starts):
            _copy(into, source)

    def _with_messages(
        self,
        schedule: _Schedule,
        memory: Memories,
        boxes: Boxes,
        number: int,
        messages: Sequence[torch.Tensor],
        starts: Sequence[int],
    ) -> list[tuple[View, View]]:
        """Return a pair of views for each part of a round: its box in the memory of tensors, and its place in a message."""

        def make() -> list[tuple[View, View]]:
            pairs = []
            for i, at, rank in schedule.places(number, starts):
                box = memory.view(boxes, i, self._wire[i])
                pairs.append((box, _in_buffer(messages[rank], at, boxes.lengths[i], self._wire[i], box)))
            return pairs

        return self._pairs((id(schedule), number, *_message_addresses(messages, starts)), make)


def _message_addresses(memory: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """Return the memory address of each rank's message. Cached views of messages are valid as long as these are the same."""
    return [part.data_ptr() + start for part, start in zip(memory, starts, strict=True)]


class _Schedule:
    """The parts that this rank sends (or receives), sorted by round, then by the other rank, then by their place in the message.

    `peer` is the rank at the other end of each part, `size` the number of ranks.
    """

    def __init__(self, transfers: Transfers, chosen: Mask, peer: I64, size: int) -> None:
        rows = np.flatnonzero(chosen)
        rows = rows[lex_order(transfers.round[rows], peer[rows])]
        self._rows, self._peer, self._round, self._bytes = rows, peer[rows], transfers.round[rows], transfers.num_bytes[rows]
        self._size = size

    def _of(self, number: int) -> slice:
        return slice(*np.searchsorted(self._round, [number, number + 1]).tolist())

    def by_peer(self, number: int) -> list[list[int]]:
        """Return, for each rank at the other end, the indices of its parts in a round, in the order of the message."""
        part = self._of(number)
        return [self._rows[part][self._peer[part] == rank].tolist() for rank in range(self._size)]

    def rows(self, number: int) -> I64:
        """Return the indices of all parts of a round, in order."""
        return self._rows[self._of(number)]

    def sizes(self, number: int) -> list[int]:
        """Return, for each rank at the other end, how many bytes of a round go between it and this rank."""
        part = self._of(number)
        total = np.zeros(self._size, np.int64)  # not a table of all rounds: with many ranks it would be large
        np.add.at(total, self._peer[part], self._bytes[part])
        sizes: list[int] = total.tolist()
        return sizes

    def places(self, number: int, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return, for each part of a round, its index, its first byte in the message, and the rank at the other end."""
        part = self._of(number)
        rows, peer, sizes = self._rows[part], self._peer[part], self._bytes[part]
        # before[i]: bytes of all parts of the round before part i; first[i]: the first part of the same peer.
        # Subtracting `before` at that part leaves the offset within the peer's message.
        before = np.cumsum(sizes) - sizes
        first = np.searchsorted(peer, peer)
        at = before - before[first] + np.array(starts, np.int64)[peer]
        return list(zip(rows.tolist(), at.tolist(), peer.tolist(), strict=True))
