"""Time lost by the interval between saves: a curve for each tier, with a mark at the best interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from ..core.planning.interval import Goodput, JobFigures, TierCosts, tiers
from ..core.report import duration_text
from .canvas import PALETTE, add_axes, new_figure, styled

WIDTH, HEIGHT = 720.0, 420.0
TICKS_S = (0.1, 1, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 604800)


@styled()
def draw_goodput(job: JobFigures, best: Goodput) -> Figure:
    """Draw the share of time lost over the interval, for saves to memory and for the store alone, or only for the store."""
    memory, store, _ = tiers(job)
    figure = new_figure(WIDTH, HEIGHT)
    axes = add_axes(figure, 70, 56, WIDTH - 100, HEIGHT - 110)
    curves: list[tuple[str, TierCosts, float]] = []
    if memory is not None and best.memory_s is not None:
        curves.append(("saves to memory", memory, best.memory_s))
        alone = tiers(replace(job, copies=None))[1]
        curves.append(("saves to the store alone, without a memory tier", alone, alone.best_interval()))
    else:
        curves.append(("saves to the store", store, best.store_s))
    center = [interval for *_, interval in curves]
    intervals = np.geomspace(min(center) / 20, max(center) * 20, 300)
    highest = 0.0
    lowest = min(range(len(curves)), key=lambda i: curves[i][1].lost(curves[i][2]).total)
    for i, ((label, tier, at), colour) in enumerate(zip(curves, PALETTE, strict=False)):
        axes.plot(intervals, [tier.lost(float(t)).total for t in intervals], color=colour, label=label)
        axes.plot([at], [tier.lost(at).total], "o", color=colour)
        # The lowest mark is labelled below its curve, all others above, so that nearby marks do not cover each other's labels.
        lift = -14 if i == lowest else 8
        axes.annotate(
            duration_text(at), (at, tier.lost(at).total), (0, lift), textcoords="offset points", ha="center", size=9, color=colour
        )
        highest = max(highest, tier.lost(at).total)
    axes.set(
        xscale="log",
        xlim=(intervals[0], intervals[-1]),
        ylim=(0, min(1.0, 3 * highest)),
        xlabel="interval between saves",
        ylabel="time lost",
    )
    ticks = [t for t in TICKS_S if intervals[0] <= t <= intervals[-1]]
    axes.set_xticks(ticks, [duration_text(t) for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.grid(color="#dfe3ea", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center")
    title = f"{job.state_bytes / 1e9:,.0f} GB on {job.nodes:,} nodes, a failure every {duration_text(job.mtbf_s)}"
    figure.text(70 / WIDTH, 1 - 34 / HEIGHT, title, size=13, weight="bold")
    return figure
