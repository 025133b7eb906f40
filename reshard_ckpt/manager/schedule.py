"""When a run saves: every so many steps, every so many seconds, or as often as its measured costs and failures advise.

1. Rank 0 measures: the time of steps with and without a save under way, and what the saves' own reports say (`SaveCosts`).
2. Ranks agree on the step at which they look again. Until then `SaveSchedule.due` is False on each, and nothing is sent.
3. At that step rank 0 decides, and tells all: save now or not, and when to look next.

So the ranks' clocks may differ, and a step asks nobody but where a save is near.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..core.durations import duration_s
from ..core.planning.interval import TierCosts
from ..core.report import SaveReport
from ..errors import UsageError

WARM_UP_STEPS = 8
"""So many steps are timed before the first save of ``"auto"``, to learn its cost: the first ones compile, allocate and tune."""

_KEPT_STEPS, _KEPT_SAVES = 101, 5


@dataclass(frozen=True, slots=True)
class Decision:
    """What rank 0 decides at a step: whether to save now, and the step at which to decide again."""

    save: bool
    look_at: int

    def encoded(self) -> bytes:
        """Encode for the other ranks."""
        return b"%d %d" % (self.save, self.look_at)

    @classmethod
    def decoded(cls, data: bytes) -> Decision:
        """Decode what rank 0 has sent."""
        save, look_at = map(int, data.split())
        return cls(bool(save), look_at)


class SaveCosts:
    """What a step takes, and what a save costs and takes, measured on one rank; any thread may report the end of a save.

    `num_steps` undisturbed steps were timed.

    A step is disturbed where a save was under way in it. What disturbed steps take beyond the median of the others is what the
    save costs. The save's own report says how long it held its callers up, which is the least that it costs.
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
        """Note that a step begins, and return the time."""
        now = self._clock()
        with self._lock:
            if self._last is not None and step > self._last[0]:
                steps, seconds = step - self._last[0], now - self._last[1]
                if self._disturbed:
                    self._excess_s += seconds - steps * self._step_s()
                else:
                    self._calm.append(seconds / steps)
                    self.num_steps += 1
            if self._disturbed and not self._running and self._reports:  # saves that failed may have cost next to nothing
                self._costs.append(max(self._excess_s, self._stall_s))
            self._last, self._disturbed = (step, now), self._running > 0
        return now

    @contextmanager
    def saving(self) -> Iterator[list[SaveReport]]:
        """Note a save that ends with the ``with`` block, which puts its report into the list."""
        reports: list[SaveReport] = []
        self.begin()
        try:
            yield reports
        finally:
            self.end(reports[0] if reports else None)

    def begin(self) -> None:
        """Note that a save begins."""
        now = self._clock()
        with self._lock:
            if not self._disturbed:
                self._excess_s = self._stall_s = 0.0
                self._reports = 0
            self._running += 1
            self._disturbed, self.began_at = True, now

    def end(self, report: SaveReport | None) -> None:
        """Note that a save is over, with its report; None where it has failed."""
        with self._lock:
            self._running -= 1
            if report is not None:
                self._reports += 1
                self._stall_s += report.stall_s
                self._durations.append(report.duration_s)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._running > 0

    @property
    def step_s(self) -> float:
        """Seconds of a step that no save disturbs: the median."""
        with self._lock:
            return self._step_s()

    def _step_s(self) -> float:
        return statistics.median(self._calm) if self._calm else 0.0

    def tier(self) -> TierCosts | None:
        """Describe what saves cost, without a rate of failures; None before the first one was measured."""
        with self._lock:
            if not self._costs or not self._durations:
                return None
            # A save that costs nothing measurable would be best at every step; a thousandth of a step keeps the sum finite.
            cost_s = max(statistics.median(self._costs), 1e-3 * self._step_s(), 1e-6)
            return TierCosts(cost_s, statistics.median(self._durations), 0.0, 0.0)


Interval = Callable[[SaveCosts], float | None]
"""Tells how long to train between the beginnings of two saves, in seconds; None as long as too little is known."""


def best_interval(mtbf_s: Callable[[], float], max_overhead: float) -> Interval:
    """Choose the interval that loses least, by what was measured; see `core/planning/interval.py`."""

    def interval(costs: SaveCosts) -> float | None:
        tier = costs.tier()
        return None if tier is None else replace(tier, failures_per_s=1 / mtbf_s()).best_interval(max_overhead)

    return interval


class SaveSchedule:
    """The saves of a run by the clock of rank 0.

    Parameters
    ----------
    interval
        How long to train between two saves.
    warm_up_steps
        How many steps are timed before the first save: one tells how far to look ahead.
    agree
        Sends rank 0's bytes to all ranks, and returns them; ``agree(step, None)`` on the others.
    costs
        What rank 0 measures; None on the other ranks.
    """

    def __init__(
        self, interval: Interval, warm_up_steps: int, agree: Callable[[int, bytes | None], bytes], costs: SaveCosts | None
    ) -> None:
        self._interval, self._agree, self._costs, self._warm_up_steps = interval, agree, costs, warm_up_steps
        self._look_at: int | None = None
        self._began_at: float | None = None
        self._asked = self._first_again = -1

    def due(self, step: int) -> bool:
        """Return whether to save at this step, the same on all ranks."""
        if step < self._asked:  # an older step was loaded, and the steps agreed on may be far ahead
            self._look_at, self._first_again = None, step
        self._asked = step
        now = None if self._costs is None else self._costs.step(step)
        if self._look_at is not None and step < self._look_at:
            return False
        own = None if self._costs is None or now is None else self._decide(step, now, self._costs).encoded()
        decision = Decision.decoded(self._agree(step, own))
        self._look_at = decision.look_at
        return decision.save

    def _decide(self, step: int, now: float, costs: SaveCosts) -> Decision:
        """Decide on rank 0 whether to save at this step."""
        self._began_at = now if self._began_at is None else self._began_at
        missing = self._warm_up_steps - costs.num_steps
        if costs.is_saving or missing > 0:
            return Decision(False, step + max(missing, 1))
        interval_s = self._interval(costs)
        if interval_s is None:  # a first save shows what saves cost; where it has failed, another one, some steps later
            is_due = costs.began_at is None or step >= self._first_again
            if is_due:
                self._first_again = step + WARM_UP_STEPS
            return Decision(is_due, step + 1)
        since = self._began_at if costs.began_at is None else costs.began_at
        left = (interval_s - (now - since)) / max(costs.step_s, 1e-6)
        if left > 0.5:  # steps
            # Steps get slower and faster: look again half-way, no further ahead than was timed, and near the end at each step.
            return Decision(False, step + max(1, min(math.floor(left / 2), costs.num_steps)))
        return Decision(True, step + 1)


def interval_rule(
    interval: str | float, mtbf: str | float | None, max_overhead: float, estimated_mtbf_s: Callable[[], float]
) -> tuple[Interval, int]:
    """Make the rule of ``interval=``, ``mtbf=`` and ``max_overhead=``, and say how many steps are timed before the first save.

    Raises
    ------
    UsageError
        One of them is no duration, or no share.
    """
    if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool) or not 0 < max_overhead <= 1:
        raise UsageError(
            f"max_overhead={max_overhead!r}: pass the share of time that saves may cost, above 0 and at most 1, as in 0.035"
        )
    known_s = None if mtbf is None else duration_s(mtbf, option="mtbf")
    if interval != "auto":
        fixed_s = duration_s(interval, option="interval")
        return lambda costs: fixed_s, 1
    return best_interval(estimated_mtbf_s if known_s is None else lambda: known_s, float(max_overhead)), WARM_UP_STEPS
