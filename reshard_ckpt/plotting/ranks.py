"""Bytes by rank: a bar for each rank, and the mesh with a cell for each rank."""

from __future__ import annotations

from math import log, prod

import numpy as np
from matplotlib.figure import Figure

from ..core.catalog.model import Catalog
from ..core.catalog.specs import Mesh
from ..core.timeline import rank_label
from ..core.words import plural
from ..engine.common.progress import size_text
from .canvas import FAINT, PALETTE, SOFT, add_axes, draw_boxes, draw_heat, fitted, new_figure, set_ticks, styled

WIDTH = 960.0
MAX_CELLS = 4096
"""A larger mesh is not drawn."""


def bytes_by_rank(catalog: Catalog) -> dict[int, int]:
    """The bytes of the shard files of each rank, also of ranks of the mesh that wrote none."""
    held = dict.fromkeys(range(catalog.mesh.size if catalog.mesh else 0), 0)
    for file in catalog.files:
        held[file.rank] = held.get(file.rank, 0) + file.size
    return dict(sorted(held.items()))


def balance_words(catalog: Catalog) -> str:
    """The balance in a sentence."""
    sizes = list(bytes_by_rank(catalog).values())
    if not sizes or not sum(sizes):
        return "No rank wrote any bytes."
    mean = sum(sizes) / len(sizes)
    return (
        f"{len(sizes):,} rank{'s' if len(sizes) != 1 else ''} wrote {size_text(sum(sizes))}: the least {size_text(min(sizes))}, "
        f"the most {size_text(max(sizes))}, which is {max(sizes) / mean:.2f} times the mean (the line)."
    )


@styled()
def draw_balance(catalog: Catalog) -> Figure:
    """Draw a bar for each rank, as high as what it wrote, and a line at their mean."""
    held = bytes_by_rank(catalog)
    most, room = max(held.values(), default=0) or 1, max(len(held), 10)
    figure = new_figure(WIDTH, 200)
    axes = add_axes(figure, 76, 10, WIDTH - 100, 160)
    axes.set(xlim=(0, room), ylim=(0, most * 1.05))
    set_ticks(axes, [i + 0.5 for i in range(len(held))], [str(rank) for rank in held], vertical=False)
    axes.set_yticks([0, most / 2, most], [size_text(round(size)) for size in (0, most / 2, most)])
    axes.set_xlabel("rank", size=8.5, color=SOFT)
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    tips = [f"{_label(rank, catalog.mesh)}: {size_text(size)}" for rank, size in held.items()]
    draw_boxes(axes, [(i + 0.1, 0, 0.8, size) for i, size in enumerate(held.values())], PALETTE[0], tips, edge=PALETTE[0])
    axes.axhline(sum(held.values()) / max(len(held), 1), color=PALETTE[5], linewidth=1.5)
    return figure


def _label(rank: int, mesh: Mesh | None) -> str:
    return rank_label(rank, mesh if mesh is not None and rank < mesh.size else None)


def mesh_words(mesh: Mesh) -> str:
    """The mesh in words.

    >>> mesh_words(Mesh(("dp", "tp"), (2, 4)))
    'dp 2 × tp 4 = 8 ranks; the darker a cell, the more its rank wrote.'
    """
    axes = " × ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    shade = "; the darker a cell, the more its rank wrote" if mesh.size <= MAX_CELLS else ""
    return f"{axes} = {plural(mesh.size, 'rank')}{shade}."


@styled()
def draw_mesh(catalog: Catalog, mesh: Mesh) -> Figure:
    """Draw a cell for each rank of the mesh: its outer axes down, its inner axes across."""
    held = bytes_by_rank(catalog)
    split = min(range(len(mesh.axes)), key=lambda k: abs(log(prod(mesh.sizes[k:]) / prod(mesh.sizes[:k]) / 3)))
    outer, inner = (Mesh(mesh.axes[of], mesh.sizes[of]) for of in (slice(split), slice(split, None)))
    cell = min((WIDTH - 150) / inner.size, 72.0)
    width, height = cell * inner.size, min(max(cell, 14.0), 30.0) * outer.size
    figure = new_figure(max(width, 200.0) + 150, height + 40)
    axes = add_axes(figure, 100, 4, width, height)
    sizes = np.array([held.get(rank, 0) for rank in range(mesh.size)], float).reshape(outer.size, inner.size)

    draw_heat(
        axes,
        sizes / max(sizes.max(), 1),
        [[f"rank {rank}", str(rank)] for rank in range(mesh.size)],
        [f"{rank_label(rank, mesh)}: {size_text(held.get(rank, 0))}" for rank in range(mesh.size)],
    )
    for side, vertical in ((outer, True), (inner, False)):
        names = [_place(side, i) for i in range(side.size)]
        set_ticks(axes, [i + 0.5 for i in range(side.size)], [fitted(name, 8, 92) for name in names], vertical=vertical)
    axes.tick_params(length=0)
    return figure


def _place(mesh: Mesh, rank: int) -> str:
    return " ".join(f"{axis}={at}" for axis, at in zip(mesh.axes, mesh.coordinates(rank), strict=True))
