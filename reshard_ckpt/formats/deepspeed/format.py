"""How a folder of DeepSpeed is recognized among all formats. This module imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol import Foreign


@dataclass(frozen=True, slots=True)
class DeepSpeedFormat:
    """Folders of DeepSpeed's engine, as one of `FORMATS`."""

    name: str = "deepspeed"
    looks_for: str = "a folder of DeepSpeed, which has mp_rank_00_model_states.pt or such, or the file latest that names one"

    def open(self, path: str) -> Foreign | None:
        """Open a path; see `ForeignFormat`."""
        from .open import open_path  # it needs the formats' common parts, which are in the room that lists this one

        return open_path(path)
