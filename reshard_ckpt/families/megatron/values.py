"""Collecting the values of Megatron's folders for a catalog: the common state, and objects in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...format.value_decode import MAX_DEPTH
from ...plugins import CatalogBuilder, Ints
from ...plugins.errors import CheckpointError
from ...plugins.torchfile import TorchFile
from ...torchfile.objects import NAMESPACE, NAMESPACE_TAG, PlainValues
from ...torchfile.pickle_reader import StandInObject
from .names import common_path

Path = tuple[Any, ...]


class MegatronValues:
    """Adds values to a catalog; a value that cannot be read becomes unreadable.

    Parameters
    ----------
    builder
        The catalog.
    as_saved
        Whether to keep Megatron's keys as names, and the paths of its own state.
    """

    def __init__(self, builder: CatalogBuilder, *, as_saved: bool) -> None:
        self.builder, self.as_saved = builder, as_saved
        self.namespaces: list[list[Any]] = []

    def add_part(self, key: str, place: Ints, shape: Ints, file: TorchFile, made: Any) -> None:
        """Add one part of an object, from a rank's file.

        Parameters
        ----------
        key
            The key of the object.
        place, shape
            The place of this part in the grid of all parts, and the shape of that grid.
        file, made
            The rank's file, and the stand-in that it has for the part.
        """
        part = "shard_" + "_".join(".".join(map(str, numbers)) for numbers in (place or (0,), shape or (1,)))
        self.add((f"{key}/{part}",) if self.as_saved else (key, part), made, self._plain(file))

    def add_common(self, tree: Any, file: TorchFile | None = None) -> None:
        """Add the values of nested dicts. They are plain values, or stand-ins if they come from a rank's file."""
        plain = None if file is None else self._plain(file)
        for path, made in _leaves(tree, ()) if tree != {} else ():
            if self.as_saved and path[-1] == NAMESPACE_TAG:
                self.namespaces.append(list(path[:-1]))
            else:
                self.add(path if self.as_saved else common_path(path), made, plain)

    def _plain(self, file: TorchFile) -> PlainValues:
        return PlainValues(file.stored, file.size, f"{self.builder.where}: {file.key}")

    def add(self, path: Path, made: Any, plain: PlainValues | None = None) -> None:
        """Add a value, or the stand-in of one, which `plain` converts."""
        try:
            self.builder.value(path, made if plain is None else plain.of(made))
        except CheckpointError as error:
            self.builder.unreadable(".".join(map(str, path)), error)


def _leaves(made: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values of nested dicts and Namespaces with their paths. A list is one value."""
    if isinstance(made, StandInObject) and made.kind.name == ":".join(NAMESPACE) and isinstance(made.state, dict):
        made = {**made.state, NAMESPACE_TAG: ":".join(NAMESPACE)}
    keys = made if isinstance(made, dict) and len(path) < MAX_DEPTH else ()
    if keys and all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys):
        for key, child in made.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, made
