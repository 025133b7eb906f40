"""An error of any operation of a store leaves the old checkpoint or none, and no file of the save. (Kills: `test_power_cut`.)"""

from __future__ import annotations

import uuid
from pathlib import Path
from unittest import mock

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import saving
from reshard_ckpt.errors import CheckpointError, StorageError
from reshard_ckpt.storage import Storage, open_storage
from tests.jobs import save_job
from tests.reliability.states import NEW, OLD, held, plain, tensors_of, values_of_rank
from tests.storage.faulty import FailAt, FaultyStorage

pytestmark = pytest.mark.filterwarnings("ignore:saved, but what it replaced is not all deleted")


def save(kind: str, storage: Storage, path: str) -> None:
    if "rank" in kind:  # the ranks run in turn, and the error is the last one's
        save_job(storage, [tensors_of(r, 4, NEW) for r in range(4)], [values_of_rank(NEW)] * 4)
        return
    with mock.patch.object(saving, "open_storage", return_value=storage):
        if kind == "sync":
            checkpoint.save(path, plain(NEW))
        else:
            checkpoint.async_save(path, plain(NEW), staging=kind).result()


@pytest.mark.parametrize("old", [None, OLD], ids=["first", "overwrite"])
@pytest.mark.parametrize("kind", ["sync", "eager", "rank 3 of 4"])
def test_an_error_of_any_operation_leaves_the_old_one_and_no_file_of_the_rank(tmp_path: Path, old: int | None, kind: str):
    for n in range(100):
        memory, fail = f"memory://{uuid.uuid4().hex}", FailAt(n, StorageError("disk full"))
        if old is not None:
            checkpoint.save(memory, plain(old))
        with open_storage(memory) as storage:
            message = ""
            try:
                save(kind, FaultyStorage(storage, fail), memory)
            except CheckpointError as error:
                message = str(error)
            failed = bool(message)
            assert ("disk full" in message) == failed
            assert held(memory) == (old if failed else NEW)
            if failed and "rank" not in kind and fail.seen[-1][0] != "publish":
                kept = checkpoint.catalog(memory).save_id if old else None
                assert {key.split("/")[0] for key, _ in storage.list() if "/" in key} <= {kept}
            storage.delete([key for key, _ in storage.list()])
        if len(fail.seen) <= n:
            break
    else:
        pytest.fail("the save has more operations than were tried")
