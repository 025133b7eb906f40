"""Names of Megatron's tensors, objects and common values in a checkpoint that Megatron's calls save.

1. A tensor is named by its key. Keys of optimizer state have had several spellings: a prefix for each chained optimizer, and
   ``fp32_param`` or ``param`` for the master weight. `checkpoint_key` converts all to one spelling, in saves and in loads.
2. An object is named by its key and its place among the objects of that key, as in Megatron's own folders.
3. A common value is named by the keys that lead to it. A Namespace, such as ``args``, is saved as a dict, and the metadata of the
   checkpoint list these dicts. Inside of lists, such a dict has a tag under a key of its own.

Checkpoints of other programs and of `convert` have this library's general names: the model below ``model``, state below its
parameter, groups right below their optimizer. `keys_of_catalog` converts those names to keys.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ...plugins import Catalog, ValueKind
from ...plugins.errors import CorruptError, LayoutError, summarize
from ...plugins.names import paths_of_values
from ...plugins.trees import flatten, unflatten

Path = tuple[Any, ...]

COMMON = "common_state"
COMMON_FILE = "common.pt"
"""Megatron's file of the common state; Megatron's own `load` reads it."""
COMMON_OBJECT = f"{COMMON}/shard_0_1"
"""The object as which Megatron saves the common state from 0.19 on."""

CONTENT_METADATA = "content_metadata"

NAMESPACE_TAG, NAMESPACE = "__class__", "argparse:Namespace"
"""The key, and its value, that mark a dict which was a Namespace."""

_STATE = re.compile(r"(?:chained_\d+\.)?(optimizer\.state\.)(?:fp32_(param\.))?")
_OBJECT = re.compile(r"(.+)[/.](shard_\d*(?:\.\d+)*_-?\d*(?:\.-?\d+)*)", re.DOTALL)
_MODEL = re.compile(r"model\d*\.")
_MARK = re.compile(r"(.+)/replica_([\d.]*)", re.DOTALL)


def checkpoint_key(key: str) -> str:
    """Return the name that a tensor has in a checkpoint, given Megatron's key of it.

    >>> checkpoint_key("chained_1.optimizer.state.fp32_param.output_layer.weight")
    'optimizer.state.param.output_layer.weight'
    """
    return _STATE.sub(lambda found: found[1] + (found[2] or ""), key, count=1) if _STATE.match(key) else key


def has_keys(catalog: Catalog) -> bool:
    """Tell whether the names of a catalog are Megatron's keys."""
    return _said(catalog) is not None


def mark_namespaces(root: Any, catalog: Catalog) -> None:
    """Tag each dict of a common state that was a Namespace when it was saved."""
    for path in (_said(catalog) or {}).get("namespaces", ()):
        node = root
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[NAMESPACE_TAG] = NAMESPACE


def metadata_of(tree: Any, common_file: bytes | None = None) -> dict[str, Any]:
    """Return the metadata to save with a tree: the mark that names are keys, Namespaces' paths, the digest of `common_file`."""
    digest = {} if common_file is None else {COMMON_FILE: hashlib.sha256(common_file).hexdigest()}
    return {"megatron": {"namespaces": [list(path) for path in _namespaces(tree, ())], **digest}}


def check_common_file(catalog: Catalog, folder: str) -> None:
    """Check that ``common.pt``, if there is one, belongs to the same save as the catalog.

    A save puts it in place before the catalog. If that save replaces a checkpoint and is killed in between, the old catalog is
    left with the new file.
    Raises
    ------
    CorruptError
        The file is damaged, or belongs to another save.
    """
    wanted, path = (_said(catalog) or {}).get(COMMON_FILE), pathlib.Path(folder, COMMON_FILE)
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


def _said(catalog: Catalog) -> dict[str, Any] | None:
    said = catalog.metadata.get("megatron") if isinstance(catalog.metadata, dict) else None
    return said if isinstance(said, dict) else None


def keys_of_catalog(catalog: Catalog) -> Callable[[str], str]:
    """Return a function that converts the name of a tensor or object in this catalog to Megatron's key."""
    if has_keys(catalog):
        return checkpoint_key
    links, tensors = catalog.links(), frozenset(catalog.names)

    def key_of(name: str) -> str:
        if name not in tensors:
            return object_key(name) or name
        link = links.get(name)
        return checkpoint_key(_MODEL.sub("", name, count=1) if link is None else f"optimizer.state.{link.key}.{link.fqn}")

    return key_of


