"""The plan of a live reshard, and the leftovers of one call of `reshard_live` for the next one (`Kept`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.report import LoadReport
from ..engine.common.rounds import Buffers
from ..engine.resharding.live import Moves
from ..engine.resharding.live_source import LiveSource, LiveValues, Overlaps
from ..engine.saving.messages import RunColumns

KEPT_ROWS, KEPT_BYTES = 1 << 16, 1 << 20
"""Limits for keeping the plan of `reshard_live` for its next call: rows of the plan on this rank (about 10 MB of memory), and
bytes of the values of all ranks, which are kept with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is planned for the layouts of two states. It refers to no tensor of theirs, so it may outlive them.

    Attributes
    ----------
    layout, names
        Digests of everything on this rank that the plan depends on.
    sources
        For each tensor of `dst` that is loaded, the catalog's tensor with its bytes.
    report
        The report of a move, without the bytes that other ranks sent.
    not_loaded
        The names of the tensors of `dst` that are not loaded.
    unfit
        A line for each value of `dst` that does not fit on this rank, although the options allow that.
    checked
        The runs of this rank that other ranks hold too, as the first comparison found them; None before it.
    """

    layout: bytes
    names: bytes
    source: LiveSource
    sources: Mapping[int, int]
    overlaps: Overlaps
    moves: Moves
    report: LoadReport
    not_loaded: Sequence[str]
    unfit: Sequence[str]
    checked: RunColumns | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows in the tables of the plan on this rank. The plan's memory is proportional to it."""
        held = 0 if self.source.held is None else len(self.source.held.rank)
        return held + len(self.source.catalog.rows.file) + len(self.moves.parts.owner)


class Kept(NamedTuple):
    """Leftovers of a call of `reshard_live` for the next one in the same process group.

    They are the plan, the values of all ranks, and the host memory for messages, of at most ``memory_bytes``.
    """

    plan: Plan | None = None
    values: LiveValues | None = None
    buffers: Buffers | None = None

    @property
    def number(self) -> int:
        """The number of the next message that the kept host memory sends or receives; -1 without kept memory."""
        return -1 if self.buffers is None else self.buffers.number
