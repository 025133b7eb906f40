"""The schedule of a run's saves: at a fixed interval, or at the interval that measured costs and failures make best.

1. Rank 0 measures the time of steps with and without a save in progress, and reads the reports of the saves (`SaveCosts`).
2. All ranks know the step of the next decision. Until then `SaveSchedule.due` returns False on each rank, without a message.
3. At that step rank 0 decides, and tells all ranks: whether to save now, and the step of the next decision.

So the clocks of the ranks may differ, and ranks communicate only near a save.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..core.planning.interval import TierCosts, for_lost_samples
from ..core.report import SaveReport, duration_s
from ..errors import UsageError

WARM_UP_STEPS = 8
"""Steps to time before the first save of ``interval="auto"``: a few more than the slow first ones, to compare later ones with."""

_KEPT_STEPS, _KEPT_SAVES = 101, 5


Decision = tuple[bool, int]
"""Rank 0's decision at a step: whether to save at this step, and the step of the next decision."""


class SaveCosts:
    """Measures on one rank how long steps take, and how much time saves cost. Any thread may report the end of a save.

    A step is *disturbed* if a save was in progress during it. The cost of a save is the time that disturbed steps take beyond the
    median of the other steps, and at least the stall in the save's own report. `num_steps` counts the timed undisturbed steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._calm: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._costs: deque[float] = deque(maxlen=_KEPT_SAVES)
        self._durations: deque[float] = deque(maxlen=_KEPT_SAVES)
        self._last: tuple[int, float] | None = None
        self._running = self._reports = 0
        self.num_steps = 0
        self._disturbed = False
        self._excess_s = self._stall_s = 0.0
        self.began_at: float | None = None

    def step(self, step: int) -> float:
        """Measure the time since the last call, at the beginning of a training step; return the time now."""
        now = self._clock()
        with self._lock:
            if self._last is not None and step > self._last[0]:
                steps, seconds = step - self._last[0], now - self._last[1]
                if self._disturbed:
                    self._excess_s += seconds - steps * self._step_s()
                else:
                    self._calm.append(seconds / steps)
                    self.num_steps += 1
            if self._disturbed and not self._running and self._reports:  # failed saves do not count: they may cost nothing
                self._costs.append(max(self._excess_s, self._stall_s))
            self._last, self._disturbed = (step, now), self._running > 0
        return now

    @contextmanager
    def saving(self) -> Iterator[list[SaveReport]]:
        """Measure the ``with`` block as a save. The block appends the save's report to the list that this yields."""
        reports: list[SaveReport] = []
        self.begin()
        try:
            yield reports
        finally:
            self.end(reports[0] if reports else None)

    def begin(self) -> None:
        """Record that a save begins, so that the steps until `end` are measured apart."""
        now = self._clock()
        with self._lock:
            if not self._disturbed:
                self._excess_s = self._stall_s = 0.0
                self._reports = 0
            self._running += 1
            self._disturbed, self.began_at = True, now

    def end(self, report: SaveReport | None) -> None:
        """Record the end of a save, with its report; None if it failed."""
        with self._lock:
            self._running -= 1
            if report is not None:
                self._reports += 1
                self._stall_s += report.stall_s
                self._durations.append(report.duration_s)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress now."""
        return self._running > 0

    @property
    def step_s(self) -> float:
        """The median time in seconds of a training step during which no save was in progress; 0 if none was timed."""
        with self._lock:
            return self._step_s()

    def _step_s(self) -> float:
        return statistics.median(self._calm) if self._calm else 0.0

    def tier(self) -> TierCosts | None:
        """Return measured cost and duration of saves as a `TierCosts`, with a failure rate of 0; None if no save was measured."""
        with self._lock:
            if not self._costs or not self._durations:
                return None
            # With a cost of 0 the best interval would be 0, so a save costs at least a thousandth of a step.
            cost_s = max(statistics.median(self._costs), 1e-3 * self._step_s(), 1e-6)
            return TierCosts(cost_s, statistics.median(self._durations), 0.0, 0.0)


Interval = Callable[[SaveCosts], float | None]
"""A function of the measured `SaveCosts`: seconds from the beginning of one save to the next; None if too little is known."""


class SaveSchedule:
    """Decides when the next save of a run is due, by the clock of rank 0.

    Parameters
    ----------
    interval
        Returns the seconds between two saves, from the measurements of rank 0.
    warm_up_steps
        Steps to time before the first save, at least 1.
    agree
        Called as ``agree(step, decision)`` on rank 0 and ``agree(step, None)`` on the others; returns the decision on all ranks.
    costs
        The measurements of rank 0; None on the other ranks.
    """

    def __init__(
        self, interval: Interval, warm_up_steps: int, agree: Callable[[int, Decision | None], Decision], costs: SaveCosts | None
    ) -> None:
        self._interval, self._agree, self._costs, self._warm_up_steps = interval, agree, costs, warm_up_steps
        self._look_at: int | None = None
        self._began_at: float | None = None
        self._asked = self._first_again = -1

    def due(self, step: int) -> bool:
        """Return whether to save at this step, the same on all ranks. Steps before the next decision need no communication."""
        if step < self._asked:  # an older step was loaded: the next decision may be far ahead
            self._look_at, self._first_again = None, step
        self._asked = step
        now = None if self._costs is None else self._costs.step(step)
        if self._look_at is not None and step < self._look_at:
            return False
        own = None if self._costs is None or now is None else self._decide(step, now, self._costs)
        is_due, self._look_at = self._agree(step, own)
        return is_due

    def _decide(self, step: int, now: float, costs: SaveCosts) -> Decision:
        """Decide on rank 0 whether to save at this step, and at which step to decide again."""
        self._began_at = now if self._began_at is None else self._began_at
        missing = self._warm_up_steps - costs.num_steps
        if costs.is_saving or missing > 0:
            return False, step + max(missing, 1)
        interval_s = self._interval(costs)
        if interval_s is None:  # the first save measures the cost; if it failed, another one follows some steps later
            is_due = costs.began_at is None or step >= self._first_again
            if is_due:
                self._first_again = step + WARM_UP_STEPS
            return is_due, step + 1
        since = self._began_at if costs.began_at is None else costs.began_at
        left = (interval_s - (now - since)) / max(costs.step_s, 1e-6)
        if left > 0.5:  # steps
            # Step times vary: decide again half-way, but not further ahead than the number of timed steps.
            return False, step + max(1, min(math.floor(left / 2), costs.num_steps))
        return True, step + 1


def interval_rule(
    interval: str | float | None,
    mtbf: str | float | None,
    max_overhead: float,
    target_pls: float | None,
    num_ranks: Callable[[], int],
    estimated_mtbf_s: Callable[[], float],
) -> tuple[Interval, int]:
    """Return the `Interval` for these options of a manager, and the steps to time before the first save.

    For ``"auto"``, the interval is the one that loses the least time by measured costs; see `core/planning/interval.py`. Raise
    `UsageError` if an option is not a duration, or `max_overhead` or `target_pls` is not a share, or `mtbf` or `target_pls` has
    no use.
    """
    for name, value in (("mtbf", mtbf), ("target_pls", target_pls)):
        if value is not None and interval != "auto":
            what = f'chooses the interval, so pass interval="auto" with it, and not interval={interval!r}'
            raise UsageError(f"{name}={value!r}: {what}")
    is_share = isinstance(target_pls, int | float) and not isinstance(target_pls, bool) and 0 < target_pls < 1
    if target_pls is not None and not is_share:
        raise UsageError(f"target_pls={target_pls!r}: pass the portion of samples that may be lost, between 0 and 1, as in 0.01")
    if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool) or not 0 < max_overhead <= 1:
        raise UsageError(
            f"max_overhead={max_overhead!r}: pass the share of time that saves may cost, above 0 and at most 1, as in 0.035"
        )
    known_s = None if mtbf is None else duration_s(mtbf, option="mtbf")
    if interval is not None and interval != "auto":
        fixed_s = duration_s(interval, option="interval", other='"auto" or ')
        return lambda costs: fixed_s, 1

    def interval_s(costs: SaveCosts) -> float | None:
        tier, mtbf_s = costs.tier(), estimated_mtbf_s() if known_s is None else known_s
        if tier is None:
            return None
        least_s = 0.0 if target_pls is None else for_lost_samples(target_pls, num_ranks(), mtbf_s)
        return max(replace(tier, failures_per_s=1 / mtbf_s).best_interval(float(max_overhead)), least_s)

    return interval_s, WARM_UP_STEPS
