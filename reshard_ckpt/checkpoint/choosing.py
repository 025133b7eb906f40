"""Which tensors and values does a caller mean? Names, names of what is above them, and shell-style patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..core.catalog import Catalog
from ..errors import MismatchError, UsageError


def choose(saved: Catalog, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The names of the tensors and of the values that the caller asks for; None asks for all.

    Raises
    ------
    MismatchError
        The checkpoint has nothing for one of them.
    """
    if names is None:
        return list(saved.names), list(saved.value_names)
    if isinstance(names, str):
        raise UsageError(f"names={names!r}: pass a list of names, as in names=[{names!r}]")
    found = {name: (_fitting(saved.names, name), _fitting(saved.value_names, name)) for name in names}
    absent = [name for name, (tensors, values) in found.items() if not tensors and not values]
    if absent:
        raise MismatchError(f"{', '.join(absent)}: not in the checkpoint; checkpoint.catalog(path).names lists what is", absent)
    return (
        list(dict.fromkeys(n for tensors, _ in found.values() for n in tensors)),
        list(dict.fromkeys(n for _, values in found.values() for n in values)),
    )


def refuse_unreadable(saved: Catalog, names: Sequence[str] | None) -> None:
    """Raise why something that is asked for cannot be read, if a foreign checkpoint has such."""
    for name in (None,) if names is None else names:
        wanted = tuple(saved.unreadable) if name is None else _fitting(tuple(saved.unreadable), name)
        for found in wanted:
            raise saved.unreadable[found]


def _fitting(known: Sequence[str], name: str) -> list[str]:
    """What goes by this name or lies below it; if nothing does, what fits it as a pattern."""
    return [n for n in known if n == name or n.startswith(f"{name}.")] or [n for n in known if fnmatchcase(n, name)]
