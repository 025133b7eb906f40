"""The interval between saves: captions of Daly's paper, a simulation of failures, and placement of copies by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.planning.copies import copy_groups, copy_holders, pair_lost_share
from reshard_ckpt.core.planning.interval import JobFigures, TierCosts, best_goodput, daly, tiers, young


@pytest.mark.parametrize(("mtbf_min", "best_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_gives_the_intervals_of_his_captions(mtbf_min: float, best_min: float):
    assert float(f"{daly(5, mtbf_min):.{0 if best_min > 10 else 1}f}") == best_min


def test_daly_saves_once_per_failure_where_a_save_takes_longer_than_two():
    assert daly(100, 50) == 50
    assert daly(99.999, 50) == pytest.approx(50, rel=0.12)  # both branches meet, about


def test_young_and_daly_agree_where_saves_cost_nearly_nothing():
    assert daly(1e-6, 1e6) == pytest.approx(young(1e-6, 1e6), rel=1e-4)


def simulate_one(tier: TierCosts, interval: float, seed: int) -> float:
    """The share of time lost by one tier: each of 200,000 failures at random keeps the work of the newest committed save."""
    up = np.random.default_rng(seed).exponential(1 / tier.failures_per_s, 200_000)
    saves = np.maximum(np.floor((up - tier.save_s) / interval), 0)
    kept = np.where(saves > 0, saves * interval - (saves - 1) * tier.cost_s, 0)
    return float(1 - kept.sum() / (up + tier.restore_s).sum())


def simulate(tiers: list[tuple[TierCosts, float]], hours: float, seed: int) -> float:
    """The share of time lost when failures strike at random, by playing it through second by second of work, event by event.

    Each tier is saved at its own interval; its failures, drawn by its rate, fall back to the newest save of that tier that was
    committed, and work done since then is lost.
    """
    rng = np.random.default_rng(seed)
    rate = sum(tier.failures_per_s for tier, _ in tiers)
    end, now, work = hours * 3600, 0.0, 0.0
    committed = [0.0] * len(tiers)
    pending: list[tuple[float, int, float]] = []  # when it is committed, tier, work in it
    next_save = [interval for _, interval in tiers]
    next_failure = rng.exponential(1 / rate)
    while now < end:
        event = min([*next_save, *(when for when, _, _ in pending), next_failure])
        work += event - now
        now = event
        for when, tier, saved in [p for p in pending if p[0] <= now]:
            committed[tier] = max(committed[tier], saved)
            pending.remove((when, tier, saved))
        if now == next_failure:
            struck = rng.choice(len(tiers), p=[tier.failures_per_s / rate for tier, _ in tiers])
            pending.clear()
            work = committed[struck]
            committed = [min(c, work) for c in committed]
            now += tiers[struck][0].restore_s
            next_failure = now + rng.exponential(1 / rate)
            next_save = [now + interval for _, interval in tiers]
            continue
        for i, (tier, interval) in enumerate(tiers):
            if next_save[i] == now:
                pending.append((now + tier.save_s, i, work))
                work -= tier.cost_s  # the time goes on, the work does not
                next_save[i] = now + interval
    return 1 - work / now


FAST = TierCosts(cost_s=4.0, save_s=20.0, restore_s=60.0, failures_per_s=1 / 14400)
SLOW = TierCosts(cost_s=1.0, save_s=300.0, restore_s=400.0, failures_per_s=1 / 86400)


@pytest.mark.parametrize("stretch", [0.4, 1.0, 3.0])
def test_lost_share_of_one_tier_is_that_of_a_simulation(stretch: float):
    interval = FAST.best_interval() * stretch
    assert simulate_one(FAST, interval, seed=1) == pytest.approx(FAST.lost(interval).total, rel=0.03)


def test_lost_shares_of_two_tiers_add_up_as_in_a_simulation():
    pairs = [(tier, tier.best_interval()) for tier in (FAST, SLOW)]
    expected = sum(tier.lost(interval).total for tier, interval in pairs)
    assert simulate(pairs, 12_000, seed=2) == pytest.approx(expected, rel=0.06)


def test_best_interval_loses_less_in_a_simulation_than_its_neighbours():
    best = FAST.best_interval(max_overhead=1.0)
    lost = {share: simulate_one(FAST, best * share, seed=3) for share in (0.35, 1.0, 3.0)}
    assert lost[1.0] < lost[0.35]
    assert lost[1.0] < lost[3.0]


def test_cap_on_the_overhead_and_length_of_a_save_keep_saves_apart():
    often = TierCosts(cost_s=10.0, save_s=5.0, restore_s=0.0, failures_per_s=1 / 600)
    assert often.best_interval(max_overhead=1.0) < 150
    assert often.best_interval(max_overhead=0.035) == pytest.approx(10 / 0.035)
    assert TierCosts(1e-3, 900.0, 0.0, 1 / 3600).best_interval() == 900.0


@given(st.integers(1, 9), st.integers(0, 4), st.integers(1, 9))
def test_copies_are_on_other_nodes_and_on_other_machines_where_there_are_any(nodes: int, copies: int, num_machines: int):
    machines = [node % num_machines for node in range(nodes)]
    holders = copy_holders(machines, copies)
    groups = copy_groups(machines, copies)
    assert sorted(node for group in groups for node in group) == list(range(nodes))
    for node, sent in enumerate(holders):
        assert node not in sent
        assert len(set(sent)) == len(sent) == min(copies, nodes - 1)
        group = next(group for group in groups if node in group)
        assert set(sent) <= set(group)
    held = [sum(node in sent for sent in holders) for node in range(nodes)]
    assert len(set(held)) == 1, "memory for copies must be the same on all nodes"
    if nodes >= 2 * (copies + 1) and num_machines >= nodes:
        assert all(len(group) == copies + 1 for group in groups[:-1])


def test_two_nodes_of_one_machine_do_not_hold_each_others_copies():
    for machines in (["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "b", "b", "c", "c"]):
        for node, sent in enumerate(copy_holders(machines, 1)):
            assert machines[sent[0]] != machines[node]


@pytest.mark.parametrize("copies", range(4))
@pytest.mark.parametrize("nodes", range(2, 10))
def test_share_of_fatal_pairs_is_that_of_trying_all(nodes: int, copies: int):
    holders = copy_holders(range(nodes), copies)
    pairs = list(combinations(range(nodes), 2))
    fatal = sum(any({*holders[node]} <= {*pair} for node in pair) for pair in pairs)
    assert pair_lost_share(nodes, copies) == pytest.approx(fatal / len(pairs))


@pytest.mark.parametrize("nodes", [2, 8, 64, 1024])
def test_with_one_copy_a_second_lost_node_is_the_only_holder_once_in_n_minus_1(nodes: int):
    assert pair_lost_share(nodes, 1) == pytest.approx(1 / (nodes - 1))


JOB = JobFigures(
    state_bytes=2e12, write_bytes_per_s=20e9, read_bytes_per_s=20e9, copy_bytes_per_s=10e9, stall_s=5, mtbf_s=10800,
    restart_s=300, nodes=64,
)  # fmt: skip


def test_memory_with_a_copy_loses_less_than_the_store_alone_and_one_without_nothing():
    alone = best_goodput(JOB)
    with_copy = best_goodput(replace(JOB, copies=1))
    assert with_copy.goodput > alone.goodput
    assert with_copy.memory_survives > 0.99
    no_copy = best_goodput(replace(JOB, copies=0))
    assert (no_copy.memory_s, no_copy.memory_survives, no_copy.lost) == (None, 0.0, alone.lost)
    processes_die = best_goodput(replace(JOB, copies=0, node_share=0.25))
    assert processes_die.memory_survives == pytest.approx(0.75)


def test_rates_of_the_tiers_are_the_failures():
    memory, store, survives = tiers(replace(JOB, copies=1, double_share=0.5))
    assert memory.failures_per_s + store.failures_per_s == pytest.approx(1 / JOB.mtbf_s)
    assert survives == pytest.approx(memory.failures_per_s * JOB.mtbf_s)
    assert 1 - survives >= 0.5 / 63
