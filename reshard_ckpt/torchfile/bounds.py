"""Limits on the size of tensors and values in a file of another library, in proportion to the bytes that the file has.

Tensors may be views of the same bytes, or repeat them by strides of 0, and a pickle may refer to one list many times. So a few
bytes can claim terabytes. A program that saves a model shares some bytes, but not many times over: files beyond that are refused.

``torch.load`` makes dicts of any keys in a file, and keys of equal hash make a dict slow. Among integers, only those of 61 bits
and more can collide. A pickle spells these with the operation LONG1, which few files use often. Tuples of smaller numbers can
collide too, and are not checked.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.catalog.model import Catalog
from ..core.trees import MAX_ALIKE, too_many_alike
from ..errors import CorruptError, UnsupportedError
from .pickle_reader import Opaque, StandInObject

TIMES = 16
"""The most bytes of tensors for each byte of a file, and the most parts of values for each byte of a pickle."""

_SMALL_BYTES, _SMALL_PARTS = 64 << 20, 1 << 20
"""Bytes of tensors and parts of values that are allowed in any file, however small."""

MAX_CYCLES = 64
"""The most cycles (objects that contain themselves) that are cut in one file."""

_TEXT_PART = 64
"""So many characters of a string, or bytes, count as one part of a value."""


class FileBudget:
    """Counts the bytes of the tensors in each file, before rows are made. More than `TIMES` its size is an error."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def spend(self, key: str, size: int, num_bytes: int, name: str) -> None:
        """Count a tensor of `num_bytes` in the file `key` of `size` bytes.

        Raise `CorruptError` if the tensors of the file have more than `TIMES` its bytes.
        """
        used = self._used[key] = self._used.get(key, 0) + num_bytes
        if used > TIMES * size:
            raise CorruptError(
                f"{name}: {key} has {size:,} bytes, and is said to hold {used:,} of tensors; use another checkpoint"
            )


def refuse_excess(catalog: Catalog, where: str) -> None:
    """Refuse a catalog whose tensors have many times the bytes of its files.

    Raise `UnsupportedError` if the tensors have more than `TIMES` the bytes of the files; the message names the largest one.
    """
    names, num_bytes = catalog.tensors_table.names, catalog.file_bytes
    # claimed[t]: bytes of tensor t in all of its rows
    claimed = np.bincount(catalog.row_tensors, weights=catalog.row_bytes, minlength=len(names))
    if claimed.sum() > _most_bytes(num_bytes):
        largest = int(claimed.argmax())
        raise _too_much(where, int(claimed.sum()), num_bytes, f"{names[largest]} of {int(claimed[largest]):,} bytes")


def _most_bytes(num_bytes: int) -> int:
    """Return the largest number of bytes that the tensors of files may have together, if the files have `num_bytes` together."""
    return TIMES * num_bytes + _SMALL_BYTES


def _too_much(where: str, claimed: int, num_bytes: int, largest: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: its tensors have {claimed:,} bytes, and its files {num_bytes:,}: many of them show the same bytes, such as "
        f"{largest}; if you trust it, load it with torch and save tensor.clone() of each"
    )


