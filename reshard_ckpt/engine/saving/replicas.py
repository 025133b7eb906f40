"""Fingerprints of replicas: each rank computes 64 bits from each of its replicated pieces, and rank 0 compares them.

1. If all of a rank's state lies in host memory, each piece is hashed (`fingerprint`): the whole piece, or with
   ``replicas="sample"`` some blocks of a large piece, which are at other places in each save (`looked_at`).
2. If some of it lies on a device, the same bytes are summed up on that device (`weighted_sums`), so that only 8 bytes of each
   piece cross the link. The bytes are read as 32-bit words; each word is multiplied by the weight of its position, and the
   products are added modulo 2^64. Weights are odd and pseudo-random. One differing word always changes the sum. Several differing
   words cancel with a chance of 2^-32 if only their highest bits differ, else far less. Pieces in host memory are then summed up
   as well, because other ranks may hold them on a device.
3. On a device the sums are queued, and so is one copy of all of them to the host; nothing waits before `Fingerprints.finish`.
   This takes 20 MiB of device memory for a state of any size, and one large page of pinned memory.
4. Rank 0 compares the fingerprints of every replica group (`compare_replicas`). The lowest bit of a fingerprint is 1 for a sum
   and 0 for a hash. A sum and a hash cannot be compared, and pass.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ...comm.protocol import Comm, merge_of_all
from ...core.catalog.specs import Replication
from ...core.geometry.runs import I64, Mask
from ...core.planning.save_plan import Checks, SavePlan
from ...core.report import summarize
from ...errors import LayoutError
from ..common.host_memory import allocate
from ..common.tensor_bytes import CopyStreams, LocalRun, Mark, bytes_in_place, chunks, copy_run, empty_bytes, is_in_order, region
from .local_shards import LocalShards
from .messages import RunColumns

U64 = NDArray[np.uint64]

WHOLE_BYTES = 1 << 20
"""Size in bytes up to which a piece is always fingerprinted whole, never by samples."""

PACKED_BYTES = 4 << 20
"""Bytes of one pack, which is summed up at once. It must be the same on all ranks, and a multiple of every element size. On the
CPU, packs of 16 MiB take four times as long, because their products leave the cache."""

NUM_SAMPLES = 16
"""Number of blocks that are sampled of a large piece."""

SAMPLE_BYTES = 64 << 10
"""Size of one sampled block in bytes."""

WORD_BYTES = 4
"""Size in bytes of the words that are multiplied by weights and added."""

_FACTOR = 0x2545F4914F6CDD1D
"""The sum of a piece so far is multiplied by this before the sum of its next pack is added, so that equal packs do not cancel."""


class Fingerprints:
    """Computes the fingerprints of runs of this rank's memory, in several calls. On a device the work is only queued.

    Parameters
    ----------
    shift
        As for `looked_at`.
    between_ranks
        Whether the fingerprints are compared with those of other ranks. Then runs in host memory are summed up, not hashed, if
        any run lies on a device, because another rank may hold the replica of a host run on a device.

    Attributes
    ----------
    taken
        One fingerprint for each run, uint64; complete after `finish`.
    """

    def __init__(
        self, copy_streams: CopyStreams, runs: Sequence[LocalRun], *, shift: int | None = None, between_ranks: bool = True
    ) -> None:
        self._copy_streams, self._runs, self._shift, self._between_ranks = copy_streams, runs, shift, between_ranks
        self.taken = np.zeros(len(runs), np.uint64)
        self._sums = torch.empty(0, dtype=torch.int64, device="cpu")
        self._come: list[tuple[list[int], torch.Tensor]] = []
        self._queued: list[Mark] = []

    def queue(self, chosen: Callable[[torch.Tensor], bool]) -> None:
        """Fingerprint the runs of each tensor for which `chosen` is True. On a device, only queue the work: `finish` waits."""
        # by_device[device][i]: chosen run i, on this device
        by_device: dict[torch.device, dict[int, LocalRun]] = defaultdict(dict)
        for i, run in enumerate(self._runs):
            if chosen(run.local.tensor):
                by_device[run.local.tensor.device][i] = run
        scratch = empty_bytes(WHOLE_BYTES)
        for device, runs in by_device.items():
            if device in self._copy_streams.by_device or (self._copy_streams and self._between_ranks):
                self._queue_sums(device, runs)
            else:
                hashes = np.array([fingerprint(run, scratch, self._shift) for run in runs.values()], np.uint64)
                self.taken[list(runs)] = with_kind(hashes, summed=False)

    def _queue_sums(self, device: torch.device, runs: dict[int, LocalRun]) -> None:
        with self._copy_streams.entered():
            sums = weighted_sums(list(runs.values()), device, self._shift)
            if device in self._copy_streams.by_device:
                there, sums = sums, self._host_memory(len(runs))
                sums.copy_(there, non_blocking=True)
                self._queued.append(Mark(self._copy_streams.by_device[device].link))
            self._come.append((list(runs), sums.cpu()))

    @property
    def is_under_way(self) -> bool:
        """Whether some queued sums may not have arrived in host memory yet."""
        return bool(self._queued)

    def finish(self) -> None:
        """Wait for the queued sums, and put them into the array `taken`."""
        self.close()
        for numbers, sums in self._come:
            self.taken[numbers] = with_kind(sums.numpy().view(np.uint64), summed=True)
        self._come = []

    def close(self) -> None:
        """Wait until no device writes sums into the host memory of this object any more."""
        for mark in self._queued:
            mark.synchronize()
        self._queued = []

    def _host_memory(self, count: int) -> torch.Tensor:
        """Return pinned host memory for `count` sums, int64. All calls together may ask for one sum for each run."""
        if not self._sums.numel():
            self._sums = allocate(8 * len(self._runs), pinned=True).view(torch.int64)
        taken, self._sums = self._sums[:count], self._sums[count:]
        return taken


def all_fingerprints(local_shards: LocalShards, checks: RunColumns, shift: int | None = None) -> U64:
    """Compute and return the fingerprints of all runs in `checks`, in their order."""
    streams = CopyStreams([local.tensor for _, local in local_shards.rows])
    fingerprints = Fingerprints(streams, local_shards.runs(checks), shift=shift)
    fingerprints.queue(lambda _: True)
    fingerprints.finish()
    return fingerprints.taken


def looked_at(run: LocalRun, shift: int | None) -> list[LocalRun]:
    """Return the parts of a run that its fingerprint is computed from: all of it, or `NUM_SAMPLES` blocks of `SAMPLE_BYTES`.

    Parameters
    ----------
    shift
        None for the whole run. Else a number below 2^32: a run above `WHOLE_BYTES` is divided into `NUM_SAMPLES` equal parts,
        and one block is taken from each part, ``shift / 2**32`` of the way through it.
    """
    if shift is None or run.num_bytes <= WHOLE_BYTES:
        return [run]
    size = SAMPLE_BYTES // run.local.tensor.element_size()
    spread = run.num_elements - size
    starts = (run.start + (spread * ((i << 32) + shift) // NUM_SAMPLES >> 32) for i in range(NUM_SAMPLES))
    return [LocalRun(run.local, start, size) for start in starts]


def fingerprint(run: LocalRun, scratch: torch.Tensor, shift: int | None = None) -> int:
    """Return the XXH3-64 of the parts of a run that `looked_at` chooses. `scratch` is host memory for copies."""
    each = run.local.tensor.element_size()
    hasher = xxhash.xxh3_64()
    whole = bytes_in_place(*run)  # one view for all parts: making a view takes longer than hashing a block
    for part in looked_at(run, shift):
        if whole is not None:
            begin = (part.start - run.start) * each
            hasher.update(whole[begin : begin + part.num_bytes])
            continue
        for chunk in chunks(*part, scratch):
            hasher.update(chunk)
    return hasher.intdigest()


def weighted_sums(runs: Sequence[LocalRun], device: torch.device, shift: int | None = None) -> torch.Tensor:
    """Return the weighted sum of each run on one device, 1-D int64, computed on its current stream.

    A sum covers the parts of its run that `looked_at` chooses. A run of several packs is combined as
    ``sum = sum * _FACTOR + sum of the next pack``, modulo 2^64.
    """
    sums = torch.zeros(len(runs), dtype=torch.int64, device=device)
    parts = [looked_at(run, shift) for run in runs]
    # sizes[i]: bytes of the largest pack of run i; the buffers below are made once for all packs
    sizes = [sum(part.num_bytes for part in of_run) for of_run in parts]
    sizes = [size if len(of_run) > 1 else min(size, PACKED_BYTES) for size, of_run in zip(sizes, parts, strict=True)]
    num_words = -(-max(sizes, default=0) // WORD_BYTES)
    weights, packed = _weights(num_words, device), empty_bytes(num_words * WORD_BYTES, device)
    products, pack_sum = torch.empty_like(weights), torch.empty((), dtype=torch.int64, device=device)
    for of_run, sum_of_run in zip(parts, sums.unbind(), strict=True):
        for number, words in enumerate(_words(of_run, packed)):
            end = len(words)
            by, product = (weights, products) if end == num_words else (weights[:end], products[:end])
            torch.mul(words, by, out=product)
            # The first pack's sum goes straight into the run's sum; a later one is added to `_FACTOR` times that.
            torch.sum(product, 0, out=pack_sum if number else sum_of_run)
            if number:
                torch.add(pack_sum, sum_of_run, alpha=_FACTOR, out=sum_of_run)
    return sums


def _words(parts: Sequence[LocalRun], packed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a run as tensors of 32-bit words, of at most `PACKED_BYTES` each, for a weighted sum.

    They are views of the run's memory if that is contiguous and begins and ends at a whole word, else copies in `packed`. If
    `parts` are several samples of a long run, one tensor has all of them.
    """
    run = parts[0]
    tensor, piece, each = run.local.tensor.detach(), run.local.piece, run.local.tensor.element_size()
    begin = (tensor.storage_offset() + piece.base + run.start) * each
    is_whole = (begin | run.num_bytes) % WORD_BYTES == 0 and not tensor.is_conj() and not tensor.is_neg()
    if len(parts) > 1:
        yield _copied_words(parts, packed)
    elif is_whole and is_in_order(piece):
        elements = region(tensor, piece.base + run.start, (run.num_elements,), (1,))
        yield from torch.split(elements.view(torch.uint8).view(torch.int32), PACKED_BYTES // WORD_BYTES)
    else:
        step = PACKED_BYTES // each
        for at in range(0, run.num_elements, step):
            yield _copied_words([LocalRun(run.local, run.start + at, min(step, run.num_elements - at))], packed)


def _copied_words(parts: Sequence[LocalRun], packed: torch.Tensor) -> torch.Tensor:
    """Copy runs into `packed`, one after the other, and return them as 32-bit words. The last word is filled up with zeros."""
    at = 0
    for part in parts:
        if part.num_elements:
            copy_run(*part, packed[at : at + part.num_bytes])
        at += part.num_bytes
    end = -(-at // WORD_BYTES)
    packed[at : end * WORD_BYTES].zero_()
    return packed.view(torch.int32)[:end]


def _weights(num: int, device: torch.device) -> torch.Tensor:
    """Return the weights of positions 0 to ``num - 1``, odd int64: splitmix64's pseudo-random numbers, alike everywhere."""
    # int64 shifts copy the sign bit, splitmix64's do not: the mask clears the copied bits.
    out = torch.arange(1, num + 1, dtype=torch.int64, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        out.bitwise_xor_((out >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return out.bitwise_or_(1)


def _signed(number: int) -> int:
    """Convert a number below 2^64 to the int64 with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def with_kind(fingerprints: U64, *, summed: bool) -> U64:
    """Return fingerprints whose lowest bit says how they were computed: 1 for a sum, 0 for a hash."""
    out: U64 = (fingerprints & ~np.uint64(1)) | np.uint64(summed)
    return out


def may_be_alike(first: U64, second: U64) -> Mask:
    """Return, for each pair of fingerprints, True if they are equal, or cannot be compared: one is a sum, one a hash."""
    out: Mask = (first == second) | ((first ^ second) & np.uint64(1) == 1)
    return out


def differing(checks: Checks, fingerprints: U64) -> I64:
    """Return the indices of the runs in `checks` that differ from the first run of their replica group, sorted by group.

    Parameters
    ----------
    fingerprints
        One for each run in `checks`: those of rank 0, in the order in which it was assigned its checks, then those of rank 1, …
    """
    rows = np.flatnonzero(~may_be_alike(fingerprints, fingerprints[checks.leader]))
    return rows[np.argsort(checks.group[rows], kind="stable")]


def differing_names(comm: Comm, plan: SavePlan | None, fingerprints: U64) -> frozenset[str]:
    """Compare the replicas of all ranks. On every rank, return the names of the tensors whose replicas differ.

    Collective: a gather of fingerprints to rank 0, then a broadcast of the names. Only rank 0 needs the plan.
    """

    def names_of(gathered: list[bytes]) -> list[str]:
        assert plan is not None
        rows = differing(plan.checks, np.frombuffer(b"".join(gathered), np.uint64))
        return [plan.tables.names[i] for i in np.unique(plan.checks.tensor[rows]).tolist()]

    return frozenset(merge_of_all(comm, fingerprints.tobytes(), names_of))


def compare_replicas(checks: Checks, names: Sequence[str], fingerprints: U64) -> None:
    """Raise an error if the members of a replica group have different fingerprints.

    Buffers under DDP and FSDP may differ: one warning names all that do. `fingerprints` as for `differing`. Raise `LayoutError`
    if replicas other than such buffers differ.
    """
    differs, leader = differing(checks, fingerprints), checks.leader
    buffers = differs[checks.replication[differs] == Replication.BUFFER]
    if len(buffers):
        listed = sorted({names[i] for i in checks.tensor[buffers].tolist()})
        warnings.warn(
            f"buffers differ between ranks; rank {checks.rank[leader[buffers[0]]]}'s are saved: {', '.join(listed)}", stacklevel=2
        )
    problems = {
        checks.tensor[i]: f"{names[checks.tensor[i]]}: ranks {checks.rank[leader[i]]} and {checks.rank[i]} hold it as the same, "
        "but their values differ"
        for i in reversed(differs[checks.replication[differs] != Replication.BUFFER].tolist())
    }
    if problems:
        advice = (
            "wrap values that differ on purpose in PerRank, declare shards with LocalShard, or give distinct names to different "
            "tensors"
        )
        raise LayoutError(summarize(list(problems.values()), advice))
