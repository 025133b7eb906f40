"""A run's checkpoints under one root: named, pruned, passed over, locked; what is damaged or read on purpose."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager, Memory, saving
from reshard_ckpt.checkpoint.listing import list_run
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.engine.common.step_folders import find_steps, remove_step
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, MismatchError, StorageError, UsageError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.format.files import CATALOG_KEY
from reshard_ckpt.formats.source import reading
from reshard_ckpt.manager import run_folder
from reshard_ckpt.manager.retention import Retention
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.local import LocalStorage
from tests.checkpoint.references import referring
from tests.launch import ROOT
from tests.reliability.ranks import jobs
from tests.warm_python import warm_python


@pytest.fixture(params=["folder", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "run")
        return
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    with open_storage(name) as storage:
        storage.delete([key for key, _ in storage.list()])


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(1000, dtype=torch.float32) + step, "step": step}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "step": -1}


def holds(loaded: dict[str, Any], step: int) -> bool:
    return loaded["step"] == step and torch.equal(loaded["w"], state(step)["w"])


def damage(root: str, step: int) -> None:
    """Flip a bit of the last tensor byte of a step."""
    with open_storage(f"{root}/step_{step}") as storage:
        key = next(key for key, _ in storage.list() if key.endswith(".safetensors"))
        data = bytearray(storage.read(key, 4 << 20))
        data[-1] ^= 1
        storage.publish(key, bytes(data))


# --- which stay ---


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_the_newest_the_regular_and_the_best_stay(root: str, background: bool):
    metrics = {10: 0.1, 20: 0.9, 30: 0.2, 40: 0.3, 50: float("nan"), 60: 0.8, 70: 0.1}
    with Manager(root, keep_last=2, keep_every=30, keep_best=1) as manager:
        for step, metric in metrics.items():
            if background:
                manager.async_save(step, state(step), metric=metric)
            else:
                manager.save(step, state(step), metric=metric)
    with Manager(root, read_only=True) as manager:
        assert manager.steps() == [20, 30, 60, 70]
        assert manager.latest() == 70
        assert manager.best() == 20
    loaded = empty()
    checkpoint.load(f"{root}/step_30", loaded)
    assert holds(loaded, 30)


def test_a_restarted_manager_knows_the_metrics_of_before(root: str):
    with Manager(root, keep_last=1, keep_best=1, best="min") as manager:
        manager.save(1, state(1), metric=0.5)
        manager.save(2, state(2), metric=3)
    with Manager(root, keep_last=1, keep_best=1, best="min") as manager:
        manager.save(3, state(3), metric=2.0, metadata={"note": "mine"})
        assert manager.steps() == [1, 3]
    assert checkpoint.catalog(f"{root}/step_3").metadata == {"note": "mine", "metric": 2.0}


def test_a_step_that_another_program_saves_again_counts_with_its_new_metric(root: str):
    with Manager(root, keep_last=1, keep_best=1) as manager:
        for step, metric in ((1, 0.9), (2, 0.5)):
            manager.save(step, state(step), metric=metric)
        assert manager.best() == 1
        checkpoint.save(f"{root}/step_1", state(1), metadata={"metric": 0.1})
        assert manager.best() == 2
        checkpoint.save(f"{root}/step_1", state(1), metadata={"metric": 0.6})
        manager.save(3, state(3), metric=0.7)
        assert manager.steps() == [3]


def test_by_default_nothing_is_removed(root: str):
    with Manager(root) as manager:
        for step in range(5):
            manager.save(step, state(step))
        assert manager.steps() == [0, 1, 2, 3, 4]


@given(
    st.sets(st.integers(0, 60), max_size=12),
    st.dictionaries(st.integers(0, 60), st.floats(allow_infinity=True)),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from(["max", "min"]),
)
def test_the_rule_keeps_just_what_it_says(steps, metrics, last, every, num_best, best):
    kept = Retention(last, every, num_best, best).kept(list(steps), metrics)
    newest = {step for step in steps if sum(other > step for other in steps) < last}
    regular = {step for step in steps if every and step % every == 0}
    better = (lambda a, b: a > b) if best == "max" else (lambda a, b: a < b)
    with_metric = {step for step in steps if step in metrics and metrics[step] == metrics[step]}
    good = {
        step
        for step in with_metric
        if sum(better(metrics[o], metrics[step]) or (metrics[o] == metrics[step] and o > step) for o in with_metric) < num_best
    }
    assert kept == newest | regular | good


# --- what is damaged ---


def test_damaged_checkpoints_are_passed_over_and_said(root: str):
    with Manager(root) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step))
    damage(root, 300)
    with open_storage(f"{root}/step_200") as storage:
        storage.publish(CATALOG_KEY, storage.read(CATALOG_KEY, 1 << 20)[:-7])
    with Manager(root) as manager:
        loaded = empty()
        with pytest.warns(UserWarning, match="passed over") as said:
            result = manager.load_latest(loaded)
        assert result.step == 100
        assert holds(loaded, 100)
        assert [line.split(":")[0] for line in result.passed_over] == ["step 300", "step 200"]
        assert len([one for one in said if issubclass(one.category, UserWarning)]) == 2
        assert "is damaged in bytes" in result.passed_over[0]
        # A part as small as this one is copied only after its blocks are verified.
        assert any("; no tensor was changed; " in str(one.message) for one in said)
        assert "tensor was changed" not in result.passed_over[0]


def test_a_copy_under_the_number_of_another_step_is_passed_over(tmp_path: Path):
    root, whole = tmp_path / "run", tmp_path / "whole"
    with Manager(root) as manager:
        for step in (3, 5):
            manager.save(step, state(step), metric=-step)
    shutil.copytree(root / "step_3", root / "step_60")
    with Manager(root) as manager:
        with pytest.warns(UserWarning, match=r"step 60: .*step_60: saved as step_3, .*--to reshard"):
            result = manager.load_latest(loaded := empty())
        assert result.step == 5
        assert holds(loaded, 5)
        for call in (manager.load, manager.read):
            with pytest.raises(CorruptError, match=r"step_60: saved as step_3"):
                call(60, {"w": torch.zeros(1000)})
        for look in (manager.catalog, manager.metadata):
            with pytest.raises(CorruptError, match=r"step_60: saved as step_3"):
                look(60)
        assert manager.latest() == 5
        manager.save(7, state(7))
        assert manager.steps() == [3, 5, 7, 60]  # the run went back from the copy to 5, which does not supersede step 3
        assert manager.best() == 3
    assert [(line.step, line.problem) for line in list_run(root) if line.problem] == [
        (60, "saved as step_3, and then copied or renamed; a manager passes it over")
    ]
    checkpoint.load(root / "step_60", loaded := empty())
    assert holds(loaded, 3)
    # A run that is copied whole keeps its steps, and a step that is written anew is that of its folder.
    shutil.copytree(root, whole, ignore=shutil.ignore_patterns("step_60"))
    with Manager(whole) as manager:
        assert manager.load_latest(empty()).step == 7
        checkpoint.convert(root / "step_60", whole / "step_70", to="reshard")
        assert manager.load_latest(empty()).step == 70
    with Manager(root, keep_last=2) as manager:  # a copy takes no place among the newest, also where no load has met it
        manager.load(7, empty())
        manager.save(8, state(8))
        assert manager.steps() == [7, 8, 60]
    stored = root / "step_60" / CATALOG_KEY
    stored.write_bytes(encode_catalog(replace(decode_catalog(stored.read_bytes()), folder="step_" + "9" * 5000)))
    with Manager(root) as manager:
        assert manager.load_latest(empty()).step == 60  # no step has a number of so many digits


def test_a_reader_decodes_a_catalog_again_only_once_its_step_was_saved_anew(root: str):
    with Manager(root) as job, Manager(root, read_only=True) as reader:
        for step in (1, 2):
            job.save(step, state(step))
        with mock.patch.object(run_folder, "identified_catalog", wraps=run_folder.identified_catalog) as decoded:
            assert [reader.latest() for _ in range(3)] == [2, 2, 2]
            assert decoded.call_count == 1
            job.save(2, state(3))
            assert reader.latest() == 2
            assert decoded.call_count == 2


def test_recovery_and_the_advice_of_errors_pass_over_a_copy(tmp_path: Path):
    with Manager(tmp_path) as manager:
        for step in (3, 5):
            manager.save(step, state(step))
        shutil.copytree(tmp_path / "step_3", tmp_path / "step_60")
        assert manager._restoring.newest() == 5
        assert [manager._restoring.has(step) for step in (3, 5, 60)] == [True, True, False]
        with pytest.raises(CheckpointNotFound, match=r"load the newest as '.*step_5'"):
            checkpoint.load(tmp_path, empty())


def test_the_last_good_one_stays_where_the_newer_are_damaged(root: str):
    with Manager(root) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step))
    damage(root, 200)
    damage(root, 300)
    with Manager(root, keep_last=1) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.load_latest(empty())
        manager.save(150, state(150))
        assert 150 in manager.steps()
        assert 100 not in manager.steps()
        loaded = empty()
        assert manager.load_latest(loaded).step == 150
        assert holds(loaded, 150)


def test_a_save_of_an_older_step_never_removes_itself(root: str):
    with Manager(root, keep_last=1) as manager:
        manager.save(500, state(500))
    with Manager(root, keep_last=1) as manager:
        with pytest.warns(UserWarning, match="step 500 is newer than all that this job saved .* another root"):
            manager.save(100, state(100))  # begun anew, without loading
        assert manager.steps() == [100, 500]
    with Manager(root, keep_last=1) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.load(100, empty())
        manager.save(200, state(200))
        assert manager.load_latest(empty()).step == 200


def test_a_newer_step_whose_catalog_is_damaged_is_not_said_to_be_loaded_next(root: str):
    with Manager(root) as manager:
        manager.save(1, state(1))
        manager.save(5, state(5))
    with open_storage(root) as storage:
        catalog = bytearray(storage.read(f"step_5/{CATALOG_KEY}", 1 << 20))
        catalog[len(catalog) // 2] ^= 1
        storage.publish(f"step_5/{CATALOG_KEY}", bytes(catalog))
    with Manager(root, keep_last=5) as manager:
        with pytest.warns(UserWarning, match="passed over"):
            assert manager.load_latest(empty()).step == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(2, state(2))


def test_nothing_to_load_is_none_and_all_damaged_an_error(root: str):
    with Manager(root) as manager:
        assert manager.load_latest(empty()) is None
        manager.save(1, state(1))
        damage(root, 1)
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(CorruptError, match=r"no checkpoint can be loaded:\nstep 1: "),
        ):
            manager.load_latest(empty())


def test_a_mismatch_is_no_damage(root: str):
    with Manager(root) as manager:
        manager.save(1, state(1))
        with pytest.raises(MismatchError):
            manager.load_latest({"w": torch.zeros(7), "step": 0})


@pytest.mark.parametrize("option", [{"strict": False}, {"allow_missing": ["b"]}, {"allow_resize": ["b"]}])
def test_nothing_of_a_damaged_one_stays_where_not_all_is_loaded(option: dict[str, Any], root: str):
    older = {"w": torch.ones(3), "b": torch.zeros(2)} if "allow_resize" in option else {"w": torch.ones(3)}
    with Manager(root) as manager:
        manager.save(1, older)
        manager.save(2, {"w": torch.ones(3) * 2, "b": torch.ones(300_000) * 2})
    damage(root, 2)
    loaded = {"w": torch.zeros(3), "b": torch.zeros(300_000)}
    with Manager(root) as manager, pytest.warns(UserWarning, match="passed over"):
        assert manager.load_latest(loaded, **option).step == 1
    assert loaded["w"].tolist() == [1, 1, 1]
    assert not loaded["b"].any()


def test_nothing_of_it_stays_on_the_ranks_that_read_no_damaged_byte(tmp_path: Path):
    def row(rank: int, value: float) -> LocalShard:
        return LocalShard(torch.full((1, 300_000), value), (2, 300_000), (rank, 0))

    with jobs() as make:
        job = make(2)
        managers = job.run(lambda rank: Manager(tmp_path))
        job.run(lambda rank: managers[rank].save(1, {"w": row(rank, 1.0)}))
        job.run(lambda rank: managers[rank].save(2, {"w": row(rank, 2.0), "b": row(rank, 2.0)}))
        damage(str(tmp_path), 2)  # in the file of one rank
        states = [{"w": row(rank, 0.0), "b": row(rank, 0.0)} for rank in range(2)]
        with pytest.warns(UserWarning, match="passed over"):
            loaded = job.run(lambda rank: managers[rank].load_latest(states[rank], allow_missing=["b"]))
        job.run(lambda rank: managers[rank].close())
    assert [one.step for one in loaded] == [1, 1]
    for of_rank in states:
        assert (of_rank["w"].tensor == 1).all()
        assert not of_rank["b"].tensor.any()


# --- what others do ---


def test_a_manager_removes_nothing_of_a_run_that_has_taken_its_place(tmp_path: Path):
    """Its lock is on a file of the folder that was moved away, so it keeps no second manager from the new folder."""
    path = tmp_path / "run"
    with Manager(path, keep_last=1) as first:
        first.save(1, state(1))
        path.rename(tmp_path / "moved")
        with Manager(path) as second:
            second.save(2, state(2))
            with pytest.warns(UserWarning, match="removed or replaced this file, or a folder above it"):
                first.save(3, state(3))
            with pytest.raises(StorageError, match="nothing was deleted"):
                first.delete(2)
            assert second.steps() == [2, 3]


def test_a_second_manager_is_refused_until_the_first_is_closed(root: str):
    with Manager(root) as manager:
        manager.save(1, state(1))
        with pytest.raises(UsageError, match=rf"process {os.getpid()} on .*, which is this one, has .*; close that one first"):
            Manager(root)
        with Manager(root, read_only=True) as reader:
            assert reader.load_latest(empty()).step == 1
            with pytest.raises(UsageError, match="read_only"):
                reader.save(2, state(2))
    Manager(root).close()


def test_a_manager_that_failed_to_open_holds_nothing(root: str):
    with Manager(root), pytest.raises(UsageError):
        Manager(root)
    Manager(root).close()
    with pytest.raises(UsageError, match="keep_last=0: pass a whole number, 1 or more, or None"):
        Manager(root, keep_last=0)
    Manager(root).close()


def test_what_somebody_reads_stays_until_the_next_time(root: str):
    with Manager(root, keep_last=1) as manager:
        manager.save(1, state(1))
        with open_storage(f"{root}/step_1") as storage, reading(storage):
            manager.save(2, state(2))
            assert manager.steps() == [1, 2]
        manager.save(3, state(3))
        assert manager.steps() == [3]


def test_loading_holds_the_checkpoint(root: str, monkeypatch: pytest.MonkeyPatch):
    with Manager(root) as manager, open_storage(root) as storage:
        manager.save(1, state(1))
        tried = []

        class Extra:
            def state_dict(self) -> dict[str, Any]:
                return {"step": 0}

            def load_state_dict(self, given: dict[str, Any]) -> None:
                tried.append(remove_step(storage, "step_1", frozenset))

        checkpoint.save(f"{root}/step_1", {"extra": Extra()})
        checkpoint.load(f"{root}/step_1", {"extra": Extra()})
        assert tried == [False]
        assert remove_step(storage, "step_1", frozenset)
        assert storage.list("step_1") == []


@pytest.mark.parametrize("name", ["step_{}", "step-{}"])
def test_files_that_a_committed_catalog_refers_to_stay(root: str, name: str):
    with Manager(root, name=name) as manager:
        manager.save(1, state(1))
        manager.save(2, {"step": 2})
    with open_storage(f"{root}/{name.format(1)}") as first, open_storage(f"{root}/{name.format(2)}") as second:
        old = open_catalog(first)
        needed = {f"{name.format(1)}/{key}" for file in old.files for key in (file.key, file.digests_key)}
        second.publish(CATALOG_KEY, encode_catalog(referring(old, f"../{name.format(1)}")))
    with open_storage(root) as storage:
        with Manager(root, name=name, keep_last=2) as manager:
            manager.save(3, state(3))
            assert manager.steps() == [2, 3]
        assert {key for key, _ in storage.list(name.format(1))} == needed
        Manager(root, name=name).close()  # which looks for leftovers
        assert {key for key, _ in storage.list(name.format(1))} == needed
        with Manager(root, name=name, keep_last=1) as manager:
            manager.save(3, state(3))
        Manager(root, name=name).close()
        assert storage.folders() == (name.format(3),)


def test_a_commit_that_a_cache_hides_from_this_machine_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A network file system may answer from its cache that a file is missing, which another machine has written since."""
    with Manager(tmp_path) as manager:
        manager.save(0, state(0))
        manager.save(1, state(1))
    stat, hidden = os.stat, str(tmp_path / "step_1" / CATALOG_KEY)

    def cached(path: Any, **options: Any) -> os.stat_result:
        if path == hidden:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", cached)
    with pytest.raises(StorageError, match=r"step_1/catalog.msgpack: .* wait"):
        Manager(tmp_path)
    monkeypatch.undo()
    assert checkpoint.verify(tmp_path / "step_1").ok


