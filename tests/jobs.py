"""Whole jobs in one process: every rank's steps in turn. What crosses ranks is encoded and decoded, as in a real job."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reshard_ckpt.core.catalog import Catalog, ValueEntry
from reshard_ckpt.core.report import LoadReport
from reshard_ckpt.core.save_plan import SavePlan
from reshard_ckpt.core.state import Mesh, TensorSpec, ValueSpec
from reshard_ckpt.engine.agreement import new_save_id, plan_offers
from reshard_ckpt.engine.load import LoadOptions, Resolved, fetch, open_catalog, resolve
from reshard_ckpt.engine.messages import (
    Assignment,
    decode_assignment,
    decode_receipt,
    decode_values,
    encode_assignments,
    encode_offer,
    encode_receipt,
)
from reshard_ckpt.engine.save import hold, look, publish
from reshard_ckpt.engine.values import merge_values
from reshard_ckpt.engine.write import Holdings, write_assignment
from reshard_ckpt.format.values import encode_value
from reshard_ckpt.storage.protocol import Storage

Tensors = Sequence[tuple[TensorSpec, torch.Tensor]]


def plan_job(holdings: Sequence[Holdings]) -> tuple[SavePlan, tuple[ValueEntry, ...], list[Assignment]]:
    """The agreement of all ranks, without a cache."""
    offers = [encode_offer(h.offer) for h in holdings]
    plan = plan_offers([offer.tensors for offer in offers], [offer.rows for offer in offers])
    values = merge_values([(rank, decode_values(offer.values)) for rank, offer in enumerate(offers)], plan.tables)
    save_id = new_save_id()
    return plan, values, [decode_assignment(data, save_id) for data in encode_assignments(plan)]


def save_job(
    storage: Storage,
    ranks: Sequence[Tensors],
    values: Sequence[Sequence[ValueSpec]] | None = None,
    mesh: Mesh | None = None,
    order: Sequence[int] | None = None,
) -> Catalog:
    """Save what each rank holds; returns the published catalog. Ranks write in the given order."""
    before = look(storage)
    holdings = [hold(tensors, values[rank] if values else (), mesh, rank) for rank, tensors in enumerate(ranks)]
    plan, merged, assignments = plan_job(holdings)
    receipt_of = {
        rank: decode_receipt(encode_receipt(write_assignment(storage, holdings[rank], assignments[rank], rank)))
        for rank in (order or range(len(ranks)))
    }
    receipts = [receipt_of[rank] for rank in range(len(ranks))]
    publish(storage, plan, merged, receipts, save_id=assignments[0].save_id, metadata=encode_value(None, ""), before=before)
    return open_catalog(storage)


def load_job(storage: Storage, tensors: Tensors, options: LoadOptions | None = None) -> tuple[Resolved, LoadReport]:
    """Load what one rank wants."""
    options = options or LoadOptions()
    saved = open_catalog(storage)
    resolved = resolve(saved, tensors, options)
    assert not any(resolved.problems.values()), resolved.problems
    bytes_read = fetch(storage, saved, resolved, options)
    return resolved, LoadReport().loaded(len(resolved.dests), resolved.plan.num_bytes, bytes_read)
