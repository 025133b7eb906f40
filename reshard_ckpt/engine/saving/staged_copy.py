"""The copy of what one rank writes, in host memory: made while it is written, or before the state changes again.

`StagedCopy` fills the ring of a `Staging`, and takes the fingerprints of replicas on the way. `write_staged` writes in the caller
what lies on a device: through a ring of pinned memory, which a thread fills meanwhile. To copy each tensor to where it is written
would wait for the device every time, and take pageable memory, which is slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...errors import UsageError
from ..common.copy_streams import has_streams, on_device
from ..common.host_memory import POOL
from .local_shards import LocalShards
from .messages import Receipt
from .options import SaveJob
from .replicas import Fingerprints
from .staging import MIN_RING_BYTES, Staging, ring_bytes
from .write import FileLayout, lay_out, write_files

RING_BYTES = 64 << 20
"""Of which a part is copied, a part is written, and a part is free."""


class StagedCopy:
    """What one rank writes in a save: copied into a ring, and fingerprinted."""

    def __init__(self, job: SaveJob, layouts: Sequence[FileLayout], ring: torch.Tensor) -> None:
        self.layouts, self.ring, self._recorder = layouts, ring, job.recorder
        local_shards, assignment = job.local_shards, job.agreed.assignment
        self.staging = Staging(local_shards, assignment, layouts, ring)
        runs = local_shards.runs(assignment.checks)
        self.fingerprints = Fingerprints(self.staging.copy_streams, runs, job.fingerprints, shift=job.shift)
        self._look: SecondLook | None = None

    def fill(
        self,
        chosen: Callable[[torch.Tensor], bool] = lambda tensor: True,
        *,
        last: bool = True,
        queued: Callable[[], None] = lambda: None,
        looks_again: bool = False,
    ) -> bool:
        """Copy and fingerprint chosen tensors.

        Parameters
        ----------
        last
            As for `Staging.fill`.
        queued
            Called as soon as all of this is queued on devices, and not yet there.
        looks_again
            Compare what was copied with what the tensors hold then, as `SecondLook` does.

        Returns
        -------
        bool
            Whether that differs.
        """
        staging, recorder = self.staging, self._recorder
        look = self._look = SecondLook(staging, chosen) if looks_again else None
        began = recorder.now()
        num_bytes = staging.fill(chosen, last=last)
        is_copied = not staging.is_under_way
        if is_copied:
            recorder.add("stage", began, num_bytes)
        with recorder.step("compare"):
            self.fingerprints.queue(chosen)
            if look is not None:
                look.queue()
        if not is_copied or self.fingerprints.is_under_way:
            queued()
        if not is_copied:
            staging.settle()
            recorder.add("stage", began, num_bytes)
        self.fingerprints.finish()
        return look is not None and look.has_changed()

    def close(self) -> None:
        """Wait until no device writes here any more."""
        self.staging.close()
        self.fingerprints.close()
        if self._look is not None:
            self._look.close()


class SecondLook:
    """Tells whether tensors held at one moment all that was copied of them, while their owner may have gone on.

    When all is copied, each is looked at again. If all then hold what was copied, there was a moment between the two at which
    they held it together. Of host memory the copy itself is compared. Of a device the copy is far away, so sums from before the
    first copy stand for it, and a change that was undone meanwhile is not seen.

    To be made before anything is copied, into a ring that holds all.
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
        """Look at all, or queue that, once all copies are made or queued."""
        if self._is_host:
            self._copied.queue(lambda _: True)
        self._now.queue(lambda _: True)

    def has_changed(self) -> bool:
        """Wait for what is queued, and compare."""
        self._copied.finish()
        self._now.finish()
        return not np.array_equal(self._copied.taken, self._now.taken)

    def close(self) -> None:
        """Wait until no device writes here any more."""
        self._copied.close()
        self._now.close()


def write_staged(job: SaveJob) -> Receipt:
    """Write and make durable all that this rank was assigned; as `write_assignment`.

    Raises
    ------
    StorageError
        The store refused; what this rank had written is removed.
    UsageError
        The system gives no thread.
    """
    layouts = lay_out(job.local_shards, job.agreed.assignment, job.comm.rank)
    copy = StagedCopy(job, layouts, take_ring(job.local_shards, layouts, RING_BYTES))
    staging = copy.staging

    def fill() -> None:
        try:
            copy.fill()
            staging.finish()
        except BaseException as error:  # whatever it is, the writer must not wait for ever
            staging.fail(error)

    thread = threading.Thread(target=fill, name="reshard-ckpt-stage")
    try:
        thread.start()
    except RuntimeError as error:
        raise UsageError(f"no thread to copy from the device in can be started ({error}); end some, or save later") from error
    try:
        fingerprints, sha256 = copy.fingerprints.taken, job.options.sha256
        receipt = write_files(job.storage, layouts, staging.drain, fingerprints, job.recorder, sha256=sha256)
        staging.wait_finished()
        return receipt
    except BaseException as error:
        staging.fail(error)
        raise
    finally:
        thread.join()
        copy.close()
        POOL.give_back(copy.ring)


def take_ring(local_shards: LocalShards, layouts: Sequence[FileLayout], host_buffer_bytes: int | None) -> torch.Tensor:
    """Take memory for the images of these files, or as much of it as the caller allows; pinned for what lies on a device."""
    wanted = ring_bytes(layouts)
    if host_buffer_bytes is not None:
        wanted = min(wanted, max(host_buffer_bytes, MIN_RING_BYTES))
    device = device_to_pin_for(local_shards)
    with on_device(device):
        return POOL.take(wanted, pinned=device is not None)[:wanted]


def device_to_pin_for(local_shards: LocalShards) -> torch.device | None:
    """Return a device that something of the state lies on, and that copies faster into pinned memory, if there is one."""
    devices = dict.fromkeys(local.tensor.device for _, local in local_shards.rows)
    return next(filter(has_streams, devices), None)
