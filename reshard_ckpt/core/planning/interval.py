"""How often to save: the interval that loses the least time to saves, failures and restores.

A save costs steps, and a failure loses the steps since the last save. With ``C`` seconds lost per save, ``M`` seconds
between failures and an interval of ``T`` seconds:

- `young`: ``√(2 C M)`` (Young, *A first order approximation to the optimum checkpoint interval*, 1974);
- `daly`: its higher-order form, accurate also if ``C`` is not far below ``M`` (Daly, *A higher order estimate of the optimum
  checkpoint interval for restart dumps*, 2006, equation 37);
- `TierCosts.lost`: the share of time that one tier loses, ``C / T + λ (T / 2 + lag + R)``. Tiers add up: a failure counts at the
  fastest tier that survives it (Vaidya 1995; Moody et al. 2010 for several levels);
- a cap on ``C / T``, as CheckFreq has with 3.5 % (Mohan, Phanishayee, Chidambaram, FAST 2021).

All times are in seconds, and a tier is a place for checkpoints (memory of nodes, or the store). ``λ`` is the rate of failures and
``R`` the time of a restore. An asynchronous save loses only the time that it stalls training and slows it down, which is ``C``. A
failure before a save is committed goes back to the checkpoint before it; the time that a save takes until then is the ``lag``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .copies import pair_lost_share

MAX_OVERHEAD = 0.035
"""The largest share of time that saves may cost, as CheckFreq proposes."""


def young(cost_s: float, mtbf_s: float) -> float:
    """Compute Young's interval in seconds between two saves, from the cost of a save and the mean time between failures.

    >>> young(300, 86400) / 60
    120.0
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Compute Daly's interval in seconds: the training time between the end of a save and the beginning of the next one.

    >>> [round(daly(300, hours * 3600) / 60, 1) for hours in (24, 6, 0.25)]
    [116.7, 56.7, 9.1]
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def for_lost_samples(target_pls: float, num_ranks: int, mtbf_s: float) -> float:
    """Compute the interval in seconds between saves at which partial recovery loses a given share of samples (PLS) on average.

    A failure of one of ``N`` ranks takes ``1 / N`` of the state back by half an interval: ``PLS = T / (2 M N)`` (Maeng et al.,
    *CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial Recovery*, 2021).

    >>> for_lost_samples(0.01, 8, 3600)
    576.0
    """
    return 2 * target_pls * num_ranks * mtbf_s


@dataclass(frozen=True, slots=True)
class TierCosts:
    """The times and the failure rate of one tier (a place for checkpoints), from which `best_interval` and `lost` are computed.

    Attributes
    ----------
    cost_s
        Seconds of training that one save loses.
    save_s
        Seconds from the beginning of a save until it is committed. The next save begins no earlier.
    restore_s
        Seconds from a failure to the first new step.
    failures_per_s
        Rate of the failures after which the state is restored from this tier.
    """

    cost_s: float
    save_s: float
    restore_s: float
    failures_per_s: float

    def best_interval(self, max_overhead: float = MAX_OVERHEAD) -> float:
        """Return the best number of seconds between the beginnings of two saves.

        It is infinite if no failure is restored from this tier.
        """
        if self.failures_per_s <= 0:
            return math.inf
        best = daly(self.cost_s, 1 / self.failures_per_s) + self.cost_s
        return max(best, self.save_s, self.cost_s / max_overhead)

    def lost(self, interval_s: float) -> LostShares:
        """Compute the shares of time that are lost if saves are `interval_s` apart, to first order in the rate of failures."""
        return LostShares(
            saving=0.0 if math.isinf(interval_s) else self.cost_s / interval_s,
            repeating=self.failures_per_s * (interval_s / 2 + self.save_s) if self.failures_per_s else 0.0,
            restoring=self.failures_per_s * self.restore_s,
        )


