"""Collecting the values of Megatron's folders for a catalog: the common state, and objects in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.catalog.model import ValueEntry
from ...core.catalog.specs import Ints, ValueKind
from ...errors import CheckpointError
from ...format.value_decode import MAX_DEPTH
from ...format.values import encode_path, encode_value
from ...torchfile.archive import TorchFile
from ...torchfile.objects import NAMESPACE, NAMESPACE_TAG, PlainValues
from ...torchfile.pickle_reader import StandInObject
from .names import common_path

Path = tuple[Any, ...]


class MegatronValues:
    """Collects values for a catalog; a value that cannot be read is listed with its error.

    Parameters
    ----------
    where
        The name of the folder in messages.
    as_saved
        Whether to keep Megatron's keys as names, and the paths of its own state.
    """

    def __init__(self, where: str, *, as_saved: bool) -> None:
        self.where, self.as_saved = where, as_saved
        self.entries: list[ValueEntry] = []
        self.unreadable: dict[str, CheckpointError] = {}
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
        return PlainValues(file.stored, file.size, f"{self.where}: {file.key}")

    def add(self, path: Path, made: Any, plain: PlainValues | None = None) -> None:
        """Add a value, or the stand-in of one, which `plain` converts."""
        name = ".".join(map(str, path))
        try:
            value = made if plain is None else plain.of(made)
            self.entries.append(ValueEntry(name, encode_path(path), ValueKind.PLAIN, encode_value(value, name)))
        except CheckpointError as error:
            self.unreadable[name] = error


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
