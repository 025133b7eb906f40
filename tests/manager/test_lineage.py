"""A run that goes back to an older step: what counts from then on, whatever the options of its managers."""

from __future__ import annotations

import errno
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.checkpoint.listing import list_run
from reshard_ckpt.engine.common.lineage import LINEAGE
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, StorageError
from reshard_ckpt.format.files import RUN_LOCK_KEY
from reshard_ckpt.manager.attempts import ATTEMPTS
from reshard_ckpt.storage import open_storage
from tests.cli.running import run
from tests.damage import flip
from tests.manager.test_manager import damage, empty, holds, state
from tests.reliability.faults import fails, faulty
from tests.reliability.ranks import jobs


@pytest.fixture(params=["store", "memory"])
def options(request: pytest.FixtureRequest, shm: Path) -> dict[str, Any]:
    return {} if request.param == "store" else {"memory": Memory(copies=0, folder=str(shm))}


def branched(root: Path, **options: Any) -> None:
    """Save 10 … 50, go back to 20, and save 30, 35 and 38 anew."""
    with Manager(root, **options) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.save(step, state(step), metric=float(step))
    with Manager(root, **options) as manager:
        manager.load(20, empty())
        for step in (30, 35, 38):
            manager.save(step, state(step + 1000), metric=float(step))


def test_a_restart_goes_on_with_the_new_branch(tmp_path: Path, options: dict[str, Any]):
    branched(tmp_path, **options)
    with Manager(tmp_path, **options) as manager:
        assert (manager.steps(), manager.latest(), manager.best()) == ([10, 20, 30, 35, 38], 38, 38)
        loaded = empty()
        found = manager.load_latest(loaded)
        assert found.step == 38
        assert holds(loaded, 1038)
    with Manager(tmp_path, read_only=True) as reader:
        assert (reader.latest(), reader.best()) == (38, 38)


def test_a_compacted_step_keeps_its_place_in_the_lineage(tmp_path: Path):
    """`compact` gives a checkpoint a new save id; a step that the run went back from must not count again by it."""

    def shared(step: int) -> dict[str, Any]:
        return {**state(step), "frozen": torch.arange(1 << 17)}

    with Manager(tmp_path, incremental=True) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, shared(step))
        manager.load(20, shared(0))
        manager.save(25, shared(25))
        for step in (40, 20, 25):
            assert checkpoint.compact(tmp_path / f"step_{step}").num_files
        assert manager.steps() == [10, 20, 25]
    with Manager(tmp_path, incremental=True) as manager:
        assert (manager.steps(), manager.latest()) == ([10, 20, 25], 25)
        assert [line.step for line in list_run(str(tmp_path)) if line.superseded] == [30, 40]
        with pytest.raises(CheckpointNotFound, match=r"load the newest as .*step_25'"):
            checkpoint.catalog(tmp_path)
        loaded = shared(0)
        manager.load(40, loaded)
        assert holds(loaded, 40)
        manager.save(45, shared(45))  # step 40 counts again, and step 25 no less than before
        assert manager.steps() == [10, 20, 25, 40, 45]
        checkpoint.save(tmp_path / "other", shared(45), base=tmp_path / "step_45")
        assert checkpoint.compact(tmp_path / "step_45").num_files
        assert checkpoint.compact(tmp_path / "other").num_files
        assert manager.steps() == [10, 20, 25, 40, 45]


def test_pruning_keeps_the_new_branch(tmp_path: Path, options: dict[str, Any]):
    branched(tmp_path, **options)
    with Manager(tmp_path, keep_last=2, **options) as manager:
        manager.load_latest(empty())
        manager.save(39, state(39))
        assert manager.steps() == [38, 39]
        for step in (60, 70):
            manager.save(step, state(step))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_60", "step_70"]


