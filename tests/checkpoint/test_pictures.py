"""Pictures show what is there: every element once, in its place, of its rank; sizes in proportion. And any name is harmless."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard_ckpt.checkpoint.pictures import flatten as flattening
from reshard_ckpt.checkpoint.pictures.cuts import Wanted, draw_cuts, feeds
from reshard_ckpt.checkpoint.pictures.flatten import flatten
from reshard_ckpt.checkpoint.pictures.page import picture_page
from reshard_ckpt.checkpoint.pictures.ranks import bytes_by_rank, draw_balance, draw_mesh
from reshard_ckpt.checkpoint.pictures.raster import png_bytes
from reshard_ckpt.checkpoint.pictures.scene import THEMES, Line, Rect, Scene, Text, on, series, shade
from reshard_ckpt.checkpoint.pictures.svg import svg_document
from reshard_ckpt.checkpoint.pictures.times import draw_timeline, timeline_words
from reshard_ckpt.checkpoint.pictures.treemap import Place, draw_treemap, squarify
from reshard_ckpt.core.catalog.name_tree import fold
from reshard_ckpt.core.catalog.specs import Mesh
from reshard_ckpt.core.geometry.runs import decompose
from reshard_ckpt.core.timeline import Step, Timeline
from reshard_ckpt.errors import UnsupportedError, UsageError
from reshard_ckpt.storage.memory import MemoryStorage
from tests.cli.states import save_trained
from tests.jobs import save_job
from tests.layouts import Layout, addresses, filled, layouts, shapes, spec_of, values_of

SVG = "{http://www.w3.org/2000/svg}"


def boxes_of(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The boxes of all ranks' pieces, and their ranks."""
    pieces = [(rank, piece) for rank, held in enumerate(layout.pieces) for piece in held]
    ndim = len(layout.shape)
    offsets, lengths = (
        np.array([getattr(p, field) for _, p in pieces], np.int64).reshape(len(pieces), ndim) for field in ("offsets", "lengths")
    )
    cut = decompose(lengths, *(np.array([getattr(p, field) for _, p in pieces], np.int64) for field in ("start", "count")))
    ranks = np.array([rank for rank, _ in pieces], np.int64)
    return offsets[cut.parent] + cut.offsets, cut.lengths, ranks[cut.parent]


def owners(layout: Layout) -> np.ndarray:
    """The last rank that holds each element, by brute force; -1 where none does."""
    held = np.full(layout.shape, -1)
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            for _, x in addresses(piece):
                held[x] = rank
    return held


@settings(max_examples=150)
@given(st.data())
def test_table_shows_every_element_in_its_place(data: st.DataObject):
    shape = data.draw(shapes().filter(lambda s: len(s) > 0 and prod(s) > 0))
    layout = data.draw(layouts(shape, data.draw(st.integers(1, 4))))
    flat = flatten(shape, *boxes_of(layout))
    shown = np.full((flat.rows, flat.columns), -1)
    for cell in flat.cells:
        shown[cell.row : cell.row + cell.rows, cell.column : cell.column + cell.columns] = cell.part
    assert not flat.is_grid
    assert (flat.rows, flat.columns) == (prod(shape[: flat.row_dims]), prod(shape[flat.row_dims :]))
    assert (shown.reshape(-1) == owners(layout).reshape(-1)).all()


