"""The three layouts that the demo trains on, behind one small interface.

Each trains a step, takes a loss, returns the state to save, and gathers its whole tensors by its own means: by torch's
DTensor and by collectives, never by the checkpoint library, whose work is checked against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from .model import GPT, Config, loss, param_groups, tensor_parallel
from .zero import ZeroAdamW, local

Named = Iterator[tuple[str, Tensor]]
ADAMW: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}
NUM_MICROBATCHES = 4


class Layout(Protocol):
    mesh: ClassVar[dict[str, int]]
    model: Any
    optimizer: Any

    def train(self, inputs: Tensor, targets: Tensor) -> float:
        """One step on a global batch; its loss, the same on every rank."""

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """The loss of a global batch, the same on every rank."""

    def whole_tensors(self) -> Named:
        """The whole tensors of which this rank holds a part, by the name that a checkpoint gives them."""


class ZeroTensorParallel:
    """dp 2 × tp 2: tensor-parallel DTensors, and an AdamW whose state is split into flat ranges over dp."""

    mesh: ClassVar = {"dp": 2, "tp": 2}

    def __init__(self, config: Config) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.model = tensor_parallel(GPT(config), mesh["tp"])
        self.data_group = mesh["dp"].get_group()
        self.optimizer = ZeroAdamW(param_groups(self.model), self.data_group, **ADAMW)

    def train(self, inputs: Tensor, targets: Tensor) -> float:
        value = self._loss(inputs, targets)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._mean(value.detach())

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        return self._mean(self._loss(inputs, targets))

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        part, parts = dist.get_rank(self.data_group), dist.get_world_size(self.data_group)
        return loss(self.model(inputs[part::parts]), targets[part::parts])

    def _mean(self, value: Tensor) -> float:
        dist.all_reduce(value, group=self.data_group)
        return value.item() / dist.get_world_size(self.data_group)

    def whole_tensors(self) -> Named:
        yield from _model_tensors(self.model)
        for key in ("exp_avg", "exp_avg_sq"):
            flat = self.optimizer.gather([self.optimizer.state[part.name][key] for part in self.optimizer.owned])
            for name, parameter in self.optimizer.named_parameters():
                shard = local(parameter)
                yield f"optimizer.state.{name}.{key}", _whole(flat[: shard.numel()].view_as(shard), parameter)
                flat = flat[shard.numel() :]
        for name, state in self.optimizer.state.items():
            yield f"optimizer.state.{name}.step", state["step"]


class PipelineTensorParallel:
    """pp 2 × tp 2: two stages of tensor-parallel DTensors under a 1F1B schedule, and torch's AdamW on each."""

    mesh: ClassVar = {"pp": 2, "tp": 2}

    def __init__(self, config: Config) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        self.group = mesh["pp"].get_group()
        self.number, self.num_stages = dist.get_rank(self.group), dist.get_world_size(self.group)
        first, last = (config.num_layers * n // self.num_stages for n in (self.number, self.number + 1))
        part = tensor_parallel(GPT(config, first, last), mesh["tp"])
        self.model = PipelineStage(part, self.number, self.num_stages, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(self.model, NUM_MICROBATCHES, loss_fn=loss)
        self.optimizer = torch.optim.AdamW(param_groups(part), **ADAMW)

    def train(self, inputs: Tensor, targets: Tensor) -> float:
        value = self._run(self.schedule.step, inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        return self._run(self.schedule.eval, inputs, targets)

    def _run(self, run: Any, inputs: Tensor, targets: Tensor) -> float:
        """Feed the first stage, compare at the last one, and send the loss to all."""
        losses: list[Tensor] = []
        is_last = self.number == self.num_stages - 1
        run(*[inputs] if self.number == 0 else [], **{"target": targets, "losses": losses} if is_last else {})
        value = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.broadcast(value, group=self.group, group_src=self.num_stages - 1)
        return value.item()

    def whole_tensors(self) -> Named:
        yield from _model_tensors(self.model.submod)
        yield from _adamw_tensors(self.model.submod, self.optimizer)


class OneProcess:
    """The plain model and torch's AdamW, with neither a mesh nor a process group."""

    mesh: ClassVar[dict[str, int]] = {}

    def __init__(self, config: Config) -> None:
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(param_groups(self.model), **ADAMW)

    def train(self, inputs: Tensor, targets: Tensor) -> float:
        value = loss(self.model(inputs), targets)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.item()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        return loss(self.model(inputs), targets).item()

    def whole_tensors(self) -> Named:
        yield from _model_tensors(self.model)
        yield from _adamw_tensors(self.model, self.optimizer)


LAYOUTS: dict[str, type[Layout]] = {
    "zero_tp": ZeroTensorParallel,
    "pipeline_tp": PipelineTensorParallel,
    "one_process": OneProcess,
}


def _whole(local: Tensor, like: Tensor) -> Tensor:
    """Gather the whole of a tensor that is laid out as `like` is."""
    if not isinstance(like, DTensor):
        return local
    sharded = DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return sharded.full_tensor()


def _model_tensors(model: nn.Module) -> Named:
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _adamw_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):  # ranks gather in one order
            yield f"optimizer.state.{name}.{key}", value.full_tensor() if isinstance(value, DTensor) else value
