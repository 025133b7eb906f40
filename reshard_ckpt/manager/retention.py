"""The retention rule of a run: keep the newest checkpoints, multiples of a step, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.report import check_choice, check_count


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule that says which checkpoints of a run to keep.

    Attributes
    ----------
    keep_last
        Number of newest steps to keep; None keeps all steps.
    keep_every
        Also keep the multiples of this.
    keep_best, best
        Also keep this many steps with the highest (``"max"``) or lowest (``"min"``) metric.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int = 0
    best: str = "max"

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last, 1, or_none=True)
        check_count("keep_every", self.keep_every, 1, or_none=True)
        check_count("keep_best", self.keep_best, 0)
        check_choice("best", self.best, ("max", "min"))

    def kept(self, steps: Sequence[int], metrics: Mapping[int, float]) -> frozenset[int]:
        """Return the steps to keep. A step without a metric, or with a NaN, is never among the best.

        >>> rule = Retention(keep_last=1, keep_every=100, keep_best=1)
        >>> sorted(rule.kept([100, 150, 200, 250, 260], {150: 0.9, 250: 0.5}))
        [100, 150, 200, 260]
        """
        if self.keep_last is None:
            return frozenset(steps)
        kept = set(sorted(steps)[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        kept.update(self.ranked(steps, metrics)[: self.keep_best])
        return frozenset(kept)

    def ranked(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        """Sort the steps that have a metric, best first. Of equal metrics the newer step comes first."""
        sign = -1.0 if self.best == "max" else 1.0
        with_metric = [step for step in steps if not math.isnan(metrics.get(step, math.nan))]
        return sorted(with_metric, key=lambda step: (sign * metrics[step], -step))
