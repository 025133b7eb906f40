"""Fingerprints of replicas, some of which lie on a device: summed up where they lie, so that 8 bytes of each come here.

1. The samples of a piece, which on the host are hashed (`fingerprint.sampled_runs`), are packed as 32-bit words. The fingerprint
   is the sum of each word times the weight of its place, modulo 2^64. Weights are odd and scattered: one word that differs always
   shows; several that differ hide each other with a chance of 2^-32 if it is in their highest bits alone, else far less.
2. On a device all of this is queued, and so is one copy of all sums; nobody waits for it before `finish`. Whatever the size of
   the state, it takes 5 MiB there, and one large page of pinned memory.

What lies in host memory beside that is summed up likewise, as other ranks may have it on a device. Where the whole state lies in
host memory, hashing is faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.host_memory import allocate
from ..common.lanes import Lanes, Mark
from ..common.tensor_bytes import LocalPiece, copy_run
from .fingerprint import checked_pieces, fingerprints, sampled_runs, with_kind
from .local_shards import LocalShards
from .messages import RunColumns

WORD_BYTES = 4


class StagedFingerprints:
    """The fingerprints of a save that is staged; those on a device are queued."""

    def __init__(
        self, lanes: Lanes, local_shards: LocalShards, checks: RunColumns, known: NDArray[np.uint64] | None = None
    ) -> None:
        self._lanes, self._local_shards, self._checks = lanes, local_shards, checks
        self.marks = np.zeros(len(checks.local), np.uint64) if known is None else known
        self._is_known = known is not None
        self._sums = torch.empty(0, dtype=torch.int64, device="cpu")
        self._come: list[tuple[list[int], torch.Tensor]] = []
        self._queued: list[Mark] = []

    def queue(self, chosen: Callable[[int], bool]) -> None:
        """Take the fingerprints of the checks of chosen rows, or queue that; nothing where they are known."""
        if self._is_known:
            return
        if not self._lanes:
            fingerprints(self._local_shards, self._checks, chosen, self.marks)
            return
        by_device: dict[torch.device, list[tuple[int, LocalPiece]]] = defaultdict(list)
        for i, local in checked_pieces(self._local_shards, self._checks, chosen):
            by_device[local.tensor.device].append((i, local))
        with self._lanes.entered():
            for device, pieces in by_device.items():
                sums = weighted_sums([local for _, local in pieces], device)
                numbers = [i for i, _ in pieces]
                if device in self._lanes.by_device:
                    there, sums = sums, self._host_memory(len(numbers))
                    sums.copy_(there, non_blocking=True)
                    self._queued.append(Mark(self._lanes.by_device[device].link))
                self._come.append((numbers, sums.cpu()))

    @property
    def is_under_way(self) -> bool:
        """Whether something is queued that may not have come."""
        return bool(self._queued)

    def finish(self) -> None:
        """Wait for what is queued."""
        self.close()
        for numbers, sums in self._come:
            self.marks[numbers] = with_kind(sums.numpy().view(np.uint64), summed=True)
        self._come = []

    def close(self) -> None:
        """Wait until no device writes here any more."""
        for mark in self._queued:
            mark.synchronize()
        self._queued = []

    def _host_memory(self, count: int) -> torch.Tensor:
        """Return pinned memory for so many sums; at most as many as there are checks are asked for."""
        if not self._sums.numel():
            self._sums = allocate(8 * len(self._checks.local), pinned=True).view(torch.int64)
        taken, self._sums = self._sums[:count], self._sums[count:]
        return taken


def weighted_sums(pieces: Sequence[LocalPiece], device: torch.device) -> torch.Tensor:
    """Sum up the samples of pieces on one device, on its current stream; 1-D int64."""
    sums = torch.zeros(len(pieces), dtype=torch.int64, device=device)
    runs = [[(start, count * local.tensor.element_size()) for start, count in sampled_runs(local)] for local in pieces]
    num_words = max((-(-sum(size for _, size in of_piece) // WORD_BYTES) for of_piece in runs), default=0)
    weights = _weights(num_words, device)
    packed = torch.empty(num_words * WORD_BYTES, dtype=torch.uint8, device=device)
    products = torch.empty_like(weights)
    for i, (local, of_piece) in enumerate(zip(pieces, runs, strict=True)):
        at, each = 0, local.tensor.element_size()
        for start, size in of_piece:
            if size:
                copy_run(local, start, size // each, packed[at : at + size])
            at += size
        end = -(-at // WORD_BYTES)
        if at % WORD_BYTES:
            packed[at : end * WORD_BYTES].zero_()
        torch.mul(packed.view(torch.int32)[:end], weights[:end], out=products[:end])
        torch.sum(products[:end], 0, out=sums[i])
    return sums


def _weights(num: int, device: torch.device) -> torch.Tensor:
    """Make the weights of the first places, as splitmix64 scatters numbers; on every device the same."""
    out = torch.arange(1, num + 1, dtype=torch.int64, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        out.bitwise_xor_((out >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return out.bitwise_or_(1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def all_fingerprints(local_shards: LocalShards, checks: RunColumns) -> NDArray[np.uint64]:
    """Take the fingerprints of all checks."""
    lanes = Lanes(local.tensor for _, local in local_shards.rows)
    taken = StagedFingerprints(lanes, local_shards, checks)
    taken.queue(lambda _: True)
    taken.finish()
    return taken.marks
