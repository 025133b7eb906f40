"""`diff`: compare the catalogs of two checkpoints of any layout and, if asked, every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import eq
from typing import Any

from ..core.catalog.model import Catalog
from ..core.catalog.placements import same_placement
from ..core.catalog.specs import AxisPlacement, ValueKind
from ..core.report import plural
from ..engine.checking.compare import Side, TensorDifference, compare
from ..engine.common.progress import OnProgress, reporter
from ..engine.loading.saved_values import SavedValue, open_values
from ..format.values import decode_value
from ..formats.source import Path, Source, open_source
from .value_changes import ValueChange, value_changes


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
        A `Change` for each name that is a tensor in one checkpoint and a value in the other; for each tensor whose global shape
        differs; for each tensor whose dtype differs.
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


def diff(a: Path, b: Path, *, values: bool = False, progress: bool | OnProgress = False) -> Diff:
    """Compare two checkpoints, of any layouts and formats.

    Parameters
    ----------
    a, b
        The checkpoints.
    values
        Compare all contents: every tensor bit by bit, in bounded memory, and every value. Without it, compare names, shapes,
        dtypes, placements, and values that are small enough to be in the catalogs, such as steps and learning rates.
    progress
        As for `inspect`.

    Raises
    ------
    CheckpointNotFound, CorruptError
        One of the checkpoints is missing, or is damaged.
    """
    with ExitStack() as stack:
        one = stack.enter_context(open_source(a))
        two = stack.enter_context(open_source(b))
        first, second = one.catalog, two.catalog
        in_a, in_b = ({*catalog.names, *catalog.value_names} for catalog in (first, second))
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
        right = Side(two.storage, second, [second.index(name) for name in comparable])
        return Diff(
            a=str(a),
            b=str(b),
            removed=tuple(sorted(in_a - in_b)),
            added=tuple(sorted(in_b - in_a)),
            # A name in both checkpoints, but as a tensor in one and a value in the other.
            kind=tuple(
                Change(name, *("tensor" if name in catalog else "value" for catalog in (first, second)))
                for name in sorted(in_a & in_b)
                if (name in first) != (name in second)
            ),
            shape=shapes,
            dtype=tuple(_changes(tensors, first, second, Catalog.dtype)),
            placement=(*_changes(tensors, first, second, _placement, same_placement), *ranks),
            values=tuple(change for change in found if isinstance(change, ValueChange)),
            tensors=tuple(compare(comparable, left, right, reporter(progress))) if values else (),
            num_compared=len(comparable) if values else 0,
        )


def _changes(
    names: Sequence[str],
    a: Catalog,
    b: Catalog,
    property_of: Callable[[Catalog, int], Any],
    same: Callable[[Any, Any], bool] = eq,
) -> Iterator[Change]:
    for name in names:
        in_a, in_b = property_of(a, a.index(name)), property_of(b, b.index(name))
        if not same(in_a, in_b):
            yield Change(name, in_a, in_b)


def _placement(catalog: Catalog, index: int) -> tuple[AxisPlacement, ...] | None:
    placement = int(catalog.tensors_table.placement[index])
    return None if placement < 0 else catalog.placements[placement]


def _compared_values(a: Source, b: Source, names: Sequence[str], *, everything: bool) -> Iterator[ValueChange | Change]:
    """Yield the values that differ; a `Change` is a per-rank value of different numbers of ranks, which cannot be compared.

    Without `everything`, compare only values that both catalogs contain.
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
    """Decode the values that the catalog itself contains."""
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
