"""The copy in host memory of the bytes that one rank saves, made while they are written or before the state changes again.

`StagedCopy` fills the ring of a `Staging`, and takes the fingerprints of replicas on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from ...format.files import BLOCK_BYTES
from ..common.host_memory import POOL
from ..common.tensor_bytes import on_device
from .local_shards import LocalShards
from .messages import RunColumns
from .options import SaveJob
from .replicas import Fingerprints
from .staging import MIN_RING_BYTES, Staging, ring_bytes
from .unchanged import find_unchanged
from .write import WRITE_BYTES, Chunks, FileLayout, chunks_in_place

RING_BYTES = 64 << 20
"""Size of the ring of a synchronous save in bytes: one part is being copied into, one is being written, and one is free."""


class StagedCopy:
    """The copy of one rank's files in a ring of host memory, with the fingerprints of its replicas."""

    def __init__(self, job: SaveJob, layouts: Sequence[FileLayout], ring: torch.Tensor) -> None:
        self.ring, self._recorder = ring, job.recorder
        local_shards, assignment = job.local_shards, job.assignment
        self.staging = Staging(local_shards, assignment, layouts, ring)
        runs = local_shards.runs(assignment.checks) if job.fingerprints is None else ()
        self._fingerprints = Fingerprints(self.staging.copy_streams, runs, shift=job.shift)
        taken = self._fingerprints.taken if job.fingerprints is None else job.fingerprints
        self.chunks = Chunks(layouts, self.staging.drain, taken, self.staging.wait_finished, job.unchanged)
        self._look: SecondLook | None = None

    def fill(
        self,
        chosen: Callable[[torch.Tensor], bool] = lambda tensor: True,
        *,
        last: bool = True,
        queued: Callable[[], None] = lambda: None,
        looks_again: bool = False,
    ) -> bool:
        """Copy chosen tensors into the ring, and fingerprint their replicas.

        Parameters
        ----------
        chosen
            Tells whether a tensor is copied by this call.
        last
            As for `Staging.fill`.
        queued
            Called once all copies are queued on devices, if some of them may not have ended.
        looks_again
            Compare the copy with the tensors after copying, as `SecondLook` does.

        Returns
        -------
        bool
            With `looks_again`, whether a tensor changed while it was copied; else False.
        """
        staging, recorder = self.staging, self._recorder
        look = self._look = SecondLook(staging, chosen) if looks_again else None
        began = recorder.now()
        num_bytes = staging.fill(chosen, last=last)
        is_copied = not staging.is_under_way
        if is_copied:
            recorder.add("stage", began, num_bytes)
        with recorder.step("compare"):
            self._fingerprints.queue(chosen)
            if look is not None:
                look.queue()
        if not is_copied or self._fingerprints.is_under_way:
            queued()
        if not is_copied:
            staging.settle()
            recorder.add("stage", began, num_bytes)
        self._fingerprints.finish()
        return look is not None and look.has_changed()

    def fill_all(self, fill: Callable[[], object]) -> BaseException | None:
        """Call `fill`, which makes the last copies; then tell the writing thread that all are made.

        If `fill` raises, also raise its error in the writing thread, which would wait for ever, and return it; else return None.
        """
        try:
            fill()
            self.staging.finish()
        except BaseException as error:  # also an interrupt: the writer must not wait for ever
            self.staging.fail(error)
            return error
        return None

    @contextmanager
    def changed(self, job: SaveJob) -> Iterator[Chunks]:
        """Wait until all is copied, and yield the chunks that the base checkpoint lacks. The ring must hold all files."""
        self.staging.wait_finished()
        local_shards, items = self.staging.copied_items(job.local_shards)
        # Each copied item is a row of its own, so the bits of a row are those of its items.
        of_row = job.assignment.bits
        bits = {i: of_row[row] for i, row in enumerate(job.assignment.items.local.tolist()) if row in of_row}
        copied = replace(job, local_shards=local_shards, assignment=replace(job.assignment, items=items, bits=bits))
        rest = without_unchanged(copied)
        yield chunks_in_place(rest.local_shards, rest.assignment, rest.comm.rank, self.chunks.fingerprints, rest.unchanged)

    def close(self) -> None:
        """Wait until no device writes into the ring, or into the memory of fingerprints, any more."""
        self.staging.close()
        self._fingerprints.close()
        if self._look is not None:
            self._look.close()


class SecondLook:
    """Tells whether the copies of some tensors show them all at one moment, although training went on while they were copied.

    After the last copy, each tensor is hashed again. If each still equals its copy, no tensor changed in between, so the copies
    show one moment. In host memory the copy itself is hashed. The copies from a device are slow to read back there, so the
    tensors' sums from before the first copy stand for them; a change that is undone in between goes unseen.

    Make it before anything is copied, for a ring that holds all files.
    """

    def __init__(self, staging: Staging, chosen: Callable[[torch.Tensor], bool]) -> None:
        streams = staging.copy_streams
        live, copied = staging.copied_runs(chosen)
        self._now = Fingerprints(streams, live, between_ranks=False)
        self._copied = Fingerprints(streams, live if streams else copied, between_ranks=False)
        self._is_host = not streams
        if not self._is_host:
            self._copied.queue(lambda _: True)

    def queue(self) -> None:
        """Hash all tensors again. On a device, only queue the work. Call it once all copies are made or queued."""
        if self._is_host:
            self._copied.queue(lambda _: True)
        self._now.queue(lambda _: True)

    def has_changed(self) -> bool:
        """Wait for the queued hashes, and return whether a tensor differs from its copy; on a device, from its earlier sums."""
        self._copied.finish()
        self._now.finish()
        return not np.array_equal(self._copied.taken, self._now.taken)

    def close(self) -> None:
        """Wait until no device writes hashes or sums of tensors into host memory any more."""
        self._copied.close()
        self._now.close()


def without_unchanged(job: SaveJob) -> SaveJob:
    """Compare this rank's bytes with the base checkpoint of a save, and return the save job that writes only the other bytes."""
    assert job.base is not None
    items, device = job.assignment.items, job.local_shards.device_to_pin
    with job.recorder.step("compare"), on_device(device):
        scratch = POOL.take(WRITE_BYTES if device is None else RING_BYTES, pinned=device is not None)
        try:
            unchanged = find_unchanged(job.base, job.local_shards, items, scratch)
        finally:
            POOL.give_back(scratch)
    parts = unchanged.written
    rest = RunColumns(items.local[parts.local], parts.start, parts.count)
    if job.picked is not None:
        unchanged = job.picked.restored(unchanged)
    # Only runs of whole blocks gain from data that begin at a block.
    aligned = any(run.num_bytes >= BLOCK_BYTES for run in job.local_shards.runs(rest))
    return replace(job, assignment=replace(job.assignment, items=rest, aligned=aligned), unchanged=unchanged)


def take_ring(local_shards: LocalShards, layouts: Sequence[FileLayout], host_buffer_bytes: int | None) -> torch.Tensor:
    """Take a ring of host memory, 1-D uint8, from the pool: as large as these files, or `host_buffer_bytes` if that is less.

    It is pinned if a tensor lies on a device. It is never smaller than the lesser of all bytes and `MIN_RING_BYTES`.
    """
    wanted = ring_bytes(layouts)
    if host_buffer_bytes is not None:
        wanted = min(wanted, max(host_buffer_bytes, MIN_RING_BYTES))
    device = local_shards.device_to_pin
    with on_device(device):
        return POOL.take(wanted, pinned=device is not None)[:wanted]
