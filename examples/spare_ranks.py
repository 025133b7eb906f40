"""A failed rank is replaced by a spare one, and a second one left out: ``torchrun --nproc-per-node 5 examples/spare_ranks.py``.

Four processes train, and one is a spare. When a rank fails, the others form a new process group with the spare in its place, or
without it if there is no spare left. `checkpoint.recover` then fills the new rank from the memory of the others: no step is lost,
and no storage is read.

The failed process steps aside and waits, since torchrun ends all processes when one of them ends with an error. A launcher
that lets the others live may end it.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint

NUM_STEPS = 9
FAILS = {3: 2, 6: 1}
"""By step: the process that fails in it, in this example."""
TIMEOUT = timedelta(seconds=10)
"""Time after which a sum of gradients that waits for a failed rank is given up."""


class Failed(Exception):
    """A rank of this group has failed."""


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}


def train_step(state: dict[str, Any], me: int) -> None:
    """One step of data parallel training: a sum of the gradients of all ranks."""
    step, model, optimizer = state["step"], state["model"], state["optimizer"]
    optimizer.zero_grad()  # also those of a step that a failure has cut short
    batch = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).tensor_split(dist.get_world_size())
    (model(batch[dist.get_rank()]).square().sum() / batch[0].numel()).backward()
    if FAILS.get(step) == me:
        raise MemoryError("this device has had an uncorrectable error")
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    state["step"] += 1


def train(state: dict[str, Any], me: int, store: dist.Store, group: int) -> None:
    """Train to the end, or raise `Failed`."""
    try:
        while state["step"] < NUM_STEPS:
            train_step(state, me)
    except MemoryError:
        store.set(f"failed in {group}", str(me))
        raise Failed from None
    except RuntimeError as error:  # another rank has ended its connections, or did not come in time
        raise Failed from error
    store.set("done", "")


def same_on_all(state: dict[str, Any]) -> bool:
    own = torch.cat([parameter.detach().flatten() for parameter in state["model"].parameters()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return all(torch.equal(part, own) for part in parts)


def main() -> None:
    me, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    members, spares, state = list(range(num - 1)), [num - 1], None
    group = 0
    while True:
        if me in members:
            store.add(f"ready for {group}", 1)
            while store.add(f"ready for {group}", 0) < len(members):  # others may notice a failure later
                time.sleep(0.1)
            prefix = dist.PrefixStore(f"group {group}", store)
            place = {"rank": members.index(me), "world_size": len(members)}
            dist.init_process_group("gloo", store=prefix, timeout=TIMEOUT, **place)
            is_new, state = state is None, state or make_state()
            if group:
                report = checkpoint.recover(state, alive=not is_new)
                is_same = same_on_all(state)
                if dist.get_rank() == 0:
                    sources = {source: num_bytes for source, num_bytes in report.bytes_from.items() if num_bytes}
                    print(f"{len(members)} ranks go on at step {report.step}, bytes from {sources}", flush=True)
                    print("alike bit for bit" if is_same else "ranks differ", flush=True)
            try:
                train(state, me, store, group)
            except Failed:
                dist.destroy_process_group()
        while not store.check([f"failed in {group}"]):  # a spare waits here too
            if store.check(["done"]):
                if dist.is_initialized():
                    dist.destroy_process_group()
                return
            time.sleep(0.1)
        failed = int(store.get(f"failed in {group}"))
        at = members.index(failed)
        members[at : at + 1] = [spares.pop()] if spares else []
        group += 1


if __name__ == "__main__":
    main()
