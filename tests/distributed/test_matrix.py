"""Each pairing of saved and loaded layout, on 1, 2, 3, 4 and 8 processes: model and AdamW come back bit for bit.

One job of 8 ranks hosts every case: a layout of fewer ranks stands on the first ones, with a process group of its own.
"""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path

import pytest

from tests.distributed.cases import wrong_pairings
from tests.distributed.net import Layout
from tests.helpers import NEWER
from tests.launch import run_ranks
from tests.tries import is_long

ALL = (
    Layout("plain"),
    Layout("dp", dp=2, data="ddp"),
    Layout("dp", dp=3),
    Layout("dp", dp=4, data="ddp"),
    Layout("dp", dp=8),
    Layout("tp", tp=2),
    Layout("tp", tp=3),
    Layout("tp", tp=4),
    Layout("tp", tp=8),
    Layout("pp", pp=2, stages_per_rank=2),
    Layout("pp", pp=3, stages_per_rank=2),
    Layout("pp", pp=4),
    Layout("pp", pp=8),
    Layout("dp×tp", dp=2, tp=2),
    Layout("dp×tp", dp=4, tp=2, data="copies"),
    Layout("dp×tp", dp=2, tp=4),
    Layout("dp×pp", pp=2, dp=2),
    Layout("dp×pp", pp=2, dp=4, data="ddp", stages_per_rank=2),
    Layout("tp×pp", pp=2, tp=2),
    Layout("tp×pp", pp=4, tp=2),
    Layout("dp×tp×pp", pp=2, dp=2, tp=2),
    Layout("dp×tp×pp", pp=2, dp=2, tp=2, data="copies", stages_per_rank=3),
    Layout("flat", flat=True, data="copies"),
    Layout("flat", dp=2, flat=True, data="ddp"),
    Layout("flat", dp=3, flat=True, data="ddp"),
    Layout("flat", dp=4, flat=True, data="copies"),
    Layout("flat", dp=8, flat=True, data="ddp"),
    Layout("flat", dp=2, tp=2, flat=True, data="copies"),
    Layout("flat", dp=3, tp=2, flat=True, data="copies"),
    Layout("flat", pp=2, dp=2, tp=2, flat=True, data="copies"),
)
LAYOUTS = tuple(layout for layout in ALL if NEWER or layout.data != "fsdp" or layout.flat or 1 in (layout.dp, layout.tp))
KINDS = ("dp", "tp", "pp", "dp×tp", "dp×pp", "tp×pp", "dp×tp×pp", "flat")


def pairings() -> list[tuple[int, int]]:
    """Every kind to every kind, in turn between the members of the kinds; and every pairing of sizes; long, each twice."""
    by_kind = {kind: [i for i, layout in enumerate(LAYOUTS) if layout.kind == kind] for kind in KINDS}
    sources, targets = ({kind: cycle(members) for kind, members in by_kind.items()} for _ in range(2))
    chosen = [(next(sources[saved]), next(targets[loaded])) for saved, loaded in product(KINDS, KINDS)]
    if is_long():
        chosen += [(next(sources[saved]), next(targets[loaded])) for loaded, saved in product(KINDS, KINDS)]
    sizes = {(LAYOUTS[a].size, LAYOUTS[b].size) for a, b in chosen}
    for want in product((1, 2, 3, 4, 8), repeat=2):
        if want not in sizes:
            chosen.append(tuple(next(i for i, layout in enumerate(LAYOUTS) if layout.size == n) for n in want))
    return list(dict.fromkeys(chosen))


def matrix_job(folder: str) -> list[str]:
    return wrong_pairings(Path(folder), LAYOUTS, pairings())


@pytest.mark.slow
def test_every_layout_loads_every_other_bit_for_bit(tmp_path: Path):
    wrong = [line for rank in run_ranks(matrix_job, 8, str(tmp_path), timeout_s=800) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])
