"""Tensors that are made of others, as torchao's quantized weights are, in modules, dicts and DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError, MismatchError, UnsupportedError
from tests.launch import on_ranks, run_ranks


class Scaled(torch.Tensor):
    """Whole numbers, and a scale for each block; it says what it is made of as torchao's classes do."""

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_of, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_of", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return cls(args[0].data_of, args[0].scale)
        raise NotImplementedError(f"{func}")


ROWS, COLUMNS = 12, 8


def weight(scales: tuple[int, int], first: int = 0) -> Scaled:
    data = torch.arange(first, first + ROWS * COLUMNS).remainder(100).to(torch.int8).reshape(ROWS, COLUMNS)
    return Scaled(data, torch.arange(first, first + scales[0] * scales[1], dtype=torch.float32).reshape(scales) + 1)


class Net(nn.Module):
    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(parameter, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3))


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.data_of, b.data_of) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("wrap", [Net, lambda tensor: {"weight": tensor, "bias": torch.zeros(3)}])
def test_its_tensors_have_names_of_their_own_and_load_in_place(wrap: Any, tmp_path: Path) -> None:
    saved, loaded = weight((ROWS, 1)), weight((ROWS, 1), first=50)
    checkpoint.save(tmp_path, {"model": wrap(saved)})
    assert {*checkpoint.read(tmp_path)} == {"model.weight.data_of", "model.weight.scale", "model.bias"}
    checkpoint.load(tmp_path, {"model": wrap(loaded)})
    assert same(loaded, saved)
    with pytest.raises(MismatchError, match=r"model.weight"):
        checkpoint.load(tmp_path, {"model": wrap(torch.zeros(ROWS, COLUMNS))})


def sharded(dim: int, scales: tuple[int, int], first: int = 0) -> Any:
    """A DTensor whose local tensor is this rank's rows or columns, with their scales."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    size, rank, whole = dist.get_world_size(), dist.get_rank(), weight(scales, first)
    parts = [part.chunk(size, dim)[rank] if part.shape[dim] > 1 else part for part in (whole.data_of, whole.scale)]
    local = Scaled(*(part.clone() for part in parts))
    mesh = init_device_mesh("cpu", (size,))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=(COLUMNS, 1))


def save(folder: str, dim: int, scales: tuple[int, int]) -> None:
    checkpoint.save(folder, {"model": Net(sharded(dim, scales))})


def load(folder: str, dim: int, scales: tuple[int, int]) -> bool:
    net = Net(sharded(dim, scales, first=50))
    checkpoint.load(folder, {"model": net})
    return same(net.weight._local_tensor, sharded(dim, scales)._local_tensor)


@pytest.mark.parametrize(
    ("dim", "other", "scales"), [(0, 0, (ROWS, 1)), (0, 0, (1, 1)), (0, 1, (ROWS, COLUMNS // 2)), (1, 0, (ROWS, 1))]
)
def test_a_sharded_one_goes_on_at_other_numbers_of_ranks(dim: int, other: int, scales: tuple[int, int], tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), dim, scales)
    whole, loaded = weight(scales), weight(scales, first=50)
    checkpoint.load(tmp_path, {"model": Net(loaded)})
    assert same(loaded, whole)
    ranks = 3 if other == 0 and dim == 0 else 2
    assert all(run_ranks(load, ranks, str(tmp_path), other, scales))


@on_ranks(2)
def test_a_place_that_cannot_be_told_is_refused_by_name(tmp_path: Path) -> None:
    """Scales whose place cannot be told, and one scale that differs between ranks."""
    told = r"model.weight.scale: has shape \(5, 1\) in a shard of shape \(6, 8\) of \(12, 8\)"
    for error, says, scale in (
        (UnsupportedError, told, torch.zeros(5, 1)),
        (LayoutError, "model.weight.scale", torch.full((1, 1), float(dist.get_rank()))),
    ):
        tensor = sharded(0, (ROWS, 1))
        tensor._local_tensor.scale = scale
        with pytest.raises(error, match=says):
            checkpoint.save(tmp_path, {"model": Net(tensor)})