def test_leftovers_of_dead_saves_go_and_nothing_else(root: str):
    with Manager(root) as manager:
        manager.save(1, state(1))
    dead = "20250101T000000Z-0a1b2c3d"
    with open_storage(root) as storage:
        before = storage.list("step_1")
        for key in (f"step_1/{dead}/rank00000-0.safetensors", f"step_2/{dead}/rank00000-0.safetensors", "step_2/notes/mine.txt",
                    "step_3/mine.txt", f"other/{dead}/rank00000-0.safetensors", f"step_04/{dead}/f"):  # fmt: skip
            with storage.create(key) as writer:
                writer.write(b"x")
        Manager(root).close()
        assert storage.list("step_1") == before
        assert {key for key, _ in storage.list()} - {key for key, _ in before} == {
            ".reshard_ckpt.lock",
            "step_2/notes/mine.txt",
            "step_3/mine.txt",
            f"other/{dead}/rank00000-0.safetensors",
            f"step_04/{dead}/f",
        }
        assert find_steps(storage) == ({1: "step_1"}, {2: "step_2", 3: "step_3"})


# --- wrong use ---


@pytest.mark.parametrize("step", [-1, True, 1.5, "7", 1 << 63])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any):
    with Manager(tmp_path) as manager, pytest.raises(UsageError, match="step="):
        manager.save(step, state(1))


WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: wrong}, f"{name}=.*pass a whole number")
        for name in ("keep_last", "keep_every", "keep_best")
        for wrong in (-1, True, 1.5, "2")
    ),
    *(({"memory": wrong}, r"memory=.*: pass a checkpoint.Memory, as in .*\(copies=1\)") for wrong in (True, "yes", Memory)),
    *(({"finish_on_sigterm": wrong}, "finish_on_sigterm=") for wrong in (0, -1, float("nan"), "20")),
    ({"finish_on_sigterm": float("inf")}, "finish_on_sigterm=inf: .* at most"),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], match: str):
    with pytest.raises(UsageError, match=match):
        Manager(tmp_path, **options)


def test_a_root_that_cannot_be_written_names_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any, **__: Any) -> None:
        raise StorageError("cannot lock: Read-only file system")

    monkeypatch.setattr(LocalStorage, "lock", refused)
    with pytest.raises(StorageError, match="Read-only file system; or pass read_only=True"):
        Manager(tmp_path)
    Manager(tmp_path, read_only=True).close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, read_only: bool):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="/file: this is a file; pass the folder"):
        Manager(tmp_path / "file", read_only=read_only)


@pytest.mark.parametrize("metadata", ["text", {"metric": 1}])
def test_a_metric_needs_a_place_in_the_metadata(tmp_path: Path, metadata: Any):
    with Manager(tmp_path) as manager, pytest.raises(UsageError, match="metadata="):
        manager.save(1, state(1), metric=1.0, metadata=metadata)


