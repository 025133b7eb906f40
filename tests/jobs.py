"""Whole jobs in one process: every rank's steps in turn. What crosses ranks is encoded and decoded, as in a real job."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reshard_ckpt.core.catalog import Catalog
from reshard_ckpt.core.report import LoadReport
from reshard_ckpt.core.state import Mesh, TensorSpec, ValueSpec
from reshard_ckpt.engine.load import LoadOptions, Resolved, fetch, open_catalog, resolve
from reshard_ckpt.engine.messages import decode_receipt, encode_assignment, encode_offer, encode_receipt
from reshard_ckpt.engine.save import hold, make_plan, publish
from reshard_ckpt.engine.write import write_assignment
from reshard_ckpt.format.values import encode_value
from reshard_ckpt.storage.protocol import Storage

Tensors = Sequence[tuple[TensorSpec, torch.Tensor]]


def save_job(
    storage: Storage, ranks: Sequence[Tensors], values: Sequence[Sequence[ValueSpec]] | None = None, mesh: Mesh | None = None
) -> Catalog:
    """Save what each rank holds; returns the published catalog."""
    holdings = [hold(tensors, values[rank] if values else (), mesh, rank) for rank, tensors in enumerate(ranks)]
    plan, merged, assignments = make_plan([encode_offer(h.offer) for h in holdings])
    assert all(encode_assignment(a) for a in assignments)
    receipts = [
        decode_receipt(encode_receipt(write_assignment(storage, h, a, rank)))
        for rank, (h, a) in enumerate(zip(holdings, assignments, strict=True))
    ]
    publish(storage, plan, merged, receipts, save_id=assignments[0].save_id, metadata=encode_value(None, ""))
    return open_catalog(storage)


def load_job(storage: Storage, tensors: Tensors, options: LoadOptions | None = None) -> tuple[Resolved, LoadReport]:
    """Load what one rank wants."""
    options = options or LoadOptions()
    saved = open_catalog(storage)
    resolved = resolve(saved, tensors, options)
    assert not any(resolved.problems.values()), resolved.problems
    bytes_read = fetch(storage, saved, resolved, options)
    return resolved, LoadReport().loaded(len(resolved.dests), resolved.plan.num_bytes, bytes_read)
