"""Train a Hugging Face Llama under FSDP2, and go on with it on other ranks: ``torchrun --nproc-per-node 2 examples/hf_llama.py``.

A whole training loop: model, optimizer, LR scheduler, and a loader that knows where it is, all in one state. The loader counts
samples of the job and not of a rank, so its place is a plain value, and the run sees the same batches on any number of ranks.
SIGTERM to any rank makes a last save; start it again, on 1, 3 or 4 ranks, and the losses go on as if nothing had happened.
Needs ``transformers``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from reshard_ckpt import checkpoint

BATCH = 12  # samples of a step, over all ranks
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


class Loader:
    """Batches of made-up text in an order that is shuffled anew in each epoch, of which a rank takes its part."""

    def __init__(self, num_samples: int = 60, length: int = 16) -> None:
        self.samples = (torch.randint(0, 64, (num_samples, 1)) + torch.arange(length)) % 64
        self.epoch, self.taken = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch))
            while self.taken < len(order):
                batch = order[self.taken : self.taken + BATCH]
                self.taken += BATCH
                yield self.samples[batch[dist.get_rank() :: dist.get_world_size()]]
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def main(root: str, num_steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = Loader()
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with checkpoint.Manager(root, keep_last=2) as manager:
        loaded = manager.load_latest(state)
        step = saved = 0 if loaded is None else loaded.step
        print(f"rank {dist.get_rank()} is process {os.getpid()}, from step {step}", flush=True)
        batches = iter(loader)  # after the load: it begins where the loader then is
        while step < num_steps and not manager.preempted:
            tokens = next(batches)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item():.6f}, lr {scheduler.get_last_lr()[0]:.3e}", flush=True)
            if step % 20 == 0:
                manager.async_save(step, state, metric=-mean.item())
                saved = step
        if step > saved:
            report = manager.save(step, state)
            print(f"rank {dist.get_rank()} saved step {step}, {report.num_bytes} bytes, and leaves", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_hf_llama", int(sys.argv[2]) if len(sys.argv) > 2 else 60)