@pytest.mark.parametrize("metric", ["good", 10**400, [1.0], torch.ones(2)])
def test_a_metric_is_a_number(tmp_path: Path, metric: Any):
    with Manager(tmp_path) as manager, pytest.raises(UsageError, match="metric=.*: pass a number"):
        manager.save(1, state(1), metric=metric)


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_metric_or_metadata_that_differ_between_ranks_are_refused_on_all(tmp_path: Path, background: bool):
    with jobs() as make:
        job = make(2)
        managers = job.run(lambda rank: Manager(tmp_path, keep_last=1, keep_best=1))

        def save(rank: int, **options: Any) -> str:
            call = managers[rank].async_save if background else managers[rank].save
            try:
                call(1, state(1), **options)
            except UsageError as error:
                return str(error)
            return ""

        for said in job.run(lambda rank: save(rank, metric=0.5 + rank)):
            assert "metric= differs between ranks: rank 0 passed 0.5, rank 1 passed 1.5" in said
        for said in job.run(lambda rank: save(rank, metadata={"loss": rank})):
            assert "metadata= of 'loss' differs between ranks: rank 0 passed 0, rank 1 passed 1" in said
        assert job.run(lambda rank: save(rank, metric=0.5)) == ["", ""]
        job.run(lambda rank: managers[rank].close())
    assert not [
        path for path in tmp_path.glob("step_1/*/*") if path.parent.name != checkpoint.catalog(tmp_path / "step_1").save_id
    ]


