"""Selecting the tensors and values of a checkpoint by name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..core.catalog.model import Catalog
from ..core.report import hint_of
from ..errors import MismatchError, UsageError

Names = str | Sequence[str] | None


class SelectedNames(NamedTuple):
    """Names selected from a catalog: tensors, values, and names of a foreign checkpoint that cannot be read."""

    tensors: list[str]
    values: list[str]
    unreadable: list[str]

    def where(self, keeps: Callable[[str], bool]) -> SelectedNames:
        """Return the selected names for which a function returns True."""
        return SelectedNames(*([name for name in names if keeps(name)] for names in self))

    def refuse_unreadable(self, saved: Catalog) -> None:
        """Raise the error of the first selected tensor or value that cannot be read."""
        for name in self.unreadable:
            raise saved.unreadable[name]


def match_names(saved: Catalog, names: Sequence[str] | None) -> SelectedNames:
    """Select the tensors and values of these names; None selects all.

    Raise `MismatchError` if the checkpoint has nothing for one of the names, and `UsageError` if they are no list of text.
    """
    kinds = saved.names, saved.value_names, tuple(saved.unreadable)
    if names is None:
        return SelectedNames(*map(list, kinds))
    if isinstance(names, str):
        raise UsageError(f"names={names!r}: pass a list of names, as in names=[{names!r}]")
    # A generator would be empty after its first use here.
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{names!r:.200}: pass a list of names, each of them text")
    everything = [name for known in kinds for name in known]
    place = {name: i for i, name in enumerate(everything)}
    ordered = sorted(place)

    def matched(name: str) -> list[str]:
        # Names below `name` lie together in `ordered`: "/" is the character after ".".
        found = ordered[bisect_left(ordered, f"{name}.") : bisect_left(ordered, f"{name}/")]
        if name in place:
            found.append(everything[place[name]])  # `name` itself may be a string of numpy
        return sorted(found, key=place.__getitem__) or matching(everything, name)

    found = {name: matched(name) for name in names}
    absent = [name for name, of_name in found.items() if not of_name]
    if absent:
        hint = hint_of(absent[0], (*saved.names, *saved.value_names))
        raise MismatchError(
            f"{', '.join(absent)}: not in the checkpoint, which has {top_level_keys(saved)}{hint}; inspect lists all", absent
        )
    chosen = dict.fromkeys(one for of_name in found.values() for one in of_name)
    return SelectedNames(*([one for one in chosen if one in known] for known in map(frozenset, kinds)))


def top_level_keys(saved: Catalog) -> str:
    """List, as text for a message, the top-level keys of a catalog's names, at most 8."""
    names = (*saved.names, *saved.value_names, *saved.unreadable)
    found = sorted({name.partition(".")[0] for name in names})
    return ", ".join([*map(repr, found[:8]), *(["…"] if len(found) > 8 else [])]) or "nothing"


def matching(names: Sequence[str], name: str) -> list[str]:
    """List the names equal to `name` or below it. If there are none, use `name` as a shell-style pattern."""
    below = [other for other in names if other == name or other.startswith(f"{name}.")]
    return below or [other for other in names if fnmatchcase(other, name)]


def select_names(saved: Catalog, select: Names, exclude: Names) -> SelectedNames:
    """Select names (None: all), without the excluded ones.

    Raise `MismatchError` if the checkpoint has nothing for one of the names.
    """
    taken = match_names(saved, as_list(select))
    if exclude is None:
        return taken
    gone = {name for names in match_names(saved, as_list(exclude)) for name in names}
    return taken.where(lambda name: name not in gone)


def as_list(names: Names) -> Sequence[str] | None:
    """Return a list of names: a single name becomes a list of one, and None stays None."""
    return [names] if isinstance(names, str) else names
