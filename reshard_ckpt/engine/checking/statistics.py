"""Statistics of the numbers in saved tensors, in one pass over their bytes, a window at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.catalog.model import Catalog
from ...format.dtypes import TORCH_DTYPES
from ...storage.protocol import Storage
from ..common.files import FileDigests
from ..common.progress import OnProgress, Tally, silent
from ..loading.stream import WINDOW_BYTES, Run, RunReader, Window, check_covered, cut_windows, read_ahead, whole_run

NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32, "I32": np.int32,
    "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
"""The numpy dtype of each dtype code; codes that numpy has no dtype for are missing."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor.

    Attributes
    ----------
    name, num_elements
        The tensor, and its number of elements.
    min, max, mean
        Over its finite numbers; None if it has no finite number. For a complex tensor, over the magnitudes.
    num_nan, num_inf
        Numbers of NaNs and of infinite numbers.
    """

    name: str
    num_elements: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    num_nan: int
    num_inf: int


def statistics(storage: Storage, catalog: Catalog, tensors: Sequence[int], report: OnProgress = silent) -> list[TensorStats]:
    """Compute the statistics of these tensors of the catalog, in one pass, and verify every block."""
    found = {tensor: _Totals() for tensor in tensors}
    runs = [whole_run(catalog, tensor) for tensor in found]
    tally = Tally("read", sum(run.count * TORCH_DTYPES[catalog.dtype(run.tensor)].itemsize for run in runs), report)
    for cut, window in windows_of(storage, catalog, runs):
        for run, data in zip(cut, window.parts(), strict=True):
            found[run.tensor].add(as_numbers(data, catalog.dtype(run.tensor)))
            tally.add(len(data))
    return [totals.stats(catalog.tensors_table.names[tensor], prod(catalog.shape(tensor))) for tensor, totals in found.items()]


def windows_of(storage: Storage, catalog: Catalog, runs: Sequence[Run]) -> Iterator[tuple[Sequence[Run], Window]]:
    """Read runs of saved tensors a window at a time. Yield the runs that are in each window, and the window with their bytes."""
    check_covered(catalog, runs)
    reader = RunReader(storage, catalog, FileDigests(storage, catalog, verify=True))
    windows = list(cut_windows(reader, runs, WINDOW_BYTES))
    yield from zip(windows, read_ahead(reader, windows), strict=True)


def as_numbers(data: memoryview, code: str) -> NDArray[Any]:
    """Convert bytes to an array that numpy can compute with; 8- and 16-bit floats become float32."""
    if code in NUMPY_DTYPES and code != "F16":
        return np.frombuffer(data, NUMPY_DTYPES[code])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[code]).float().numpy()


class _Totals:
    """The statistics of one tensor so far: minimum, maximum, sum, and the numbers of finite elements, NaNs and infinities."""

    def __init__(self) -> None:
        self.low: Any = inf
        self.high: Any = -inf
        self.sum = 0.0
        self.num_finite = self.num_nan = self.num_inf = 0

    def add(self, numbers: NDArray[Any]) -> None:
        if np.iscomplexobj(numbers):
            numbers = np.abs(numbers)
        low, high = numbers.min(), numbers.max()
        # The least and the largest show any NaN or infinity. Most tensors have none, so a third pass over them is seldom needed.
        if not (np.isfinite(low) and np.isfinite(high)):
            self.num_nan += int(np.isnan(numbers).sum())
            self.num_inf += int(np.isinf(numbers).sum())
            numbers = numbers[np.isfinite(numbers)]
            if len(numbers) == 0:
                return
            low, high = numbers.min(), numbers.max()
        self.low, self.high = min(self.low, low.item()), max(self.high, high.item())
        self.sum += float(numbers.sum(dtype=np.float64))
        self.num_finite += len(numbers)

    def stats(self, name: str, num_elements: int) -> TensorStats:
        if self.num_finite == 0:
            return TensorStats(name, num_elements, None, None, None, self.num_nan, self.num_inf)
        return TensorStats(name, num_elements, self.low, self.high, self.sum / self.num_finite, self.num_nan, self.num_inf)