def object_name(sharded: Any) -> str:
    """Return the name of an object: its key, its offsets among the objects of that key, and the shape of their grid."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (sharded.global_offset, sharded.global_shape))
    return f"{sharded.key}/shard_{offset}_{shape}"


def object_key(name: str) -> str | None:
    """Convert the name of an object, with ``/`` or ``.`` before ``shard``, to its key and place; None for any other name.

    >>> object_key("rng_state.shard_0.1_2.2"), object_key("args.seed")
    ('rng_state/shard_0.1_2.2', None)
    """
    found = _OBJECT.fullmatch(name)
    return None if found is None else f"{found[1]}/{found[2]}"


def key_of_object(name: str) -> str | None:
    """Return the key of an object by its name; None if the name is not that of an object."""
    found = _OBJECT.fullmatch(name)
    return None if found is None else found[1]


def replica_name(name: str) -> str:
    """Return the name of the claim that an object exists; a rank makes it for a replica that is not the main one."""
    key, _, place = name.rpartition("/shard_")
    return f"{key}/replica_{place.rpartition('_')[2]}"


def check_objects(names: Iterable[str], claims: Iterable[str]) -> None:
    """Check that every object has a main replica, which is the one that is saved.

    The names give the number of objects of each key; that many must have been offered.

    Raises
    ------
    LayoutError
        Some objects have no main replica.
    """
    # found: by key and shape of its grid, the places of all objects that have a main replica
    found: dict[tuple[str, str], list[str]] = {(m[1], m[2]): [] for m in map(_MARK.fullmatch, claims) if m}
    for name in names:
        if (match := _OBJECT.fullmatch(name)) and name[match.end(1)] == "/":
            found.setdefault((match[1], match[2].rpartition("_")[2]), []).append(match[2])
    lines = [
        f"{key}: {len(parts) or 'none'} of its {num} objects have a main replica{f', {parts[0]} first' if parts else ''}"
        for (key, shape), parts in found.items()
        if len(parts) < (num := prod(int(size or 1) for size in shape.split(".")))
    ]
    if lines:
        raise LayoutError(summarize(lines, "have one rank declare each with replica_id 0, or leave them out"))


def common_values(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a common state with the keys that lead to them; anything but dicts and Namespaces is one value."""
    return flatten(tree, _children) if tree else iter(())


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    items = vars(node) if isinstance(node, argparse.Namespace) else node
    return items.items() if type(items) is dict and items else None


def common_state(catalog: Catalog, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Build the common state from its values by name. A checkpoint that keeps it as one object has it whole."""
    if COMMON_OBJECT in values:
        return dict(_alive(values[COMMON_OBJECT]))
    paths = {name: path for name, path in paths_of_values(catalog).items() if name in values}
    if not has_keys(catalog):
        outer = _without_inner(catalog)
        paths = {name: inner_path(path, paths.values(), outer=name in outer) for name, path in paths.items()}
    root = unflatten((path, values[name]) for name, path in paths.items())
    mark_namespaces(root, catalog)
    return dict(_alive(root))


def _without_inner(catalog: Catalog) -> frozenset[str]:
    """Return the names of all plain values if the optimizer is an FP32 one: it has no master weights, and no inner optimizer."""
    keys = {link.key for link in catalog.links().values()}
    if not keys or "param" in keys:
        return frozenset()
    return frozenset(entry.name for entry in catalog.values_table if entry.kind is ValueKind.PLAIN)


def inner_path(path: Path, paths: Iterable[Path], *, outer: bool) -> Path:
    """Convert a path of another program's checkpoint to Megatron's: most optimizers have their groups in an inner optimizer.

    Parameters
    ----------
    paths
        The paths of all values.
    outer
        Whether this is an FP32 optimizer, which has no inner one. Its state has no master weights.
    """
    if len(path) < 2 or path[0] != "optimizer" or path[-1] != "param_groups" or (len(path) > 2 and path[-2] == "optimizer"):
        return path
    beside = (*path[:-1], "state")  # an FP32 optimizer has state beside its groups, too
    if outer or any(other[: len(beside)] == beside for other in paths):
        return path
    return (*path[:-1], "optimizer", "param_groups")


def _alive(value: Any) -> Any:
    """Make the standard library's objects from their tagged values: Namespaces and BytesIO. Anything else stays as it is."""
    if type(value) is dict:
        items = {key: _alive(item) for key, item in value.items() if key != NAMESPACE_TAG or item != NAMESPACE}
        return _namespace(items) if len(items) < len(value) else items
    if type(value) is list:
        return [_alive(item) for item in value]
    # A tagged value of another class: its module, its name, its plain state. The class itself is not imported.
    named = getattr(value, "module", None), getattr(value, "name", None)
    if named in (("_io", "BytesIO"), ("io", "BytesIO")):
        return io.BytesIO(value.plain[0] if isinstance(value.plain, tuple) else value.plain)
    return value


def _namespace(items: Mapping[Any, Any]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(items)
    return made
