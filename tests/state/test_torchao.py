"""Modules with torchao's quantized weights: saved as they are, and loaded on other numbers of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from tests.launch import run_ranks

pytest.importorskip("torchao")


def quantized(kind: str, seed: int) -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 6))
    quantize_(net, {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[kind]())
    return net


def sharded(kind: str, seed: int) -> nn.Module:
    """The same module, with each weight as a DTensor whose local tensor has this rank's rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    net, size, rank = quantized(kind, seed), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (net[0], net[2]):
        rows = layer.weight.shape[0] // size
        local = layer.weight.detach()[rank * rows : (rank + 1) * rows]
        # As FSDP2 makes one: `from_local` views the local tensor, which torchao's class of int8 cannot.
        meta = TensorMeta(layer.weight.shape, layer.weight.stride(), layer.weight.dtype)
        whole = DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
        layer.weight = nn.Parameter(whole, requires_grad=False)
    return net


def save(folder: str, kind: str) -> None:
    checkpoint.save(folder, {"model": sharded(kind, 0)})


def load(folder: str, kind: str) -> bool:
    net, expected = sharded(kind, 5), sharded(kind, 0)
    checkpoint.load(folder, {"model": net})
    pairs = [(net[i].weight._local_tensor, expected[i].weight._local_tensor) for i in (0, 2)]
    return all(torch.equal(getattr(a, key), getattr(b, key)) for a, b in pairs for key in a.__tensor_flatten__()[0])


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_quantized_weights_go_on_at_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), kind)
    net, samples = quantized(kind, 5), torch.arange(32.0).reshape(2, 16) / 32
    checkpoint.load(tmp_path, {"model": net})
    assert torch.equal(net(samples), quantized(kind, 0)(samples))
    assert all(run_ranks(load, 3, str(tmp_path), kind))
    names: dict[str, Any] = checkpoint.read(tmp_path)
    assert {"model.0.weight.qdata", "model.0.weight.scale", "model.0.bias"} <= set(names)
