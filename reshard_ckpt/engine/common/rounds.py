"""The rounds of an exchange: each rank packs bytes for the others into messages of bounded size, and unpacks theirs.

1. A `Mover` says how many bytes go between this rank and each other one in a round, packs the bytes to send, and unpacks the
   received bytes. The bytes may come from live tensors, or from files that it reads and verifies. Its errors stop all ranks.
2. While one round travels, the next one is packed; while a round is unpacked, the next one travels.
3. In a message, a *head* stands before the part for each rank. It says whether the sender has failed. So all ranks stop after the
   same round, and no rank waits in a collective that another rank never enters. A message of heads alone comes first, once each
   rank has allocated its memory, and another one last, once all bytes are in place.
4. Ranks of one machine read each other's parts in shared memory, where they were packed. The process group carries only the heads
   of these parts, and the parts between machines.
5. `settle` ends the exchange: if a rank failed, all ranks raise its error, with the names of the tensors overwritten on any rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from ...comm import Exchange, interrupts_allowed
from ...comm.protocol import Comm, merge_of_all, union
from ...comm.shared_memory import SharedMemory, share_memory
from ...core.geometry.columns import ColumnTable, Table, columns_of
from ...core.geometry.runs import I64
from ...core.report import few
from ...errors import CheckpointError, PeerError
from .host_memory import allocate
from .mover import Mover
from .tensor_bytes import empty_bytes

HEAD_BYTES = 16
"""Bytes of the head before each rank's part of a message: a multiple of every element size, so that parts are aligned for all
dtypes."""

_FAILED = 1
"""A head is two int64. The lowest byte of the first is `_FAILED` if the sender has failed, and 0 otherwise; its other bits
hold the number of the message. The second is the byte of the sender's shared memory at which the part begins."""

NUM_BUFFERS = 4
"""Two buffers for messages to send and two for received ones: one of each pair travels while the other is filled or emptied.

Shared memory has as many slots: while a round is packed, other ranks may still read the round three before it.
"""

_HEADS = NUM_BUFFERS, NUM_BUFFERS + 1
"""Numbers of the two buffers, to send and to receive, for messages that consist of heads alone."""

PAGE_BYTES = 4096
"""The space of each round in shared memory is a multiple of this many bytes."""

LARGE_BYTES = 16 << 20
"""Buffers of at least this many bytes lie in large pages, and may be up to 2 MiB larger than asked for."""


