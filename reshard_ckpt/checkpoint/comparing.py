"""`diff`: compare the catalogs of two checkpoints of any layout and, if asked, every byte.

Values that are dicts and lists are walked together, down to the parts that differ. Two values are identical if their encoded
bytes are, as in a catalog: a NaN equals itself, and 3 differs from 3.0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import eq
from typing import Any

import numpy as np
import torch

from ..comm import ALONE, open_session
from ..core.catalog.model import Catalog
from ..core.catalog.placements import same_placement
from ..core.catalog.specs import ValueKind
from ..core.report import plural
from ..engine.checking.compare import Side, TensorDifference, compare
from ..engine.common.progress import OnProgress, reporter
from ..engine.loading.saved_values import SavedValue, open_values
from ..format.values import decode_value, encode_value
from ..formats.source import Path, Source, open_shared_source


@dataclass(frozen=True, slots=True)
class Change:
    """A property that differs: the name it belongs to, and its value in the first checkpoint and in the second."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences that `diff` found.

    Attributes
    ----------
    a, b
        The paths.
    removed, added
        Names of tensors and values that only the first checkpoint has, and that only the second has.
    kind, shape, dtype
        A `Change` for each name that is a tensor in one checkpoint and a value in the other, or that cannot be read from one of
        them; for each tensor whose global shape differs; for each tensor whose dtype differs.
    placement
        A `Change` for each tensor whose placement differs, and for each per-rank value whose number of ranks differs. ``equal``
        ignores these.
    values
        A `ValueChange` for each value that differs, or for each part of it that does. Values in the catalogs are always compared;
        large and per-rank ones, which lie in the shard files, only with ``values=True``.
    tensors
        With ``values=True``: the tensors whose bytes differ, and how large the differences are.
    num_compared
        The number of tensors whose bytes were compared.
    """

    a: str
    b: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    kind: tuple[Change, ...]
    shape: tuple[Change, ...]
    dtype: tuple[Change, ...]
    placement: tuple[Change, ...]
    values: tuple[ValueChange, ...]
    tensors: tuple[TensorDifference, ...] = ()
    num_compared: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal, apart from the layout."""
        return not (self.removed or self.added or self.kind or self.shape or self.dtype or self.tensors or self.values)


def diff(
    a: Path,
    b: Path,
    *,
    values: bool = False,
    progress: bool | OnProgress = False,
    process_group: Any = ALONE,
    timeout_s: float = 600.0,
) -> Diff:
    """Compare two checkpoints, of any layouts and formats, by one process or several.

    Parameters
    ----------
    a, b
        The checkpoints.
    values
        Compare all contents: every tensor bit by bit, in bounded memory, and every value. Without it, compare names, shapes,
        dtypes, placements, and values that are small enough to be in the catalogs, such as steps and learning rates.
    progress
        As for `inspect`.
    process_group
        The ranks that divide the tensors among them, about equally in bytes. All get the same result. Each rank reads all
        values. None stands for all ranks. By default this process is on its own.
    timeout_s
        Seconds to wait for the other ranks.

    Returns
    -------
    Diff

    Raises
    ------
    CheckpointNotFound, CorruptError
        One of the checkpoints is missing or damaged.
    PeerError
        Another rank failed or did not arrive.
    """
    call = "diff(values=True)" if values else "diff"  # ranks that differ in it get an error that says so
    session = open_session(call, f"{a} {b}", process_group=process_group, timeout_s=timeout_s)
    with (
        session as comm,
        open_shared_source(comm, a, timeout_s=timeout_s) as one,
        open_shared_source(comm, b, timeout_s=timeout_s) as two,
    ):
        first, second = one.catalog, two.catalog
        kinds_a, kinds_b = _kinds(first), _kinds(second)
        tensors = [name for name in first.names if name in second]
        saved = set(second.value_names)
        both = [name for name in first.value_names if name in saved]
        found = list(_compared_values(one, two, both, everything=values))
        ranks = [change for change in found if isinstance(change, Change)]
        shapes = tuple(_changes(tensors, first, second, Catalog.shape))
        reshaped = {change.name for change in shapes}
        # Bytes are compared also if dtypes differ, but not if shapes do.
        comparable = [name for name in tensors if name not in reshaped]
        left = Side(one.storage, first, [first.index(name) for name in comparable])
        report = reporter(progress if comm.rank == 0 else False)
        right = Side(two.storage, second, [second.index(name) for name in comparable])
        return Diff(
            a=str(a),
            b=str(b),
            removed=tuple(sorted(kinds_a.keys() - kinds_b.keys())),
            added=tuple(sorted(kinds_b.keys() - kinds_a.keys())),
            kind=tuple(
                Change(name, kinds_a[name], kinds_b[name])
                for name in sorted(kinds_a.keys() & kinds_b.keys())
                if kinds_a[name] != kinds_b[name] or kinds_a[name] == UNREADABLE
            ),
            shape=shapes,
            dtype=tuple(_changes(tensors, first, second, Catalog.dtype)),
            placement=(*_changes(tensors, first, second, Catalog.placement, same_placement), *ranks),
            values=tuple(change for change in found if isinstance(change, ValueChange)),
            tensors=tuple(compare(comparable, left, right, report, comm)) if values else (),
            num_compared=len(comparable) if values else 0,
        )


UNREADABLE = "unreadable"


def _kinds(catalog: Catalog) -> dict[str, str]:
    """Map every name in a catalog to its kind: ``"tensor"``, ``"value"``, or `UNREADABLE` if the entry cannot be read."""
    kinds = dict.fromkeys(catalog.names, "tensor") | dict.fromkeys(catalog.value_names, "value")
    return kinds | dict.fromkeys(catalog.unreadable, UNREADABLE)


