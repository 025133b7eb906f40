"""Fingerprints of replicas: how each rank takes those of its pieces, and how rank 0 compares them.

1. Where all of a rank's state lies in host memory, a small piece is hashed whole, and a large one in samples (`fingerprint`).
2. Where some of it lies on a device, the same samples, packed as 32-bit words, are summed up where they lie (`weighted_sums`), so
   that 8 bytes of each come here. The sum is that of each word times the weight of its place, modulo 2^64. Weights are odd and
   scattered: one word that differs always shows; several that differ hide each other with a chance of 2^-32 if it is in their
   highest bits alone, else far less. What lies in host memory beside that is summed up likewise, as other ranks may have it on a
   device.
3. On a device all of this is queued, and so is one copy of all sums; nobody waits for it before `Fingerprints.finish`. Whatever
   the size of the state, it takes 5 MiB there, and one large page of pinned memory.
4. Rank 0 compares the fingerprints of every replica group (`compare_replicas`). The lowest bit says how one was taken: of two
   that were taken in different ways nothing can be said.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgpack
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ...comm.protocol import Comm
from ...core.catalog.specs import Replication
from ...core.geometry.runs import I64
from ...core.planning.save_plan import Checks, SavePlan
from ...core.report import summarize
from ...errors import LayoutError
from ..common.copy_streams import CopyStreams, Mark
from ..common.host_memory import allocate
from ..common.tensor_bytes import LocalRun, bytes_in_place, chunks, copy_run
from .local_shards import LocalShards
from .messages import Receipt, RunColumns

U64 = NDArray[np.uint64]

WHOLE_BYTES = 1 << 20
"""Pieces up to this size are hashed whole."""

NUM_SAMPLES = 16
SAMPLE_BYTES = 64 << 10
WORD_BYTES = 4


class Fingerprints:
    """The fingerprints of the pieces that a rank is to check, taken in parts; those on a device are queued.

    Attributes
    ----------
    taken
        One for each check, all there after `finish`.
    """

    def __init__(
        self, copy_streams: CopyStreams, local_shards: LocalShards, checks: RunColumns, known: U64 | None = None
    ) -> None:
        self._copy_streams, self._local_shards, self._checks = copy_streams, local_shards, checks
        self.taken = np.zeros(len(checks.local), np.uint64) if known is None else known
        self._is_known = known is not None
        self._sums = torch.empty(0, dtype=torch.int64, device="cpu")
        self._come: list[tuple[list[int], torch.Tensor]] = []
        self._queued: list[Mark] = []

    def queue(self, chosen: Callable[[torch.Tensor], bool]) -> None:
        """Take the fingerprints of the checks of chosen tensors, or queue that; nothing where they are known."""
        if self._is_known:
            return
        by_device: dict[torch.device, dict[int, LocalRun]] = defaultdict(dict)
        for i, run in enumerate(self._local_shards.runs(self._checks)):
            if chosen(run.local.tensor):
                by_device[run.local.tensor.device][i] = run
        if self._copy_streams:
            self._queue_sums(by_device)
            return
        scratch = torch.empty(WHOLE_BYTES, dtype=torch.uint8, device="cpu")
        for runs in by_device.values():
            hashes = np.array([fingerprint(run, scratch) for run in runs.values()], np.uint64)
            self.taken[list(runs)] = with_kind(hashes, summed=False)

    def _queue_sums(self, by_device: dict[torch.device, dict[int, LocalRun]]) -> None:
        with self._copy_streams.entered():
            for device, runs in by_device.items():
                sums = weighted_sums(list(runs.values()), device)
                if device in self._copy_streams.by_device:
                    there, sums = sums, self._host_memory(len(runs))
                    sums.copy_(there, non_blocking=True)
                    self._queued.append(Mark(self._copy_streams.by_device[device].link))
                self._come.append((list(runs), sums.cpu()))

    @property
    def is_under_way(self) -> bool:
        """Whether something is queued that may not have come."""
        return bool(self._queued)

    def finish(self) -> None:
        """Wait for what is queued."""
        self.close()
        for numbers, sums in self._come:
            self.taken[numbers] = with_kind(sums.numpy().view(np.uint64), summed=True)
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


def all_fingerprints(local_shards: LocalShards, checks: RunColumns) -> U64:
    """Take the fingerprints of all checks."""
    fingerprints = Fingerprints(CopyStreams(local.tensor for _, local in local_shards.rows), local_shards, checks)
    fingerprints.queue(lambda _: True)
    fingerprints.finish()
    return fingerprints.taken


def samples_of(run: LocalRun) -> list[LocalRun]:
    """Choose what of a run is looked at: all of a small one, else `NUM_SAMPLES` blocks spread evenly, first and last included."""
    if run.num_bytes <= WHOLE_BYTES:
        return [run]
    size = SAMPLE_BYTES // run.local.tensor.element_size()
    spread = run.num_elements - size
    return [LocalRun(run.local, run.start + spread * i // (NUM_SAMPLES - 1), size) for i in range(NUM_SAMPLES)]


def fingerprint(run: LocalRun, scratch: torch.Tensor) -> int:
    """Return the XXH3-64 of the samples of a run."""
    each = run.local.tensor.element_size()
    hasher = xxhash.xxh3_64()
    whole = bytes_in_place(*run)  # one view for all samples: making a view takes longer than hashing what it shows
    for sample in samples_of(run):
        if whole is not None:
            begin = (sample.start - run.start) * each
            hasher.update(whole[begin : begin + sample.num_bytes])
            continue
        for chunk in chunks(*sample, scratch):
            hasher.update(chunk)
    return hasher.intdigest()


def weighted_sums(runs: Sequence[LocalRun], device: torch.device) -> torch.Tensor:
    """Sum up the samples of runs on one device, on its current stream; 1-D int64."""
    sums = torch.zeros(len(runs), dtype=torch.int64, device=device)
    samples = [[(sample, sample.num_bytes) for sample in samples_of(run)] for run in runs]
    num_words = max((-(-sum(size for _, size in of_run) // WORD_BYTES) for of_run in samples), default=0)
    weights = _weights(num_words, device)
    packed = torch.empty(num_words * WORD_BYTES, dtype=torch.uint8, device=device)
    products = torch.empty_like(weights)
    for i, of_run in enumerate(samples):
        at = 0
        for sample, size in of_run:
            if size:
                copy_run(*sample, packed[at : at + size])
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


def with_kind(fingerprints: U64, *, summed: bool) -> U64:
    """Say in the lowest bit how fingerprints were taken."""
    out: U64 = (fingerprints & ~np.uint64(1)) | np.uint64(summed)
    return out


def may_be_alike(ones: U64, others: U64) -> NDArray[np.bool_]:
    """Tell which fingerprints show no difference; of two that were taken in different ways nothing can be said."""
    out: NDArray[np.bool_] = (ones == others) | ((ones ^ others) & np.uint64(1) == 1)
    return out


def differing(checks: Checks, fingerprints: Sequence[U64]) -> tuple[I64, I64]:
    """Find the rows that differ from the first of their replica group, by the fingerprints of all ranks; and each row's first."""
    if not len(checks.group):
        return checks.group, checks.group
    by_rank = np.argsort(checks.rank, kind="stable")
    of_row = np.empty(len(by_rank), np.uint64)
    of_row[by_rank] = np.concatenate(fingerprints)
    new = np.concatenate([[True], checks.group[1:] != checks.group[:-1]])
    leader = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    return np.flatnonzero(~may_be_alike(of_row, of_row[leader])), leader