class Buffers:
    """The buffers and the shared memory for messages.

    They are kept from exchange to exchange. The buffers grow to the largest size needed; the shared memory keeps its first size.

    Parameters
    ----------
    first
        The number of the first message, below 2³¹, the same on all ranks. Different exchanges should have different ones.

    Attributes
    ----------
    number
        The number of the next message.
    """

    def __init__(self, device: torch.device, first: int = 0) -> None:
        self._device, self.number = device, first
        self._buffers: dict[int, torch.Tensor] = {}
        self._shared: SharedMemory | None = None
        self._shared_bytes = -1

    def get(self, slot: int, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` bytes of buffer number `slot`, 1-D uint8.

        The buffer is made, or made larger, if necessary.
        """
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers.pop(slot, None)
            if self._device.type == "cpu" and num_bytes >= LARGE_BYTES:
                buffer = allocate(num_bytes, pinned=False)
            else:
                buffer = empty_bytes(num_bytes, self._device)
            self._buffers[slot] = buffer
        return buffer[:num_bytes]

    def numbers(self, count: int) -> int:
        """Reserve `count` consecutive message numbers, and return the first of them."""
        self.number += count
        return self.number - count

    def share(self, exchange: Exchange, num_bytes: int) -> SharedMemory:
        """Return the memory shared with the ranks of this machine. The first call makes it, and is collective."""
        if self._shared is None:
            self._shared, self._shared_bytes = share_memory(exchange, num_bytes), num_bytes
        return self._shared

    def next_number(self, mover: Mover, memory_bytes: int) -> int:
        """Return the number of the next message; -1 if these buffers do not suit the messages of this mover.

        They do not suit it if their shared memory is too small for its rounds, or larger than `memory_bytes`. An exchange may use
        the buffers again if all ranks have the same number here, other than -1.
        """
        return self.number if NUM_BUFFERS * _slot_bytes(mover) <= self._shared_bytes <= memory_bytes else -1


def _padded(size: int) -> int:
    return -(-size // HEAD_BYTES) * HEAD_BYTES


def _slot_bytes(mover: Mover) -> int:
    """Return the bytes of shared memory that the largest round of this rank needs for the messages that it sends."""
    largest = max((sum(map(_padded, mover.sizes(number)[0])) for number in range(mover.num_rounds)), default=0)
    return -(-largest // PAGE_BYTES) * PAGE_BYTES


class _Message:
    """The layout of a message in a buffer: for each rank a head, whose bytes are at `heads`, and a part of one of the `sizes`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = [HEAD_BYTES + _padded(size) for size in sizes]
        self.num_bytes = sum(self.sizes)
        self.starts = [end - size + HEAD_BYTES for end, size in zip(accumulate(self.sizes), self.sizes, strict=True)]
        self.heads = torch.tensor(self.starts, device="cpu")[:, None] + torch.arange(-HEAD_BYTES, 0, device="cpu")


_message = lru_cache(maxsize=8)(_Message)  # on one machine all messages are of heads alone


class Rounds:
    """Runs the rounds of one exchange on one rank: packs, sends, receives and unpacks messages.

    Parameters
    ----------
    buffers
        The buffers of an earlier exchange, to be reused.

    Attributes
    ----------
    failure
        The error of this rank, or None.
    stopped
        Whether the rounds ended early because some rank had failed.
    complete
        Whether all ranks are known to have all bytes in place.
    """

    def __init__(self, exchange: Exchange, mover: Mover, buffers: Buffers | None = None) -> None:
        self._exchange, self._mover = exchange, mover
        self._buffers = buffers or Buffers(exchange.device)
        self._slot_bytes = self._first = 0
        self._shared = SharedMemory(empty_bytes(0), [None] * exchange.size, [False] * exchange.size)
        self.failure: BaseException | None = None
        self.stopped = self.complete = False

    def attempt(self, work: Callable[[], None]) -> None:
        """Call `work`, and keep its error in `failure`: the next message tells the other ranks.

        Skip it if this rank has failed already.
        """
        if self.failure is None:
            try:
                with interrupts_allowed():
                    work()
            except BaseException as error:
                self.failure = error

    def run(self, changed: Callable[[], Iterable[str]], *last: Callable[[], None]) -> None:
        """Exchange the planned parts with the other ranks, round by round.

        Parameters
        ----------
        changed
            Returns the names of the tensors that have new values on this rank, wholly or in part.
        last
            Functions to call after the last round, in order. Each is called once all ranks have called the one before it.

        Raises
        ------
        PeerError
            The process group failed, so other ranks may not come to `settle`.
        """
        try:
            self._run(last)
        except PeerError as error:
            raise PeerError(f"{error}; on this rank {overwritten_text(sorted(changed()))}", error.ranks) from error

    def _run(self, last: Sequence[Callable[[], None]]) -> None:
        num_rounds = self._mover.num_rounds
        if not num_rounds:
            return
        self._mover.agree(self._exchange, self.attempt)
        if self._exchange.device.type == "cpu":
            self._slot_bytes = _slot_bytes(self._mover)
            self._shared = self._buffers.share(self._exchange, NUM_BUFFERS * self._slot_bytes)
        self.attempt(self._allocate)
        last = last or (lambda: None,)
        self._first = self._buffers.numbers(num_rounds + 1 + len(last))
        all_are_ready = self._meet(-1)
        packed = self._packed(0) if self.failure is None else None
        if not all_are_ready():
            return
        assert packed is not None
        arrived: _Arriving | None = self._start(0, *packed)
        for number in range(num_rounds):
            assert arrived is not None
            following = self._packed(number + 1) if number + 1 < num_rounds else None
            data, starts = self._await(number, arrived)
            if self.stopped:
                return
            arrived = None if following is None else self._start(number + 1, *following)
            self.attempt(lambda: self._mover.unpack(number, data, starts))  # noqa: B023
        for number, work in enumerate(last, num_rounds):
            self.attempt(work)
            if not self._meet(number)():
                return
        self.complete = True

    def _allocate(self) -> None:
        """Allocate all messages before the first is sent: a rank that failed to allocate later would leave the others waiting."""
        for number in range(self._mover.num_rounds):
            for slot, message in zip((number % 2, 2 + number % 2), self._messages(number), strict=True):
                self._buffers.get(slot, message.num_bytes)

    def _meet(self, number: int) -> Callable[[], bool]:
        """Start a message of heads alone, in which each rank says whether it has failed.

        Return a function that waits for the heads of all ranks, and returns whether all ranks go on.
        """
        nothing = (0,) * self._exchange.size
        message = _message(nothing)
        out, data = (self._buffers.get(slot, message.num_bytes) for slot in _HEADS)
        self._put_heads(number, out, message, nothing)
        arriving = self._exchange.start(out, message.sizes, data, message.sizes), data, message

        def all_go_on() -> bool:
            self._await(number, arriving)
            return not self.stopped

        return all_go_on

    def _await(self, number: int, arriving: _Arriving) -> tuple[list[torch.Tensor], list[int]]:
        """Wait for the message of a round. For each rank, return the memory that holds its part, and the part's first byte there.

        Set `stopped` if a sender says that it has failed.
        """
        wait, data, message = arriving
        wait()
        first, places = data[message.heads.to(data.device)].cpu().view(torch.int64).T.tolist()
        if any(word >> 8 != self._first + 1 + number for word in first):
            raise PeerError(
                "the ranks are out of step in their process group: one has left a call out, or failed in one; end the job"
            )
        self.stopped = any(word & _FAILED for word in first)
        memories, starts = [data] * len(places), list(message.starts)
        for rank, memory in enumerate(self._shared.read):
            if memory is not None:
                memories[rank], starts[rank] = memory, places[rank]
        return memories, starts

    def _messages(self, number: int) -> tuple[_Message, _Message]:
        """Return the layouts of two messages of a round: the one that this rank sends, and the one that it receives."""
        sent, received = self._mover.sizes(number)
        to = [0 if reads else size for size, reads in zip(sent, self._shared.readers, strict=True)]
        came = [size if memory is None else 0 for size, memory in zip(received, self._shared.read, strict=True)]
        return _message(tuple(to)), _message(tuple(came))

    def _packed(self, number: int) -> tuple[torch.Tensor, _Message]:
        """Pack the message of a round, with its heads: the flag of a failure, and the place of each part in shared memory."""
        sizes, message = self._mover.sizes(number)[0], self._messages(number)[0]
        out = self._buffers.get(number % 2, message.num_bytes)
        memories, starts = [out] * len(sizes), list(message.starts)
        at = number % NUM_BUFFERS * self._slot_bytes
        for rank, reads in enumerate(self._shared.readers):
            if reads:
                memories[rank], starts[rank] = self._shared.own, at
                at += _padded(sizes[rank])
        self.attempt(lambda: self._mover.pack(number, memories, starts))
        self._put_heads(number, out, message, starts)
        return out, message

    def _put_heads(self, number: int, out: torch.Tensor, message: _Message, starts: Sequence[int]) -> None:
        word = (self._first + 1 + number) << 8 | (0 if self.failure is None else _FAILED)
        heads = torch.tensor([[word, start] for start in starts], device="cpu").view(torch.uint8)
        out[message.heads.to(out.device)] = heads.to(out.device)

    def _start(self, number: int, out: torch.Tensor, sent: _Message) -> _Arriving:
        received = self._messages(number)[1]
        data = self._buffers.get(2 + number % 2, received.num_bytes)
        return self._exchange.start(out, sent.sizes, data, received.sizes), data, received


_Arriving = tuple[Callable[[], None], torch.Tensor, _Message]
"""A message that is being received: a function that waits for it, the buffer in which it arrives, and its layout."""

Explain = Callable[[BaseException, str], CheckpointError]
"""A function that makes the error to raise: from the failure of this rank, and a text naming the tensors overwritten on any rank.
"""


def pack_table(table: I64) -> bytes:
    """Encode a table of integers (rows, columns): the differences between the rows, which are small, compressed."""
    head: bytes = int(table.shape[1]).to_bytes(4, "little")
    return head + zlib.compress(np.diff(table, prepend=0, axis=0).astype("<i8").T.tobytes(), 1)


def unpack_table(data: bytes) -> I64:
    """Decode a table of integers that `pack_table` encoded."""
    width = int.from_bytes(data[:4], "little")
    table: I64 = np.frombuffer(zlib.decompress(data[4:]), "<i8").reshape(width, -1).T.cumsum(axis=0)
    return table


def pack_columns(table: ColumnTable) -> bytes:
    """Encode the columns of a table as one table of integers by `pack_table`."""
    return pack_table(np.column_stack(columns_of(table)))


def unpack_columns(kind: type[Table], data: bytes) -> Table:
    """Decode a table of the class `kind` that `pack_columns` encoded.

    The last two fields of the class have a column for each dim of a box: they get shape (rows, dims).
    """
    table, num = unpack_table(data), len(fields(kind)) - 2
    return kind(*table[:, :num].T, *np.split(table[:, num:], 2, axis=1))


def settle(comm: Comm, failure: BaseException | None, changed: Callable[[], Iterable[str]], explain: Explain) -> None:
    """If any rank has failed in an exchange, raise its error on all ranks, with the names of overwritten tensors. Collective.

    If the rounds are complete on all ranks (`Rounds.complete`), this call is not needed.

    Parameters
    ----------
    failure
        The error of this rank, or None.
    changed
        Returns the names of the tensors that have new values on this rank, wholly or in part.

    Raises
    ------
    CheckpointError
        A rank failed.
    """
    if not merge_of_all(comm, failure is not None, any):
        return
    overwritten = overwritten_text(sorted(merge_of_all(comm, list(changed()), union)))
    if failure is not None:
        if not isinstance(failure, Exception):
            raise failure  # an interrupt is raised as it is
        error = explain(failure, overwritten)
        raise error from (None if error is failure else failure)
    comm.gather(b"")  # raises the error of the rank that failed
    raise PeerError("another rank failed without saying why; its log may")


NOTHING_CHANGED = "no tensor was changed"
VERIFY_FIRST = "verify_first=True would have changed none"
USE_ANOTHER = "use another checkpoint"
_OVERWRITTEN = "already overwritten, wholly or in part"


def overwritten_text(names: Sequence[str], where: str = "") -> str:
    """Return a text that names the overwritten tensors, or says that there are none, for an error's message.

    `where` is empty for the tensors of all ranks, or the text ``" on this rank"``.
    """
    return f"{_OVERWRITTEN}{where}: {few(names)}" if names else f"{NOTHING_CHANGED}{where}"


def without_changes(text: str) -> str:
    """Remove from an error's text the parts about overwritten tensors and the next step.

    They are wrong once a later load has succeeded.
    """
    stale = (_OVERWRITTEN, NOTHING_CHANGED, VERIFY_FIRST, USE_ANOTHER)
    return "; ".join(part for part in text.split("; ") if not part.startswith(stale))


def named_error(failure: BaseException, overwritten: str) -> CheckpointError:
    """Return a `CheckpointError` for any failure, with the text on overwritten tensors appended."""
    if isinstance(failure, CheckpointError):
        failure.args = (f"{failure}; {overwritten}", *failure.args[1:])
        return failure
    return PeerError(f"{type(failure).__name__}: {failure}; {overwritten}")
