"""A training loop that makes a last save on SIGTERM: ``torchrun --nproc-per-node 2 examples/preemption.py``.

A cluster that takes a job's machines away sends SIGTERM some time before. `manager.preempted` is then True on all ranks at the
same step, whichever of them got the signal and when. So all leave the loop together, save, and exit with 0. Start the job again,
also on another number of ranks, and it goes on from there. To try it, ``kill -TERM`` one of the
processes whose numbers it prints.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint


def main(root: str, num_steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    with checkpoint.Manager(root, keep_last=2) as manager:
        loaded = manager.load_latest(state)
        step = 0 if loaded is None else loaded.step
        print(f"rank {dist.get_rank()} is process {os.getpid()}, from step {step}", flush=True)
        saved = step
        while step < num_steps and not manager.preempted:  # read once a step, on every rank
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}", flush=True)
            if step % 1000 == 0:
                manager.async_save(step, state)
                saved = step
        if step > saved:
            report = manager.save(step, state)
            print(f"rank {dist.get_rank()} saved step {step} in {report.duration_s:.2f} s, and leaves", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_preemption", int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