def test_a_manager_with_other_options_sees_what_counts(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    branched(tmp_path, memory=memory)
    with Manager(tmp_path) as manager:
        assert manager.load_latest(empty()).step == 38
    shutil.rmtree(tmp_path)
    branched(tmp_path)
    with Manager(tmp_path, memory=memory) as manager:
        assert manager.load_latest(empty()).step == 38


def test_what_is_in_memory_of_before_a_job_without_memory_does_not_count(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.save(1, state(1))
    manager.async_save(9, state(9)).result()
    manager.__exit__(RuntimeError, RuntimeError(), None)  # killed: 9 is in memory alone
    with Manager(tmp_path) as manager:
        assert manager.load_latest(empty()).step == 1
        manager.save(2, state(2))
    with Manager(tmp_path, memory=memory) as manager:
        assert manager.load_latest(empty()).step == 2


def test_a_listing_marks_the_steps_that_the_run_went_back_from(tmp_path: Path):
    for step in (5, 60):  # those of another library go by the names of their folders
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / f"step_{step}")
    branched(tmp_path)
    listed = {line.step: line.superseded for line in list_run(tmp_path)}
    assert listed == {5: False, 10: False, 20: False, 30: False, 35: False, 38: False, 40: True, 50: True, 60: True}
    lines = run("inspect", tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("(superseded)")] == ["40", "50", "60"]
    assert [line["superseded"] for line in run("inspect", tmp_path, "--json").json["steps"]] == [*listed.values()]
    with pytest.raises(CheckpointNotFound, match="load the newest as '.*/step_38'"):
        checkpoint.read(tmp_path)


def test_a_listing_names_a_damaged_lineage_and_lists_the_steps_all_the_same(tmp_path: Path):
    branched(tmp_path)
    (tmp_path / LINEAGE.key).write_bytes(b"?")
    shown = run("inspect", tmp_path, "--json").json["steps"]
    assert [line["step"] for line in shown] == [10, 20, 30, 35, 38, 40, 50, None]
    assert "this note cannot be read" in shown[-1]["problem"]
    assert "this note cannot be read" in run("inspect", tmp_path).out


def files(root: Path) -> dict[Path, bytes]:
    """All files of a run but its lock."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != RUN_LOCK_KEY}


def test_a_load_writes_nothing_and_hides_nothing(tmp_path: Path, options: dict[str, Any]):
    with Manager(tmp_path, **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    before = files(tmp_path)
    with Manager(tmp_path, **options) as manager:
        for step in (1, 2):  # to average them
            manager.load(step, empty())
        assert manager.steps() == [1, 2, 3]
        assert manager.load_latest(empty()).step == 3
        assert files(tmp_path) == before
        manager.save(4, state(4))
        assert manager.steps() == [1, 2, 3, 4]  # it went on from the last that was loaded


def test_a_reader_follows_a_job_that_goes_back(tmp_path: Path):
    with Manager(tmp_path) as manager, Manager(tmp_path, read_only=True) as reader:
        for step in (1, 2, 3):
            manager.save(step, state(step), metric=float(step))
        assert (reader.steps(), reader.best()) == ([1, 2, 3], 3)
        reader.load(1, empty())  # which changes nothing for the job
        manager.load(1, empty())
        manager.save(2, state(22), metric=0.5)
        assert (reader.steps(), reader.best()) == ([1, 2], 1)
        manager.save(3, state(33), metric=2.0)
        assert (reader.steps(), reader.best()) == ([1, 2, 3], 3)


def test_all_ranks_go_by_it(tmp_path: Path):
    with jobs() as make:
        job = make(2)
        managers = job.run(lambda rank: Manager(tmp_path))

        def go_back(rank: int) -> list[list[int]]:
            manager, seen = managers[rank], []
            for step in (1, 2, 3):
                manager.save(step, state(step))
            manager.load(1, empty())
            seen.append(manager.steps())
            manager.async_save(2, state(22)).result()
            return [*seen, manager.steps()]

        assert job.run(go_back) == [[[1, 2, 3], [1, 2]]] * 2
        job.run(lambda rank: managers[rank].close())
        managers = job.run(lambda rank: Manager(tmp_path))
        assert job.run(lambda rank: managers[rank].load_latest(empty()).step) == [2, 2]
        job.run(lambda rank: managers[rank].close())


@pytest.mark.parametrize("note", [LINEAGE, ATTEMPTS], ids=["lineage", "attempts"])
def test_a_damaged_note_is_named(tmp_path: Path, note: Any):
    branched(tmp_path, interval="auto")
    path = tmp_path / note.key
    flip(path)
    if note is ATTEMPTS:
        with pytest.warns(UserWarning, match=f"{path}.*a new log"):
            Manager(tmp_path, interval="auto").close()
        return
    for options in ({}, {"read_only": True}):
        with pytest.raises(CorruptError, match=f"{path}: this note cannot be read.*or delete it"):
            Manager(tmp_path, **options)
    path.unlink()
    with Manager(tmp_path) as manager:
        assert manager.latest() == 50


def test_a_full_store_hinders_no_load_and_the_next_save_notes_it(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    with Manager(tmp_path, **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))

    def full(*_: Any) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(type(LINEAGE), "keep", full)
        manager = Manager(tmp_path, interval="auto", **options)
        manager.load(1, empty())
        with pytest.warns(UserWarning, match="from which step this job went on could not be written: no space"):
            manager.save(2, state(22))
    manager.save(4, state(4))
    manager.close()
    with Manager(tmp_path, **options) as manager:
        assert manager.steps() == [1, 2, 4]


def test_a_damaged_newest_that_was_passed_over_is_no_reason_to_go_back_further(tmp_path: Path):
    with Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    damage(str(tmp_path), 3)
    with Manager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="passed over"):
            assert manager.load_latest(empty()).step == 2
        manager.save(4, state(4))
    with Manager(tmp_path) as manager:
        assert manager.steps() == [1, 2, 4]
        assert checkpoint.verify(tmp_path / "step_4").ok
        with open_storage(tmp_path) as storage:
            assert LINEAGE.read(storage).starts[-1][1] == 2


@pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store")
def test_a_store_that_is_full_at_a_restart_hinders_neither_the_load_nor_saves_to_memory(tmp_path: Path, shm: Path):
    options: dict[str, Any] = {"memory": Memory(copies=0, folder=str(shm)), "persist_every": 1000, "interval": "auto"}
    manager = Manager(tmp_path, **options)
    manager.save(1, state(1))
    manager.async_save(5, state(5)).result()
    manager.__exit__(RuntimeError, RuntimeError(), None)
    with faulty("write", None, fails(errno.ENOSPC)):
        manager = Manager(tmp_path, **options)
        assert manager.load_latest(empty()).step == 5
        manager.load(1, empty())
        with pytest.warns(UserWarning, match="from which step this job went on could not be written"):
            manager.async_save(2, state(2)).result()
        manager.__exit__(RuntimeError, RuntimeError(), None)
    with Manager(tmp_path, **options) as manager:
        assert manager.load_latest(empty()).step == 2  # the newest attempt in memory
        manager.load(1, empty())
        manager.async_save(3, state(3)).result()
        manager.__exit__(RuntimeError, RuntimeError(), None)
    with Manager(tmp_path, **options) as manager:
        assert manager.load_latest(empty()).step == 3
