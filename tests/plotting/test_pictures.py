"""Pictures show what is there: sizes in proportion, every rank and step, who feeds whom. No test looks at pixels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.name_tree import fold, spans
from reshard_ckpt.core.catalog.placements import local_region
from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, Replication, TensorSpec, box_piece, row_major_strides
from reshard_ckpt.core.catalog.summary import summarize_catalog
from reshard_ckpt.core.timeline import Step, Timeline, rank_label
from reshard_ckpt.engine.common.progress import size_text
from reshard_ckpt.plotting import times
from reshard_ckpt.plotting.canvas import rank_colour
from reshard_ckpt.plotting.cuts import draw_cuts
from reshard_ckpt.plotting.feeds import WantedPart, feeds
from reshard_ckpt.plotting.page import bytes_by_rank, report_page
from reshard_ckpt.plotting.times import draw_goodput, draw_timeline, timeline_words
from reshard_ckpt.storage.memory import MemoryStorage
from tests.cli.states import save_trained
from tests.jobs import save_job
from tests.layouts import Layout, cells, filled, layouts, shapes, spec_of, values_of
from tests.tries import examples


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}


def boxes(drawn: PolyCollection) -> np.ndarray:
    """Left, top, width and height of each box."""
    corners = np.array([path.vertices[:4] for path in drawn.get_paths()]).reshape(-1, 4, 2)
    return np.concatenate([corners.min(axis=1), np.ptp(corners, axis=1)], axis=1)


def tips(figure: Figure) -> dict[str, np.ndarray]:
    """The boxes that have a tip."""
    return {
        tip: box
        for axes in figure.axes
        for drawn in axes.collections
        if isinstance(drawn, PolyCollection)
        for tip, box in zip(drawn.get_urls(), boxes(drawn), strict=False)
        if tip
    }


@examples(80)
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
    wanted = [
        WantedPart((r,), tuple((p.offsets, p.lengths, p.start, p.count) for p in held)) for r, held in enumerate(new.pieces)
    ]
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
            expected[tuple(cells(piece)[1])] = 1
        assert (seen == expected).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    return save_trained(tmp_path_factory.mktemp("pictures") / "ckpt", pp=2, dp=2, tp=2)


def test_cut_of_a_tensor_is_in_proportion(trained):
    figure = draw_cuts(trained, "model.layers.0.up")
    wrote = {shard.offsets: shard.file.rank for shard in trained.tensor("model.layers.0.up").shards}
    found = {tip.partition(", also")[0]: box.tolist() for tip, box in tips(figure).items()}
    assert found == {f"rank {wrote[0, 0]}: [0:8, 0:8]": [0, 0, 8, 8], f"rank {wrote[8, 0]}: [8:16, 0:8]": [0, 8, 8, 8]}
    assert {"model.layers.0.up", "F32 16 × 8, 512 B", "Saved on pp=2, dp=2, tp=2", "↓ dim 0: 16   → dim 1: 8"} <= texts(figure)
    assert {f"rank {rank}" for rank in wrote.values()} <= {text.partition("\n")[0] for text in texts(figure)}
    assert figure.axes[0].get_yticks().tolist() == [0, 8, 16]  # where the cuts are
    fills = {to_hex(colour) for colour in figure.axes[0].collections[0].get_facecolor()}
    (legend,) = figure.legends
    assert {to_hex(patch.get_facecolor()) for patch in legend.get_patches()} == fills
    assert len(fills) == 2


GRID = Mesh(("dp", "tp"), (8, 4))


def on_grid(shape: tuple[int, ...], placement: Sequence[AxisPlacement], mesh: Mesh = GRID) -> Catalog:
    """Save one tensor from the ranks of a mesh, placed so."""
    ranks = []
    for rank in range(mesh.size):
        region = local_region(shape, placement, mesh.sizes, mesh.coordinates(rank))
        ((offsets, lengths),) = region.boxes() if region is not None else ()
        piece = box_piece(offsets, lengths, 0, row_major_strides(lengths))
        spec = TensorSpec("w", "F32", shape, (piece,), Replication.DECLARED, tuple(placement))
        ranks.append([(spec, torch.zeros(lengths))])
    return save_job(MemoryStorage("grid"), ranks, mesh=mesh)


def test_every_part_of_32_ranks_has_a_label_with_its_coordinates():
    placement = [AxisPlacement("dp", "shard", 0, turn=1), AxisPlacement("tp", "shard", 0, turn=0)]
    wanted = [WantedPart((r,), (((8 * r, 0), (8, 64), 0, 512),)) for r in range(32)]
    figure = draw_cuts(on_grid((256, 64), placement), "w", wanted, GRID)
    names = {rank_label(rank, GRID) for rank in range(32)}
    saved, new, feeds_of = figure.axes
    assert {text.get_text() for text in saved.texts} >= names
    assert {text.get_text() for text in new.texts} >= names
    assert {label.get_text() for label in feeds_of.get_yticklabels()} == names
    assert {text.get_text() for text in figure.legends[0].get_texts()} == names


def test_ranks_keep_their_colour_and_replicas_are_named():
    placement = [AxisPlacement("dp", "shard", 0, turn=0), AxisPlacement("tp", "replicate")]
    catalog = on_grid((64, 64), placement)
    figure = draw_cuts(catalog, "w")
    wrote = {shard.offsets[0] // 8: shard.file.rank for shard in catalog.tensor("w").shards}
    fills = {to_hex(colour) for colour in figure.axes[0].collections[0].get_facecolor()}
    assert fills == {rank_colour(rank) for rank in wrote.values()}
    assert "colour: the rank that wrote it; 4 ranks hold each part" in texts(figure)
    for dp, rank in wrote.items():
        others = spans([r for r in range(4 * dp, 4 * dp + 4) if r != rank])
        assert f"rank {rank}: [{8 * dp}:{8 * dp + 8}, 0:64], also on ranks {others}" in tips(figure)
        assert f"rank {rank}\ndp={dp} tp={rank % 4}\nalso on ranks {others}" in texts(figure)


@pytest.mark.parametrize("shape", [(), (64,)])
def test_scalars_and_vectors_are_small(shape: tuple[int, ...]):
    placement = [AxisPlacement("dp", "replicate"), AxisPlacement("tp", "replicate")]
    extent = draw_cuts(on_grid(shape, placement), "w").axes[0].get_window_extent()
    assert max(extent.width, extent.height) <= 120


def test_labels_of_nearby_intervals_do_not_overlap():
    report = checkpoint.goodput(state_gb=100, write_gbps=20, stall=5, mtbf="3h", nodes=64, copies=1)
    figure = draw_goodput(report.job, report.best)
    figure.canvas.draw()
    (axes,) = figure.axes
    one, other = (text.get_window_extent() for text in axes.texts)
    assert not one.overlaps(other)
    legend = axes.get_legend().get_window_extent()
    assert not any(legend.overlaps(text.get_window_extent()) for text in axes.texts)


def test_flat_ranges_are_named_as_such(trained):
    found = tips(draw_cuts(trained, "optimizer.state.layers.1.down.exp_avg"))
    assert "rank 0: elements 0 to 32 of [0:8, 0:8]" in found


def test_picture_of_another_layout_says_who_feeds_whom(trained):
    wanted = [WantedPart((0,), (((0, 0), (4, 8), 0, 32),)), WantedPart((1,), (((4, 0), (12, 8), 0, 96),))]
    figure = draw_cuts(trained, "model.layers.0.up", wanted, Mesh(("tp",), (2,)))
    found = tips(figure)
    wrote = {shard.offsets: shard.file.rank for shard in trained.tensor("model.layers.0.up").shards}
    assert f"rank 0 reads 128 B of [0:4, 0:8] that rank {wrote[0, 0]} wrote" in found
    for rank, size, source in ((0, "128 B", wrote[0, 0]), (1, "128 B", wrote[0, 0]), (1, "256 B", wrote[8, 0])):
        row, column = found[f"rank {rank} reads {size} that rank {source} wrote"][[1, 0]]
        assert (row, column) == (rank, source)
    assert {"33%\n128 B", "67%\n256 B", "100%\n128 B", "Wanted on tp=2", "Who feeds whom"} <= texts(figure)
    outlines = boxes(figure.axes[1].collections[1])
    assert sorted(outlines.tolist()) == [[0, 0, 8, 4], [0, 4, 8, 12]]


def test_who_feeds_whom_of_many_ranks_is_grouped():
    spec = [spec_of(layout, r, "w", "U8") for layout in [_rows(130)] for r in range(130)]
    whole = values_of((130, 4), "U8", 1)
    catalog = save_job(MemoryStorage("many"), [[(spec[r], filled(_rows(130), r, whole))] for r in range(130)])
    wanted = [WantedPart((r,), (((r, 0), (1, 4), 0, 4),)) for r in range(130)]
    figure = draw_cuts(catalog, "w", wanted, Mesh(("dp",), (130,)))
    cells = boxes(figure.axes[-1].collections[0])
    assert len(cells) == 64 * 64
    assert figure.axes[-1].get_yticklabels()[0].get_text() == "rank 0 … 2"
    assert {"rank 0", "rank 129"} <= texts(figure)


def _rows(count: int) -> Layout:
    pieces = tuple((box_piece((r, 0), (1, 4), 0, row_major_strides((1, 4))),) for r in range(count))
    return Layout((count, 4), pieces, (4,) * count)


def test_page_has_every_rank_with_its_bytes_and_its_place_on_the_mesh(trained):
    held = bytes_by_rank(trained)
    assert held == {rank: sum(f.size for f in trained.files if f.rank == rank) for rank in range(8)}
    page = page_of(trained, ["model.w"], [1])
    bars = re.findall(r'width:([0-9.]+)px"></i>rank (\d) pp=(\d) dp=(\d) tp=(\d): ([^<]+)<', page)
    assert [tuple(map(int, bar[1:5])) for bar in bars] == [(r, r // 4, r // 2 % 2, r % 2) for r in range(8)]
    assert [bar[5] for bar in bars] == [size_text(size) for size in held.values()]
    assert [float(bar[0]) for bar in bars] == pytest.approx([500 * n / max(held.values()) for n in held.values()], abs=0.06)
    assert f"pp 2 × dp 2 × tp 2 = 8 ranks wrote {size_text(sum(held.values()))}" in page


def test_page_has_the_largest_tensors_first_folds_layers_and_takes_any_name(trained):
    names = [f"model.layers.{i}.w" for i in range(8)] + ["model.emb", "tiny", "x" * 100_000, "<script>&"]
    page = page_of(trained, names, [100] * 8 + [1400, 0, 3, 2], looks=["same"] * 12)
    lines = re.findall(r"</i>([^<]*: \d[^<]*)<", page.partition("Tensors by size")[2])
    assert lines[:3] == ["model: 2.2 kB", "model.emb: 1.4 kB", "model.layers.0-7.w (×8): 800 B"]
    assert lines[-2:] == ["&lt;script&gt;&amp;: 2 B", "tiny: 0 B"]
    assert len(page) < 30_000
    many = page_of(trained, [f"t{i}" for i in range(150)], list(range(150)))
    assert f"50 smaller ones: {size_text(sum(range(50)))}" in many


def page_of(catalog: Catalog, names: list[str], sizes: list[int], looks: list[str] | None = None) -> str:
    return report_page("t", catalog, summarize_catalog(catalog), fold(names, looks or names), sizes, None)


def steps_of(num_ranks: int) -> Timeline:
    steps = [
        Step(r, name, "caller", i * 0.1, i * 0.1 + 0.05 * (r + 1), 1000)
        for r in range(num_ranks)
        for i, name in enumerate(["meet", "write"])
    ]
    return Timeline("save", 0.0, Mesh(("dp",), (num_ranks,)), (0.0,) * num_ranks, tuple(steps))


def test_timeline_has_each_step_at_its_time():
    timeline = steps_of(3)
    figure = draw_timeline(timeline)
    bars = boxes(figure.axes[0].collections[0])
    assert bars[:, 0].tolist() == pytest.approx([step.start_s for step in timeline.steps])
    assert bars[:, 2].tolist() == pytest.approx([step.end_s - step.start_s for step in timeline.steps])
    assert [int(y) for y in bars[:, 1]] == [step.rank for step in timeline.steps]
    assert "rank 1 dp=1 write (caller): 0.1 s from 0.1 s, 1 kB, 10 kB/s" in tips(figure)
    assert {"rank 2 dp=2", "meet", "write", "A save of 0.25 s on 3 ranks"} <= texts(figure)
    assert timeline_words(timeline) == "The longest step, but for those that wait, is “write” of rank 2 dp=2: 0.15 of 0.25 s."


def test_a_timeline_is_as_wide_as_its_constant_says():
    assert draw_timeline(steps_of(3)).get_figwidth() * 72 == times.WIDTH == 960


def test_legend_of_a_timeline_is_in_the_order_of_a_save():
    starts = {"publish": 0.0, "write": 0.1, "mine": 0.2, "meet": 0.3}  # clocks of ranks differ a little
    steps = tuple(Step(0, name, "caller", start, start + 0.1, 0) for name, start in starts.items())
    (legend,) = draw_timeline(Timeline("save", 0.0, None, (0.0,), steps)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["meet", "write", "publish", "mine"]


def test_empty_timeline_is_drawn_and_of_a_huge_one_the_busiest_ranks():
    empty = Timeline("save", 0.0, None, (0.0,), ())
    assert "A save of 0 s on 1 rank" in texts(draw_timeline(empty))
    assert timeline_words(empty) == "No step took any time."
    huge = draw_timeline(steps_of(2000))
    assert huge.get_size_inches()[1] * 72 < 1500
    assert any(text.endswith("on 2,000 ranks; the 128 busiest ranks") for text in texts(huge))
    labels = [label.get_text() for label in huge.axes[0].get_yticklabels()]
    assert (labels[0], labels[-1]) == ("rank 1872 dp=1872", "rank 1999 dp=1999")
    assert len(boxes(huge.axes[0].collections[0])) == 2 * times.MAX_RANKS
