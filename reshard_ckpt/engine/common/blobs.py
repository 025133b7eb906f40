"""Blobs: values whose encoded bytes lie in shard files, each as a tensor of bytes."""

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
    """The name of the value if every rank has a value of its own, else None."""


def byte_blob(name: str, tensor: torch.Tensor, own: str | None = None) -> Blob:
    """Make a blob over a 1-D uint8 tensor."""
    size = (tensor.numel(),)
    piece = box_piece((0,), size, 0, (1,))
    return Blob(TensorSpec(name, "U8", size, (piece,), Replication.PLAIN), tensor, own)
