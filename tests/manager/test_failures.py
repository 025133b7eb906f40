"""``on_failure="warn"``: background saves that fail do not end training, until too many fail in a row."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reshard_ckpt.checkpoint import Manager, PerRank, SaveHandle
from reshard_ckpt.errors import CheckpointError, StorageError, UsageError
from tests.launch import on_ranks
from tests.manager.test_manager import empty, state
from tests.reliability.faults import fails, faulty


def failing_save(manager: Manager, step: int, call: str = "write", of: Any = None) -> SaveHandle:
    """Save while each call of this name fails, and wait until that is over."""
    with faulty(call, None, fails(errno.EIO)):
        handle = manager.async_save(step, of or state(step))
        handle.running.wait()
    return handle


@pytest.mark.parametrize("call", ["write", "statvfs"])  # in the background; and before the save goes there
def test_failed_saves_are_counted_and_training_goes_on(call: str, tmp_path: Path):
    with Manager(tmp_path, keep_last=1, on_failure="warn") as manager:
        manager.save(1, state(1))
        handle = failing_save(manager, 2, call)
        assert handle.failed()
        with pytest.raises(StorageError):
            handle.result()
        with pytest.warns(UserWarning, match=r"failed in the background \(1 of at most 2 in a row\).*step 2: StorageError"):
            failing_save(manager, 3, call)
        assert manager.steps() == [1]
        assert manager.load_latest(empty()).step == 1
        with pytest.warns(UserWarning, match=r"2 of at most 2 in a row.*step 3"):
            assert manager.async_save(4, state(4)).result().failed_before == 2
        assert [line.split(":")[0] for line in manager.failures] == ["step 2", "step 3"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = manager.async_save(5, state(5)).result()
        assert (report.failed_before, manager.failures) == (0, ())
    with Manager(tmp_path) as manager:
        assert manager.steps() == [5]
        assert manager.load_latest(empty()).step == 5


def test_too_many_in_a_row_are_raised(tmp_path: Path):
    with Manager(tmp_path, on_failure="warn", max_failures=2) as manager:
        manager.save(1, state(1))
        failing_save(manager, 2)
        with pytest.warns(UserWarning, match="step 2"):
            failing_save(manager, 3)
        with (
            pytest.raises(CheckpointError, match="2 saves in a row failed.*max_failures=2: step 2: .*; step 3: "),
            pytest.warns(),
        ):
            manager.async_save(4, state(4))
        assert manager.save(5, state(5)).failed_before == 0
        assert manager.steps() == [1, 5]


def test_the_last_saves_of_a_job_count_when_it_closes(tmp_path: Path):
    manager = Manager(tmp_path, on_failure="warn", max_failures=2)
    failing_save(manager, 1)
    with pytest.warns(UserWarning, match="1 of at most 1"):
        manager.close()
    manager = Manager(tmp_path, on_failure="warn", max_failures=1)
    failing_save(manager, 2)
    with pytest.raises(CheckpointError, match="1 saves in a row|step 2"), pytest.warns():
        manager.close()
    assert Manager(tmp_path, read_only=True).steps() == []


def test_a_state_that_cannot_be_saved_is_raised_at_once(tmp_path: Path):
    with Manager(tmp_path, on_failure="warn") as manager, pytest.raises(UsageError):
        manager.async_save(1, {"x": object()})


def test_the_options_are_checked(tmp_path: Path):
    with pytest.raises(UsageError, match="on_failure='ignore': pass one of 'raise', 'warn'"):
        Manager(tmp_path, on_failure="ignore")
    with pytest.raises(UsageError, match="max_failures=0"):
        Manager(tmp_path, on_failure="warn", max_failures=0)
    with pytest.raises(UsageError, match="max_failures=2: is for on_failure='warn', and not for on_failure='raise'"):
        Manager(tmp_path, max_failures=2)


@on_ranks(2)
def test_all_ranks_say_the_failure_of_one(tmp_path: Path):
    own = {"own": PerRank(bytes(100_000)), **state(1)}  # each rank writes something
    with Manager(tmp_path, keep_last=1, on_failure="warn", max_failures=3) as manager:
        manager.save(1, own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (2, 3):
                if dist.get_rank() == 1:
                    failing_save(manager, step, of=own)
                else:
                    manager.async_save(step, own).running.wait()
            report = manager.async_save(4, own).result()
        said = [str(w.message) for w in caught if "in the background" in str(w.message)]
        assert len(said) == report.failed_before == 2
        assert all("rank 1" in line for line in said)
        assert [line.split(":")[0] for line in manager.failures] == ["step 2", "step 3"]
        assert manager.latest() == 4
