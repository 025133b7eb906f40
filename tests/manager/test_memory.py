"""A manager with a memory tier: the saves that its rule keeps go to the store, and it lists the steps of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_ckpt.checkpoint import Manager, Memory
from tests.manager.test_manager import state


@pytest.mark.parametrize("best", ["max", "min"])
def test_the_best_saves_go_to_the_store(tmp_path: Path, shm: Path, best: str):
    memory = Memory(copies=0, folder=str(shm))
    sign = 1 if best == "max" else -1
    with Manager(tmp_path, memory=memory, persist_every=1000, keep_last=1, keep_best=2, best=best) as manager:
        stored = []
        for step, metric in enumerate([5.0, 9.0, float("nan"), 3.0, None, 7.0, 1.0, 2.0], 1):
            handle = manager.async_save(step, state(step), metric=None if metric is None else sign * metric)
            if handle.persisted():
                stored.append(step)
        assert stored == [1, 2, 6]  # the first two, and one that is better than either
        assert manager.best() == 2
    with Manager(tmp_path, read_only=True, best=best) as reader:
        assert reader.steps() == [2, 6, 8]
        assert reader.best() == 2


def test_regular_saves_go_to_the_store_and_the_interval_counts_from_them(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    with Manager(tmp_path, memory=memory, persist_every=4, keep_last=1, keep_every=5) as manager:
        assert [step for step in range(1, 12) if manager.async_save(step, state(step)).persisted()] == [4, 5, 9, 10]
    with Manager(tmp_path, read_only=True) as reader:
        assert reader.steps() == [5, 10, 11]


def test_the_newest_step_is_that_of_memory_or_of_the_store(tmp_path: Path, shm: Path):
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000) as manager:
        assert (manager.latest(), manager._restoring.newest(), manager.best()) == (None, None, None)
        saves = (
            (lambda: manager.async_save(1, state(1), metric=5.0).result(), 1, 1),  # in memory alone
            (lambda: manager.save(2, state(2), metric=1.0), 2, 1),
            (lambda: manager.async_save(3, state(3), metric=9.0).result(), 3, 3),
        )
        for save, newest, best in saves:
            save()
            assert (manager.latest(), manager._restoring.newest(), manager.best()) == (newest, newest, best)
        assert manager.steps() == [1, 2, 3]
