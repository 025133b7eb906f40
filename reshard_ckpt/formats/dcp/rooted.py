"""Reading several folders below one root, each with a ``.metadata`` like DCP's own, as one checkpoint with this library's names.

1. *Read* the metadata of each folder. Their classes may be another library's copies of DCP's.
2. *Rename*: replace each path in the state that the other library saved by this library's path of the same thing.
3. Their content is then added to a catalog together, as that of a DCP folder is (`read.add_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...core.trees import name_of, unflatten
from ...errors import CorruptError, UnsupportedError
from ...storage.protocol import Storage
from .folder import refuse_begun
from .metadata import MAX_METADATA_BYTES, METADATA_KEY, Classes, Extent, Metadata, SavedTensor, read_metadata
from .names import KeyPath
from .values import read_values

PathOf = Callable[[KeyPath], KeyPath | None]
"""A function that converts the path of an entry in the saved state to the path here, or returns None to leave the entry out."""


def _metadata_bytes(storage: Storage, folder: str) -> bytes | None:
    """Read the ``.metadata`` of a folder; return None if it has none."""
    key = _key(folder, METADATA_KEY)
    return None if storage.size(key) is None else bytes(storage.read(key, limit=MAX_METADATA_BYTES))


def is_written_by(storage: Storage, folders: Iterable[str], module: str, *, format: str) -> bool:
    """Tell whether the metadata of one of these folders below a root name classes of a module.

    Raises
    ------
    UnsupportedError
        The path itself is such a folder, and not the root.
    """
    text = module.encode()
    found = any(text in (_metadata_bytes(storage, folder) or b"") for folder in folders)
    if not found and text in (_metadata_bytes(storage, "") or b""):
        raise UnsupportedError(f"{storage.url}: is one part of a {format} checkpoint; pass the root that has the folder model/")
    return found


def read_part(storage: Storage, folder: str, classes: Classes) -> Metadata | None:
    """Read the metadata of a folder, with the keys of files as seen from the root; return None if the folder is missing.

    Parameters
    ----------
    folder
        The folder below the root; ``""`` is the root itself.
    classes
        The classes of the other library; see `read_metadata`.

    Raises
    ------
    CorruptError
        The folder has data but no metadata: the save did not finish. Or another save began to replace the data.
    """
    data = _metadata_bytes(storage, folder)
    if data is not None:
        refuse_begun(storage, _key(folder, METADATA_KEY))
        saved = read_metadata(data, name=f"{storage.url}: {_key(folder, METADATA_KEY)}", classes=classes)

        def moved(extent: Extent) -> Extent:
            return replace(extent, file=_key(folder, extent.file))

        tensors = {
            fqn: replace(tensor, chunks=tuple(replace(chunk, extent=moved(chunk.extent)) for chunk in tensor.chunks))
            for fqn, tensor in saved.tensors.items()
        }
        return replace(saved, tensors=tensors, values={fqn: moved(extent) for fqn, extent in saved.values.items()})
    if any(key.startswith(f"{folder}/") and key.endswith(".distcp") for key, _ in storage.list()):
        raise CorruptError(
            f"{storage.url}: {folder} has .distcp files and no {METADATA_KEY}, which is written last: the save did not end, so "
            "use another checkpoint"
        )
    return None


def renamed(saved: Metadata, path_of: PathOf, where: str) -> Metadata:
    """Return the metadata with new paths: `path_of` gives the path of each entry, which also becomes its name.

    Raises
    ------
    CorruptError
        Two entries get the same name.
    """
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Extent] = {}
    paths: dict[str, KeyPath] = {}
    for fqn, saved_path in saved.paths.items():
        path = path_of(saved_path)
        if path is None:
            continue
        name = name_of(path)
        if name in paths:
            raise CorruptError(f"{where}: {fqn:.200} and another entry are both {name:.200}; use another checkpoint")
        paths[name] = path
        if fqn in saved.tensors:
            tensors[name] = saved.tensors[fqn]
        else:
            values[name] = saved.values[fqn]
    return replace(saved, tensors=tensors, values=values, paths=paths)


def read_nested(storage: Storage, extents: Mapping[KeyPath, Extent]) -> Any:
    """Read the values of a folder, and return them as nested dicts and lists by their paths; see `unflatten`.

    Raises
    ------
    CheckpointError
        A value cannot be read.
    """
    read = read_values(storage, {str(i): extent for i, extent in enumerate(extents.values())})
    for error in read.unreadable.values():
        raise error
    return unflatten((path, read.values[str(i)]) for i, path in enumerate(extents))


def _key(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file
