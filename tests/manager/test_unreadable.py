"""A store that cannot be read, for a while or on one rank: that is no damage of one checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import CorruptError, StorageError
from reshard_ckpt.manager import restoring
from tests.manager.test_manager import damage
from tests.reliability.faults import fails, faulty
from tests.reliability.ranks import LOCAL, Job
from tests.reliability.states import NEW, OLD, expected, plain
from tests.reliability.test_sick_ranks import SIZE, state


@pytest.fixture
def managers(job: Job, tmp_path: Path) -> Iterator[list[Manager]]:
    """Of a run with an old and a new checkpoint."""
    managers = job.run(lambda rank: Manager(tmp_path))
    job.run(lambda rank: managers[rank].save(1, state(rank, OLD)))
    job.run(lambda rank: managers[rank].save(2, state(rank, NEW)))
    yield managers
    job.run(lambda rank: managers[rank].close())


def latest(job: Job, managers: list[Manager]) -> list[Any]:
    """What each rank loads: the step, once the state is proved right, or the error."""

    def load(rank: int) -> int:
        into = state(rank, 7)
        found = managers[rank].load_latest(into)
        wanted = {1: OLD, 2: NEW}[found.step]
        assert into["extra"]["step"] == expected(wanted)["extra.step"]
        return found.step

    return job.run(load)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize(("call", "thread"), [("preadv", ""), ("read", "rank 1")])
def test_no_older_one_is_loaded_on_any_rank(job: Job, managers: list[Manager], number: int, call: str, thread: str):
    with faulty(call, None, fails(number), thread) as fault:  # each call: a document that ESTALE took away is read again
        outcomes = latest(job, managers)
    assert fault.calls
    assert {type(error) for error in outcomes} == {StorageError}, outcomes
    for error in outcomes:
        assert os.strerror(number) in str(error)
        assert "nobody knows whether step 2 is damaged" in str(error)
    assert latest(job, managers) == [2] * SIZE


@pytest.mark.filterwarnings("ignore:passed over")
def test_damage_is_passed_over_on_all_ranks(job: Job, managers: list[Manager], tmp_path: Path):
    damage(str(tmp_path), 2)
    assert latest(job, managers) == [1] * SIZE


def test_ranks_that_meet_different_things_decide_alike(job: Job, managers: list[Manager], monkeypatch: pytest.MonkeyPatch):
    errors = [CorruptError("a file is missing"), *[StorageError("the device failed")] * (SIZE - 1)]

    def load(*args: Any, **options: Any) -> Any:
        raise errors[LOCAL.rank]

    with monkeypatch.context() as patched:
        patched.setattr(restoring, "load_given", load)
        outcomes = latest(job, managers)
    assert {type(error) for error in outcomes} == {StorageError}, outcomes
    assert all("the device failed" in str(error) for error in outcomes)
    assert latest(job, managers) == [2] * SIZE


def test_one_that_stays_unreadable_can_be_deleted(job: Job, managers: list[Manager]):
    with faulty("preadv", None, fails(errno.EIO)):
        assert {type(error) for error in latest(job, managers)} == {StorageError}
        assert job.run(lambda rank: managers[rank].delete(2)) == [None] * SIZE
    assert latest(job, managers) == [1] * SIZE


@pytest.mark.parametrize("call", ["write", "pwrite"])
def test_a_job_begins_and_loads_where_the_disk_is_full(tmp_path: Path, call: str):
    with Manager(tmp_path) as manager:
        manager.save(1, plain(NEW))
    into = plain(OLD)
    with faulty(call, None, fails(errno.ENOSPC)) as fault, Manager(tmp_path, interval="auto") as manager:
        found = manager.load_latest(into)
    assert fault.calls
    assert found is not None
    assert into["extra"]["step"] == NEW
