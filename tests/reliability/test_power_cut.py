"""A kill or a power cut at any moment of a save: whatever survives, the path holds the old checkpoint or the new one.

The next save works, and cleans up.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.storage import open_storage
from tests import jobs
from tests.jobs import save_job
from tests.reliability.calls import Call, Calls
from tests.reliability.disk import Disk, Tree, write_tree
from tests.reliability.states import NEW, OLD, assert_next_save_works, held, plain, tensors_of, values_of_rank

LUCKY_TRIES = 8


def save_alone(path: Path, number: int, calls: Calls) -> None:
    checkpoint.save(path, plain(number))


def save_async(path: Path, number: int, calls: Calls) -> None:
    checkpoint.async_save(path, plain(number), staging="lazy").result()


def save_four(path: Path, number: int, calls: Calls) -> None:
    with open_storage(path) as storage:
        save_job(storage, [tensors_of(r, 4, number) for r in range(4)], [values_of_rank(number)] * 4)


SAVES = {"sync": save_alone, "async": save_async, "4 ranks": save_four}


def record(base: Path, path: Path, number: int, save: Callable[[Path, int, Calls], None]) -> list[Call]:
    """The calls of a save; the real disk is not waited for."""
    calls = Calls(str(base))
    with mock.patch.object(os, "fsync"), calls.watching():
        save(path, number, calls)
    return calls.done


def freeze(tree: Tree) -> str:
    return json.dumps(tree, default=lambda data: data.hex(), sort_keys=True)


class Cuts:
    """Tries what a disk may hold, each only once; counts them."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.tried = scratch, {}

    def holds(self, tree: Tree) -> int | None:
        """The state that the path ``p`` of such a disk holds; the next save works, too."""
        key = freeze(tree)
        if key not in self.tried:
            at = self.scratch / str(len(self.tried))
            write_tree(tree, at)
            with mock.patch.object(os, "fsync"):
                self.tried[key] = held(at / "p")
                assert_next_save_works(at / "p")
            shutil.rmtree(at)
        return self.tried[key]


@pytest.fixture
def cuts(tmp_path: Path) -> Cuts:
    return Cuts(tmp_path / "cut")


def prefixes(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    for n in range(len(calls) + 1):
        yield calls[:n]


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("old", [None, OLD], ids=["first", "overwrite"])
def test_a_kill_or_a_power_cut_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, cuts: Cuts, old: int | None, kind: str):
    base, luck = tmp_path / "disk", random.Random(f"{old}{kind}")
    base.mkdir()
    earlier = record(base, base / "p", OLD, save_alone) if old else []
    calls = record(base, base / "p", NEW, SAVES[kind])
    killed = []
    for done in prefixes(calls):
        disk = Disk().load(earlier)
        disk.sync_all()
        disk.load(done)
        killed.append(cuts.holds(disk.after_kill()))
        for lucky in [None] + [luck] * LUCKY_TRIES:
            found = cuts.holds(disk.after_cut(lucky))
            assert found in (old, NEW)
            # Once the save has returned, and from its last fsync on, it is the new one.
            assert found == NEW or len(done) < durable_from(calls)
    assert len(cuts.tried) > 10
    # There is one moment from which on it is the new one.
    assert killed == [old] * killed.index(NEW) + [NEW] * killed.count(NEW)
    assert killed.index(NEW) > 9


def durable_from(calls: Sequence[Call]) -> int:
    """How many calls make the commit durable: up to the sync of the folder after the rename."""
    rename = next(i for i, call in enumerate(calls) if call.name == "rename")
    return next(i for i, call in enumerate(calls) if i > rename and call == Call("fsync", "p")) + 1


def test_a_save_that_returned_outlives_a_power_cut_though_an_earlier_one_was_killed_anywhere(tmp_path: Path, cuts: Cuts):
    """What a killed process made and did not sync is synced by who relies on it: folders, above all."""
    base = tmp_path / "disk"
    base.mkdir()
    deep = record(base, base / "a" / "p", NEW, save_alone)
    for n in range(len(deep)):
        shutil.rmtree(base)
        base.mkdir()
        killed = Calls(str(base), stop_after=n + 1)
        with mock.patch.object(os, "fsync"), killed.watching(), pytest.raises(BaseException):  # noqa: B017
            checkpoint.save(base / "a" / "p", plain(OLD))
        again = record(base, base / "a" / "p", NEW, save_alone)
        tree = Disk().load([*killed.done, *again]).after_cut(None)
        assert cuts.holds(tree["a"]) == NEW


def test_ranks_that_write_at_the_same_time_may_be_cut_each_at_its_own_point(tmp_path: Path, cuts: Cuts):
    base, luck = tmp_path / "disk", random.Random(5)
    base.mkdir()
    earlier = record(base, base / "p", OLD, save_alone)
    of_rank: list[list[Call]] = []
    real = jobs.write_assignment

    def write(*args: object) -> object:
        of_rank.append([])
        begin = len(calls.done)
        receipt = real(*args)
        of_rank[-1] = calls.done[begin:]
        return receipt

    calls = Calls(str(base))
    with mock.patch.object(os, "fsync"), mock.patch.object(jobs, "write_assignment", write), calls.watching():
        save_four(base / "p", NEW, calls)
    made = next(i for i, call in enumerate(of_rank[0]) if call.name == "mkdir") + 1
    lead, queues = of_rank[0][:made], [of_rank[0][made:], *of_rank[1:]]
    for _ in range(60):
        merged = list(lead)
        left = [list(queue[: luck.randrange(len(queue) + 1)]) for queue in queues]
        while any(left):
            merged.append(luck.choice([queue for queue in left if queue]).pop(0))
        disk = Disk().load(earlier)
        disk.sync_all()
        assert cuts.holds(disk.load(merged).after_cut(luck)) == OLD


@pytest.mark.parametrize("what", ["file", "folder", "root"])
def test_a_save_that_left_out_a_sync_would_be_found(tmp_path: Path, what: str):
    """The model is no wall of paper: without any one kind of sync, some cut loses the checkpoint."""
    base, cuts = tmp_path / "disk", Cuts(tmp_path / "cut")
    base.mkdir()
    calls = record(base, base / "p", NEW, save_alone)
    save_id = checkpoint.catalog(base / "p").save_id
    left_out = {"file": lambda p: "rank" in p, "folder": lambda p: p == f"p/{save_id}", "root": lambda p: p == "p"}[what]
    disk = Disk().load([call for call in calls if call.name != "fsync" or not left_out(call.path)])
    try:
        found = cuts.holds(disk.after_cut(None))
    except Exception:
        return
    assert found is None
