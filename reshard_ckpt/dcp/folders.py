"""What of DCP's own folders does a call that speaks DCP want otherwise? The names as they were saved, and the bytes of values."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..adapters.dcp import DcpFormat
from ..adapters.dcp.chunks import FORMAT, file_sizes, spoils
from ..adapters.dcp.folder import read_folder
from ..adapters.dcp.metadata import Extent
from ..adapters.foreign import FORMATS, ForeignFormat
from ..checkpoint.source import Source
from ..storage.protocol import Storage

FORMATS_AS_SAVED: tuple[ForeignFormat, ...] = tuple(
    replace(one, as_saved=True) if isinstance(one, DcpFormat) else one for one in FORMATS
)
"""All foreign formats; the names in a folder of DCP are those of the state dict that DCP was given."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A value of a folder, as its planner encoded it; `path` is what the planner recorded."""

    path: tuple[str | int, ...]
    extent: Extent

    def read(self, storage: Storage) -> io.BytesIO:
        """Its bytes; nothing is made of them here."""
        data = bytearray(self.extent.length)
        storage.read_into(self.extent.file, self.extent.offset, [memoryview(data)])
        return io.BytesIO(data)


def raw_values(source: Source) -> Iterator[tuple[str, Raw]]:
    """The values of a folder of DCP whose bytes can be read, also those that only unpickling could make objects of."""
    if source.format != FORMAT:
        return
    storage = source.storage
    said = read_folder(storage)
    saved = said.saved
    sizes = file_sizes(storage, iter(saved.values.values()))
    for name, extent in saved.values.items():
        if name not in said.spoiled and spoils(storage, name, extent, sizes[extent.file]) is None:
            yield name, Raw(saved.paths.get(name, (name,)), extent)
