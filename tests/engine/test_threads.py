"""Tasks in threads: each number once, the first failure is raised, and nothing runs any more when it is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard_ckpt.engine.loading.read import in_threads


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_each_number_is_taken_once(count: int) -> None:
    taken: list[int] = []
    in_threads(taken.append, range(count))
    with ThreadPoolExecutor(3) as pool:
        in_threads(taken.append, range(count), pool)
        in_threads(taken.append, range(count), pool)
    assert sorted(taken) == sorted([*range(count)] * 3)


def still_running(pool: ThreadPoolExecutor | None) -> set[int]:
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
        in_threads(task, range(50), pool)
    return set(running)


@pytest.mark.parametrize("own", [False, True])
def test_nothing_runs_any_more_when_a_failure_is_raised(own: bool) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert not any(still_running(pool if own else None) for _ in range(100))
