"""Loading the objects that packages register under a group of entry points: this package's own, and those of other packages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

Found = TypeVar("Found")


def load_all(group: str, own: Mapping[str, str], kind: type[Found]) -> list[Found]:
    """Load every entry point of a group, and return the loaded objects. Skip one with a warning if it fails, or is not a `kind`.

    Parameters
    ----------
    own
        This package's own entry points, name to value as in pyproject.toml. They are loaded even if this package is not
        installed.
    kind
        The class that each loaded object must be an instance of.
    """
    points = {point.name: point for point in entry_points(group=group)}
    points |= {name: EntryPoint(name, value, group) for name, value in own.items()}
    found: list[Found] = []
    for point in points.values():
        try:
            loaded = point.load()
            why = f"it is a {type(loaded).__name__}, not a reshard_ckpt.plugins.{kind.__name__}"
        except Exception as error:  # code of another package may raise anything, and must not stop the others
            loaded, why = None, f"{type(error).__name__}: {error}"
        if isinstance(loaded, kind):
            found.append(loaded)
            continue
        owner = f" of {point.dist.name}" if point.dist is not None else ""
        warnings.warn(
            f"the {kind.__name__.lower()} {point.name!r}{owner} ({point.value}) cannot be used: {why}; repair or uninstall the "
            "package that brings it",
            stacklevel=2,
        )
    return found
