"""The policies of `TouchedRows`: each watches the rows of one embedding table, and scores how much each row needs saving."""

from __future__ import annotations

from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Scores = NDArray[Any]
"""The scores of a table's rows, (rows,), bool or a number; `engine.saving.touched` merges those of all ranks."""


class Policy(Protocol):
    """The interface of all policies: an object that keeps the scores of one table's rows.

    It is made from the table's number of rows, the fraction of them to save, and this rank's part of the table.
    """

    def __init__(self, num_rows: int, fraction: float, memory: torch.Tensor) -> None: ...

    def add(self, rows: torch.Tensor) -> None:
        """Record that training used these rows, 1-D int64."""

    def scores(self, memory: torch.Tensor) -> Scores:
        """Return the score of each row, (rows,); a row with 0 need not be saved. `memory` is this rank's part of the table."""

    def take(self, chosen: NDArray[np.bool_], memory: torch.Tensor) -> None:
        """Reset the scores of the rows in the mask `chosen`, (rows,), because they are saved now."""


class Touched:
    """Policy "touched": a bitmap of the rows that training has updated, on the device of the indices; rows / 8 bytes."""

    def __init__(self, num_rows: int, fraction: float, memory: torch.Tensor) -> None:
        self._num_bytes, self._num_rows = -(-num_rows // 8), num_rows
        self._bits: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        if self._bits is None or self._bits.device != rows.device:
            held = torch.zeros(self._num_bytes + 1, dtype=torch.uint8, device=rows.device) if self._bits is None else self._bits
            self._bits = held.to(rows.device)
        # For each of the 8 bits, all rows with that bit write equal values into a byte, so repeated rows do no harm. The other
        # rows write into the last byte, which stands for no row. Nothing here waits for a device.
        byte, bit = rows >> 3, rows & 7
        spare = torch.full_like(byte, self._num_bytes)
        for position in range(8):
            at = torch.where(bit == position, byte, spare)
            self._bits[at] = self._bits[at] | (1 << position)

    def add_where(self, is_touched: torch.Tensor) -> None:
        """Record the rows for which `is_touched`, a bool for each row, is True. Do not wait for the device that holds it."""
        if self._bits is None:
            self._bits = torch.zeros(self._num_bytes + 1, dtype=torch.uint8, device=is_touched.device)
        padded = torch.zeros(self._num_bytes * 8, dtype=torch.uint8, device=is_touched.device)
        padded[: self._num_rows] = is_touched
        # bits[i, k]: the bit of row 8 i + k in byte i
        bits = padded.view(self._num_bytes, 8) << torch.arange(8, dtype=torch.uint8, device=padded.device)
        self._bits[:-1] |= bits.sum(1, dtype=torch.uint8).to(self._bits.device)

    def scores(self, memory: torch.Tensor) -> Scores:
        if self._bits is None:
            return np.zeros(self._num_rows, bool)
        packed = self._bits[:-1].cpu().numpy()
        return np.unpackbits(packed, count=self._num_rows, bitorder="little").astype(bool)

    def take(self, chosen: NDArray[np.bool_], memory: torch.Tensor) -> None:
        self._bits = None


class MostUsed:
    """Policy "most_used": the number of uses of each row since it was last saved; 4 bytes a row."""

    def __init__(self, num_rows: int, fraction: float, memory: torch.Tensor) -> None:
        self._counts = torch.zeros(num_rows, dtype=torch.int32, device=memory.device)

    def add(self, rows: torch.Tensor) -> None:
        self._counts = self._counts.to(rows.device)
        self._counts.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))

    def scores(self, memory: torch.Tensor) -> Scores:
        return self._counts.cpu().numpy().astype(np.int64)

    def take(self, chosen: NDArray[np.bool_], memory: torch.Tensor) -> None:
        self._counts[torch.from_numpy(chosen).to(self._counts.device)] = 0


class Sampled:
    """Policy "sampled": a list of the rows of every second use, of at most ``fraction`` of the rows, 8 bytes each.

    A full list drops rows at random. `take` drops all of them, also rows that were not chosen.
    """

    def __init__(self, num_rows: int, fraction: float, memory: torch.Tensor) -> None:
        self._num_rows, self._limit, self._skip = num_rows, ceil(fraction * num_rows), 0
        self._rows = torch.zeros(0, dtype=torch.int64, device=memory.device)
        self._random = torch.Generator().manual_seed(num_rows)  # the job's own random numbers stay as they are

    def add(self, rows: torch.Tensor) -> None:
        half, self._skip = rows[self._skip :: 2], (self._skip + rows.numel()) % 2
        self._rows = torch.cat([self._rows.to(rows.device), half]).unique()  # type: ignore[no-untyped-call]
        if len(self._rows) > self._limit:
            kept = torch.randperm(len(self._rows), generator=self._random)[: self._limit]
            self._rows = self._rows[kept.to(rows.device)]

    def scores(self, memory: torch.Tensor) -> Scores:
        scores = np.zeros(self._num_rows, bool)
        scores[self._rows.cpu().numpy()] = True
        return scores

    def take(self, chosen: NDArray[np.bool_], memory: torch.Tensor) -> None:
        self._rows = self._rows[:0]


class LargestChange:
    """Policy "largest_change": the squared distance of each row from its value when it was saved.

    It keeps these values: a copy of this rank's part of the table.

    A row that became NaN or infinite counts as farthest. A row that is NaN or infinite and has not changed since has distance 0.
    """

    def __init__(self, num_rows: int, fraction: float, memory: torch.Tensor) -> None:
        self._saved = memory.detach().clone()

    def add(self, rows: torch.Tensor) -> None:
        pass

    def scores(self, memory: torch.Tensor) -> Scores:
        now, saved = memory.detach().flatten(1), self._saved.flatten(1)
        is_same = (now == saved) | (now.isnan() & saved.isnan())
        # The square of a tiny change may be too small for a float, but the row has changed.
        change = (now - saved).abs().float().square().nan_to_num(torch.inf).clamp(min=torch.finfo(torch.float32).tiny)
        return change.masked_fill(is_same, 0).sum(1).cpu().numpy()

    def take(self, chosen: NDArray[np.bool_], memory: torch.Tensor) -> None:
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(memory.device)
        self._saved[rows] = memory.detach()[rows]


POLICIES: dict[str, type[Policy]] = {
    "touched": Touched,
    "most_used": MostUsed,
    "sampled": Sampled,
    "largest_change": LargestChange,
}
