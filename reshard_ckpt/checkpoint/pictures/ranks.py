"""Who wrote how much, and where did each rank stand? Bars of bytes by rank, and the mesh with a cell for each rank."""

from __future__ import annotations

import numpy as np

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Mesh
from ...core.timeline import rank_label
from ...core.words import plural
from ...engine.common.progress import size_text
from .scene import Line, Rect, Scene, Shape, Text, on, shade

WIDTH = 960.0
BAR_HEIGHT = 150.0
MAX_BARS = 290
MAX_BAR_WIDTH = 72.0
MAX_CELLS = 4096


def bytes_by_rank(catalog: Catalog) -> dict[int, int]:
    """The bytes of the shard files of each rank, also of ranks of the mesh that wrote none."""
    held = dict.fromkeys(range(catalog.mesh.size if catalog.mesh else 0), 0)
    for file in catalog.files:
        held[file.rank] = held.get(file.rank, 0) + file.size
    return dict(sorted(held.items()))


def draw_balance(catalog: Catalog) -> Scene:
    """A bar for each rank, as high as what it wrote, and a line at their mean."""
    held = bytes_by_rank(catalog)
    ranks, sizes = list(held), list(held.values())
    groups = np.array_split(np.arange(len(ranks)), min(len(ranks), MAX_BARS)) if ranks else []
    highest, mean = max(sizes, default=0), sum(sizes) / max(len(sizes), 1)
    left, top, width = 76.0, 10.0, WIDTH - 86.0
    shapes: list[Shape] = _scale(highest, left, top, width)
    step = min(width / max(len(groups), 1), MAX_BAR_WIDTH)
    for i, group in enumerate(groups):
        size = max(sizes[j] for j in group.tolist())  # of several ranks in one bar, the one that wrote most
        bar = BAR_HEIGHT * size / highest if highest else 0.0
        first, last = ranks[int(group[0])], ranks[int(group[-1])]
        who = rank_label(first, _known(catalog.mesh, first)) if first == last else f"ranks {first}-{last}, at most"
        inset = min(step * 0.12, 6.0) if step > 3 else 0.0
        shapes.append(
            Rect(
                left + i * step + inset,
                top + BAR_HEIGHT - bar,
                max(step - 2 * inset, 0.5),
                bar,
                "#4477aa",
                tip=f"{who}: {size_text(size)}",
            )
        )
    every = max(-(-len(groups) // max(int(width / 44), 1)), 1)
    for i in range(0, len(groups), every):
        shapes.append(Text(left + (i + 0.5) * step, top + BAR_HEIGHT + 13, str(ranks[int(groups[i][0])]), 11, "soft", "middle"))
    if highest:
        y = top + BAR_HEIGHT * (1 - mean / highest)
        shapes.append(Line(left, y, left + width, y, "#c28f00", 1.5))
    return Scene(WIDTH, top + BAR_HEIGHT + 26, "Bytes written by each rank", tuple(shapes))


def balance_words(catalog: Catalog) -> str:
    """The same in a sentence."""
    sizes = list(bytes_by_rank(catalog).values())
    if not sizes or not sum(sizes):
        return "No rank wrote any bytes."
    mean = sum(sizes) / len(sizes)
    return (
        f"{len(sizes):,} rank{'s' if len(sizes) != 1 else ''} wrote {size_text(sum(sizes))}: the least {size_text(min(sizes))}, "
        f"the most {size_text(max(sizes))}, which is {max(sizes) / mean:.2f} times the mean (the line)."
    )


def _scale(highest: int, left: float, top: float, width: float) -> list[Shape]:
    shapes: list[Shape] = []
    for part in (0.0, 0.5, 1.0):
        y = top + BAR_HEIGHT * (1 - part)
        shapes += [Line(left, y, left + width, y), Text(left - 8, y, size_text(round(highest * part)), 11, "soft", "end")]
    return shapes


def _known(mesh: Mesh | None, rank: int) -> Mesh | None:
    return mesh if mesh is not None and rank < mesh.size else None


def draw_mesh(catalog: Catalog) -> Scene | None:
    """A cell for each rank of the mesh: the last axis across, the one before it down, the others as blocks side by side."""
    mesh = catalog.mesh
    if mesh is None or not mesh.axes or mesh.size > MAX_CELLS:
        return None
    held = bytes_by_rank(catalog)
    most = max(held.values(), default=0) or 1
    across, down = mesh.sizes[-1], mesh.sizes[-2] if len(mesh.sizes) > 1 else 1
    cell = min(max((WIDTH - 40) / max(across, 1), 6.0), 64.0)
    tall = min(cell, 34.0)
    wide, high = across * cell, down * tall
    per_line = max(int((WIDTH + 24) // (wide + 24)), 1)
    shapes: list[Shape] = []
    for block in range(mesh.size // (across * down)):
        x, y = (block % per_line) * (wide + 24), (block // per_line) * (high + 40) + 22
        shapes.append(Text(x, y - 12, _block_name(mesh, block), 11.5, "soft"))
        for i in range(across * down):
            rank = block * across * down + i
            shapes += _cell(mesh, rank, held.get(rank, 0), most, (x + i % across * cell, y + i // across * tall, cell, tall))
    blocks = -(-(mesh.size // (across * down)) // per_line)
    width = min(per_line, mesh.size // (across * down)) * (wide + 24)
    return Scene(max(width, 300.0), blocks * (high + 40) - 14, "The mesh, with a cell for each rank", tuple(shapes))


def _block_name(mesh: Mesh, block: int) -> str:
    """The coordinates that a block's ranks share, and which axes its cells lie on."""
    outer = Mesh(mesh.axes[:-2], mesh.sizes[:-2])
    shared = [f"{axis}={at}" for axis, at in zip(outer.axes, outer.coordinates(block), strict=True)]
    arrows = [f"{arrow} {axis}" for arrow, axis in zip(("↓", "→") if len(mesh.axes) > 1 else ("→",), mesh.axes[-2:], strict=True)]
    return "  ".join([*shared, *arrows])


def _cell(mesh: Mesh, rank: int, size: int, most: int, place: tuple[float, float, float, float]) -> list[Shape]:
    x, y, width, height = place
    fill = shade(size / most) if size else "faint"
    shapes: list[Shape] = [Rect(x, y, width, height, fill, "paper", 1.0, tip=f"{rank_label(rank, mesh)}: {size_text(size)}")]
    if width >= 26 and height >= 14:
        shapes.append(Text(x + width / 2, y + height / 2, str(rank), 11, on(fill) if size else "soft", "middle"))
    return shapes


def mesh_words(mesh: Mesh) -> str:
    """The mesh in words.

    >>> mesh_words(Mesh(("dp", "tp"), (2, 4)))
    'dp 2 × tp 4 = 8 ranks; the darker a cell, the more its rank wrote.'
    """
    axes = " × ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    return (
        f"{axes} = {plural(mesh.size, 'rank')}{'; the darker a cell, the more its rank wrote' if mesh.size <= MAX_CELLS else ''}."
    )
