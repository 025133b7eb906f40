"""Are two sets of tensors bit-identical? The trainer's own record of what it holds, made without the checkpoint library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

Digests = dict[str, str]


def digest(tensor: Tensor) -> str:
    """Hash dtype, shape and bytes in row-major order with SHA-256.

    >>> digest(torch.zeros(2, 3))[:22]
    'float32 (2, 3) 9d908ec'
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"


def digests_of_job(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Gather the digests of all ranks' whole tensors; ranks that have the same tensor must agree.

    Raises
    ------
    ValueError
        Two ranks hold different bytes under one name.
    """
    mine = {name: digest(tensor) for name, tensor in tensors}
    if not dist.is_initialized():
        return mine
    by_rank: list[Digests] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    merged: Digests = {}
    for rank, theirs in enumerate(by_rank):
        for name, value in theirs.items():
            if merged.setdefault(name, value) != value:
                raise ValueError(f"{name}: rank {rank} holds {value}, an earlier rank {merged[name]}")
    return merged


def differences(saved: Digests, found: Digests) -> list[str]:
    """List the tensors that differ, or that only one side has."""
    return sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))
