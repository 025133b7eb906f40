"""Values kept as bytes in the shard files: their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.catalog.specs import Replication, TensorSpec, box_piece


@dataclass(frozen=True, slots=True)
class Blob:
    """The encoded bytes of a value, as a tensor of dtype U8 that is saved and loaded like any other."""

    spec: TensorSpec
    tensor: torch.Tensor
    own: str | None = None
    """The name of the value, where every rank has one of its own."""


def byte_blob(name: str, tensor: torch.Tensor, own: str | None = None) -> Blob:
    """Return a blob over a 1-D uint8 tensor."""
    size = (tensor.numel(),)
    return Blob(TensorSpec(name, "U8", size, (box_piece((0,), size, 0, (1,)),), Replication.PLAIN), tensor, own)