def test_a_failed_background_save_is_raised_at_close_and_lets_go(tmp_path: Path):
    manager = Manager(tmp_path)
    (tmp_path / "step_1").write_text("a file in the way")

    def save_and_close() -> None:
        manager.async_save(1, state(1))
        manager.close()

    with pytest.raises(CheckpointError, match="step_1"):
        save_and_close()
    manager.close()
    Manager(tmp_path).close()


def test_close_raises_the_errors_of_both_saves_that_two_threads_began_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    both, launch = threading.Barrier(2), saving.launch

    def at_once(*args: Any) -> Any:
        both.wait()  # each has had its turn, and neither has begun to write
        return launch(*args)

    manager = Manager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "launch", at_once)
        threads = [threading.Thread(target=manager.async_save, args=(step, state(step))) for step in (1, 2)]
        for step, thread in zip((1, 2), threads, strict=True):
            (tmp_path / f"step_{step}").touch()
            thread.start()
        for thread in threads:
            thread.join()
    with pytest.raises(CheckpointError, match="2 saves failed in the background: ") as caught:
        manager.close()
    assert all(f"{tmp_path}/step_{step}" in str(caught.value) for step in (1, 2))


def test_signals_are_handled_in_the_main_thread_alone(tmp_path: Path):
    raised: list[BaseException] = []

    def make() -> None:
        try:
            Manager(tmp_path, finish_on_sigterm=True)
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_rank_that_cannot_handle_signals_is_an_error_on_all_ranks(tmp_path: Path):
    """Else the others would have a manager, and wait in its calls."""
    with jobs() as make:
        raised = make(2).run(lambda rank: Manager(tmp_path, finish_on_sigterm=rank == 1))
    assert [type(error) for error in raised] == [UsageError, UsageError]
    assert all("main thread" in str(error) for error in raised)
    Manager(tmp_path).close()  # the root is free
    Manager(tmp_path).close()


