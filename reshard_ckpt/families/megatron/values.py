"""Collecting the values of Megatron's folders for a catalog: the common state, and objects in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...plugins import CatalogBuilder, Ints
from ...plugins.errors import CheckpointError
from ...plugins.names import name_of
from ...plugins.torchfile import TorchFile, attributes_of, class_of
from ...plugins.trees import flatten
from .names import common_path
from .sharded_names import NAMESPACE, NAMESPACE_TAG

Path = tuple[Any, ...]
MAX_DEPTH = 64


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
        self.add((f"{key}/{part}",) if self.as_saved else (key, part), made, file)

    def add_common(self, tree: Any, file: TorchFile | None = None) -> None:
        """Add the values of nested dicts. They are plain values, or stand-ins if they come from a rank's file."""
        for path, made in flatten(tree, _children, max_depth=MAX_DEPTH) if tree != {} else ():
            if self.as_saved and path[-1] == NAMESPACE_TAG:
                self.namespaces.append(list(path[:-1]))
            else:
                self.add(path if self.as_saved else common_path(path), made, file)

    def add(self, path: Path, made: Any, file: TorchFile | None = None) -> None:
        """Add a value, or the stand-in of one in a rank's file."""
        try:
            self.builder.value(path, made if file is None else file.plain(made))
        except CheckpointError as error:
            self.builder.unreadable(name_of(path), error)


def _children(made: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a dict or a Namespace; a list is one value."""
    attributes = attributes_of(made) if class_of(made) == NAMESPACE else None
    node = made if attributes is None else {**attributes, NAMESPACE_TAG: NAMESPACE}
    is_tree = isinstance(node, dict) and all(isinstance(key, str | int) and not isinstance(key, bool) for key in node)
    return node.items() if is_tree and node else None
