"""Write the folder of torch_checkpointing that the tests read, with the real package (0.1.1), on the CPU.

In an environment that has torch and ``torch_checkpointing``:

    torchrun --nproc-per-node 2 tests/data/torch_checkpointing/make.py FOLDER

writes ``FOLDER/step-3``, and beside it `expected.safetensors`: the state, gathered by torch, under the names of this library.

The package gathers its metadata in tensors on a GPU, so one of its methods is replaced: the same gathering by gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def gathered(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


class Net(nn.Module):
    """Sizes that two ranks divide unevenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Sequential(nn.Linear(5, 2, bias=False))
        self.register_buffer("seen", torch.tensor([3, 1, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def flattened(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as torchtitan's container gives it."""
    names = {param: name for name, param in net.named_parameters()}
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            flat |= {f"state.{names[param]}.{key}": value for key, value in optimizer.state[param].items()}
            flat |= {f"param_groups.{names[param]}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = gathered
    torch.manual_seed(0)
    net = Net()
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.arange(6.0).reshape(2, 3) + dist.get_rank()).square().sum().backward()
    optimizer.step()
    with_layouts = ItemSpec(resharder=DefaultResharder(), required=False)
    manager = CheckpointManager.Config(
        items={"model": with_layouts, "optimizer": with_layouts},
        default=ItemSpec(requires_copy=False),
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    state = {
        "model": net.state_dict(),
        "optimizer": flattened(net, optimizer),
        "train_state": {"step": 3, "ntokens_seen": 48},
        "dataloader": {f"dp_rank_{dist.get_rank()}": bytes([dist.get_rank()]) * 4, "world_size": 2},
    }
    manager.save(str(folder / "step-3"), state)
    manager.close()
    tensors = {f"model.{name}": part for name, part in state["model"].items()}
    tensors |= {f"optimizer.{name}": part for name, part in state["optimizer"].items() if torch.is_tensor(part)}
    full = {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in tensors.items()}
    if dist.get_rank() == 0:
        save_file({name: tensor.detach().contiguous() for name, tensor in full.items()}, folder / "expected.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
