"""How a checkpoint of Megatron-Core is recognized among all formats. This module imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol import Foreign


@dataclass(frozen=True, slots=True)
class MegatronFormat:
    """Checkpoints of Megatron-Core, as one of `FORMATS`."""

    as_saved: bool = False
    """Names are Megatron's keys; see `read.open_path`."""
    named: bool = False
    """State that lies in buckets has names where the weights prove it; see `buckets`."""
    name: str = "megatron"
    looks_for: str = (
        "a run or an iteration of Megatron-Core, which has latest_checkpointed_iteration.txt, a metadata.json, or mp_rank_00"
    )

    def open(self, path: str) -> Foreign | None:
        """Open a path; see `ForeignFormat`."""
        from .read import open_path  # it needs the formats' common parts, which are in the room that lists this one

        return open_path(path, as_saved=self.as_saved, named=self.named)