# --- processes that die ---

SCRIPT = """
import os, signal, sys, threading
import torch
from reshard_ckpt import checkpoint
from reshard_ckpt.engine.saving import commit as engine_save
root, how = sys.argv[1:]
publish = engine_save.publish
began, go = threading.Event(), threading.Event()

def slow(*args, **options):
    began.set()
    assert go.wait(600)
    return publish(*args, **options)

engine_save.publish = slow
if how == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: (print("own", flush=True), sys.exit(7)))
grace = {"plain": False, "short": 0.2}.get(how, 600.0)
manager = checkpoint.Manager(root, keep_last=1, finish_on_sigterm=grace)
state = {"w": torch.arange(1000.0)}
if how == "in a thread":
    threading.Thread(target=manager.save, args=(1, state)).start()
else:
    manager.async_save(1, state)
assert began.wait(600)
if grace == 600:
    threading.Timer(0.2, go.set).start()  # the commit comes well after the signal
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


@pytest.mark.parametrize(("how", "code"), [("finish", -signal.SIGTERM), ("own handler", 7), ("in a thread", -signal.SIGTERM)])
def test_sigterm_finishes_the_save_and_then_does_what_it_did(tmp_path: Path, how: str, code: int):
    command = [warm_python(), "-c", SCRIPT, tmp_path, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("own" in done.stdout) == (how == "own handler")
    with Manager(tmp_path) as manager:  # the dead job's lock is gone
        loaded = {"w": torch.zeros(1000)}
        assert manager.load_latest(loaded).step == 1
    assert torch.equal(loaded["w"], torch.arange(1000.0))


def test_without_being_asked_sigterm_ends_the_job_and_the_next_one_cleans_up(tmp_path: Path):
    done = subprocess.run([warm_python(), "-c", SCRIPT, tmp_path, "plain"], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGTERM
    assert list((tmp_path / "step_1").rglob("*.safetensors"))
    with Manager(tmp_path) as manager:
        assert manager.steps() == []
    assert not (tmp_path / "step_1").exists()


def test_a_save_that_takes_longer_than_it_may_is_given_up(tmp_path: Path):
    done = subprocess.run([warm_python(), "-c", SCRIPT, tmp_path, "short"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert "not finished within 0.2 s, so given up" in done.stderr
    with Manager(tmp_path) as manager:
        assert manager.steps() == []


# --- which folder, and when no longer ---


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Manager("run", keep_last=1) as manager:
        manager.save(1, state(1))
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(2, state(2))
        handle = manager.async_save(3, state(3))
        monkeypatch.chdir(tmp_path)
        assert handle.result().path == str(tmp_path / "run" / "step_3")
        monkeypatch.chdir(tmp_path / "elsewhere")
        loaded = empty()
        assert manager.load_latest(loaded).step == 3
        assert holds(loaded, 3)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["step_3"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("target", ["first", "../runs/first", "../disk/first"])
def test_a_run_stays_where_it_began_if_a_link_to_its_root_moves(tmp_path: Path, target: str):
    """Else the steps of the other run, whose lock this manager does not have, would be removed."""
    root = tmp_path / "runs" / "current"
    runs = {"first": root.parent / target, "other": root.with_name("other")}
    for path in (root, tmp_path / "disk" / "first"):
        path.parent.mkdir()
    for path in runs.values():
        with Manager(path) as manager:
            manager.save(1, state(1))
    root.symlink_to(target)
    with Manager(root, keep_last=1) as manager:
        root.unlink()
        root.symlink_to("other")
        manager.save(2, state(2))
        assert manager.load_latest(empty()).step == 2
    steps = {name: [step.name for step in path.glob("step_*")] for name, path in runs.items()}
    assert steps == {"first": ["step_2"], "other": ["step_1"]}


def test_a_step_that_was_moved_to_another_disk_counts_by_its_link_and_keeps_what_it_refers_to(tmp_path: Path):
    root, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    kept = {"same": torch.arange(70_000) * 3, "step": torch.arange(9) + 3}
    with Manager(root, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, kept | {"step": torch.arange(9) + step})
    for step in ("step_2", "step_3"):
        (root / step).rename(disk / step)
        (root / step).symlink_to(disk / step)
    (disk / "step_2" / CATALOG_KEY).unlink()  # as a save that was killed leaves it
    (root / "step_4").symlink_to(tmp_path / "nowhere")
    with Manager(root, keep_last=2) as manager:
        assert manager.steps() == [1, 3]
        found = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
        assert manager.load_latest(found).step == 3
        for step in (5, 6, 7):
            manager.save(step, state(step))
        assert manager.steps() == [3, 6, 7]
        with pytest.raises(StorageError, match="step_3: .* not removed.* If it is a link .* remove the link"):
            manager.delete(3)
    for holder in (found, checkpoint.read(root / "step_3")):
        assert all(torch.equal(holder[name], tensor) for name, tensor in kept.items())
    assert len(list((disk / "step_2").rglob("rank*"))) == 2


def test_a_closed_manager_changes_nothing_and_still_looks(root: str):
    with Manager(root, keep_last=1) as closed:
        closed.save(1, state(1))
    with Manager(root) as other:
        other.save(2, state(2))
        verbs = {
            "save": lambda: closed.save(3, state(3)),
            "async_save": lambda: closed.async_save(3, state(3)),
            "load": lambda: closed.load(1, empty()),
            "load_latest": lambda: closed.load_latest(empty()),
            "delete": lambda: closed.delete(1),
            "preempted": lambda: closed.preempted,
        }
        for name, call in verbs.items():
            with pytest.raises(UsageError, match=f"^{name}: the manager of .* is closed"):
                call()
        assert closed.steps() == other.steps() == [1, 2]
        assert (closed.latest(), closed.best()) == (2, None)
        closed.close()


def test_a_save_that_outlives_its_manager_does_not_prune(root: str, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in `close` lets go of the root before the save is over; by then another job may have it."""
    manager = Manager(root, keep_last=1)
    manager.save(1, state(1))
    monkeypatch.setattr(manager, "_wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    manager._committed(2)
    assert Manager(root).steps() == [1]


# --- one step ---


def test_one_step_is_loaded_and_one_that_is_not_there_is_named(root: str):
    with Manager(root) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
        loaded = empty()
        assert manager.load(20, loaded).num_tensors == 1
        assert holds(loaded, 20)
        with pytest.raises(CheckpointNotFound, match=r"step_25: no committed checkpoint; the run has step_10, step_20, step_30$"):
            manager.load(25, loaded)
        with pytest.raises(UsageError, match="step=-1"):
            manager.load(-1, loaded)
        assert holds(loaded, 20)


def test_a_step_is_deleted_unless_somebody_reads_it(root: str):
    with Manager(root, keep_last=5) as manager:
        for step in (10, 20):
            manager.save(step, state(step))
        manager.async_save(30, state(30))
        manager.delete(30)
        with open_storage(f"{root}/step_10") as storage, reading(storage), pytest.raises(StorageError, match="somebody reads it"):
            manager.delete(10)
        assert manager.steps() == [10, 20]
        manager.delete(10)
        assert manager.steps() == [20]
        with pytest.raises(CheckpointNotFound, match="step_10: .*the run has step_20"):
            manager.delete(10)
        with Manager(root, read_only=True) as reader, pytest.raises(UsageError, match="read_only"):
            reader.delete(20)
        assert manager.load_latest(empty()).step == 20
    with open_storage(root) as storage:
        assert storage.folders() == ("step_20",)


READERS = {
    "load": lambda path, folder: checkpoint.load(path, empty()),
    "read": lambda path, folder: checkpoint.read(path),
    "verify": lambda path, folder: checkpoint.verify(path),
    "diff": lambda path, folder: checkpoint.diff(path, path),
    "reshard": lambda path, folder: checkpoint.reshard(path, f"{folder}/resharded", mesh={}),
    "convert": lambda path, folder: checkpoint.convert(path, f"{folder}/converted", to="safetensors"),
    "compact": lambda path, folder: checkpoint.compact(path),
}


@pytest.mark.parametrize("name", READERS)
def test_a_step_that_is_being_removed_is_not_found_by_readers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    # The remover has locked the step, and goes on once the reader has the catalog, or has asked for the lock a second time.
    root, go_on, removed, refused = str(tmp_path / "run"), threading.Event(), threading.Event(), []
    lock, read, delete, reader = LocalStorage.lock, LocalStorage.read, LocalStorage.delete, threading.current_thread()

    def asked(self: LocalStorage, key: str, **options: Any) -> Any:
        found = lock(self, key, **options)
        if found is None:
            refused.append(key)
        if len(refused) > 1:
            go_on.set()
        return found

    def seen(self: LocalStorage, key: str, limit: int) -> bytes:
        data = read(self, key, limit)
        if key == CATALOG_KEY and threading.current_thread() is reader and locked.is_set():
            go_on.set()
            removed.wait()
        return data

    def delayed(self: LocalStorage, keys: Iterable[str]) -> None:
        keys = list(keys)
        if f"step_10/{CATALOG_KEY}" in keys:
            locked.set()
            go_on.wait()
        delete(self, keys)

    locked = threading.Event()
    with Manager(root, keep_last=5) as manager:
        manager.save(10, state(10))
        for method, replacement in (("lock", asked), ("read", seen), ("delete", delayed)):
            monkeypatch.setattr(LocalStorage, method, replacement)
        remover = threading.Thread(target=lambda: (manager.delete(10), removed.set()))
        remover.start()
        locked.wait()
        with pytest.raises(CheckpointNotFound):
            READERS[name](f"{root}/step_10", str(tmp_path))
        go_on.set()
        remover.join()


def test_saves_return_what_they_did(root: str):
    with Manager(root) as manager:
        for report in (manager.save(1, state(1)), manager.async_save(2, state(2)).result()):
            step = 1 if report.path.endswith("step_1") else 2
            with open_storage(f"{root}/step_{step}") as storage:
                size = sum(size for key, size in storage.list() if key.endswith(".safetensors"))
                assert report.save_id in storage.folders()
            assert report.num_bytes == report.total_bytes == size > 4000
            assert 0 < report.stall_s <= report.duration_s
            assert report.path == manager.path(step)
            assert re.fullmatch(r"SaveReport\(path='.*step_\d', num_bytes=\d+, duration_s=[\d.]+, stall_s=[\d.]+\)", repr(report))
