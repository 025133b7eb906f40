"""Names of Megatron's tensors, objects and common values in a checkpoint.

1. A tensor goes by its key. Keys of optimizer state have had several spellings for one thing: each chained optimizer's own
   prefix, and ``fp32_param`` where others write ``param``. `checkpoint_key` gives all of them one name, saving and loading.
2. An object goes by its key and its place among the objects of that key, as in Megatron's own folders.
3. Common values go by the keys that lead to them. A tree's Namespaces, such as ``args``, are dicts in the checkpoint, whose
   metadata says where they were.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.catalog.specs import ValueKind
from ..collector import NamedValue
from ..scan import Path, name_of, path_keys

COMMON_OBJECT = "common_state/shard_0_1"
"""What Megatron from 0.19 on calls the common state, which it saves as an object."""

CONTENT_METADATA = "content_metadata"

_STATE = re.compile(r"(?:chained_\d+\.)?(optimizer\.state\.)(?:fp32_(param\.))?")
_OBJECT = re.compile(r"(.+)/shard_[\d.]*_-?[\d.]*", re.DOTALL)


def checkpoint_key(key: str) -> str:
    """Return the name of a tensor's key in a checkpoint.

    >>> checkpoint_key("chained_1.optimizer.state.fp32_param.output_layer.weight")
    'optimizer.state.param.output_layer.weight'
    """
    return _STATE.sub(lambda found: found[1] + (found[2] or ""), key, count=1) if _STATE.match(key) else key


def object_name(sharded: Any) -> str:
    """Return the name of an object: its key, its offsets among the objects of that key, and how many there are."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (sharded.global_offset, sharded.global_shape))
    return f"{sharded.key}/shard_{offset}_{shape}"


def key_of_object(name: str) -> str | None:
    """Return the key of an object by its name; None for what is the name of none."""
    found = _OBJECT.fullmatch(name)
    return None if found is None else found[1]


def common_values(tree: Any, path: Path = ()) -> Iterator[NamedValue]:
    """Yield the values of a common state by the keys that lead to them; what no dict holds is one value."""
    items = vars(tree) if isinstance(tree, argparse.Namespace) else tree
    if type(items) is dict and (items or not path):
        for key, value in items.items():
            yield from common_values(value, (*path, key))
    else:
        yield NamedValue(name_of(path), path_keys(path), ValueKind.PLAIN, tree)


def namespaces(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all Namespaces in the dicts of a tree."""
    if isinstance(tree, argparse.Namespace):
        yield path
        tree = vars(tree)
    if type(tree) is dict:
        for key, value in tree.items():
            yield from namespaces(value, (*path, key))


def common_tree(values: Iterable[tuple[Path, Any]], of_namespaces: Iterable[Path]) -> dict[Any, Any]:
    """Make the common state again, of its values by path; dicts at some paths were Namespaces."""
    root: dict[Any, Any] = {}
    for path, value in values:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    for path in sorted(of_namespaces, key=len, reverse=True):  # what is inside first
        above: Any = root
        for key in path[:-1]:
            above = above.get(key) if isinstance(above, dict) else None
        if isinstance(above, dict) and type(above.get(path[-1])) is dict:
            above[path[-1]] = _namespace(above[path[-1]])
    return root


def _namespace(items: Mapping[Any, Any]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(items)
    return made
