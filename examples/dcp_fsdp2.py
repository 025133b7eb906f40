"""A trainer that calls DCP, with one line changed: ``torchrun --nproc-per-node 2 examples/dcp_fsdp2.py``.

Only the import of ``dcp`` is new: `AppState`, as PyTorch's tutorial has it, and the rest of the trainer are as they were. What it
saves is a checkpoint of this library; the folders that torch's own DCP wrote before still load, by the same line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import reshard_ckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp
from reshard_ckpt import checkpoint


class AppState:
    """The state of the job, as DCP asks for it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def make_job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 5))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_same(one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(one[1].state[a][key].full_tensor(), other[1].state[b][key].full_tensor())


def main(path: str) -> None:
    dist.init_process_group("gloo")
    job = make_job(seed=0)
    train(*job, steps=3)

    # Saving, and loading into a job that starts afresh.
    dcp.save({"app": AppState(*job), "step": 3}, checkpoint_id=path)
    again, state = make_job(seed=1), {"step": 0}
    dcp.load({"app": AppState(*again)}, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    check_same(again, job)
    assert state["step"] == 3

    # In the background: training goes on as soon as the call returns.
    future = dcp.async_save({"app": AppState(*job), "step": 3}, checkpoint_id=path)
    train(*job, steps=1)
    future.result()
    dcp.load({"app": AppState(*job)}, checkpoint_id=path)
    check_same(job, again)

    # What torch's own DCP wrote loads too.
    torch_dcp.save({"app": AppState(*job)}, checkpoint_id=f"{path}_of_torch")
    fresh = make_job(seed=2)
    dcp.load({"app": AppState(*fresh)}, checkpoint_id=f"{path}_of_torch")
    check_same(fresh, job)

    # Going further: modules and optimizers themselves, on any layout, without an AppState.
    model = nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 5))
    if dist.get_rank() == 0:
        whole = checkpoint.read(path, ["app.model"])
        model.load_state_dict({name.removeprefix("app.model."): tensor for name, tensor in whole.items()})
        assert checkpoint.verify(path).ok
        print(f"{Path(path).name}: saved, loaded, saved in the background, and loaded from torch's own folder, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_dcp_fsdp2")