@settings(max_examples=60)
@given(st.data())
def test_grid_shows_what_lies_at_its_points(data: st.DataObject):
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    layout = data.draw(layouts(shape, data.draw(st.integers(1, 4))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flattening, "MAX_RECTANGLES", 0)
        patch.setattr(flattening, "GRID", (7, 9))
        flat = flatten(shape, *boxes_of(layout))
    down, across = min(shape[0], 7), min(shape[1], 9)
    held = owners(layout)
    found = {}
    for cell in flat.cells:
        for i in range(down):
            for j in range(across):
                r, c = (2 * i + 1) * shape[0] // (2 * down), (2 * j + 1) * shape[1] // (2 * across)
                top, left = i * shape[0] // down, j * shape[1] // across
                if cell.row == top and cell.column <= left < cell.column + cell.columns:
                    found[i, j] = (cell.part, held[r, c])
    assert all(part == rank for part, rank in found.values())
    assert len(found) == sum(
        held[(2 * i + 1) * shape[0] // (2 * down), (2 * j + 1) * shape[1] // (2 * across)] >= 0
        for i in range(down)
        for j in range(across)
    )


def test_what_falls_apart_into_too_many_rectangles_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flattening, "MAX_CUT", 1)
    with pytest.raises(UnsupportedError, match="2 rectangles"):
        flatten((4, 4, 4), np.array([[0, 0, 0]]), np.array([[4, 2, 2]]), np.zeros(1, np.int64))


@settings(max_examples=80)
@given(st.data())
def test_each_wanted_element_is_fed_once_by_the_rank_that_wrote_it(data: st.DataObject):
    shape = data.draw(shapes().filter(lambda s: prod(s) > 0))
    saved = data.draw(layouts(shape, data.draw(st.integers(1, 3))))
    new = data.draw(layouts(shape, data.draw(st.integers(1, 3))))
    whole = values_of(shape, "F32", 1)
    catalog = save_job(
        MemoryStorage("feeds"), [[(spec_of(saved, r, "w", "F32"), filled(saved, r, whole))] for r in range(len(saved.pieces))]
    )
    wrote = np.full(shape, -1)
    for shard in catalog.tensor("w").shards:
        inner = np.indices(shard.lengths).reshape(len(shape), prod(shard.lengths))[:, shard.start : shard.start + shard.count]
        wrote[tuple(inner + np.array(shard.offsets, np.int64).reshape(-1, 1))] = shard.file.rank
    wanted = [Wanted((r,), tuple((p.offsets, p.lengths, p.start, p.count) for p in held)) for r, held in enumerate(new.pieces)]
    fed = feeds(catalog, catalog.index("w"), wanted)
    ndim = len(shape)
    for number, held in enumerate(new.pieces):
        seen = np.zeros(shape, int)
        for i in np.flatnonzero(fed.wanted == number):
            at = tuple(slice(o, o + n) for o, n in zip(fed.offsets[i, :ndim], fed.lengths[i, :ndim], strict=True))
            seen[at] += 1
            assert (wrote[at] == fed.saved[i]).all()
        expected = np.zeros(shape, int)
        for piece in held:
            for _, x in addresses(piece):
                expected[x] = 1
        assert (seen == expected).all()


@example([21_920_784_886, 1], 5, 5)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=40), st.integers(5, 900), st.integers(5, 900))
def test_treemap_rectangles_are_as_large_as_their_amounts_and_do_not_overlap(amounts: list[int], width: int, height: int):
    amounts.sort(reverse=True)
    places = squarify(amounts, Place(0, 0, width, height))
    unit = width * height / sum(amounts)
    assert len(places) == len(amounts)
    for amount, p in zip(amounts, places, strict=True):
        assert p.width * p.height == pytest.approx(amount * unit, rel=1e-6, abs=1e-6)
        assert p.x >= -1e-6
        assert p.y >= -1e-6
        assert p.x + p.width <= width + 1e-6
        assert p.y + p.height <= height + 1e-6
    for i, p in enumerate(places):
        for q in places[i + 1 :]:
            apart_x = min(p.x + p.width, q.x + q.width) - max(p.x, q.x)
            apart_y = min(p.y + p.height, q.y + q.height) - max(p.y, q.y)
            assert min(apart_x, apart_y) <= 1e-6


