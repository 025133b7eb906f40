"""torch's own planner (torch.distributed.checkpoint) on the same model, for comparison.

DCP has no flat ranges, so its job is FSDP over tp: each rank holds one box of each tensor of its stage. What is timed is rank 0's
part of `_DistWrapper.reduce_scatter`: unpickle the local plans, plan and check, pickle what each rank is sent.
"""

from __future__ import annotations

import pickle
import time

import torch
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from .planning_job import STATES, Job


def local_plans(job: Job, num_ranks: int) -> list[planner.SavePlan]:
    """Make the plans of the first ranks of a job that has no others."""
    small = Job(job.pp, max(num_ranks // (job.pp * job.tp), 1), job.tp, job.bucket)
    return [_local_plan(small, rank) for rank in range(small.mesh.size)]


def _local_plan(job: Job, rank: int) -> planner.SavePlan:
    stage, dp, tp = job.mesh.coordinates(rank)
    items = []
    for param in job.stages[stage]:
        offsets, lengths = list(job.box(param, tp)[0]), list(job.box(param, tp)[1])
        begin, end = dp * lengths[0] // job.dp, (dp + 1) * lengths[0] // job.dp
        offsets[0], lengths[0] = offsets[0] + begin, end - begin
        names = [(f"model.{param.name}", torch.bfloat16)]
        names += [(f"optimizer.state.{param.name}.{state}", torch.float32) for state in STATES]
        for name, dtype in names:
            size = torch.Size(param.shape)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
            data = planner.TensorWriteData(chunk, TensorProperties(dtype=dtype), size)
            index = MetadataIndex(name, torch.Size(offsets))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
    return planner.SavePlan(items)


def measure(job: Job, num_ranks: int) -> tuple[int, float]:
    """Measure items, and CPU seconds of rank 0."""
    gathered = [pickle.dumps(plan) for plan in local_plans(job, num_ranks)]
    begin = time.process_time()
    plans = [pickle.loads(data) for data in gathered]
    leader = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    leader.set_up_planner({}, is_coordinator=True)
    scattered, _ = leader.create_global_plan(plans)
    sent = [pickle.dumps(plan) for plan in scattered]
    used_s = time.process_time() - begin
    assert len(sent) == len(gathered)
    return sum(len(plan.items) for plan in plans), used_s


def largest_within(job: Job, limit_s: float, num_ranks: int) -> tuple[int, float]:
    """Return the largest measured size that ends within the limit: sizes double as long as the next is likely to."""
    size, best = job.pp * job.tp, (0, 0.0)
    growth = 2.0
    while size <= num_ranks:
        items, used_s = measure(job, size)
        if used_s > limit_s:
            break
        growth = max(2.0, used_s / best[1]) if best[1] else 2.0
        best = items, used_s
        if used_s * growth > limit_s:
            break
        size *= 2
    return best
