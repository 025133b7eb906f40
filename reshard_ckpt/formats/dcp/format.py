"""How a folder of ``torch.distributed.checkpoint`` is recognized among all formats. This module imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol import Foreign


@dataclass(frozen=True, slots=True)
class DcpFormat:
    """Folders of ``torch.distributed.checkpoint``, as one of `FORMATS`."""

    as_saved: bool = False
    """Name things as this library would have named them in the state that was passed to DCP. By default, a model at the top gets
    the key ``model``, and the groups of any optimizer become one value by FQN."""
    name: str = "dcp"
    looks_for: str = "a folder of torch.distributed.checkpoint, which has a .metadata file, or __0.metadata"

    def open(self, path: str) -> Foreign | None:
        """Open a path; see `ForeignFormat`."""
        from .read import open_path  # it needs the formats' common parts, which are in the room that lists this one

        return open_path(path, as_saved=self.as_saved)
