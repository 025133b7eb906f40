"""Helpers of the writers of foreign files: a stream of tensor bytes, the order of tensors, and their aliases."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..core.catalog.model import Catalog

_NUMBER = re.compile(r"(\d+)")


class ByteStream:
    """A stream of bytes. Callers take as many bytes as they need."""

    def __init__(self, stream: Iterator[memoryview]) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the next `num_bytes` bytes in parts, which must be used up before the next call."""
        while num_bytes:
            if not len(self._rest):
                self._rest = next(self._stream)
            part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(part)
            yield part


def in_natural_order(catalog: Catalog) -> list[int]:
    """Return the indices of all tensors, sorted by name with numbers in numeric order: layer 2 before layer 10."""
    return sorted(map(catalog.index, catalog.names), key=lambda index: natural(catalog.tensors_table.names[index]))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key to sort names by, with numbers in numeric order.

    >>> sorted(["h.10.w", "h.2.w", "emb"], key=natural)
    ['emb', 'h.2.w', 'h.10.w']
    """
    return tuple((1, int(part), part) if part.isdecimal() else (2, 0, part) for part in _NUMBER.split(name) if part)


def aliases_of(catalog: Catalog) -> dict[str, str]:
    """Map the name of each tensor that shares another one's bytes to the name of that one."""
    names = catalog.tensors_table.names
    by_index = {name: catalog.source(catalog.index(name)) for name in catalog.names}
    return {name: names[source] for name, source in by_index.items() if names[source] != name}