def _changes(
    names: Sequence[str],
    a: Catalog,
    b: Catalog,
    property_of: Callable[[Catalog, int], Any],
    is_same: Callable[[Any, Any], bool] = eq,
) -> Iterator[Change]:
    for name in names:
        in_a, in_b = property_of(a, a.index(name)), property_of(b, b.index(name))
        if not is_same(in_a, in_b):
            yield Change(name, in_a, in_b)


def _compared_values(a: Source, b: Source, names: Sequence[str], *, everything: bool) -> Iterator[ValueChange | Change]:
    """Yield the differences between the values that two checkpoints have under the same names.

    A per-rank value that was saved for different numbers of ranks cannot be compared; for it, yield a `Change` with both
    numbers. Without `everything`, compare only values that both catalogs contain.
    """
    small_a, small_b = _small_values(a.catalog), _small_values(b.catalog)
    for name in names:
        if name in small_a and name in small_b:
            yield from _compared(name, small_a[name], small_b[name])
        elif everything:  # one at a time, because they are large
            of_a = open_values(a.storage, a.catalog, [name], verify=True)
            of_b = open_values(b.storage, b.catalog, [name], verify=True)
            yield from _compared(name, of_a[name], of_b[name])


def _small_values(catalog: Catalog) -> dict[str, SavedValue]:
    """Map names to the decoded values that a catalog itself contains. Large and per-rank values lie in shard files."""
    held = [(entry, entry.data) for entry in catalog.values_table if entry.data is not None]
    return {entry.name: SavedValue(entry.kind, decode_value(data, name=entry.name)) for entry, data in held}


def _compared(name: str, a: SavedValue, b: SavedValue) -> Iterable[ValueChange | Change]:
    if a.kind == b.kind == ValueKind.PER_RANK and len(a.value) != len(b.value):
        return [Change(name, plural(len(a.value), "rank"), plural(len(b.value), "rank"))]
    as_groups = ValueKind.PARAM_GROUPS in (a.kind, b.kind)
    return value_changes(name, _with_sorted_params(a.plain, as_groups), _with_sorted_params(b.plain, as_groups))


def _with_sorted_params(value: Any, as_groups: bool) -> Any:
    """Sort the parameters of each group, because different layouts list them in different orders."""
    if not as_groups or not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        return value
    return [{**group, "params": sorted(group.get("params", ()), key=repr)} for group in value]


MAX_LEAVES = 16
"""The most differences that a diff lists for one value; with more, the whole value is listed as one difference."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value, or a part of a value, that differs.

    Attributes
    ----------
    name
        The name of the value.
    where
        The part, as a Python expression behind the value: ``[0]['lr']``; empty for the whole value.
    a, b
        The value or part in the first checkpoint, and in the second.
    by, relative
        For numbers, ``b - a`` and ``|b - a| / max(|a|, |b|)``; for numpy arrays and tensors of one shape, the largest absolute
        and the largest relative difference of an element. None for other types, and if a number is NaN or infinite.
    """

    name: str
    where: str
    a: Any
    b: Any
    by: float | int | None = None
    relative: float | None = None


def value_changes(name: str, a: Any, b: Any) -> list[ValueChange]:
    """List the differences between two values of one name.

    >>> [(c.where, c.a, c.b, c.by) for c in value_changes("x", {"lr": 1, "n": [1, 2]}, {"lr": 1, "n": [1, 5]})]
    [("['n'][1]", 2, 5, 3)]
    """
    if is_identical(a, b):
        return []
    leaves = list(_leaves(a, b, ""))
    if len(leaves) > MAX_LEAVES:
        leaves = [("", a, b)]
    return [ValueChange(name, where, x, y, *_difference(x, y)) for where, x, y in leaves]


def is_identical(a: Any, b: Any) -> bool:
    """Tell whether two values are identical, down to the types and bits that a catalog would encode."""
    return encode_value(a, "a value") == encode_value(b, "a value")


def _leaves(a: Any, b: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the smallest parts in which two values differ: the part as an expression, and the part of each value."""
    if type(a) is type(b) and isinstance(a, dict) and list(a) == list(b):
        parts = [(f"{where}[{key!r}]", a[key], b[key]) for key in a]
        if isinstance(a, OrderedDict):  # these alone may have attributes
            parts.append((f"{where}.__dict__", vars(a), vars(b)))
    elif type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        parts = [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        parts = []
    differing = [part for part in parts if not is_identical(part[1], part[2])]
    # The parts are equal, or there are none, so this value itself is the smallest part that differs.
    if not differing:
        yield where, a, b
    for at, x, y in differing:
        yield from _leaves(x, y, at)


def _difference(a: Any, b: Any) -> tuple[float | int | None, float | None]:
    """Return the largest absolute and relative difference of two numbers, arrays or tensors.

    Both are None for other types, for arrays of different shapes, and if a number is not finite.
    """
    if all(isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_complex() for x in (a, b)):
        a, b = (x.detach().to(torch.float64).numpy() for x in (a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf" or not a.size:
            return None, None
        a, b = (side.astype(np.float64) for side in (a, b))
        apart, largest = np.abs(b - a), np.maximum(np.abs(a), np.abs(b))
        if not np.isfinite(apart).all():
            return None, None
        return float(apart.max()), float((apart / np.where(largest > 0, largest, 1)).max())
    x, y = (n.item() if isinstance(n, np.number) else n for n in (a, b))
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in (x, y)):
        return None, None
    largest = max(abs(x), abs(y))
    try:
        relative = float(abs(y - x) / largest) if largest else 0.0
    except OverflowError:  # a float, and an integer beyond all floats
        return None, None
    return (y - x, relative) if isfinite(relative) else (None, None)
