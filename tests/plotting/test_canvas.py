"""A figure becomes the same file each time, and any name in it is harmless."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from reshard_ckpt.plotting import canvas
from reshard_ckpt.plotting.canvas import (
    PALETTE,
    add_axes,
    draw_boxes,
    new_figure,
    png_bytes,
    rank_colour,
    styled,
    svg_bytes,
    text_colour_on,
    write_in,
)
from reshard_ckpt.plotting.page import rendered
from tests.warm_python import warm_python

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>&\"'\x00\x1f]]>\ud800 $x$_{1} % \\frac{ 中文 العربية"


@styled()
def figure_of(name: str) -> Figure:
    figure = new_figure(300, 100)
    axes = add_axes(figure, 0, 0, 300, 100)
    axes.set(xlim=(0, 300), ylim=(100, 0))
    draw_boxes(axes, [(0, 0, 150, 50), (150, 50, 150, 50)], PALETTE[:2], [name, "second"])
    write_in(axes, 100, 50, [name], 1e9, 1e9)
    return figure


def test_any_name_is_text_in_every_file_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of what other tests have left
        figure = figure_of(HOSTILE)
        png_bytes(figure)
        root = ElementTree.fromstring(svg_bytes(figure, HOSTILE))
        page = rendered(figure, HOSTILE, ".html").decode()
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\x1f", "\ufffd").replace("\ud800", "\ufffd")
    assert [title.text for title in root.iter(f"{SVG}title")] == [shown, shown, "second"]
    assert shown in [text.text for text in root.iter(f"{SVG}text")]
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter(f"{SVG}a"))
    assert "<script" not in page


def test_svg_is_the_same_each_time_whatever_the_user_s_style():
    first = svg_bytes(figure_of("a $b$"), "t")
    with matplotlib.rc_context({"svg.hashsalt": "other", "svg.fonttype": "path", "font.size": 30, "text.usetex": True}):
        assert svg_bytes(figure_of("a $b$"), "t") == first
    assert not re.search(rb"<metadata|\d{4}-\d\d-\d\d|atplotlib v", first)
    assert b">a $b$</text>" in first


def test_crowd_of_boxes_is_one_image(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(canvas, "MAX_BOXES", 1)
    root = ElementTree.fromstring(svg_bytes(figure_of("a"), "t"))
    assert len(list(root.iter(f"{SVG}image"))) == 1
    assert len(list(root.iter(f"{SVG}title"))) == 1


def test_png_has_two_pixels_a_point():
    data = png_bytes(figure_of("a"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (600, 200)


def test_colours_of_ranks_can_be_told_apart_and_written_on():
    colours = [rank_colour(rank) for rank in range(5000)]
    assert tuple(colours[:8]) == PALETTE
    assert len(set(colours[:64])) == 64
    assert len(set(colours)) >= 1000
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) and text_colour_on(colour) != colour for colour in colours)


def test_matplotlib_is_imported_only_when_something_is_drawn():
    code = "import sys, reshard_ckpt.checkpoint, reshard_ckpt.cli; print({'matplotlib'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.strip() == "set()"
