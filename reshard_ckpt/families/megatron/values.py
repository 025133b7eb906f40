"""The values of Megatron's checkpoints: the common state, and objects in parts.

A common value is named by the keys that lead to it. A Namespace, such as ``args``, is saved as a dict, and the metadata of the
checkpoint list these dicts. Inside of lists, such a dict has a tag under a key of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...plugins import Catalog, CatalogBuilder, Ints, Storage, ValueKind
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.names import Index, name_of, paths_of_values
from ...plugins.torchfile import TorchFile, attributes_of, class_of
from ...plugins.trees import flatten, unflatten
from .names import (
    COMMON_FILE,
    COMMON_OBJECT,
    GROUPS,
    NAME,
    NAMESPACE,
    NAMESPACE_TAG,
    OPTIMIZER,
    Path,
    common_path,
    has_keys,
    lacks_masters,
    noted,
)

INTEGRITY_KEY = "integrity.json"
MAX_BYTES = 64 << 20


def read_integrity(storage: Storage) -> dict[str, bytes]:
    """Return the SHA-256 of each file by its key; an empty dict if Megatron wrote no list.

    Raise `CorruptError` if the list is damaged, and `UnsupportedError` if the digests are not SHA-256.
    """
    if storage.size(INTEGRITY_KEY) is None:
        return {}
    where = f"{storage.url}: {INTEGRITY_KEY}"
    try:
        listed = json.loads(bytes(storage.read(INTEGRITY_KEY, limit=MAX_BYTES)))
        algorithm, files = listed["algorithm"], listed["files"]
        digests = {str(key): bytes.fromhex(digest) for key, digest in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{where}: is not a list of digests ({error}); use another checkpoint") from None
    if algorithm != "sha256":
        raise UnsupportedError(f"{where}: has digests of {algorithm!r:.40}; only sha256 is known; load it with Megatron")
    return digests


MAX_DEPTH = 64


def add_part(builder: CatalogBuilder, key: str, place: Ints, shape: Ints, file: TorchFile, made: Any) -> None:
    """Add one part of an object, from a rank's file, to the catalog; if it cannot be read, it becomes unreadable.

    Parameters
    ----------
    key
        The key of the object.
    place, shape
        The place of this part in the grid of all parts, and the shape of that grid.
    file, made
        The rank's file, and the stand-in in its content that `TorchFile.plain` converts to the part.
    """
    part = "shard_" + "_".join(".".join(map(str, numbers)) for numbers in (place or (0,), shape or (1,)))
    add_value(builder, (key, part), made, file)


def add_common(builder: CatalogBuilder, tree: Any, file: TorchFile) -> None:
    """Add the values in nested dicts of a file to the catalog; each value that cannot be read becomes unreadable."""
    for path, made in flatten(tree, _children_of, max_depth=MAX_DEPTH) if tree != {} else ():
        add_value(builder, common_path(path), made, file)


def add_value(builder: CatalogBuilder, path: Path, made: Any, file: TorchFile) -> None:
    """Convert a stand-in in a file's content to a value, and add that to the catalog; if this fails, it becomes unreadable."""
    with builder.reading(name_of(path)):
        builder.value(path, file.plain(made))