def differing_names(comm: Comm, plan: SavePlan | None, fingerprints: U64) -> frozenset[str]:
    """Find on every rank the tensors whose replicas differ, by the fingerprints of all; rank 0 has the plan."""
    gathered = comm.gather(fingerprints.tobytes())
    names: list[str] = []
    if gathered is not None:
        assert plan is not None
        rows, _ = differing(plan.checks, [np.frombuffer(data, np.uint64) for data in gathered])
        names = [plan.tables.names[i] for i in np.unique(plan.checks.tensor[rows]).tolist()]
    return frozenset(msgpack.unpackb(comm.broadcast(msgpack.packb(names))))


def compare_replicas(checks: Checks, names: Sequence[str], receipts: Sequence[Receipt]) -> None:
    """Compare the fingerprints of every replica group; buffers under DDP may differ, with one warning."""
    differs, leader = differing(checks, [receipt.fingerprints for receipt in receipts])
    buffers = differs[checks.replication[differs] == Replication.BUFFER]
    if len(buffers):
        listed = sorted({names[i] for i in checks.tensor[buffers].tolist()})
        warnings.warn(
            f"buffers differ between DDP ranks; rank {checks.rank[leader[buffers[0]]]}'s are saved: {', '.join(listed)}",
            stacklevel=2,
        )
    problems = {
        checks.tensor[i]: f"{names[checks.tensor[i]]}: ranks {checks.rank[leader[i]]} and {checks.rank[i]} hold it as the same, "
        "but their values differ"
        for i in reversed(differs[checks.replication[differs] != Replication.BUFFER].tolist())
    }
    if problems:
        advice = (
            "wrap values of each rank's own in PerRank, declare shards with LocalShard, or give different tensors distinct names"
        )
        raise LayoutError(summarize(list(problems.values()), advice))
