"""Jobs with a memory tier. A node is a folder: its id, and all that it has in memory, are in it, and go with it.

Two folders stand in for two machines here: what tells nodes apart is the id in the folder, and copies go over gloo all the same.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reshard_ckpt import LocalShard
from reshard_ckpt.checkpoint import Manager, Memory
from tests.layouts import values_of

WIDTHS = (24, 40, 9)
SHAPE = (12, 5)


class Training:
    """A model and its AdamW in one of several layouts, whose every value follows from its global position and a number.

    Parameters
    ----------
    layout
        ``"fsdp"``: FSDP2 over all ranks; ``"hsdp"``: over two, twice; ``"dp"``: whole on each rank.
    """

    def __init__(self, layout: str) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)))
        if layout != "dp":
            mesh = (dist.get_world_size(),) if layout == "fsdp" else (2, dist.get_world_size() // 2)
            names = ("shard",) if layout == "fsdp" else ("replicate", "shard")
            fully_shard(self.model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.extra = {"step": 0, "long": "x" * 9000}
        self.state = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def _tensors(self) -> list[torch.Tensor]:
        out = []
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            out += [parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        return out

    def fill(self, number: int) -> None:
        """Give every element its value."""
        for salt, tensor in enumerate(self._tensors()):
            whole = values_of(tuple(tensor.shape), "F32", number * 100 + salt)
            if isinstance(tensor, DTensor):
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
                tensor = tensor.to_local()
            tensor.copy_(whole)
        self.extra["step"] = number

    def is_filled(self, number: int) -> bool:
        """Whether every element has its value, bit for bit."""
        for salt, tensor in enumerate(self._tensors()):
            whole = values_of(tuple(tensor.shape), "F32", number * 100 + salt)
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(found.view(torch.int32), whole.view(torch.int32)):
                return False
        return self.extra["step"] == number


def rows(number: int, rank: int, size: int, held: torch.Tensor | None = None) -> dict[str, Any]:
    """Some rows of a tensor of each rank: a state for the tests that are not about layouts."""
    first, end = SHAPE[0] * rank // size, SHAPE[0] * (rank + 1) // size
    tensor = values_of(SHAPE, "F32", number)[first:end].clone() if held is None else held
    return {"w": LocalShard(tensor, SHAPE, (first, 0)), "extra": {"step": number}}


def are_rows(state: dict[str, Any], number: int, rank: int, size: int) -> bool:
    """Whether a state is what `rows` makes for this number."""
    wanted = rows(number, rank, size)["w"].tensor
    return torch.equal(state["w"].tensor.view(torch.int32), wanted.view(torch.int32)) and state["extra"]["step"] == number


@dataclass(frozen=True)
class Restored:
    """What a rank found after a restart."""

    step: int
    tier: str
    is_right: bool
    passed_over: tuple[str, ...]
    steps: list[int]
    copies: int


def save_and_be_killed(root: str, folders: Sequence[str], layout: str, until: int, out: str, **memory: Any) -> None:
    """Save every step to memory, of which some go on to the store; then all ranks are killed."""
    rank = dist.get_rank()
    manager = Manager(root, memory=Memory(folder=folders[rank], **memory), persist_every=2)
    training = Training(layout)
    assert manager.load_latest(training.state) is None
    copies, stored = [], []
    for step in range(1, until + 1):
        training.fill(step)
        handle = manager.async_save(step, training.state)
        handle.result()
        copies.append(handle.copies)
        stored.append(handle.persisted() if step < until else None)
    Path(out, f"rank{rank}").write_text(repr((copies, stored, manager.steps())))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(root: str, folders: Sequence[str], layout: str, **memory: Any) -> Restored:
    """Load the newest checkpoint into another layout, go on for a step, and end."""
    rank = dist.get_rank()
    training = Training(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        manager = Manager(root, memory=Memory(folder=folders[rank], **memory), persist_every="1h")
        with manager:
            loaded = manager.load_latest(training.state)
            is_right = training.is_filled(loaded.step)
            training.fill(loaded.step + 1)
            handle = manager.async_save(loaded.step + 1, training.state)
            handle.result()
    return Restored(loaded.step, loaded.tier, is_right, loaded.passed_over, manager.steps(), handle.copies)
