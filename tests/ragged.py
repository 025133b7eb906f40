"""A placement like veScale's `RaggedShard`, and what it means, by the plainest means.

The meaning follows veScale's own source (`vescale/dtensor/placement_types.py`, `_split_tensor`, and `_utils.py`): all other axes
cut first; the row-major flattening of what is left is divided in proportion to the units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class RaggedShard(Placement):
    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        Placement.__init__(self)  # a class of C++ in torch 2.13


@dataclass(frozen=True)
class _StridedRaggedShard(RaggedShard):
    split_factor: int


Ragged = RaggedShard
StridedRagged = _StridedRaggedShard


def is_ragged(placement: object) -> bool:
    return isinstance(placement, RaggedShard)


def cut(whole: torch.Tensor, placements: Sequence[Any], sizes: Sequence[int], where: Sequence[int]) -> torch.Tensor:
    """What the rank at a coordinate holds of a whole tensor."""
    for placement, size, index in reversed(list(zip(placements, sizes, where, strict=True))):
        if placement.is_shard():
            parts = whole.chunk(size, placement.dim)
            whole = parts[index] if index < len(parts) else whole.narrow(placement.dim, 0, 0)
    for placement, index in zip(placements, where, strict=True):
        if is_ragged(placement):
            units = placement.local_units
            begin, count = (whole.numel() * n // sum(units) for n in (sum(units[:index]), units[index]))
            whole = whole.flatten()[begin : begin + count]
    return whole.clone()


def dtensor(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """The DTensor of a whole tensor; torch's own functions know no such placement, so it is put together by hand."""
    local = cut(whole, placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def splits(total: int, num: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide a number of units among some coordinates, in order."""
    if num == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in splits(total - first, num - 1))