@dataclass(frozen=True, slots=True)
class LostShares:
    """The shares of time that are lost, by cause: saves that stall training, steps of training done again, and restoring."""

    saving: float
    repeating: float
    restoring: float

    @property
    def total(self) -> float:
        """The whole share of time that is lost, at most 1. With 1, no training step is ever finished."""
        return min(1.0, self.saving + self.repeating + self.restoring)

    def __add__(self, other: LostShares) -> LostShares:
        return LostShares(self.saving + other.saving, self.repeating + other.repeating, self.restoring + other.restoring)


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures of a training job and its machines, from which the best interval between saves is computed.

    Attributes
    ----------
    state_bytes
        Size of a checkpoint, over all nodes.
    write_bytes_per_s, read_bytes_per_s
        Rates of the store, for all nodes together.
    copy_bytes_per_s
        Rate at which one node sends to another.
    stall_s
        Seconds of training that one save loses.
    mtbf_s
        Mean time between failures of the whole job.
    restart_s
        Seconds from a failure until the state is loaded: noticing the failure, getting new nodes, starting the processes.
    nodes, copies
        The number of nodes, and the number of other nodes that hold a copy of a node's part of the checkpoint in memory. None for
        `copies`: there are no checkpoints in memory.
    node_share
        Share of the failures that take a node with its memory; the others end only processes.
    double_share
        Share of the failures of nodes that take a second node at the same time.
    """

    state_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float
    stall_s: float
    mtbf_s: float
    restart_s: float
    nodes: int = 1
    copies: int | None = None
    node_share: float = 1.0
    double_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """The best intervals between a job's saves, and the shares of time that it then loses.

    Attributes
    ----------
    memory_s, store_s
        Seconds between saves to memory (None without a memory tier) and to the store.
    memory, store
        The shares of time that each tier loses.
    memory_survives
        Share of the failures that the memory tier survives.
    """

    memory_s: float | None
    store_s: float
    memory: LostShares
    store: LostShares
    memory_survives: float

    @property
    def lost(self) -> LostShares:
        """The shares of time that the memory tier and the store lose together."""
        return self.memory + self.store

    @property
    def goodput(self) -> float:
        """The share of time that goes into training steps that are not repeated after a failure."""
        return 1.0 - self.lost.total


def best_goodput(job: JobFigures, max_overhead: float = MAX_OVERHEAD) -> Goodput:
    """Choose the best intervals between saves to memory and to the store.

    With a memory tier the store is written from memory, in the background, so that only a save to memory costs training time.
    """
    memory, store, survives = tiers(job)
    memory_s = None if memory is None else memory.best_interval(max_overhead)
    store_s = max(store.best_interval(max_overhead), memory_s or 0.0)  # only a save to memory can be written to the store
    nothing = LostShares(0.0, 0.0, 0.0)
    lost = nothing if memory is None or memory_s is None else memory.lost(memory_s)
    return Goodput(memory_s, store_s, lost, store.lost(store_s), survives)


def tiers(job: JobFigures) -> tuple[TierCosts | None, TierCosts, float]:
    """Compute the costs of the memory tier and of the store, and the share of failures that the memory tier survives.

    The first is None without a memory tier, or if it would survive no failure.
    """
    write_s = job.state_bytes / job.write_bytes_per_s
    read_s = job.state_bytes / job.read_bytes_per_s
    rate = 1 / job.mtbf_s
    store_alone = TierCosts(job.stall_s, job.stall_s + write_s, job.restart_s + read_s, rate)
    if job.copies is None:
        return None, store_alone, 0.0
    copies = min(job.copies, job.nodes - 1)
    image_s = job.state_bytes / job.nodes / job.copy_bytes_per_s
    # After a node is lost, one copy of its images is missing until the next save. A second loss in that time counts as a loss
    # of two nodes at once.
    exposed_s = job.restart_s + image_s * (1 + copies) + young(job.stall_s, job.mtbf_s)
    double = min(1.0, job.double_share + 1 - math.exp(-exposed_s * rate))
    single_lost = 0.0 if copies else 1.0
    survives = 1 - job.node_share * ((1 - double) * single_lost + double * pair_lost_share(job.nodes, copies))
    if not survives:  # every failure takes the memory, so saving to it would cost time and never help
        return None, store_alone, 0.0
    memory = TierCosts(job.stall_s, job.stall_s + image_s * copies, job.restart_s + image_s, rate * survives)
    store = TierCosts(0.0, write_s, job.restart_s + read_s, rate * (1 - survives))
    return memory, store, survives
