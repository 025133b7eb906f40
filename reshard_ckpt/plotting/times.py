"""Pictures of times. For a save: a row for each thread of each rank, time from left to right, a colour for each step.

For ``goodput``: the time lost over the interval between saves, a curve for each tier, with a mark at the best interval.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator, PercentFormatter

from ..core.planning.interval import Goodput, JobFigures, TierCosts, tiers
from ..core.report import duration_text, plural
from ..core.timeline import Step, Timeline
from ..engine.common.progress import size_text
from .canvas import (
    PALETTE,
    add_axes,
    add_legend,
    draw_boxes,
    fitted,
    new_figure,
    set_ticks,
    styled,
    text_colour_on,
    text_width,
    write_head,
    write_in,
)

WIDTH = 960.0
HEAD, FOOT = 78.0, 30.0
MAX_RANKS = 128
MAX_LEGEND = 16
WAITS = ("meet", "turn", "receipts")
_COLOURS = {
    "meet": "#c4c9d1", "turn": "#d6cfc2", "capture": "#0072b2", "agree": "#e69f00", "compare": "#cc79a7", "stage": "#56b4e9",
    "write": "#009e73", "sync": "#8a8a3c", "receipts": "#dcd3e6", "check": "#d55e00", "publish": "#882255", "clean up": "#7f5539",
}  # fmt: skip
"""The colour of each step, in the order of a save; steps that wait for others are pale."""


@styled()
def draw_timeline(timeline: Timeline) -> Figure:
    """Draw the timeline of a save: a row of steps for each thread of each rank; of too many ranks, only the busiest."""
    rows, hidden = _rows(timeline)
    labels = [fitted(timeline.label(rank) + ("" if thread == "caller" else f" {thread}"), 8, 200) for rank, thread in rows]
    left = max((text_width(label, 8) for label in labels), default=20.0) + 24
    tall = min(max(640.0 / max(len(rows), 1), 4.0), 26.0)
    across, down = WIDTH - left - 24, tall * max(len(rows), 1)
    figure = new_figure(WIDTH, HEAD + down + FOOT)
    axes = add_axes(figure, left, HEAD, across, down)
    seconds = max(timeline.seconds, 1e-9)
    axes.set(xlim=(0, seconds * 1.005), ylim=(max(len(rows), 1), 0))
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.grid(axis="x", color="#dfe3ea", linewidth=0.8)
    axes.set_axisbelow(True)
    set_ticks(axes, [i + 0.5 for i in range(len(rows))], labels, vertical=True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    at = {row: i for i, row in enumerate(rows)}
    steps = [step for step in timeline.steps if (step.rank, step.thread) in at]
    least = 0.6 * seconds / across  # shorter steps are drawn this long, so that they can still be seen
    boxes = [(s.start_s, at[s.rank, s.thread] + 0.08, max(s.end_s - s.start_s, least), 0.84) for s in steps]
    draw_boxes(axes, boxes, [colour_of(step.name) for step in steps], [_tip(step, timeline) for step in steps], edge="none")
    for step, (x, y, width, height) in zip(steps, boxes, strict=True):
        colour = text_colour_on(colour_of(step.name))
        write_in(axes, x + width / 2, y + height / 2, [step.name], width / seconds * across, tall, size=8, color=colour)
    more = f"; the {MAX_RANKS} busiest ranks" if hidden else ""
    write_head(figure, f"{timeline_title(timeline)}{more}")
    # The legend has known steps in the order of a save, then unknown steps in the order of their first start.
    begun = dict.fromkeys(step.name for step in sorted(timeline.steps, key=lambda step: step.start_s))
    names = [*(name for name in _COLOURS if name in begun), *(name for name in begun if name not in _COLOURS)][:MAX_LEGEND]
    add_legend(figure, {name: colour_of(name) for name in names}, 10, 28, 12 if len(names) <= 12 else 8)
    return figure


def timeline_title(timeline: Timeline) -> str:
    """Return the title of a timeline's picture: the length of the save and the number of ranks."""
    return f"A save of {timeline.seconds:.3g} s on {plural(timeline.num_ranks, 'rank')}"


