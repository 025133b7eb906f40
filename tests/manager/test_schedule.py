"""When a run saves: costs measured from steps, one decision on all ranks, and the log of attempts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt.checkpoint import Manager, SaveReport
from reshard_ckpt.core.planning.interval import TierCosts, daly
from reshard_ckpt.errors import PeerError, UsageError
from reshard_ckpt.manager.attempts import ATTEMPTS, PRIOR_S, Attempt, AttemptLog, estimate_mtbf, read_attempts
from reshard_ckpt.manager.schedule import WARM_UP_STEPS, Decision, Interval, SaveCosts, SaveSchedule, interval_rule
from reshard_ckpt.storage import open_storage
from tests.launch import on_ranks


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def report(duration_s: float, stall_s: float) -> SaveReport:
    return SaveReport("run/step_1", "s", 0, 0, duration_s, stall_s)


def run(
    schedule: SaveSchedule, costs: SaveCosts, clock: Clock, steps: int, *, step_s: float, cost_s: float, save_steps: int
) -> list[int]:
    """Train for so many steps of `step_s`; a save spans `save_steps` of them and makes them `cost_s` longer, together."""
    saved: list[int] = []
    left = 0
    for step in range(1, steps + 1):
        if schedule.due(step):
            saved.append(step)
            costs.begin()
            left = save_steps
        clock.now += step_s + (cost_s / save_steps if left else 0)
        if left:
            left -= 1
            if not left:
                costs.end(report(save_steps * step_s, 0.0))
    return saved


def alone(step: int, own: Decision | None) -> Decision:
    assert own is not None
    return own


def timed(
    interval: Callable[[SaveCosts], float],
    warm_up: int = WARM_UP_STEPS,
    agree: Callable[[int, Decision | None], Decision] = alone,
) -> tuple[SaveSchedule, SaveCosts, Clock]:
    """A schedule of one rank, and the clock that it goes by."""
    clock = Clock()
    costs = SaveCosts(clock)
    return SaveSchedule(interval, warm_up, agree, costs), costs, clock


def test_a_save_costs_what_steps_take_longer_while_it_is_under_way():
    clock = Clock()
    costs = SaveCosts(clock)
    for step in range(40):
        costs.step(step)
        if step == 20:
            costs.begin()
        if step == 24:
            costs.end(report(40.0, 0.5))
        clock.now += 10.0 + (0.7 if 20 <= step < 24 else 0)
    tier = costs.tier()
    assert tier.cost_s == pytest.approx(4 * 0.7)
    assert (tier.save_s, costs.step_s) == (40.0, 10.0)


def test_a_save_costs_at_least_what_its_report_says():
    clock = Clock()
    costs = SaveCosts(clock)
    for step in range(20):
        costs.step(step)
        if step == 15:
            with costs.saving() as saved:
                saved.append(report(3.0, 3.0))
        clock.now += 10.0
    tier = costs.tier()
    assert tier.cost_s == 3.0


def test_failed_saves_teach_no_cost():
    clock = Clock()
    costs = SaveCosts(clock)
    for step in range(20):
        costs.step(step)
        clock.now += 1
        if step == 10:
            costs.begin()
            costs.end(None)
    assert costs.tier() is None
    assert not costs.is_saving


def best_interval(mtbf_s: Callable[[], float], max_overhead: float) -> Interval:
    return interval_rule("auto", None, max_overhead, None, lambda: 1, mtbf_s)[0]


def test_auto_saves_after_a_warm_up_and_then_at_the_best_interval():
    schedule, costs, clock = timed(best_interval(lambda: 3600.0, 0.5))
    saved = run(schedule, costs, clock, 2000, step_s=2.0, cost_s=5.0, save_steps=5)
    assert saved[0] == WARM_UP_STEPS + 1
    best = (daly(5.0, 3600.0) + 5.0 - 5.0) / 2.0  # steps: an interval holds the 5 s of the save itself
    gaps = [later - earlier for earlier, later in itertools.pairwise(saved)]
    assert len(gaps) > 5
    assert all(abs(gap - best) <= 1.5 for gap in gaps), (gaps, best)


def test_overhead_stays_below_its_cap():
    schedule, costs, clock = timed(best_interval(lambda: 60.0, 0.035))
    saved = run(schedule, costs, clock, 3000, step_s=1.0, cost_s=4.0, save_steps=2)
    spent = len(saved) * 4.0
    assert len(saved) > 10
    assert spent / (clock.now - 1000.0) <= 0.036


def test_a_portion_of_lost_samples_that_is_allowed_makes_the_interval_longer(monkeypatch: pytest.MonkeyPatch):
    """The interval is 2 × PLS × ranks × MTBF, unless the best one is longer anyway."""
    rule, often, best = (interval_rule("auto", 3600, 0.5, pls, lambda: 8, lambda: 1.0)[0] for pls in (0.01, 1e-6, None))
    costs = SaveCosts()
    assert rule(costs) is None  # nothing is measured yet
    monkeypatch.setattr(costs, "tier", lambda: TierCosts(1.0, 2.0, 0.0, 0.0))
    assert rule(costs) == 576.0
    assert often(costs) == best(costs) == pytest.approx(math.sqrt(2 * 3600), rel=0.05)


def test_a_first_save_that_failed_is_tried_again_and_then_the_interval_is_known():
    schedule, costs, clock = timed(best_interval(lambda: 3600.0, 0.5))
    saved = []
    for step in range(1, 200):
        if schedule.due(step):
            saved.append(step)
            costs.begin()
            costs.end(report(1.0, 1.0) if len(saved) == 4 else None)
        clock.now += 1.0
    assert saved[:4] == [WARM_UP_STEPS * n + 1 for n in (1, 2, 3, 4)]
    assert saved[4] - saved[3] == pytest.approx(daly(1.0, 3600.0) + 1.0, abs=1)


def test_a_loop_that_goes_back_to_an_older_step_saves_as_often_as_before():
    schedule, costs, clock = timed(lambda costs: 100.0)
    at = []
    for step in (*range(1, 960), *range(20, 500)):
        if schedule.due(step):
            at.append(clock.now)
            costs.begin()
            costs.end(report(0.1, 0.1))
        clock.now += 1.0
    assert all(later - earlier == 100.0 for earlier, later in itertools.pairwise(at))
    assert clock.now - at[-1] < 101.0


def test_no_save_is_due_while_one_is_under_way():
    schedule, costs, clock = timed(lambda costs: 1.0)
    saved = run(schedule, costs, clock, 100, step_s=1.0, cost_s=0.1, save_steps=12)
    assert all(later - earlier >= 12 for earlier, later in itertools.pairwise(saved))


@pytest.mark.parametrize("step_s", [0.1, 1.0, 7.0, 400.0])
def test_a_fixed_interval_is_kept_to_half_a_step_with_few_agreements(step_s: float):
    looks: list[int] = []

    def agree(step: int, own: Decision | None) -> Decision:
        looks.append(step)
        return alone(step, own)

    schedule, costs, clock = timed(lambda costs: 600.0, 1, agree)
    saved = run(schedule, costs, clock, max(60, int(3000 / step_s)), step_s=step_s, cost_s=0.0, save_steps=1)
    gaps = [(later - earlier) * step_s for earlier, later in itertools.pairwise(saved)]
    assert gaps
    assert all(abs(gap - 600) <= step_s / 2 + 1e-6 or gap == math.ceil(600 / step_s) * step_s for gap in gaps)
    assert len(looks) <= (len(saved) + 1) * (6 + math.log2(max(600 / step_s, 2)))


def test_a_fixed_interval_waits_for_no_warm_up():
    schedule, costs, clock = timed(lambda costs: 0.3, 1)
    assert run(schedule, costs, clock, 12, step_s=0.1, cost_s=0.0, save_steps=1) == [4, 7, 10]


def test_steps_that_get_slower_delay_no_save_by_more_than_what_was_timed():
    schedule, _, clock = timed(lambda costs: 60.0, 1)
    for step in range(1, 40):
        if schedule.due(step):
            break
        clock.now += 0.001 if step < 3 else 10.0
    assert clock.now - 1000.0 <= 80.0  # a look ahead of half of 60,000 steps would never have come


@on_ranks(3)
def test_ranks_save_at_the_same_steps(tmp_path: Path):
    """Train with clocks of one's own: ranks differ in speed, and rank 0's clock decides."""
    rank, saved, of_ranks = dist.get_rank(), [], [[]] * 3
    with Manager(tmp_path / "run", interval=1e-6) as manager:
        for step in range(1, 41):
            sum(range(1000 * (1 + rank)))
            if manager.should_save(step):
                saved.append(step)
                manager.save(step, {"x": torch.tensor([float(step)])})
        dist.all_gather_object(of_ranks, [*saved, manager.latest()])
    assert of_ranks == [[*saved, saved[-1]]] * 3
    assert saved[0] == 2  # one step tells what a step takes
    assert len(saved) > 9


@on_ranks(2)
def test_different_steps_on_ranks_are_a_named_error(tmp_path: Path):
    said = pytest.raises(PeerError, match="step 7(?s:.*)step 8")
    with Manager(tmp_path / "run", interval="auto", mtbf="6h") as manager, said:
        manager.should_save(7 + dist.get_rank())


@pytest.mark.parametrize(
    "options",
    [
        {"interval": "soon"},
        {"interval": 0},
        {"interval": "auto", "mtbf": "6x"},
        {"interval": "auto", "max_overhead": 0},
        {"interval": "auto", "target_pls": 0},
        {"interval": "auto", "target_pls": 1.5},
        {"interval": "10min", "target_pls": 0.01},
        {"target_pls": 0.01},
        {"interval": "10min", "mtbf": "6h"},
        {"mtbf": "6h"},
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(UsageError, match=list(options)[-1]):
        Manager(tmp_path / "run", **options)


def test_an_unknown_interval_names_both_kinds(tmp_path: Path):
    with pytest.raises(UsageError, match='interval=.often.: wanted "auto" or a duration'):
        Manager(tmp_path / "run", interval="often")


def test_should_save_wants_an_interval(tmp_path: Path):
    with Manager(tmp_path / "run") as manager, pytest.raises(UsageError, match="interval="):
        manager.should_save(1)


def attempts(root: Path) -> list[Attempt]:
    with open_storage(root) as storage:
        return read_attempts(storage)


def test_attempts_are_logged_with_how_they_ended(tmp_path: Path):
    root = tmp_path / "run"
    with Manager(root, interval="auto") as manager:
        manager.save(1, {"x": torch.ones(1)})
    with pytest.raises(ZeroDivisionError), Manager(root, interval="auto"):
        raise ZeroDivisionError
    with Manager(root, interval="auto"):
        assert [attempt.closed for attempt in attempts(root)] == [True, False, False]
    assert [attempt.closed for attempt in attempts(root)] == [True, False, True]
    with Manager(root, read_only=True, interval="auto"):
        assert len(attempts(root)) == 3


def test_mtbf_is_time_by_failures_and_begins_at_a_day(tmp_path: Path):
    clock = Clock()
    with open_storage(tmp_path) as storage:
        for n in range(4):
            log = AttemptLog(storage, clock, clock)
            clock.now += 3600.0
            log.note_alive()  # then the process dies, but for the second
            if n == 1:
                log.close(failed=False)
        assert AttemptLog(storage, clock, clock).mtbf_s() == pytest.approx((PRIOR_S + 4 * 3600) / 4)
    assert estimate_mtbf([]) == PRIOR_S


@pytest.mark.parametrize("jump_s", [-1e6, 1.7e9])
def test_a_clock_that_is_set_changes_no_estimate_and_no_interval(tmp_path: Path, jump_s: float):
    clock, timer = Clock(), Clock()
    with open_storage(tmp_path) as storage:
        log = AttemptLog(storage, clock, timer)
        costs = SaveCosts(timer)
        schedule = SaveSchedule(best_interval(log.mtbf_s, 0.035), WARM_UP_STEPS, alone, costs)
        saved = []
        for step in range(60):
            if schedule.due(step):
                saved.append(step)
                costs.begin()
                costs.end(report(1.0, 1.0))
            timer.now += 60.0
            clock.now += 60.0 + jump_s
        log.note_alive()
        assert log.mtbf_s() == PRIOR_S + (timer.now - 1000.0)
        (attempt,) = read_attempts(storage)
        assert attempt.seen - attempt.began == timer.now - 1000.0
        best = (daly(1.0, PRIOR_S) + 1.0) / 60.0  # steps; the hour of the test changes little
        assert all(abs(later - earlier - best) <= 1 for earlier, later in itertools.pairwise(saved))
        assert len(saved) > 5


def test_a_damaged_log_begins_anew_with_a_warning(tmp_path: Path):
    (tmp_path / ATTEMPTS.key).write_text("")
    with open_storage(tmp_path) as storage:
        with pytest.warns(UserWarning, match="a new log"):
            AttemptLog(storage)
        assert len(read_attempts(storage)) == 1


def test_a_log_that_cannot_be_read_stops_no_job(tmp_path: Path):
    (tmp_path / ATTEMPTS.key).symlink_to(ATTEMPTS.key)
    with pytest.warns(UserWarning, match=rf"{ATTEMPTS.key}.*pass mtbf="):
        Manager(tmp_path, interval="auto").close()


def test_the_log_stays_small(tmp_path: Path):
    clock: Callable[[], float] = Clock()
    with open_storage(tmp_path) as storage:
        ATTEMPTS.keep(storage, [(1.0, 2.0, True)] * 2000)
        AttemptLog(storage, clock)
        assert len(read_attempts(storage)) == 1000
