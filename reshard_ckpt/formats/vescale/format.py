"""How a folder of ``vescale.checkpoint`` is recognized among all formats. This module imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol import Foreign


@dataclass(frozen=True, slots=True)
class VeScaleFormat:
    """Folders of ``vescale.checkpoint`` (0.1), as one of `FORMATS`."""

    as_saved: bool = False
    """Names are those that `reshard_ckpt.vescale` gives: 16-bit weights are the model, and their master an optimizer's state."""
    name: str = "vescale"
    looks_for: str = "a folder of vescale.checkpoint, which has model/.metadata or optimizer/pp_0/.metadata of its own classes"

    def open(self, path: str) -> Foreign | None:
        """Open a path; see `ForeignFormat`."""
        from .read import open_path  # it needs the formats' common parts, which are in the room that lists this one

        return open_path(path, as_saved=self.as_saved)
