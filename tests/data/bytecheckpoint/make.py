"""Write the folders of ByteCheckpoint that the tests read, with the real package.

In an environment that has torch, ``bytecheckpoint`` (0.0.2, whose code is that of 0.0.3), and what it imports:

    torchrun --nproc-per-node 2 tests/data/bytecheckpoint/make.py FOLDER fsdp2

writes one flavour: ``fsdp``, ``fsdp-flat`` (what the package calls decomposed), ``fsdp2`` or ``ddp``. Beside each lies
`expected.safetensors`: what the package's own `load` puts into a fresh model and optimizer on the same ranks, gathered by torch,
under the names that this library gives them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    """Sizes that two ranks divide unevenly, a buffer, and a name with a dot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Sequential(nn.Linear(5, 2, bias=False))
        self.register_buffer("seen", torch.tensor([3, 1, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def job(flavour: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: nn.Module = Net()
    if flavour == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif flavour.startswith("fsdp-") or flavour == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1 / seed)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.arange(6.0).reshape(2, 3) + dist.get_rank()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(flavour: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of the model and of the optimizer, whole, by the names of this library."""
    if flavour.startswith("fsdp-") or flavour == "fsdp":
        model, state = _of_fsdp(net, optimizer)
    else:
        names = [name.removeprefix("module.") for name, _ in net.named_parameters()]
        model = {name.removeprefix("module."): tensor for name, tensor in net.state_dict().items()}
        state = {names[i]: entry for i, entry in optimizer.state_dict()["state"].items()}
    out = {f"model.{name}": tensor for name, tensor in model.items()}
    out |= {f"optimizer.state.{fqn}.{key}": value for fqn, entry in state.items() for key, value in entry.items()}
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in out.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in whole.items()}


def _of_fsdp(net: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """What FSDP1 itself gathers of the parameters; of the state, the flat parts of all ranks put together by their place."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(net):
        model = {name: tensor.detach().clone() for name, tensor in net.module.state_dict().items()}
        shapes = {name: param.shape for name, param in net.module.named_parameters()}
    state: dict[str, Any] = {name: {} for name in shapes}
    for (name, shape), (_, param) in zip(shapes.items(), net.named_parameters(), strict=True):
        held: list[Any] = [None, None]
        dist.all_gather_object(held, optimizer.state.get(param, {}))
        for key in ("exp_avg", "exp_avg_sq"):
            state[name][key] = torch.cat([entry[key].flatten() for entry in held if key in entry]).reshape(shape)
        state[name]["step"] = next(entry["step"] for entry in held if "step" in entry)
    return model, state


def main(folder: str, flavour: str) -> None:
    import bytecheckpoint

    dist.init_process_group("gloo")
    net, optimizer = job(flavour, 1)
    for _ in range(2):
        step(net, optimizer)
    rank = dist.get_rank()
    extra = {"step": 7, "rank": rank, "rng": torch.arange(4, dtype=torch.uint8) + rank, "lr": {"last": [0.5, None]}}
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "extra_state": extra}
    framework, _, flat = flavour.partition("-")
    options = {"save_decomposed_model_optimizer": True} if flat else {}
    bytecheckpoint.save(folder, state, framework=framework, global_steps=5, **options)
    dist.barrier()
    net, optimizer = job(flavour, 2)
    step(net, optimizer)
    options = {"load_decomposed_model_optimizer": True} if flat else {}
    bytecheckpoint.load(f"{folder}/global_step_5", {"model": net, "optimizer": optimizer}, framework=framework, **options)
    expected = gathered(flavour, net, optimizer)
    if rank == 0:
        save_file(expected, Path(folder, "expected.safetensors"))
    dist.barrier()
    sys.stdout.flush()
    for server in multiprocessing.active_children():
        server.kill()  # `os._exit` would leave it behind
    os._exit(0)  # the package's own threads keep the interpreter from its end


if __name__ == "__main__":
    main(*sys.argv[1:])
