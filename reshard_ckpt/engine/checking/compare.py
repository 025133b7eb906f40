"""Differences between the tensors of two checkpoints, which are streamed side by side, whatever their layouts.

Bytes are compared first: equal ones, the usual case, cost no arithmetic. Numbers are compared only where bytes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.catalog.model import Catalog
from ...format.columns import TORCH_DTYPES
from ...storage.protocol import Storage
from ..common.progress import OnProgress, Tally, silent
from ..loading.stream import whole_run
from .statistics import NUMPY_DTYPES, as_numbers, windows_of


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How two tensors of one name and shape differ in value.

    Attributes
    ----------
    name, num_elements
        The tensor, and its number of elements.
    num_different
        Elements whose bytes differ; so a NaN equals itself, and 0.0 differs from -0.0. If the dtypes differ, both are first
        converted to a dtype that holds either.
    max_abs, max_rel
        The largest ``|a - b|``, and the largest ``|a - b| / max(|a|, |b|)``. Elements with a NaN on one side do not count.
    num_nan
        Elements that are NaN in just one of the two.
    """

    name: str
    num_elements: int
    num_different: int
    max_abs: float
    max_rel: float
    num_nan: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of two checkpoints that are compared: its store, its catalog, and its tensors, in an order that both sides share."""

    storage: Storage
    catalog: Catalog
    tensors: Sequence[int]


def compare(names: Sequence[str], a: Side, b: Side, report: OnProgress = silent) -> list[TensorDifference]:
    """Find the tensors whose bytes differ; both sides have the same shapes, in the same order.

    Raises
    ------
    CorruptError
        A file of either is damaged.
    """
    sources_a = [a.catalog.source(tensor) for tensor in a.tensors]
    sources_b = [b.catalog.source(tensor) for tensor in b.tensors]
    keys = list(zip(sources_a, sources_b, strict=True))
    pairs = {key: _Pair(a.catalog, key[0], b.catalog, key[1]) for key in keys}  # tied names are compared once
    tally = Tally("compare", sum(pair.num_bytes for pair in pairs.values()), report)
    windows_a = windows_of(a.storage, a.catalog, [pair.a for pair in pairs.values()])
    windows_b = windows_of(b.storage, b.catalog, [pair.b for pair in pairs.values()])
    for (cut_a, window_a), (cut_b, window_b) in zip(windows_a, windows_b, strict=True):
        for run_a, run_b, x, y in zip(cut_a, cut_b, window_a.parts(), window_b.parts(), strict=True):
            pairs[run_a.tensor, run_b.tensor].add(x, y)
            tally.add(len(x))
    return [pairs[key].difference(name) for name, key in zip(names, keys, strict=True) if pairs[key].num_different]


def _common(a: str, b: str) -> str:
    """Return a dtype that holds the numbers of both.

    It is that of numpy. torch would compare int64 with float32 in float32, and so round.
    """
    both = np.promote_types(NUMPY_DTYPES.get(a, np.float32), NUMPY_DTYPES.get(b, np.float32))
    codes = {np.dtype(dtype): code for code, dtype in NUMPY_DTYPES.items()}
    return codes.get(both, "C64")  # the only complex dtype that a checkpoint can have


class _Pair:
    """Two tensors to read whole, in one dtype, so that both are cut alike; and the differences found so far."""

    def __init__(self, a: Catalog, tensor_a: int, b: Catalog, tensor_b: int) -> None:
        codes = a.dtype(tensor_a), b.dtype(tensor_b)
        common = None if codes[0] == codes[1] else _common(*codes)
        self.a = replace(whole_run(a, tensor_a), dtype=common)
        self.b = replace(whole_run(b, tensor_b), dtype=common)
        self.code = common or codes[0]
        self.num_bytes = self.a.count * TORCH_DTYPES[self.code].itemsize
        self.num_different = self.num_nan = 0
        self.max_abs = self.max_rel = 0.0

    def add(self, x: memoryview, y: memoryview) -> None:
        """Compare the next bytes of both."""
        bits = np.dtype(f"u{TORCH_DTYPES[self.code].itemsize}")
        bytes_x, bytes_y = np.frombuffer(x, bits), np.frombuffer(y, bits)
        if np.array_equal(bytes_x, bytes_y):
            return
        differs = np.flatnonzero(bytes_x != bytes_y)
        self.num_different += len(differs)
        a, b = (as_numbers(side, self.code)[differs] for side in (x, y))
        apart, largest = _integers_apart(a, b) if a.dtype.kind in "iub" else self._floats_apart(a, b)
        if len(apart) == 0:
            return
        self.max_abs = max(self.max_abs, float(apart.max()))
        some = np.flatnonzero(apart > 0)
        with np.errstate(invalid="ignore"):  # infinity by infinity is NaN, and counts as the largest difference
            relative = np.nan_to_num(apart[some] / largest[some], nan=np.inf)
        self.max_rel = max(self.max_rel, float(relative.max(initial=0.0)))

    def _floats_apart(self, a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        self.num_nan += int((nan_a != nan_b).sum())
        a, b = (side[~(nan_a | nan_b)].astype(wide) for side in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            return np.abs(a - b), np.maximum(np.abs(a), np.abs(b))

    def difference(self, name: str) -> TensorDifference:
        """Report the differences found, under this name."""
        return TensorDifference(name, self.a.count, self.num_different, self.max_abs, self.max_rel, self.num_nan)


def _integers_apart(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Subtract exactly, also where the difference of two int64 needs 64 bits; returns that, and the larger magnitudes."""
    if a.dtype.kind == "b":
        a, b = a.astype(np.uint8), b.astype(np.uint8)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    apart = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
    largest = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    return apart.astype(np.float64), largest
