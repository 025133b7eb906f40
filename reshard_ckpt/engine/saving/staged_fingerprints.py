"""Fingerprints of replicas that may lie on devices: samples are packed there, and come over the link together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..common.host_memory import allocate
from ..common.lanes import Lane, Lanes, Scratch
from ..common.tensor_bytes import LocalPiece, copy_run
from .fingerprint import checked_pieces, fingerprints, sampled_runs
from .local_shards import LocalShards
from .messages import RunColumns

BOUNCE_BYTES = 1 << 20
"""Samples of a device that come over the link at once, in two buffers by turns."""


class _Sent(NamedTuple):
    """Samples on their way to a bounce buffer: which checks they are of, with the bytes of each."""

    event: torch.Event
    buffer: torch.Tensor
    parts: list[tuple[int, slice]]


class StagedFingerprints:
    """The fingerprints of a save that is staged; those on a device are queued, and hashed when they are here.

    What does not fit into the bounce buffers is waited for, and then the buffers are used again.
    """

    def __init__(
        self, lanes: Lanes, local_shards: LocalShards, checks: RunColumns, known: NDArray[np.uint64] | None = None
    ) -> None:
        self._lanes, self._local_shards, self._checks = lanes, local_shards, checks
        self.marks = np.zeros(len(checks.local), np.uint64) if known is None else known
        self._is_known = known is not None
        self._hashers: dict[int, xxhash.xxh3_64] = {}
        self._sent: deque[_Sent] = deque()
        self._buffers: list[torch.Tensor] = []
        self._turn = 0
        self._lane: Lane | None = None
        self._parts: list[tuple[int, slice]] = []
        self._scratch: dict[torch.device, Scratch] = {}
        self._packed = torch.empty(0)

    def queue(self, chosen: Callable[[int], bool]) -> None:
        """Take the fingerprints of the checks of chosen rows, or queue their samples; nothing where they are known."""
        if self._is_known:
            return
        lanes, rows = self._lanes, self._local_shards.rows
        there = {row for row, (_, local) in enumerate(rows) if local.tensor.device in lanes.by_device} if lanes else set()
        fingerprints(self._local_shards, self._checks, lambda row: row not in there and chosen(row), self.marks)
        queued = checked_pieces(self._local_shards, self._checks, lambda row: row in there and chosen(row)) if there else []
        if queued:
            with lanes.entered():
                for i, local in queued:
                    self._hashers[i] = xxhash.xxh3_64()
                    for start, count in sampled_runs(local):
                        self._pack(i, local, start, count)
                self._send()

    @property
    def is_under_way(self) -> bool:
        """Whether samples are queued that may not have come."""
        return bool(self._sent)

    def finish(self) -> None:
        """Wait for what is queued, and hash it."""
        while self._sent:
            self._hash_one()
        for i, hasher in self._hashers.items():
            self.marks[i] = hasher.intdigest()
        self._hashers.clear()
        self._buffers, self._scratch, self._packed = [], {}, torch.empty(0)

    def _pack(self, i: int, local: LocalPiece, start: int, count: int) -> None:
        lane, each = self._lanes.by_device[local.tensor.device], local.tensor.element_size()
        while count:
            at = -(-(self._parts[-1][1].stop if self._parts else 0) // 16) * 16  # aligned for every element
            num = min(count, (BOUNCE_BYTES - at) // each)
            if (self._lane is not lane and self._parts) or not num:
                self._send()
                continue
            if not self._parts:
                scratch = self._scratch.get(lane.device) or Scratch(lane, BOUNCE_BYTES)
                self._lane, self._scratch[lane.device], self._packed = lane, scratch, scratch.begin()
            part = slice(at, at + num * each)
            copy_run(local, start, num, self._packed[part])
            self._parts.append((i, part))
            start, count = start + num, count - num

    def _send(self) -> None:
        """Queue the copy of what is packed, into the buffer that is free, or made free."""
        if not self._parts or self._lane is None:
            return
        if len(self._sent) == 2:
            self._hash_one()
        if not self._buffers:
            both = allocate(2 * BOUNCE_BYTES, pinned=True)
            self._buffers = [both[:BOUNCE_BYTES], both[BOUNCE_BYTES : 2 * BOUNCE_BYTES]]
        buffer, self._turn = self._buffers[self._turn], 1 - self._turn
        end = self._parts[-1][1].stop
        self._scratch[self._lane.device].send(slice(0, end), buffer[:end])
        self._sent.append(_Sent(self._lane.link.record_event(), buffer, self._parts))
        self._parts = []

    def _hash_one(self) -> None:
        sent = self._sent.popleft()
        sent.event.synchronize()
        data = sent.buffer.numpy().data
        for i, part in sent.parts:
            self._hashers[i].update(data[part])


def all_fingerprints(local_shards: LocalShards, checks: RunColumns) -> NDArray[np.uint64]:
    """Take the fingerprints of all checks."""
    lanes = Lanes(local.tensor for _, local in local_shards.rows)
    taken = StagedFingerprints(lanes, local_shards, checks)
    taken.queue(lambda _: True)
    taken.finish()
    return taken.marks