def test_treemap_names_what_is_large_and_folds_layers():
    names = [f"model.layers.{i}.w" for i in range(8)] + ["model.emb", "tiny"]
    scene = draw_treemap(fold(names, ["same"] * 10), [100] * 8 + [400, 0])
    tips = [shape.tip for shape in scene.shapes if isinstance(shape, Rect)]
    assert "model.layers.0-7.w (×8): 800 B" in tips
    assert "model.emb: 400 B" in tips
    assert not any("tiny" in tip for tip in tips)
    areas = {shape.tip: shape.width * shape.height for shape in scene.shapes if isinstance(shape, Rect)}
    assert areas["model.layers.0-7.w (×8): 800 B"] == pytest.approx(2 * areas["model.emb: 400 B"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    return save_trained(tmp_path_factory.mktemp("pictures") / "ckpt", pp=2, dp=2, tp=2)


def test_cut_of_a_tensor_is_in_proportion(trained):
    scene = draw_cuts(trained, "model.layers.0.up")
    rects = [s for s in scene.shapes if isinstance(s, Rect) and s.tip]
    assert [r.tip for r in rects] == ["rank 0: rows [0, 8), columns [0, 8)", "rank 1: rows [8, 16), columns [0, 8)"] or len(
        rects
    ) == 2
    assert rects[0].height == pytest.approx(rects[1].height)
    assert len({r.fill for r in rects}) == 2
    labels = {s.text for s in scene.shapes if isinstance(s, Text)}
    assert {"model.layers.0.up", "F32 16 × 8, 512 B", "Saved on pp=2, dp=2, tp=2", "↓ dim 0: 16  → dim 1: 8"} <= labels


def test_picture_of_another_layout_says_who_feeds_whom(trained):
    wanted = [Wanted((0,), (((0, 0), (4, 8), 0, 32),)), Wanted((1,), (((4, 0), (12, 8), 0, 96),))]
    tips = [s.tip for s in draw_cuts(trained, "model.layers.0.up", wanted, Mesh(("tp",), (2,))).shapes if isinstance(s, Rect)]
    first = {shard.offsets: shard.file.rank for shard in trained.tensor("model.layers.0.up").shards}
    assert f"rank 0 reads 128 B that rank {first[0, 0]} wrote" in tips
    assert f"rank 1 reads 128 B that rank {first[0, 0]} wrote" in tips
    assert f"rank 1 reads 256 B that rank {first[8, 0]} wrote" in tips


def test_bars_and_mesh_have_every_rank_and_its_bytes(trained):
    held = bytes_by_rank(trained)
    assert held == {rank: sum(f.size for f in trained.files if f.rank == rank) for rank in range(8)}
    bars = [s for s in draw_balance(trained).shapes if isinstance(s, Rect)]
    heights = [bar.height for bar in bars]
    assert heights == pytest.approx([max(heights) * size / max(held.values()) for size in held.values()])
    mesh = draw_mesh(trained)
    assert mesh is not None
    cells = [s.tip for s in mesh.shapes if isinstance(s, Rect)]
    assert len(cells) == 8
    assert cells[5].startswith("rank 5 pp=1 dp=0 tp=1: ")
    assert [s.text for s in mesh.shapes if isinstance(s, Text) and "→" in s.text] == ["pp=0  ↓ dp  → tp", "pp=1  ↓ dp  → tp"]


def steps_of(num_ranks: int) -> Timeline:
    steps = [
        Step(r, name, "caller", i * 0.1, i * 0.1 + 0.05 * (r + 1), 1000)
        for r in range(num_ranks)
        for i, name in enumerate(["meet", "write"])
    ]
    return Timeline("save", 0.0, Mesh(("dp",), (num_ranks,)), (0.0,) * num_ranks, tuple(steps))


def test_timeline_has_each_step_at_its_time():
    timeline = steps_of(3)
    bars = [s for s in draw_timeline(timeline).shapes if isinstance(s, Rect) and s.tip]
    assert len(bars) == 6
    begin, scale = bars[0].x, bars[0].width / 0.05
    for step, bar in zip(timeline.steps, bars, strict=True):
        assert bar.x == pytest.approx(begin + step.start_s * scale)
        assert bar.width == pytest.approx((step.end_s - step.start_s) * scale)
    assert len({bar.y for bar in bars}) == 3
    assert timeline_words(timeline) == "The longest step, but for those that wait, is “write” of rank 2 dp=2: 0.15 of 0.25 s."


def test_empty_and_huge_timelines_are_drawn():
    empty = Timeline("save", 0.0, None, (0.0,), ())
    assert draw_timeline(empty).height > 0
    assert timeline_words(empty) == "No step took any time."
    huge = draw_timeline(steps_of(2000))
    assert huge.height < 5000
    assert any(isinstance(s, Text) and "500 more rows" in s.text for s in huge.shapes)


HOSTILE = "<script>alert(1)</script>&\"'\x00\x1f]]>\ud800"


def test_names_cannot_break_out_of_a_picture():
    scene = Scene(100, 50, HOSTILE, (Rect(0, 0, 10, 10, "#123456", tip=HOSTILE), Text(5, 5, HOSTILE), Line(0, 0, 1, 1)))
    document = svg_document(scene).encode()
    root = ElementTree.fromstring(document)
    assert root.find(f"{SVG}text").text.startswith("<script>alert(1)</script>&\"'")  # as text
    assert not root.findall(f".//{SVG}script")
    page = picture_page(scene)
    assert "<script" not in page
    assert page.encode()


@given(st.builds(Rect, *[st.floats(-10, 10)] * 4, st.sampled_from(["none", *THEMES["light"], "#00ff7f"])))
def test_colours_are_roles_or_fixed_and_every_role_is_in_both_themes(rect: Rect):
    assert THEMES["light"].keys() == THEMES["dark"].keys()
    document = svg_document(Scene(10, 10, "", (rect,)))
    used = set(re.findall(r"var\(--(\w+)\)", document))
    assert used <= THEMES["light"].keys()
    assert all(document.count(f"--{role}:") == 2 for role in THEMES["light"])


@pytest.mark.parametrize("count", [1, 10, 11, 5000])
def test_colours_can_be_told_apart_and_written_on(count: int):
    colours = [series(i, count) for i in range(min(count, 10))]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) and on(colour) != colour for colour in colours)
    assert shade(0.1) != shade(0.9)


def test_png_is_one_and_needs_matplotlib(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    scene = Scene(60, 40, "t", (Rect(0, 0, 30, 40, "#ff0000"), Text(5, 5, "$x$_{1} % \\frac", 9), Line(0, 0, 9, 9)))
    data = png_bytes(scene)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (120, 80)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"reshard-ckpt\[plot\]"):
        png_bytes(scene)


def test_matplotlib_is_imported_by_nothing_else():
    package = Path(flattening.__file__).resolve().parents[2]
    users = [path.name for path in package.rglob("*.py") if re.search(r"^\s*(from|import) matplotlib", path.read_text(), re.M)]
    assert users == ["raster.py"]
