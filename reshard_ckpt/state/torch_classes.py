"""Tests for classes of torch that ``import torch`` does not bring.

DTensor and FSDP1 bring sympy and a quarter of all modules of torch, a second of CPU time for each process. Nothing is of a class
whose module nobody has imported, so these tests look the module up and never import it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Shard


def is_dtensor(thing: Any) -> TypeGuard[DTensor]:
    """Tell whether a thing is a DTensor of torch's own class, or of a class derived from it.

    >>> is_dtensor(3)
    False
    """
    return isinstance(thing, _known("torch.distributed.tensor", "DTensor"))


def is_shard(placement: Any, *, exactly: bool = False) -> TypeGuard[Shard]:
    """Tell whether a placement is a ``Shard``, or of a class derived from it unless `exactly`."""
    known = _known("torch.distributed.tensor", "Shard")
    return type(placement) is known if exactly else isinstance(placement, known)


def is_fsdp1(module: Any) -> TypeGuard[FullyShardedDataParallel]:
    """Tell whether a module is wrapped by FSDP1."""
    return isinstance(module, _known("torch.distributed.fsdp", "FullyShardedDataParallel"))


def is_fsdp(module: Any) -> bool:
    """Tell whether FSDP1 wraps a module, or ``fully_shard`` was applied to it."""
    return is_fsdp1(module) or isinstance(module, _known("torch.distributed.fsdp", "FSDPModule"))


def _known(module: str, name: str) -> Any:
    """Return a class of a module, or (), of which nothing is an instance, while nobody has imported that."""
    return getattr(sys.modules.get(module), name, ())
