"""Transfers of bytes between ranks in the background: point to point, over a gloo group that only the memory tier uses.

The group is made over the job's key-value store under a name of its own, without a collective. So the job's groups are not used,
and their backend need not support host memory (NCCL does not). Each wait for another rank has a deadline. Once a deadline has
passed, the group is not used again.

`Links` sends and receives whole buffers. `Serving` answers requests for ranges of files while a checkpoint is loaded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CorruptError, PeerError, StorageError
from .bounded import BoundedStore, bounded, named_failure
from .calls import did_not_arrive
from .peers import Ended
from .wire import name_ranks

CHUNK_BYTES = 2 << 20
"""Size in bytes of the chunks that `Links.swap` sends: a chunk fits in the processor's cache while the receiver copies it."""

AHEAD = 32
"""The number of chunks of one buffer that are sent or received at once."""

_REQUEST, _DATA = 1, 1 << 16
_FIELDS = 6
_DONE, _READ = 0, 1
_NO_DEADLINE = timedelta(days=365)
_FAREWELL_S = 5.0


class Links:
    """Point-to-point transfers among some ranks, over a gloo group made for them.

    Parameters
    ----------
    store, ended
        As `shared_store` returns them.
    rank, size
        The number of this process among these ranks, and the number of ranks.
    timeout_s
        Seconds for the ranks to meet, and for each message.
    members
        The number in the job of each of these ranks, for error messages; by default 0 to ``size - 1``.

    Raises
    ------
    PeerError
        The others did not come in time, or have ended.
    """

    def __init__(
        self, store: Any, ended: Ended, rank: int, size: int, *, timeout_s: float, members: Sequence[int] | None = None
    ) -> None:
        self._members = range(size) if members is None else members
        self.rank, self.size, self.timeout_s, self._timeout = rank, size, timeout_s, timedelta(seconds=timeout_s)
        what = "the ranks that hold each other's memory did not meet"
        self._group = gloo_group(store, ended, self._members, rank, timeout_s=timeout_s, what=what)

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], ends: float) -> None:
        """Send a buffer to each rank of `outgoing` and fill a buffer from each rank of `incoming`, all at once, in chunks.

        Raise `PeerError` if a rank did not come in time, or is gone.

        Parameters
        ----------
        outgoing, incoming
            1-D uint8 buffers in host memory, by rank.
        ends
            The deadline for all of it, by `time.monotonic`.
        """
        longest = max((len(data) for data in (*outgoing.values(), *incoming.values())), default=0)
        under_way: deque[list[tuple[int, Any]]] = deque()

        def settle(left: int) -> None:
            while len(under_way) > left:
                for rank, request in under_way.popleft():
                    with self._named(rank):
                        request.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))

        for at in range(0, longest, CHUNK_BYTES):
            settle(AHEAD - 1)
            work = []
            for start, buffers in ((self._group.recv, incoming), (self._group.send, outgoing)):
                for rank, data in buffers.items():
                    if at < len(data):
                        with self._named(rank):
                            work.append((rank, start([data[at : at + CHUNK_BYTES]], rank, _DATA)))
            under_way.append(work)
        settle(0)

    def _named(self, rank: int) -> AbstractContextManager[None]:
        member = self._members[rank]
        return named_failure(f"copying to or from the memory of rank {member}'s node failed", (member,))

    def send(self, rank: int, data: torch.Tensor, tag: int, timeout_s: float) -> None:
        """Send a buffer to a rank as one message; wait at most `timeout_s` seconds until it is sent."""
        self._group.send([data], rank, tag).wait(timedelta(seconds=max(timeout_s, 0.001)))

    def receive(self, rank: int, data: torch.Tensor, tag: int) -> None:
        """Fill a buffer with one message of a rank; wait for it at most the `timeout_s` of these links."""
        self._group.recv([data], rank, tag).wait(self._timeout)

    def receive_any(self, data: torch.Tensor, tag: int) -> None:
        """Fill a buffer with the next message of any rank.

        It waits without a deadline, because other ranks may send no request for a long time.
        """
        # A deadline that passes would end the whole group, and with it the requests of this rank to others.
        self._group.recv_anysource([data], tag).wait(_NO_DEADLINE)


def gloo_group(store: Any, ended: Ended, members: Sequence[int], rank: int, *, timeout_s: float, what: str) -> Any:
    """Make a gloo group of some ranks. Its members must pass the same part of the job's store, which no group has used.

    ``dist.new_group`` is not fit for some of the ranks: it names a group after the number of groups that each rank is in already.
    Ranks that are in more groups than others wait for the others for ever. Raise `PeerError` if the others did not come in time,
    or have ended.

    Parameters
    ----------
    store, ended
        A part of the job's store, and a function that returns the ranks that have ended.
    members
        The numbers in the job of the group's ranks, in order.
    rank
        The number of this process among them.
    what
        The beginning of the error's message, for ranks that do not meet.
    """
    own = BoundedStore.of(store, timeout_s)
    own.allow(timeout_s)

    def refuse_ended() -> None:
        if gone := tuple(sorted(ended() & {*members})):
            raise PeerError(f"{what}: {name_ranks(gone)} ended; their own logs say why", gone)

    with named_failure(what):
        own.append("came", b"%d " % rank)
        try:
            with named_failure(what):
                return bounded(lambda: _meet(own, rank, len(members), timeout_s), timeout_s, what, look=refuse_ended)
        except PeerError as error:
            if error.ranks:
                raise
            came = {int(number) for number in own.get("came").split()}
            absent = tuple(member for number, member in enumerate(members) if number not in came)
            raise PeerError(f"{what}: {did_not_arrive(absent, timeout_s)}" if absent else str(error), absent) from None