def _children_of(made: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a dict or a Namespace; None for any other object, which is one value.

    A dict that is empty, or has other keys than texts and ints, is one value too.
    """
    attributes = attributes_of(made) if class_of(made) == NAMESPACE else None
    node = made if attributes is None else {**attributes, NAMESPACE_TAG: NAMESPACE}
    is_tree = isinstance(node, dict) and all(isinstance(key, str | int) and not isinstance(key, bool) for key in node)
    return node.items() if is_tree and node else None


def mark_namespaces(root: Any, catalog: Catalog) -> None:
    """Put the Namespace tag into each dict of a common state that was a Namespace when it was saved."""
    for path in (noted(catalog) or {}).get("namespaces", ()):
        node = root
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[NAMESPACE_TAG] = NAMESPACE


def metadata_of(tree: Any, common_file: bytes | None = None) -> dict[str, Any]:
    """Return the metadata that the calls save with a tree.

    They mark that names are Megatron's keys, list the paths of Namespaces, and have the digest of `common_file`, if given.
    """
    digest = {} if common_file is None else {COMMON_FILE: hashlib.sha256(common_file).hexdigest()}
    return {NAME: {"namespaces": [list(path) for path in _namespaces(tree, ())], **digest}}


def check_common_file(catalog: Catalog, folder: str) -> None:
    """Check that ``common.pt``, if there is one, belongs to the same save as the catalog.

    A save puts it in place before the catalog. If that save replaces a checkpoint and is killed in between, the old catalog is
    left with the new file. Raise `CorruptError` if the file is damaged, or belongs to another save.
    """
    wanted, path = (noted(catalog) or {}).get(COMMON_FILE), pathlib.Path(folder, COMMON_FILE)
    if wanted is not None and path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
        raise CorruptError(
            f"{path}: is damaged, or of a save that was cut off before it replaced this checkpoint; the right common state is in "
            "the checkpoint, and reshard_ckpt.megatron.load, in the place of Megatron's own, loads it"
        )


def _namespaces(tree: Any, path: Path) -> Iterator[Path]:
    if isinstance(tree, argparse.Namespace):
        yield path
        tree = vars(tree)
    for key, value in tree.items() if type(tree) is dict else ():
        yield from _namespaces(value, (*path, key))


def common_values(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield each value of a common state with its path (the keys that lead to it). Only dicts and Namespaces are taken apart."""
    return flatten(tree, _children) if tree else iter(())


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    items = vars(node) if isinstance(node, argparse.Namespace) else node
    return items.items() if type(items) is dict and items else None


def common_state(catalog: Catalog, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Build Megatron's common state from the values of a checkpoint. Some checkpoints have it as one value already."""
    if COMMON_OBJECT in values:
        return dict(_alive(values[COMMON_OBJECT]))
    paths = {name: path for name, path in paths_of_values(catalog).items() if name in values}
    root = unflatten(((path, values[name]) for name, path in inner_paths(catalog, paths).items()), index=Index)
    mark_namespaces(root, catalog)
    return dict(_alive(root))


def inner_paths(catalog: Catalog, paths: Mapping[str, Path]) -> dict[str, Path]:
    """Map the name of each value to Megatron's path of it. Most of Megatron's optimizers keep their groups in an inner one.

    An FP32 optimizer has no inner one: it has no master weights, or has its state beside its groups. Paths that are Megatron's
    already stay, except for the groups of optimizer objects.
    """
    is_own, is_fp32 = has_keys(catalog), lacks_masters(catalog)
    objects = {entry.name for entry in catalog.values_table if entry.kind is ValueKind.PARAM_GROUPS}
    found = dict(paths)
    for name, path in paths.items():
        *above, last = path
        if last != GROUPS or above[:1] != [OPTIMIZER] or above[1:][-1:] == [OPTIMIZER]:
            continue
        beside = (*above, "state")
        has_state = any(other[: len(beside)] == beside for other in paths.values())
        if not has_state and (name in objects or not (is_own or is_fp32)):
            found[name] = (*above, OPTIMIZER, GROUPS)
    return found


def _alive(value: Any) -> Any:
    """Make the standard library's objects from their tagged values: Namespaces and BytesIO. Anything else stays as it is."""
    if type(value) is dict:
        items = {key: _alive(item) for key, item in value.items() if key != NAMESPACE_TAG or item != NAMESPACE}
        if len(items) == len(value):
            return items
        made = argparse.Namespace()
        vars(made).update(items)
        return made
    if type(value) is list:
        return [_alive(item) for item in value]
    # A tagged value of another class: its module, its name, its plain state. The class itself is not imported.
    named = getattr(value, "module", None), getattr(value, "name", None)
    if named in (("_io", "BytesIO"), ("io", "BytesIO")):
        return io.BytesIO(value.plain[0] if isinstance(value.plain, tuple) else value.plain)
    return value
