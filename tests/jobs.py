"""Whole jobs in one process: every rank's steps in turn. What crosses ranks is encoded and decoded, as in a real job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from reshard_ckpt.core.catalog.model import Catalog, ValueEntry
from reshard_ckpt.core.catalog.names import links_from_names
from reshard_ckpt.core.catalog.specs import Mesh, TensorSpec, ValueSpec
from reshard_ckpt.core.planning.save_plan import SavePlan, plan_save
from reshard_ckpt.core.report import LoadReport
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.engine.common.progress import Recorder
from reshard_ckpt.engine.loading.load import LoadOptions, Resolved, fetch, resolve
from reshard_ckpt.engine.saving.commit import catalog_of, publish, read_previous
from reshard_ckpt.engine.saving.local_shards import LocalShards, describe_local, merge_values
from reshard_ckpt.engine.saving.messages import (
    Assignment,
    Receipt,
    Receipts,
    decode_assignment,
    decode_metadata,
    decode_receipts,
    decode_values,
    encode_assignments,
    encode_metadata,
    encode_receipt,
)
from reshard_ckpt.engine.saving.options import SaveContents
from reshard_ckpt.engine.saving.replicas import all_fingerprints
from reshard_ckpt.engine.saving.write import chunks_in_place, write_files
from reshard_ckpt.format.files import new_save_id
from reshard_ckpt.storage.memory import MemoryStorage
from reshard_ckpt.storage.protocol import DISK, Storage

Tensors = Sequence[tuple[TensorSpec, torch.Tensor]]


def plan_job(local_shards: Sequence[LocalShards]) -> tuple[SavePlan, tuple[ValueEntry, ...], list[Assignment]]:
    """The agreement of all ranks, without a cache."""
    tensors, rows, values = zip(*(encode_metadata(one.local_metadata) for one in local_shards), strict=True)
    plan = plan_save(decode_metadata(tensors, rows))
    merged = merge_values([(rank, decode_values(data)) for rank, data in enumerate(values)], plan.tables)
    save_id = new_save_id()
    return plan, merged, [decode_assignment(data, save_id) for data in encode_assignments(plan)]


def write_assignment(storage: Storage, local_shards: LocalShards, assignment: Assignment, rank: int) -> Receipt:
    """Write the part of one rank from the tensors' own memory."""
    fingerprints = all_fingerprints(local_shards, assignment.checks)
    return write_files(storage, chunks_in_place(local_shards, assignment, rank, fingerprints), Recorder())


def joined(receipts: Sequence[Receipt]) -> Receipts:
    """The receipts of all ranks, as rank 0 gets them."""
    return decode_receipts([encode_receipt(receipt) for receipt in receipts])


def planned_job(ranks: Sequence[Tensors]) -> Catalog:
    """The catalog of what each rank holds, for tests of what is planned from it: it is not published and read back."""
    local_shards = [describe_local(tensors, (), None, rank) for rank, tensors in enumerate(ranks)]
    plan, values, assignments = plan_job(local_shards)
    storage = MemoryStorage("planned")
    receipts = joined([write_assignment(storage, local_shards[rank], own, rank) for rank, own in enumerate(assignments)])
    return catalog_of(SaveContents(plan, values, assignments[0].save_id), receipts)


def save_job(
    storage: Storage,
    ranks: Sequence[Tensors],
    values: Sequence[Sequence[ValueSpec]] | None = None,
    mesh: Mesh | None = None,
    order: Sequence[int] | None = None,
) -> Catalog:
    """Save what each rank holds; returns the published catalog. Ranks write in the given order."""
    before = read_previous(storage)
    links = links_from_names(dict.fromkeys(spec.name for tensors in ranks for spec, _ in tensors), {})
    linked = [[(replace(spec, link=spec.link or links.get(spec.name)), memory) for spec, memory in tensors] for tensors in ranks]
    local_shards = [describe_local(tensors, values[rank] if values else (), mesh, rank) for rank, tensors in enumerate(linked)]
    plan, merged, assignments = plan_job(local_shards)
    receipt_of = {
        rank: write_assignment(storage, local_shards[rank], assignments[rank], rank) for rank in (order or range(len(ranks)))
    }
    receipts = joined([receipt_of[rank] for rank in range(len(ranks))])
    publish(storage, SaveContents(plan, merged, assignments[0].save_id, before=before), receipts)
    return open_catalog(storage)


def load_job(
    storage: Storage,
    tensors: Tensors,
    options: LoadOptions | None = None,
    saved: Catalog | None = None,
    *,
    window_bytes: int = DISK.read_bytes,
) -> tuple[Resolved, LoadReport]:
    """Load what one rank wants, from what another rank may have opened."""
    options = options or LoadOptions()
    saved = saved or open_catalog(storage)
    resolved = resolve(saved, tensors, options, window_bytes=window_bytes)
    assert not any(resolved.problems.values()), resolved.problems
    bytes_read = fetch(storage, saved, resolved, options)
    return resolved, LoadReport(num_tensors=len(resolved.targets), num_bytes=resolved.plan.num_bytes, bytes_read=bytes_read)