def timeline_words(timeline: Timeline) -> str:
    """Return a sentence that names the longest step and its rank; steps that wait for others do not count."""
    steps = [step for step in timeline.steps if step.name not in WAITS]
    if not steps:
        return "No step took any time."
    slowest = max(steps, key=lambda step: step.end_s - step.start_s)
    took = slowest.end_s - slowest.start_s
    who = f"“{slowest.name}” of {timeline.label(slowest.rank)}"
    return f"The longest step, but for those that wait, is {who}: {took:.3g} of {timeline.seconds:.3g} s."


def colour_of(step: str) -> str:
    """Choose the colour of a step; it is the same in every picture."""
    return _COLOURS.get(step, PALETTE[sum(step.encode(errors="replace")) % len(PALETTE)])


def _rows(timeline: Timeline) -> tuple[list[tuple[int, str]], int]:
    """List the ranks' threads to draw, in order, and the number of ranks left out, which are the least busy ones."""
    busy: dict[int, float] = {}
    for step in timeline.steps:
        took = 0.0 if step.name in WAITS else step.end_s - step.start_s
        busy[step.rank] = busy.get(step.rank, 0.0) + took
    kept = set(sorted(busy, key=lambda rank: -busy[rank])[:MAX_RANKS])
    rows = {(step.rank, step.thread) for step in timeline.steps if step.rank in kept}
    return sorted(rows, key=lambda row: (row[0], row[1] != "caller", row[1])), len(busy) - len(kept)


def _tip(step: Step, timeline: Timeline) -> str:
    """Return the text that appears when the pointer is on a step: rank, step, thread, times, bytes."""
    took = step.end_s - step.start_s
    size = f", {size_text(step.num_bytes)}, {size_text(round(step.num_bytes / max(took, 1e-9)))}/s" if step.num_bytes else ""
    return f"{timeline.label(step.rank)} {step.name} ({step.thread}): {took:.3g} s from {step.start_s:.3g} s{size}"


GOODPUT_WIDTH, GOODPUT_HEIGHT = 720.0, 420.0
TICKS_S = (0.1, 1, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 604800)


@styled()
def draw_goodput(job: JobFigures, best: Goodput) -> Figure:
    """Draw the share of time that a job loses over the interval between its saves.

    If saves to memory are best, it is drawn with and without a memory tier; else only for saves to the store.
    """
    memory, store, _ = tiers(job)
    figure = new_figure(GOODPUT_WIDTH, GOODPUT_HEIGHT)
    axes = add_axes(figure, 70, 56, GOODPUT_WIDTH - 100, GOODPUT_HEIGHT - 110)
    curves: list[tuple[str, TierCosts, float]] = []
    if memory is not None and best.memory_s is not None:
        curves.append(("saves to memory", memory, best.memory_s))
        alone = tiers(replace(job, copies=None))[1]
        curves.append(("saves to the store alone, without a memory tier", alone, alone.best_interval()))
    else:
        curves.append(("saves to the store", store, best.store_s))
    center = [interval for *_, interval in curves]
    intervals = np.geomspace(min(center) / 20, max(center) * 20, 300)
    marks = [tier.lost(at).total for _, tier, at in curves]
    for (label, tier, at), lost, colour in zip(curves, marks, PALETTE, strict=False):
        axes.plot(intervals, [tier.lost(float(t)).total for t in intervals], color=colour, label=label)
        axes.plot([at], [lost], "o", color=colour)
        # The lowest mark is labelled below its curve, all others above, so that nearby marks do not cover each other's labels.
        lift = -14 if lost == min(marks) else 8
        axes.annotate(duration_text(at), (at, lost), (0, lift), textcoords="offset points", ha="center", size=9, color=colour)
    axes.set(
        xscale="log",
        xlim=(intervals[0], intervals[-1]),
        ylim=(0, min(1.0, 3 * max(marks))),
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
    figure.text(70 / GOODPUT_WIDTH, 1 - 34 / GOODPUT_HEIGHT, title, size=13, weight="bold")
    return figure
