"""Bytes from rank to rank in the background: point to point, over a gloo group of the memory tier's own.

The group is made over the job's key-value store under a name of its own, without a collective; so the job's groups are not used,
and a backend without host memory (NCCL) does not matter. Whoever waits for another rank has a deadline; a group in which one has
passed is not used again.

`Links` sends and receives whole buffers. `Serving` answers requests for ranges of files while a checkpoint is loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CorruptError, PeerError, StorageError

CHUNK_BYTES = 16 << 20
_REQUEST, _DATA = 1, 1 << 16
_FIELDS = 6
_DONE, _READ = 0, 1
_NO_DEADLINE = timedelta(days=365)
_FAREWELL_S = 5.0


class Links:
    """A gloo group of some ranks.

    Parameters
    ----------
    store
        Keys of the job's store that nobody else has used.
    rank, size
        Of this process among them.
    timeout_s
        Seconds after which a swap, or one message, has failed.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s, self._timeout = rank, size, timeout_s, timedelta(seconds=timeout_s)
        group_class: Any = dist.ProcessGroupGloo
        if hasattr(store, "clone"):  # a connection of its own: whoever waits for another rank's key holds it
            store = store.clone()
            store.set_timeout(self._timeout)
        try:
            self._group = group_class(store, rank, size, self._timeout)
        except RuntimeError as error:
            raise PeerError(f"the ranks that hold each other's memory did not meet within {timeout_s:g} s: {error}") from error

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send buffers to ranks and receive others from ranks, all at once, a chunk of each at a time.

        Raises
        ------
        PeerError
            A rank did not come in time, or is gone.
        """
        longest = max((len(data) for data in (*outgoing.values(), *incoming.values())), default=0)
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            for at in range(0, longest, CHUNK_BYTES):
                work = [
                    self._group.recv([data[at : at + CHUNK_BYTES]], rank, _DATA)
                    for rank, data in incoming.items()
                    if at < len(data)
                ]
                work += [
                    self._group.send([data[at : at + CHUNK_BYTES]], rank, _DATA)
                    for rank, data in outgoing.items()
                    if at < len(data)
                ]
                for one in work:
                    one.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise PeerError(f"copying to and from other nodes' memory failed: {error}") from error

    def send(self, rank: int, data: torch.Tensor, tag: int) -> None:
        """Send a buffer, and wait until it is out."""
        self._group.send([data], rank, tag).wait(self._timeout)

    def receive(self, rank: int, data: torch.Tensor, tag: int) -> None:
        """Fill a buffer from a rank."""
        self._group.recv([data], rank, tag).wait(self._timeout)

    def receive_any(self, data: torch.Tensor, tag: int) -> None:
        """Fill a buffer from whichever rank sends first, whenever that is: others may have nothing to ask for long."""
        # A deadline would be the end of the whole group, also for what this rank itself asks others meanwhile.
        self._group.recv_anysource([data], tag).wait(_NO_DEADLINE)


class Serving:
    """Reads files of other ranks, and answers their reads, until all ranks are done.

    Parameters
    ----------
    read_into
        Fills buffers from a byte of a file of this rank on.
    keys
        The keys of all files, in the same order on all ranks.
    """

    def __init__(self, links: Links, keys: Sequence[str], read_into: Callable[[str, int, Sequence[memoryview]], None]) -> None:
        self._links, self._keys, self._read_into = links, keys, read_into
        self._number = {key: i for i, key in enumerate(keys)}
        self._lock, self._tag = threading.Lock(), _DATA
        self._thread = threading.Thread(target=self._serve, name="reshard-ckpt-memory", daemon=True)
        self._thread.start()

    def read(self, rank: int, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill flat buffers from a byte of a file of another rank on; any thread may call it.

        Raises
        ------
        StorageError
            That rank could not read it.
        PeerError
            It did not answer.
        """
        with self._lock:
            self._tag += 2
            tag = self._tag
        length = sum(len(buffer) for buffer in buffers)
        answer = torch.empty(length + 1, dtype=torch.uint8, device="cpu")
        try:
            self._links.send(rank, self._message(_READ, self._number[key], offset, length, tag), _REQUEST)
            self._links.receive(rank, answer, tag)
        except RuntimeError as error:
            raise PeerError(f"rank {rank} did not hand on {key} from its memory: {error}", ranks=(rank,)) from error
        if answer[0] != 0:
            raise CorruptError(f"rank {rank} could not read {key} in the memory of its node; this copy is not used")
        data, at = _bytes_of(answer)[1:], 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def finish(self, wait_s: float) -> None:
        """Tell all ranks that this one reads no more, and answer until all have said so, or the time for that is over."""
        for rank in range(self._links.size):
            if rank != self._links.rank:
                with suppress(RuntimeError):  # it is gone; the others still wait for the word of this one
                    self._links.send(rank, self._message(_DONE, 0, 0, 0, 0), _REQUEST)
        self._thread.join(wait_s)

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
                self._links.send(rank, self._answer(number, offset, length), tag)
        except RuntimeError:
            return  # a rank is gone: whoever waits for this one learns it by a deadline

    def _answer(self, number: int, offset: int, length: int) -> torch.Tensor:
        answer = torch.empty(length + 1, dtype=torch.uint8, device="cpu")
        answer[0] = 0
        try:
            self._read_into(self._keys[number], offset, [_bytes_of(answer)[1:]])
        except (StorageError, CorruptError, OSError):
            answer[0] = 1
        return answer


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


@contextmanager
def serving(links: Links, keys: Sequence[str], read_into: Callable[[str, int, Sequence[memoryview]], None]) -> Iterator[Serving]:
    """Serve this rank's files to others while the ``with`` block lasts, and a while longer if they still read."""
    server = Serving(links, keys, read_into)
    try:
        yield server
    except BaseException:
        server.finish(_FAREWELL_S)  # whoever still reads fails as well
        raise
    server.finish(links.timeout_s)