def _meet(store: BoundedStore, rank: int, size: int, timeout_s: float) -> Any:
    group_class: Any = dist.ProcessGroupGloo
    # On a connection of its own: whoever waits for another rank's key holds it.
    return group_class(store.clone(timeout_s), rank, size, timedelta(seconds=timeout_s))


class Serving(AbstractContextManager["Serving"]):
    """Reads files in the memory of other ranks, and answers their reads of this rank's files, until all ranks are done.

    Use it in a ``with`` block. It ends once all ranks have left their blocks, and waits for them at most the ``timeout_s`` of the
    links, or 5 s if its own block has failed.

    Parameters
    ----------
    lend
        Takes a key, an offset and a number of bytes. Returns a context manager that gives these bytes of a file of this rank. It
        raises `CorruptError` if the file lacks the bytes, or if they have changed when the context ends.
    keys
        The keys of all files, in the same order on all ranks.
    """

    def __init__(
        self, links: Links, keys: Sequence[str], lend: Callable[[str, int, int], AbstractContextManager[memoryview]]
    ) -> None:
        self._links, self._keys, self._lend = links, keys, lend
        self._number = {key: i for i, key in enumerate(keys)}
        self._lock, self._tag = threading.Lock(), _DATA
        self._thread = threading.Thread(target=self._serve, name="reshard-ckpt-memory", daemon=True)
        self._thread.start()

    def read(self, rank: int, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with bytes of another rank's file, from byte `offset` on. Any thread may call it.

        Raises
        ------
        CorruptError
            That rank could not read the file.
        PeerError
            That rank did not answer.
        """
        with self._lock:
            self._tag += 2
            tag = self._tag
        length, failed = sum(len(buffer) for buffer in buffers), torch.empty(1, dtype=torch.uint8, device="cpu")
        if len(buffers) == 1 and length:
            data = torch.frombuffer(buffers[0], dtype=torch.uint8)
        else:
            data = torch.empty(length, dtype=torch.uint8, device="cpu")
        try:
            request = self._message(_READ, self._number[key], offset, length, tag)
            self._links.send(rank, request, _REQUEST, self._links.timeout_s)
            if length:
                self._links.receive(rank, data, tag)
            self._links.receive(rank, failed, tag + 1)
        except RuntimeError as error:
            raise PeerError(f"rank {rank} did not hand on {key} from its memory: {error}", ranks=(rank,)) from error
        if failed[0] != 0:
            raise CorruptError(f"rank {rank} could not read {key} in the memory of its node; this copy is not used")
        view, at = _bytes_of(data), 0
        for buffer in buffers if len(buffers) > 1 else ():
            buffer[:] = view[at : at + len(buffer)]
            at += len(buffer)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(self._links.timeout_s if error is None else _FAREWELL_S)  # after an error, whoever still reads fails as well

    def finish(self, wait_s: float) -> None:
        """Tell all ranks that this one reads no more, and answer reads until all have said so, at most `wait_s` seconds."""
        ends = time.monotonic() + wait_s
        for rank in range(self._links.size):
            if rank != self._links.rank:
                with suppress(RuntimeError):  # it is gone; the others still wait for the word of this one
                    self._links.send(rank, self._message(_DONE, 0, 0, 0, 0), _REQUEST, ends - time.monotonic())
        self._thread.join(max(ends - time.monotonic(), 0.0))

    def _message(self, kind: int, number: int, offset: int, length: int, tag: int) -> torch.Tensor:
        return torch.tensor([kind, self._links.rank, number, offset, length, tag], dtype=torch.int64, device="cpu")

    def _serve(self) -> None:
        left = self._links.size - 1
        message = torch.empty(_FIELDS, dtype=torch.int64, device="cpu")
        try:
            while left:
                self._links.receive_any(message, _REQUEST)
                kind, rank, number, offset, length, tag = message.tolist()
                if kind == _DONE:
                    left -= 1
                    continue
                self._answer(rank, number, offset, length, tag)
        except RuntimeError:
            return  # a rank is gone: whoever waits for this one learns it by a deadline

    def _answer(self, rank: int, number: int, offset: int, length: int, tag: int) -> None:
        """Send a range of a file of this rank to the rank that asked for it, without a copy.

        A second message of one byte follows. It tells whether the file lacked the bytes, or they changed while they were sent.
        """
        failed, timeout_s, is_sent = torch.zeros(1, dtype=torch.uint8, device="cpu"), self._links.timeout_s, not length
        try:
            with self._lend(self._keys[number], offset, length) as data:
                if length:
                    self._links.send(rank, torch.frombuffer(data, dtype=torch.uint8), tag, timeout_s)
                    is_sent = True
        except (StorageError, CorruptError, OSError):
            failed[0] = 1
        if not is_sent:  # the other rank waits for as many bytes as it has asked for
            self._links.send(rank, torch.zeros(length, dtype=torch.uint8, device="cpu"), tag, timeout_s)
        self._links.send(rank, failed, tag + 1, timeout_s)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
