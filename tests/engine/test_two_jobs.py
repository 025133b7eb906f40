"""Two jobs save to one path at the same time, by mistake: whatever their order, the path holds one whole checkpoint."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch

from reshard_ckpt.core.planning.save_plan import SavePlan, plan_save
from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import MemoryStorage, PublishConflict
from tests import jobs
from tests.comm.threads import run_together
from tests.engine.saving.test_commit import whole
from tests.jobs import load_job, save_job
from tests.storage.faulty import FaultyStorage


def state(salt: int) -> list:
    return [whole("a", torch.arange(10.0) + salt), whole("b", torch.arange(7.0) * salt)]


def loaded(storage: MemoryStorage, known: dict[str, int]) -> str:
    """Whose checkpoint the path holds; anything but one whole one is an error."""
    got = state(0)
    for _, tensor in got:
        tensor.zero_()
    load_job(storage, got)
    (name,) = [
        name for name, salt in known.items() if all(torch.equal(t, w) for (_, t), (_, w) in zip(got, state(salt), strict=True))
    ]
    return name


class Turns:
    """Lets each of two jobs run some operations, by turns; the last two turns have no end."""

    def __init__(self, turns: list[tuple[str, int]]) -> None:
        self.turns, self.lock = turns, threading.Condition()
        self.over: set[str] = set()

    def wait(self, job: str) -> None:
        """Before an operation: wait until it is this job's turn."""
        with self.lock:
            while True:
                while self.turns and (self.turns[0][1] == 0 or self.turns[0][0] in self.over):
                    self.turns.pop(0)
                    self.lock.notify_all()
                if self.turns[0][0] == job:
                    self.turns[0] = (job, self.turns[0][1] - 1)
                    return
                assert self.lock.wait(300), "the other job has stopped"

    def end(self, job: str) -> None:
        with self.lock:
            self.over.add(job)
            self.lock.notify_all()


def run_both(memory: MemoryStorage, a_first: int, b_then: int) -> tuple[dict[str, BaseException | None], int, int]:
    """A runs some operations, then B some, then A to its end, then B; what each raised, and how many operations each has."""
    turns = Turns([("A", a_first), ("B", b_then), ("A", 10**9), ("B", 10**9)])
    raised: dict[str, BaseException | None] = {}
    seen = {"A": 0, "B": 0}

    def run(job: str) -> None:
        def before(operation: str, key: str) -> None:
            turns.wait(job)
            seen[job] += 1

        try:
            save_job(FaultyStorage(memory, before), [state(1 if job == "A" else 2)])
            raised[job] = None
        except StorageError as error:
            raised[job] = error
        finally:
            turns.end(job)

    run_together(run, ("A", "B"))
    return raised, seen["A"], seen["B"]


@pytest.fixture
def one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs here have one layout, whose plan has to be made but once, as in a job that saves again and again."""
    plans: list[SavePlan] = []

    def planned(*args: Any) -> SavePlan:
        if not plans:
            plans.append(plan_save(*args))
        return plans[0]

    monkeypatch.setattr(jobs, "plan_save", planned)


@pytest.mark.slow
@pytest.mark.usefixtures("one_plan")
@pytest.mark.parametrize(("overwrite", "step"), [(False, 4), (True, 2)])
def test_no_order_of_two_saves_breaks_the_checkpoint(overwrite: bool, step: int):
    conflicts = 0
    for a_first in range(1, 30):
        for b_then in range(1, 30, step):
            memory = MemoryStorage(uuid.uuid4().hex)
            if overwrite:
                save_job(memory, [state(5)])
            raised, num_a, num_b = run_both(memory, a_first, b_then)
            found = loaded(memory, {"old": 5, "A": 1, "B": 2})
            assert raised[found] is None, f"{found} is there, but said {raised[found]}"
            refused = [error for error in raised.values() if error]
            conflicts += sum(isinstance(error, PublishConflict) for error in refused)
            assert len(refused) < 2
            catalog = save_job(memory, [state(7)])
            assert loaded(memory, {"next": 7}) == "next"
            assert {key.split("/")[0] for key, _ in memory.list()} == {"catalog.msgpack", catalog.save_id}
            memory.delete([key for key, _ in memory.list()])
            if b_then > num_b:
                break
        if a_first > num_a:
            break
    else:
        pytest.fail("the jobs have more operations than were tried")
    assert conflicts > 10
