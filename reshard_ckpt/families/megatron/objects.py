"""A check on Megatron-FSDP's DTensors: their placements may not tell the true order in which mesh axes cut a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...plugins import Objects
from ...plugins.errors import LayoutError
from .names import NAME


def check_mesh(mesh: Any, placements: Sequence[Any], name: str) -> None:
    """Refuse a DTensor if Megatron-FSDP has noted on its mesh that later axes cut a dim before earlier ones."""
    if getattr(mesh, "_shard_order", None) is not None:
        raise LayoutError(
            f"{name}: Megatron-FSDP cuts it in another order than its placements {placements} say; pass the state dict to "
            "preprocess_state_dict_for_uneven_dtensor first, which notes what each rank holds"
        )


OBJECTS = Objects(NAME, check_mesh=check_mesh)
