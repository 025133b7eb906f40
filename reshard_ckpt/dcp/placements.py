"""Mesh and placements of the tensors of a DCP save: DCP's plans lack them, so they are captured from the planner's state.

1. Each rank captures the tensors of the planner's state dict as `checkpoint.save` does. It sends their local metadata, without
   bytes, to the coordinator with its results.
2. The coordinator merges the local metadata as every save does, and takes only the mesh and the placements from the outcome.

No load needs them, so a save never fails for them. None are recorded where a planner has no state dict, or where ranks describe
it differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ..core.planning.save_plan import SavePlan, plan_save
from ..engine.saving.local_shards import describe_local
from ..engine.saving.messages import EncodedMetadata, decode_metadata, encode_metadata
from ..errors import CheckpointError
from ..state.capture import capture
from ..state.walk import Verbatim


def rank_metadata(planner: SavePlanner, rank: int) -> EncodedMetadata | None:
    """Capture how the tensors in a planner's state lie on this rank; None if that cannot be found out."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        return None
    try:
        captured = capture(Verbatim({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}))
        return encode_metadata(describe_local(captured.tensors, (), captured.mesh, rank).local_metadata)
    except Exception:  # a DTensor that came from another process may have a mesh that is none here, which raises anything
        return None


def with_placements(plan: SavePlan, of_ranks: Sequence[EncodedMetadata | None]) -> SavePlan:
    """Add the mesh and the placements that follow from the ranks' metadata to a plan, where the ranks agree on them."""
    known = [one for one in of_ranks if one is not None]
    if len(known) < len(of_ranks):
        return plan
    try:
        captured_plan = plan_save(decode_metadata([one.tensors for one in known], [one.rows for one in known]))
    except CheckpointError:  # what ranks hold need not fit together where DCP's planner chose from it
        return plan
    if captured_plan.mesh is None or captured_plan.mesh.size != len(known):
        return plan
    return replace(
        plan,
        mesh=captured_plan.mesh,
        placements=captured_plan.placements,
        placement=np.array(_numbers(plan, captured_plan), np.int64),
    )


def _numbers(plan: SavePlan, captured_plan: SavePlan) -> list[int]:
    """Return the placement number of each tensor of the plan; -1 for one that was not captured, or with another shape."""
    known = dict(zip(_tensors(captured_plan), captured_plan.placement.tolist(), strict=True))
    return [known.get(tensor, -1) for tensor in _tensors(plan)]


def _tensors(plan: SavePlan) -> list[tuple[str, tuple[int, ...]]]:
    """List the name and shape of each tensor."""
    tables = plan.tables
    found = []
    for name, shape, ndim in zip(tables.names, tables.shape.tolist(), tables.ndim.tolist(), strict=True):
        found.append((name, tuple(shape[len(shape) - ndim :])))  # shapes are padded on the left
    return found