def refuse_bombs(root: Any, pickle_bytes: int, num_bytes: int, name: str, *, tries: int = MAX_CYCLES) -> None:
    """Refuse an object that torch loaded, or that was read from a pickle, if it is many times larger than the file can describe.

    Objects of unknown classes that contain themselves become `Opaque`, in up to `tries` places. Raise `CorruptError` if values
    refer to each other too many times, or contain themselves, and `UnsupportedError` if tensors show the same bytes too many
    times.

    Parameters
    ----------
    pickle_bytes, num_bytes
        The size of the pickle, which limits the parts of values, and of the file, which limits the bytes of tensors.
    """
    most = TIMES * pickle_bytes + _SMALL_PARTS
    parts: dict[int, int] = {}  # by id of each finished container: its number of parts, with shared ones counted each time
    begun: set[int] = set()
    path: list[Any] = []  # the containers that were begun and are not finished, the outermost first
    tensors: dict[int, torch.Tensor] = {}
    top = [root]
    todo: list[Any] = [top]
    # A walk from the leaves up, with a stack in place of recursion. A container stays on the stack until all of its children are
    # in `parts`. If it is met again (`begun`) and still lacks one, that child is waiting for it: it contains itself.
    while todo:
        node = todo[-1]
        if id(node) in parts:
            todo.pop()
            continue
        children = _children(node)
        missing = [child for child in children if isinstance(child, _CONTAINERS) and id(child) not in parts]
        if missing and id(node) not in begun:
            begun.add(id(node))
            path.append(node)
            todo += missing
            continue
        todo.pop()
        if missing:
            at = next(i for i, one in enumerate(path) if one is node)
            objects = [one for one in path[at:] if isinstance(one, StandInObject)]
            if not objects or not tries:
                raise CorruptError(f"{name}: contains itself; use another copy")
            for one in objects:
                one.state = Opaque(one.kind.name)
            refuse_bombs(root, pickle_bytes, num_bytes, name, tries=tries - 1)
            return
        if path and path[-1] is node:
            path.pop()
        parts[id(node)] = min(1 + sum(parts.get(id(child)) or _text_parts(child) for child in children), most + 1)
        # Only strided tensors that are not on the meta device take memory.
        found = [child for child in children if isinstance(child, torch.Tensor) and not child.is_meta]
        tensors |= {id(child): child for child in found if child.layout == torch.strided}
    if parts[id(top)] > most:
        raise CorruptError(
            f"{name}: its values repeat each other more often than its {pickle_bytes:,} bytes can spell; use another copy"
        )
    claimed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if claimed > _most_bytes(num_bytes):
        raise _too_much(name, claimed, num_bytes, f"one of shape {tuple(max(tensors.values(), key=torch.numel).shape)}")


_CONTAINERS = (Mapping, list, tuple, set, frozenset, StandInObject)


def _children(node: Any) -> tuple[Any, ...]:
    if isinstance(node, Mapping):
        return (*node.keys(), *node.values())
    if isinstance(node, StandInObject):
        return (node.state,)
    return tuple(node) if isinstance(node, list | tuple | set | frozenset) else ()


def _text_parts(leaf: Any) -> int:
    return 1 + (len(leaf) // _TEXT_PART if isinstance(leaf, str | bytes | bytearray) else 0)


UNCHECKED_BYTES = 4096
"""The size in bytes up to which a pickle is not checked for integers of equal hash, because it is too small to do harm."""

_LONG1 = b"\x8a"


def refuse_hash_collisions(pickled: bytes, name: str) -> None:
    """Refuse a pickle with too many integers of one hash.

    Raise `CorruptError` if more than `MAX_ALIKE` integers have the same hash; or the bytes cannot be parsed as a pickle.
    """
    try:
        large = _large(pickled)
    except (ValueError, OverflowError) as error:
        raise CorruptError(f"{name}: holds no pickle ({error}); use another copy") from None
    if too_many_alike(large):
        raise CorruptError(f"{name}: more than {MAX_ALIKE} of its numbers have the same hash; use another copy")


def _large(pickled: bytes) -> list[int]:
    """List the distinct integers of 61 bits and more in a pickle. The list is empty if they are too few to do harm."""
    if pickled.count(_LONG1) <= MAX_ALIKE:
        return []
    found = (argument for code, argument, _ in pickletools.genops(pickled) if code.code == _LONG1.decode("latin-1"))
    large = (number for number in found if isinstance(number, int) and abs(number) >= 2**60)
    # Keyed by bytes, whose hash is salted: a dict keyed by the numbers themselves would be slow if they collide.
    distinct = {number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True): number for number in large}
    return list(distinct.values())
