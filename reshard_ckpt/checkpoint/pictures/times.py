"""Where did a save's time go? Ranks down, time across, a colour for each step; a slow rank or step stands out."""

from __future__ import annotations

import numpy as np

from ...core.timeline import Step, Timeline
from ...engine.common.progress import size_text
from .scene import SERIES, Line, Rect, Scene, Shape, Text, fitted, on, text_width

WIDTH = 960.0
TOP = 62.0
MAX_ROWS = 1500
WAITS = ("meet", "turn", "receipts")
_COLOURS = {
    "meet": "#9aa3b2", "turn": "#b8b0a0", "capture": "#4477aa", "agree": "#c28f00", "compare": "#7a6fd0", "stage": "#2a9db5",
    "write": "#228833", "sync": "#8a8a3c", "receipts": "#d7b98e", "check": "#cc5566", "publish": "#aa3377", "clean up": "#e07b39",
}  # fmt: skip
"""Waiting is pale."""


def draw_timeline(timeline: Timeline) -> Scene:
    """A row for each thread of each rank, its steps along it; the summary names the rank and the step that took longest."""
    rows = sorted({(step.rank, step.thread) for step in timeline.steps}, key=lambda row: (row[0], row[1] != "caller", row[1]))
    hidden = max(len(rows) - MAX_ROWS, 0)
    rows = rows[:MAX_ROWS]
    height = min(max(640.0 / max(len(rows), 1), 3.0), 24.0)
    labels = [timeline.label(rank) + ("" if thread == "caller" else f" {thread}") for rank, thread in rows]
    left = min(max((text_width(label, 11) for label in labels), default=0.0) + 12, 220.0)
    scale = (WIDTH - left - 10) / max(timeline.seconds, 1e-9)
    place = {row: TOP + i * height for i, row in enumerate(rows)}
    bottom = TOP + len(rows) * height
    shapes: list[Shape] = [*_axis(timeline.seconds, left, scale, bottom)]
    every = max(round(13 / height), 1)
    for i, label in enumerate(labels):
        if i % every == 0:
            shapes.append(Text(left - 6, TOP + (i + 0.5) * height, fitted(label, 11, left - 8), 11, "soft", "end"))
    for step in timeline.steps:
        if (step.rank, step.thread) in place:
            shapes += _bar(step, timeline, left, place[step.rank, step.thread], height, scale)
    if hidden:
        shapes.append(Text(left, bottom + 12, f"… and {hidden:,} more rows", 11, "soft"))
    legend = _legend(timeline)
    title = f"A save of {timeline.seconds:.3g} s on {timeline.num_ranks} rank{'s' if timeline.num_ranks != 1 else ''}"
    head: list[Shape] = [Text(0, 12, title, 13, bold=True), *legend]
    return Scene(WIDTH, bottom + 22, title, (*head, *shapes))


def _axis(seconds: float, left: float, scale: float, bottom: float) -> list[Shape]:
    """Lines at round times."""
    raw = max(seconds, 1e-9) / 8
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= raw)
    shapes: list[Shape] = []
    for i in range(int(seconds / step) + 1):
        x = left + i * step * scale
        unit = f"{i * step:.3g} s" if step >= 0.1 else f"{i * step * 1000:.3g} ms"
        shapes += [Line(x, TOP - 4, x, bottom), Text(x, TOP - 12, unit, 10.5, "soft", "middle" if i else "start")]
    return shapes


def _bar(step: Step, timeline: Timeline, left: float, y: float, height: float, scale: float) -> list[Shape]:
    took = step.end_s - step.start_s
    size = f", {size_text(step.num_bytes)}, {size_text(round(step.num_bytes / max(took, 1e-9)))}/s" if step.num_bytes else ""
    tip = f"{timeline.label(step.rank)} {step.name} ({step.thread}): {took:.3g} s from {step.start_s:.3g} s{size}"
    x, width = left + step.start_s * scale, max(took * scale, 0.6)
    inset = 1.5 if height >= 8 else 0.0
    fill = colour_of(step.name)
    shapes: list[Shape] = [Rect(x, y + inset, width, height - 2 * inset, fill, tip=tip)]
    if height >= 15 and text_width(step.name, 10.5) <= width - 6:
        shapes.append(Text(x + width / 2, y + height / 2, step.name, 10.5, on(fill), "middle"))
    return shapes


def colour_of(step: str) -> str:
    """The colour of a step, the same in every picture."""
    return _COLOURS.get(step, SERIES[sum(step.encode()) % len(SERIES)])


def _legend(timeline: Timeline) -> list[Shape]:
    """The steps, in the order in which they are first met, each with its longest time on any rank."""
    longest: dict[str, Step] = {}
    for step in sorted(timeline.steps, key=lambda step: step.start_s):
        known = longest.get(step.name)
        if known is None or step.end_s - step.start_s > known.end_s - known.start_s:
            longest[step.name] = step
    x, shapes = 0.0, list[Shape]()
    for name in longest:
        wide = text_width(name, 11) + 26
        if x + wide > WIDTH:
            break
        shapes += [Rect(x, 24, 11, 11, colour_of(name)), Text(x + 16, 29.5, name, 11, "soft")]
        x += wide
    return shapes


def timeline_words(timeline: Timeline) -> str:
    """Which step of which rank took longest, but for those that wait."""
    steps = [step for step in timeline.steps if step.name not in WAITS]
    if not steps:
        return "No step took any time."
    slowest = max(steps, key=lambda step: step.end_s - step.start_s)
    took = slowest.end_s - slowest.start_s
    who = f"“{slowest.name}” of {timeline.label(slowest.rank)}"
    return f"The longest step, but for those that wait, is {who}: {took:.3g} of {timeline.seconds:.3g} s."
