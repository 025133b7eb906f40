"""The committed figures of `make bench-guard`, and what lies above them."""

from __future__ import annotations

import json

from benchmarks.guard import COMMITTED, above


def test_figures_far_above_the_committed_ones_are_named():
    committed = json.loads(COMMITTED.read_text())
    assert len(committed) > 10
    assert above(committed, committed) == []
    assert above({name: 1.5 * value for name, value in committed.items()}, committed) == list(committed)


def test_a_figure_that_nobody_committed_is_named():
    assert above({"calls a tensor, dance": 1.0}, {}) == ["calls a tensor, dance"]
