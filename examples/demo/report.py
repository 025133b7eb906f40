"""The demo's two pictures: the loss across the changes of layout, and where the parts of one tensor lie on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from reshard_ckpt.core.catalog.model import Catalog, ShardView, TensorView

mpl.use("agg")

COLORS = ("#4477aa", "#cc7722", "#228866", "#aa3377")
"""One for each rank, and one for each phase; which most colour-blind people can distinguish, too."""


@dataclass(slots=True)
class PhaseResult:
    """The events of one phase, step `first` to `last`."""

    title: str
    path: Path
    first: int
    last: int
    resumed: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    text: str = ""


def draw_losses(results: Sequence[PhaseResult], unchanged: Sequence[float], path: Path) -> None:
    """Draw the training loss of every step over that of a run without any change, and the held-back loss on both sides of a
    change.
    """
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    top = max(unchanged)
    axes.plot(
        range(1, len(unchanged) + 1), unchanged, color="#bbbbbb", linewidth=4, label="one process throughout, no checkpoint"
    )
    for result, color in zip(results, COLORS, strict=False):
        steps = range(result.first + 1, result.last + 1)
        axes.axvspan(result.first + 0.5, result.last + 0.5, color=color, alpha=0.07, linewidth=0)
        axes.plot(
            steps, result.losses, color=color, linewidth=1.2, label="three layouts, two changes" if not result.first else None
        )
        axes.text((result.first + result.last + 1) / 2, top, result.title, color=color, ha="center", va="top", fontweight="bold")
    for result in results[1:]:
        x, (saved, loaded) = result.first + 0.5, (result.resumed["loss_saved"], result.resumed["loss_loaded"])
        axes.axvline(x, color="#222222", linewidth=1, linestyle=":")
        axes.plot([x], [loaded], "o", color="#222222", markersize=5, label="held-back loss" if result is results[1] else None)
        axes.annotate(
            f"saved at {saved:.4f}\nloaded at {loaded:.4f}", (x, loaded), (8, 14), textcoords="offset points", fontsize=9
        )
    axes.set(xlabel="step", ylabel="loss", xlim=(0.5, len(unchanged) + 0.5), title="One training run on three layouts")
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def split_tensor(catalog: Catalog) -> str:
    """Choose a state tensor that a flat range cuts in the middle of a row; else the one in the most parts."""

    def score(tensor: TensorView) -> tuple[bool, int]:
        cut = any(shard.start % shard.lengths[-1] for shard in tensor.shards if shard.lengths)
        return cut, len(tensor.shards)

    states = [t for t in catalog.tensors() if t.name.endswith(".exp_avg") and len(t.shape) == 2]
    return max(states, key=score).name


def draw_layouts(catalogs: Sequence[tuple[str, Catalog]], name: str, path: Path) -> None:
    """Draw the parts of one tensor in each checkpoint, in the colour of the rank that wrote them."""
    figure = Figure(figsize=(9, 2.2 * len(catalogs) + 0.4), dpi=150, layout="constrained")
    all_axes = figure.subplots(len(catalogs), 1, squeeze=False)[:, 0]
    for axes, (title, catalog) in zip(all_axes, catalogs, strict=True):
        tensor = catalog.tensor(name)
        rows, columns = tensor.shape
        for shard in tensor.shards:
            draw_shard(axes, shard)
        axes.set(xlim=(0, columns), ylim=(rows, 0), title=f"{title}: {describe(tensor)}")
        axes.title.set_fontsize(10)
        axes.set_ylabel("dim 0")
    all_axes[-1].set_xlabel("dim 1")
    figure.suptitle(f"{name}, {tensor.shape[0]} × {tensor.shape[1]}, in three checkpoints of one run")
    figure.savefig(path)


def describe(tensor: TensorView) -> str:
    ranks = sorted({shard.file.rank for shard in tensor.shards})
    parts = f"{len(tensor.shards)} parts" if len(tensor.shards) > 1 else "whole"
    return f"{parts}, by {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def draw_shard(axes: Axes, shard: ShardView) -> None:
    """Draw a run of a box, which covers up to three rectangles; the largest one holds the label."""
    color = COLORS[shard.file.rank % len(COLORS)]
    rectangles = list(rectangles_of(shard))
    for top, left, height, width in rectangles:
        axes.add_patch(Rectangle((left, top), width, height, facecolor=color, edgecolor="none", alpha=0.9))
    top, left, height, width = max(rectangles, key=lambda r: r[2] * r[3])
    whole = shard.count == shard.lengths[0] * shard.lengths[1]
    (row, column), (num_rows, num_columns) = shard.offsets, shard.lengths
    label = f"rank {shard.file.rank}\n"
    label += "" if whole else f"elements [{shard.start}, {shard.start + shard.count}) of "
    label += f"rows [{row}, {row + num_rows}) × columns [{column}, {column + num_columns})"
    label = label if height > 20 else label.replace("\n", ": ")
    axes.text(left + width / 2, top + height / 2, label, ha="center", va="center", color="white", fontsize=8)
    axes.add_patch(Rectangle((column, row), num_columns, num_rows, facecolor="none", edgecolor="white", linewidth=2))


def rectangles_of(shard: ShardView) -> Iterator[tuple[int, int, int, int]]:
    """Split the run ``[start, start + count)`` of a 2-D box into (top, left, height, width): row end, rows, row begin."""
    row, column = shard.offsets
    width = shard.lengths[1]
    position, stop = shard.start, shard.start + shard.count
    while position < stop:
        line, left = divmod(position, width)
        whole_rows = (stop - position) // width if left == 0 else 0
        length = whole_rows * width or min(width - left, stop - position)
        yield row + line, column + left, max(whole_rows, 1), width if whole_rows else length
        position += length
