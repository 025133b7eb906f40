"""Ranks of one machine that are as on several ones: those of one open no memory of another's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgpack
import torch
import torch.distributed as dist

from reshard_ckpt.comm import shared_memory


class Machines:
    """Say of each rank which machine it is on; collective when made."""

    def __init__(self) -> None:
        self.of_rank: Sequence[int] = [0] * dist.get_world_size()
        self._processes = [None] * dist.get_world_size()
        dist.all_gather_object(self._processes, os.getpid())
        self._open = shared_memory.open_segment
        self.opened = 0
        shared_memory.open_segment = self._open_near

    def _open_near(self, address: bytes) -> torch.Tensor | None:
        other = self._processes.index(msgpack.unpackb(address)[0])
        if self.of_rank[other] != self.of_rank[dist.get_rank()]:
            return None
        self.opened += 1
        return self._open(address)
