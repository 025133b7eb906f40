"""Writing in the caller what lies on a device: through a ring of pinned memory, which a thread fills while the caller writes.

To copy each tensor to where it is written would wait for the device every time, and take pageable memory, which is slower.
"""

from __future__ import annotations

import threading

from ...errors import UsageError
from ..common.host_memory import POOL
from .async_save import take_ring
from .messages import Receipt
from .options import SaveJob
from .staged_fingerprints import StagedFingerprints
from .staging import Staging
from .write import lay_out, write_files

RING_BYTES = 64 << 20
"""Of which a part is copied, a part is written, and a part is free."""


def write_staged(job: SaveJob) -> Receipt:
    """Write and make durable all that this rank was assigned; as `write_assignment`.

    Raises
    ------
    StorageError
        The store refused; what this rank had written is removed.
    UsageError
        The system gives no thread.
    """
    local_shards, assignment, recorder = job.local_shards, job.agreed.assignment, job.recorder
    layouts = lay_out(local_shards, assignment, job.comm.rank)
    ring = take_ring(local_shards, layouts, RING_BYTES)
    staging = Staging(local_shards, assignment, layouts, ring)
    marks = StagedFingerprints(staging.lanes, local_shards, assignment.checks, job.fingerprints)

    def fill() -> None:
        began = recorder.now()
        try:
            num_bytes = staging.fill(lambda _: True)
            with recorder.step("compare"):
                marks.queue(lambda _: True)
            staging.settle()
            marks.finish()
            recorder.add("stage", began, num_bytes)
            staging.finish()
        except BaseException as error:  # whatever it is, the writer must not wait for ever
            staging.fail(error)

    thread = threading.Thread(target=fill, name="reshard-ckpt-stage")
    try:
        thread.start()
    except RuntimeError as error:
        raise UsageError(f"no thread to copy from the device in can be started ({error}); end some, or save later") from error
    try:
        receipt = write_files(job.storage, layouts, staging.drain, marks.marks, recorder, sha256=job.options.sha256)
        staging.wait_finished()
        return receipt
    except BaseException as error:
        staging.fail(error)
        raise
    finally:
        thread.join()
        staging.close()
        marks.close()
        POOL.give_back(ring)
