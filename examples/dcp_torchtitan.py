"""A trainer in the style of torchtitan, saving through this library: ``torchrun --nproc-per-node 2 examples/dcp_torchtitan.py``.

Its checkpointer keeps the model's names at the top of the state, wraps the optimizer in a container that keys parameters by
name, and saves in the background while training goes on. One line is new: the import.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard_ckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp
from reshard_ckpt import checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelWrapper(Stateful):
    """The model's state dict, whose names go to the top of the state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerContainer(Stateful):
    """The optimizer's state by parameter name, flattened, so that pipeline stages can be put together."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class TrainState(Stateful):
    """Where training is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Trainer:
    """A model on a mesh, its optimizer and schedule, and the calls of DCP."""

    def __init__(self, folder: str, seed: int, replicate: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (replicate, dist.get_world_size() // replicate), mesh_dim_names=("replicate", "shard"))
        self.model = nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 5))
        fully_shard(self.model, mesh=mesh)  # hybrid sharding, if there is more than one replica
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.train_state = TrainState()
        self.folder, self.saving = folder, None
        self.states = {
            "optimizer": OptimizerContainer(self.model, self.optimizer),
            "lr_scheduler": self.scheduler,
            "train_state": self.train_state,
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(8, 10)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.train_state.step += 1

    def save(self) -> None:
        """Begin a save, once the one before is done; its error is raised here."""
        if self.saving is not None:
            self.saving.result()
        state = {**ModelWrapper(self.model).state_dict(), **self.states}
        self.saving = dcp.async_save(state, checkpoint_id=f"{self.folder}/step-{self.train_state.step}")

    def load(self, step: int) -> None:
        state = {**ModelWrapper(self.model).state_dict(), **self.states}
        dcp.load(state, checkpoint_id=f"{self.folder}/step-{step}")
        names = get_model_state_dict(self.model)
        ModelWrapper(self.model).load_state_dict({name: state[name] for name in names})

    def whole(self) -> dict[str, torch.Tensor]:
        """Gather all tensors by torch itself."""
        state = {**get_model_state_dict(self.model), **get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)}
        return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items() if torch.is_tensor(t)}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer(folder, seed=0, replicate=1)
    trainer.train(2)
    trainer.save()
    saved = trainer.whole()
    trainer.train(1)
    trainer.save()
    trainer.saving.result()

    # Another job, of another layout: each rank has all (two replicas), where each had half.
    other = Trainer(folder, seed=1, replicate=2)
    other.load(step=2)
    loaded = other.whole()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert (other.train_state.step, other.scheduler.last_epoch) == (2, 2)

    # The same checkpoint, by the library's own names: the optimizer itself loads, whichever form it was saved in.
    model = nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    renamed = {name: f"model.{name}" for name in model.state_dict()}
    checkpoint.load(f"{folder}/step-2", {"model": model, "optimizer": optimizer}, rename=renamed)
    assert optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    if dist.get_rank() == 0:
        print(f"{Path(folder).name}: saved on 2 shards, loaded on 2 replicas and on 1 process, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_dcp_torchtitan")
