"""Replicas under torchft: a replica that is killed comes back with the state of the others; if all are lost, from a checkpoint.

``python examples/torchft_replicas.py RUN REPLICA LIGHTHOUSE`` is one replica of two, of one process each; it prints its losses.
LIGHTHOUSE is the address that ``torchft_lighthouse --min_replicas 2`` prints. torchft sends the state of a replica that lives to
one that comes back, by the two functions that its manager is given. This library keeps what outlives all replicas: the first
replica saves every third step, in the background, and replicas that start together begin at the newest checkpoint.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from reshard_ckpt import checkpoint

STEPS = 12
SAVE_EVERY = 3


def train(run: Path, replica: int, lighthouse: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    nn.utils.parameters_to_vector(model.parameters()).sum().backward()
    optimizer.step()  # so that its state is there to be loaded; the loads below replace all of it

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,  # a step with fewer replicas would see less data
        use_async_quorum=False,  # a replica that comes back has its state before the step, and takes part in it
        init_sync=False,  # replicas that start together already have equal states
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
    )
    steps = sorted(run.glob("step_*/catalog.msgpack"), key=lambda path: int(path.parent.name[5:]))
    saving = None
    if steps:
        extra = {"torchft": manager.state_dict()}
        loaded = {"model": model, "optimizer": optimizer, "extra": extra}
        checkpoint.load(steps[-1].parent, loaded)
        manager.load_state_dict(loaded["extra"]["torchft"])
    fault_tolerant = Optimizer(manager, optimizer)
    try:
        while (step := manager.current_step()) < STEPS:
            fault_tolerant.zero_grad()  # replicas meet here; one that came back gets its state
            step = manager.current_step()
            data = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + manager.participating_rank()))
            loss = model(data).square().mean()
            loss.backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            fault_tolerant.step()
            print(step, loss.item().hex(), flush=True)
            if manager.current_step() % SAVE_EVERY == 0 and manager.participating_rank() == 0:
                state = {"model": model, "optimizer": optimizer, "extra": {"torchft": manager.state_dict()}}
                saving = checkpoint.async_save(run / f"step_{manager.current_step()}", state)
        if saving is not None:
            saving.result()
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
