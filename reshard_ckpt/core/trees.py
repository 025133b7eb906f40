"""Trees of dicts, lists and tuples: flatten a tree into paths and leaves, build it from them, copy it with other leaves.

A path is the tuple of the keys and indices that lead from the root to a node. A function of type `Children` decides where a tree
ends: it returns the keys and children of a node, and None for a leaf.

The keys of a dict that comes from a file are first checked for equal hashes (`too_many_alike`). Python salts the hashes of text
and bytes, but numbers and tuples of numbers have the same hash in every process. The hash of an integer is its remainder modulo
2^61 - 1, so a hostile file can spell any number of keys with one hash, and putting n of these into a dict or a set takes n²
comparisons. The check sorts the hashes before any table is made of the keys, which takes n log n always. Honest keys rarely share
a hash: -1 and -2 do, and powers of two whose exponents differ by 61.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import NameCollisionError

Path = tuple[Any, ...]
Children = Callable[[Any], Iterable[tuple[Any, Any]] | None]


def name_of(path: Iterable[Any]) -> str:
    """Return the dotted name of a node from its path (the keys that lead to it).

    >>> name_of(("model", "layers.0.weight"))
    'model.layers.0.weight'
    """
    return ".".join(map(str, path))


def children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and values of a dict, or the indices and items of a list or tuple; None for any other object, a leaf."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else None


def children_of_dict(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and values of a non-empty dict; None for any other object, so that lists are leaves."""
    return node.items() if isinstance(node, Mapping) and node else None


def flatten(
    tree: Any, children: Children = children, path: Path = (), *, max_depth: int | None = None
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each leaf of a tree, in order.

    Parameters
    ----------
    path
        The path to the tree itself, with which all yielded paths begin.
    max_depth
        A node whose path has this many keys is a leaf.

    Examples
    --------
    >>> list(flatten({"a": [1, 2], "b": {}}, children_of_dict))
    [(('a',), [1, 2]), (('b',), {})]
    """
    below = None if len(path) == max_depth else children(tree)
    if below is None:
        yield path, tree
    else:
        for key, child in below:
            yield from flatten(child, children, (*path, key), max_depth=max_depth)


def leaves(tree: Any, children: Children = children) -> Iterator[Any]:
    """Yield the values of the leaves of a tree, in order."""
    return (leaf for _, leaf in flatten(tree, children))


def put(
    tree: dict[Any, Any], path: Path, value: Any, advice: str = "rename one of them", *, branch: type[dict[Any, Any]] = dict
) -> None:
    """Set the value at a path of nested dicts. Missing dicts are made, of the class `branch`.

    Raises
    ------
    NameCollisionError
        The path has a value already, or leads through a value. `advice` ends the message.
    """
    *above, last = path
    node = tree
    for depth, key in enumerate(above):
        node = node.setdefault(key, branch())
        if not isinstance(node, branch):
            raise NameCollisionError(f"{name_of(above[: depth + 1])}: is a value, and has others below it; {advice}")
    if last in node:
        raise NameCollisionError(f"{name_of(path)}: two things have this name; {advice}")
    node[last] = value


class _Branch(dict[Any, Any]):
    """A dict that `unflatten` has made for an inner node; a plain dict is a leaf."""


def unflatten(entries: Iterable[tuple[Path, Any]], *, index: type[int] = int) -> Any:
    """Build a tree from the paths and values of its leaves.

    Children with keys 0, 1, … without a gap become a list, others a dict.

    Only keys of the type `index` make a list: with a type of their own, a dict with the keys 0 and 1 stays a dict.

    >>> unflatten([(("a", 0, "b"), 1), (("a", 1), 2), (("c", 1), 3)])
    {'a': [{'b': 1}, 2], 'c': {1: 3}}

    Raises
    ------
    NameCollisionError
        As for `put`.
    """
    root = _Branch()
    for path, value in entries:
        put(root, path, value, branch=_Branch)
    return _with_lists(root, index)


def _with_lists(node: Any, index: type[int]) -> Any:
    if not isinstance(node, _Branch):
        return node
    children = {key: _with_lists(child, index) for key, child in node.items()}
    is_list = bool(children) and all(type(key) is index for key in children) and children.keys() == set(range(len(children)))
    return [children[i] for i in range(len(children))] if is_list else children


def map_tree(change: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """Copy a tree of dicts, lists and tuples, and put in the node that `change` returns for each node.

    `change` is called with the path and the value of each node, the outermost first. Where it returns another object, that takes
    the node's place, and nothing inside of it is visited. Instances of subclasses of list and tuple are leaves.

    >>> map_tree(lambda path, node: -node if isinstance(node, int) else node, {"a": [1, (2, "b")]})
    {'a': [-1, (-2, 'b')]}
    """
    changed = change(path, tree)
    if changed is not tree:
        return changed
    if isinstance(tree, Mapping):
        return {key: map_tree(change, child, (*path, key)) for key, child in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(change, child, (*path, i)) for i, child in enumerate(tree))
    return tree


MAX_ALIKE = 64
"""The most keys of one dict or set that may have the same hash. Comparing all pairs of so many keys takes as long as decoding
them."""

_SALTED = frozenset({str, bytes})


def too_many_alike(keys: Collection[Hashable]) -> bool:
    """Tell whether more than `MAX_ALIKE` of these keys have the same hash, which would make a dict of them slow.

    >>> too_many_alike(range(1000)), too_many_alike([i * (2**61 - 1) for i in range(1000)])
    (False, True)
    """
    if len(keys) <= MAX_ALIKE:
        return False
    hashes = np.array([hash(key) for key in keys if type(key) not in _SALTED], np.int64)
    # Sorted, more than MAX_ALIKE equal hashes show as two equal ones at this distance.
    hashes.sort()
    return bool((hashes[MAX_ALIKE:] == hashes[:-MAX_ALIKE]).any())
