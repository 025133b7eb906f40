"""The names of the tensors and values that lie in a range of a file, for messages about damage."""

from __future__ import annotations

import numpy as np

from ...core.catalog.model import Catalog
from ...core.catalog.specs import item_bytes_of
from ...core.words import few


class FileContents:
    """An index of the rows of all files by their bytes. It is made once damage was found, and then serves any range."""

    def __init__(self, catalog: Catalog) -> None:
        table, rows = catalog.tensors_table, catalog.rows
        # owner[i]: the tensor of row i. The columns kept below are sorted by file and offset; file f begins at first[f].
        owner = np.repeat(np.arange(len(table.names)), np.diff(table.row_start))
        sizes = rows.count * item_bytes_of(table.dtype)[owner]
        order = np.lexsort((rows.offset, rows.file))
        order = order[sizes[order] > 0]
        self._catalog, self._owner = catalog, owner[order]
        self._begin, self._end = rows.offset[order], (rows.offset + sizes)[order]
        self._first = np.searchsorted(rows.file[order], np.arange(len(catalog.files) + 1))
        self._values = {index: value.name for value in catalog.values_table for index in value.blobs}

    def names(self, file: int, begin: int, end: int) -> list[str]:
        """List the tensors and values in these bytes of a file, in order of place."""
        part = slice(self._first[file], self._first[file + 1])
        last = int(np.searchsorted(self._begin[part], end))
        hit = np.flatnonzero(self._end[part][:last] > begin)
        names = self._catalog.tensors_table.names
        owners = self._owner[part][hit].tolist()
        return list(dict.fromkeys(self._values.get(i, names[i]) for i in owners))

    def text(self, file: int, begin: int, end: int) -> str:
        """Name the tensors and values in these bytes of a file, for a message."""
        names = self.names(file, begin, end)
        return few(names) if names else "its header alone"


def contents_from(catalog: Catalog, file: int, begin: int = 0) -> str:
    """Name the tensors and values of a file from byte `begin` on, for a message."""
    return FileContents(catalog).text(file, begin, catalog.files[file].size)
