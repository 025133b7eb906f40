"""What lies in some bytes of a file? The names of tensors and values, for messages about damage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.catalog.model import Catalog
from ...core.geometry.dtypes import item_bytes_of


class FileContents:
    """The rows of all files, in order of their bytes: made once, where damage has been found, then asked for any range."""

    def __init__(self, catalog: Catalog) -> None:
        table, rows = catalog.tensors_table, catalog.rows
        owner = np.repeat(np.arange(len(table.names)), np.diff(table.row_start))
        sizes = rows.count * item_bytes_of(table.dtype)[owner]
        order = np.lexsort((rows.offset, rows.file))
        order = order[sizes[order] > 0]
        self._catalog, self._owner = catalog, owner[order]
        self._begin, self._end = rows.offset[order], (rows.offset + sizes)[order]
        self._first = np.searchsorted(rows.file[order], np.arange(len(catalog.files) + 1))
        self._values = {index: value.name for value in catalog.values_table for index in value.blobs}

    def names(self, file: int, begin: int, end: int) -> list[str]:
        """What lies in these bytes, in order of place."""
        part = slice(self._first[file], self._first[file + 1])
        last = int(np.searchsorted(self._begin[part], end))
        hit = np.flatnonzero(self._end[part][:last] > begin)
        names = self._catalog.tensors_table.names
        return list(dict.fromkeys(self._values.get(i, names[i]) for i in self._owner[part][hit].tolist()))

    def text(self, file: int, begin: int, end: int) -> str:
        """What lies in these bytes, in words."""
        names = self.names(file, begin, end)
        return few(names) if names else "its header alone"


def contents_from(catalog: Catalog, file: int, begin: int = 0) -> str:
    """What lies in a file from some byte on, in words."""
    return FileContents(catalog).text(file, begin, catalog.files[file].size)


def few(names: Sequence[str]) -> str:
    """The first names of many, and how many more there are."""
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")
