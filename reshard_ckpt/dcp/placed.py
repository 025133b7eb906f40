"""On which mesh do the tensors of a DCP save lie, and how? What DCP's plans do not say, from the state that its planner holds.

1. Each rank captures the tensors of the planner's state dict as `checkpoint.save` does, and sends what it would have offered to
   save, bytes apart, with what it wrote.
2. The coordinator merges these offers as every save does. Only the mesh and the placements of the outcome are taken over.

Nobody needs them to load, so a save never fails for them: where a planner shows no state dict, or one that is not described
alike by all ranks, none are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ..core.planning.save_plan import SavePlan
from ..engine.saving.agreement import plan_from_metadata
from ..engine.saving.local_shards import describe_local
from ..engine.saving.messages import encode_metadata
from ..errors import CheckpointError
from ..state.capture import capture
from ..state.scan import Verbatim


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What one rank holds of all tensors, encoded as an offer's parts; None if that could not be found out."""

    tensors: bytes
    rows: bytes


def placed(planner: SavePlanner, rank: int) -> RankMetadata | None:
    """How the tensors lie that a planner holds on this rank."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        return None
    try:
        captured = capture(Verbatim({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}))
        local_metadata = encode_metadata(describe_local(captured.tensors, (), captured.mesh, rank).local_metadata)
    except Exception:  # a DTensor that came from another process may have a mesh that is none here, which raises anything
        return None
    return RankMetadata(local_metadata.tensors, local_metadata.rows)


def with_placements(plan: SavePlan, of_ranks: Sequence[RankMetadata | None]) -> SavePlan:
    """The plan with the mesh and the placements that follow from what the ranks hold; as it is, if nothing does."""
    known = [one for one in of_ranks if one is not None]
    if len(known) < len(of_ranks):
        return plan
    try:
        shown = plan_from_metadata([one.tensors for one in known], [one.rows for one in known])
    except CheckpointError:  # what ranks hold need not fit together where DCP's planner chose from it
        return plan
    if shown.mesh is None or shown.mesh.size != len(known):
        return plan
    return replace(plan, mesh=shown.mesh, placements=shown.placements, placement=np.array(_numbers(plan, shown), np.int64))


def _numbers(plan: SavePlan, shown: SavePlan) -> list[int]:
    """Of each tensor of the plan, the number of its placement; -1 for what was not shown, or with another shape."""
    known = dict(zip(_tensors(shown), shown.placement.tolist(), strict=True))
    return [known.get(tensor, -1) for tensor in _tensors(plan)]


def _tensors(plan: SavePlan) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor."""
    tables = plan.tables
    shapes = [tuple(row[len(row) - ndim :]) for row, ndim in zip(tables.shape.tolist(), tables.ndim.tolist(), strict=True)]
    return list(zip(tables.names, shapes, strict=True))
