"""Differences between the tensors of two checkpoints, which are streamed side by side, whatever their layouts.

1. Several ranks divide the bytes of all pairs of tensors evenly.
2. Bytes are compared first: equal ones, the usual case, cost no arithmetic. Numbers are compared only where bytes differ.
3. The ranks add up their counts and take the largest differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...comm.protocol import Comm, merge_of_all
from ...core.catalog.model import Catalog
from ...format.dtypes import TORCH_DTYPES
from ...storage.protocol import Storage
from ..common.progress import OnProgress, SharedTally
from ..common.sections import share_cut
from ..loading.stream import Run, whole_run
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


class Side(NamedTuple):
    """One side of a comparison: the store and catalog of a checkpoint, and the catalog indices of the tensors to compare.

    ``tensors[i]`` of one side is compared with ``tensors[i]`` of the other.
    """

    storage: Storage
    catalog: Catalog
    tensors: Sequence[int]


def compare(names: Sequence[str], a: Side, b: Side, report: OnProgress, comm: Comm) -> list[TensorDifference]:
    """Find the tensors whose bytes differ; both sides have the same shapes, in the same order.

    The ranks of `comm` share the reading. Collective if there are several: a gather of the differences and a broadcast of them
    all. Raise `CorruptError` if a file of either side is damaged.
    """
    sources_a = [a.catalog.source(tensor) for tensor in a.tensors]
    sources_b = [b.catalog.source(tensor) for tensor in b.tensors]
    keys = list(zip(sources_a, sources_b, strict=True))
    pairs = {key: _Pair(a.catalog, key[0], b.catalog, key[1]) for key in keys}  # tied names are compared once
    each = list(pairs.values())
    share = share_cut((pair.num_bytes for pair in each), (pair.item_bytes for pair in each), comm.rank, comm.size)
    tally = SharedTally(comm, "compare", sum(pair.num_bytes for pair in each), report)
    runs = [each[index].cut(part) for index, part in share]
    windows_a = windows_of(a.storage, a.catalog, [run for run, _ in runs])
    windows_b = windows_of(b.storage, b.catalog, [run for _, run in runs])
    for (cut_a, window_a), (cut_b, window_b) in zip(windows_a, windows_b, strict=True):
        for run_a, run_b, x, y in zip(cut_a, cut_b, window_a.parts(), window_b.parts(), strict=True):
            pairs[run_a.tensor, run_b.tensor].add(x, y)
            tally.add(len(x))
    if comm.size > 1:
        found = [(*key, *astuple(pair.totals)) for key, pair in pairs.items() if pair.totals.num_different]
        for pair in pairs.values():
            pair.totals = _Totals()
        for of_rank in merge_of_all(comm, found):
            for tensor_a, tensor_b, *totals in of_rank:
                pairs[tensor_a, tensor_b].totals.join(_Totals(*totals))
        tally.finish()
    return [pairs[key].difference(name) for name, key in zip(names, keys, strict=True) if pairs[key].totals.num_different]


def _common(a: str, b: str) -> str:
    """Return the code of a dtype that holds the numbers of dtypes `a` and `b`.

    Numpy's rules choose it. By torch's rules, int64 and float32 would be compared in float32, which rounds.
    """
    both = np.promote_types(NUMPY_DTYPES.get(a, np.float32), NUMPY_DTYPES.get(b, np.float32))
    codes = {np.dtype(dtype): code for code, dtype in NUMPY_DTYPES.items()}
    return codes.get(both, "C64")  # the only complex dtype that a checkpoint can have


@dataclass(slots=True)
class _Totals:
    """Counts and maxima of the differences found so far in a pair of tensors; `TensorDifference` explains the fields."""

    num_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    num_nan: int = 0

    def join(self, other: _Totals) -> None:
        """Add the counts of another rank, which has compared another part of the same two tensors."""
        self.num_different += other.num_different
        self.max_abs, self.max_rel = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        self.num_nan += other.num_nan


class _Pair:
    """A pair of tensors to compare, with the differences found so far.

    If their dtypes differ, both are read in a common dtype, so that the same byte range holds the same elements of either.
    """

    def __init__(self, a: Catalog, tensor_a: int, b: Catalog, tensor_b: int) -> None:
        codes = a.dtype(tensor_a), b.dtype(tensor_b)
        common = None if codes[0] == codes[1] else _common(*codes)
        self.a = replace(whole_run(a, tensor_a), dtype=common)
        self.b = replace(whole_run(b, tensor_b), dtype=common)
        self.code = common or codes[0]
        self.item_bytes = TORCH_DTYPES[self.code].itemsize
        self.num_bytes = self.a.count * self.item_bytes
        self.totals = _Totals()

    def cut(self, part: range) -> tuple[Run, Run]:
        """Return one run for each tensor of the pair: the elements in a byte range. Bytes are counted in the common dtype."""
        start, count = part.start // self.item_bytes, len(part) // self.item_bytes
        return replace(self.a, start=start, count=count), replace(self.b, start=start, count=count)

    def add(self, x: memoryview, y: memoryview) -> None:
        """Compare the bytes of one run, read from each of the two tensors, and add the differences to the totals."""
        bits = np.dtype(f"u{self.item_bytes}")
        bytes_x, bytes_y = np.frombuffer(x, bits), np.frombuffer(y, bits)
        if np.array_equal(bytes_x, bytes_y):
            return
        differs = np.flatnonzero(bytes_x != bytes_y)
        self.totals.num_different += len(differs)
        a, b = (as_numbers(side, self.code)[differs] for side in (x, y))
        apart, largest = _integers_apart(a, b) if a.dtype.kind in "iub" else self._floats_apart(a, b)
        if len(apart) == 0:
            return
        self.totals.max_abs = max(self.totals.max_abs, float(apart.max()))
        some = np.flatnonzero(apart > 0)
        with np.errstate(invalid="ignore"):  # infinity by infinity is NaN, and counts as the largest difference
            relative = np.nan_to_num(apart[some] / largest[some], nan=np.inf)
        self.totals.max_rel = max(self.totals.max_rel, float(relative.max(initial=0.0)))

    def _floats_apart(self, a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ``|a - b|`` and ``max(|a|, |b|)`` of elements without a NaN; count elements that are NaN on one side."""
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        self.totals.num_nan += int((nan_a != nan_b).sum())
        a, b = (side[~(nan_a | nan_b)].astype(wide) for side in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            return np.abs(a - b), np.maximum(np.abs(a), np.abs(b))

    def difference(self, name: str) -> TensorDifference:
        """Return the totals of this pair as a `TensorDifference` with this name."""
        return TensorDifference(name, self.a.count, *astuple(self.totals))


def _integers_apart(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``|a - b|``, exact also if it needs 64 bits, and ``max(|a|, |b|)`` of integers or bools; both as float64."""
    if a.dtype.kind == "b":
        a, b = a.astype(np.uint8), b.astype(np.uint8)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    apart = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
    largest = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    return apart.astype(np.float64), largest
