"""Tasks in threads: each item once, the first failure is raised, and nothing runs any more when it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from reshard_ckpt.engine.common.files import in_threads


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_each_item_is_taken_once(count: int) -> None:
    taken: list[int] = []
    for threads in (1, 3):
        in_threads(taken.append, iter(range(count)), threads)
    assert sorted(taken) == sorted([*range(count)] * 2)


def still_running() -> set[int]:
    """The tasks that run when the failure of one of them is raised."""
    others_run, one_fails = threading.Event(), threading.Event()
    running: set[int] = set()

    def task(number: int) -> None:
        if number == 0:
            assert others_run.wait(600)
            one_fails.set()
            raise ValueError("number 0")
        running.add(number)
        others_run.set()
        assert one_fails.wait(600)
        sum(range(10_000))  # as long as the failure takes to be seen
        running.remove(number)

    with pytest.raises(ValueError, match="number 0"):
        in_threads(task, range(50), 4)
    return set(running)


def test_nothing_runs_any_more_when_a_failure_is_raised() -> None:
    assert not any(still_running() for _ in range(100))


def test_a_failure_to_make_the_next_item_ends_all() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("item 1")

    taken: list[int] = []
    with pytest.raises(ValueError, match="item 1"):
        in_threads(taken.append, items(), 4)
    assert taken == [0]
