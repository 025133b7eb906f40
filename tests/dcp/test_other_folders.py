"""What else torch's writers make of a distributed state: safetensors of each rank, and metadata of each rank."""

from __future__ import annotations

import inspect
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CorruptError, UsageError
from tests.dcp.on_ranks import same_bytes
from tests.launch import on_ranks
from tests.layouts import values_of

SHAPES = {"rows": (7, 3), "columns": (4, 5), "both": (6, 8), "grid": (5, 5), "whole": (3, 2), "few": (1, 4)}
DTYPES = {"rows": "F32", "columns": "BF16", "both": "F16", "grid": "F64", "whole": "F32", "few": "I64"}

HAS_HUB_WRITER = (
    hasattr(torch_dcp, "HuggingFaceStorageWriter")
    and "save_distributed" in inspect.signature(torch_dcp.HuggingFaceStorageWriter).parameters
)
HAS_OWN_METADATA = "use_collectives" in inspect.signature(torch_dcp.save).parameters


def whole(name: str) -> torch.Tensor:
    return values_of(SHAPES[name], DTYPES[name], len(name))


def sharded() -> dict[str, torch.Tensor]:
    """Tensors cut in all sorts of ways over two ranks, unevenly too."""
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(1)], "whole": [Replicate()], "few": [Shard(0)]}
    state = {name: distribute_tensor(whole(name), mesh, how) for name, how in placements.items()}
    return {**state, "grid": distribute_tensor(whole("grid"), grid, [Shard(1), Shard(0)])}


def blank(state: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """The same tensors, empty, cut along another dim."""
    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(torch.zeros_like(whole(name)), mesh, [Shard(dim)]) for name in state}


def is_right(found: dict[str, torch.Tensor]) -> bool:
    """Return whether this rank's part of each tensor has the saved values."""
    same = []
    for name, tensor in found.items():
        expected = whole(name)
        if isinstance(tensor, DTensor):
            parts = expected.chunk(2, tensor.placements[0].dim)
            rank = dist.get_rank()
            expected, tensor = parts[rank] if rank < len(parts) else expected[:0], tensor.to_local()
        same.append(not expected.numel() or same_bytes(tensor, expected.contiguous()))
    return all(same)


@pytest.mark.skipif(not HAS_HUB_WRITER, reason="this torch writes no safetensors of each rank")
@pytest.mark.parametrize("num_files", [1, 2])
@on_ranks(2, timeout_s=800)
def test_safetensors_that_each_rank_wrote_open_as_one_model(tmp_path: Path, num_files: int):
    state = sharded()
    mapping = {name: 1 + i % 2 for i, name in enumerate(sorted(state))} if num_files > 1 else None
    writer = torch_dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=mapping, save_distributed=True)
    torch_dcp.save(dict(state), storage_writer=writer)
    dist.barrier()
    read = checkpoint.read(tmp_path)
    assert set(read) == {f"model.{name}" for name in SHAPES}
    assert is_right({name: read[f"model.{name}"] for name in SHAPES})
    for dim in (0, 1):
        target = blank(state, dim)
        checkpoint.load(tmp_path, {"model": target})
        assert is_right(target)
    assert checkpoint.verify(tmp_path).ok
    dist.barrier()
    if dist.get_rank() == 0:
        first = min(tmp_path.glob("shard-00001-*"))
        with pytest.raises(UsageError, match="pass the folder"):
            checkpoint.read(first)
        first.rename(tmp_path / "gone")
        with pytest.raises(CheckpointError, match="model.both: no saved shard holds some of it, 24 of 48 elements are saved"):
            checkpoint.read(tmp_path)


@pytest.mark.skipif(not HAS_OWN_METADATA, reason="this torch writes no metadata of each rank")
@on_ranks(2, timeout_s=800)
def test_ranks_that_saved_without_collectives_made_one_checkpoint_of_all_that_they_agree_in(tmp_path: Path):
    warnings.simplefilter("ignore")
    path, rank = tmp_path / "own", dist.get_rank()
    state: dict[str, Any] = {
        "model": sharded(),
        "plain": torch.arange(9.0),
        "large": torch.ones(1 << 19),
        "rng": torch.full((5,), float(rank)),
        "extra": {"step": 3, "seed": rank, "list": [{"a": 1}, {"b": 2}]},
        **({"second": torch.full((2,), 2.0), "name": "b"} if rank else {}),
    }
    torch_dcp.save(state, checkpoint_id=path, use_collectives=False)
    dist.barrier()
    assert sorted(checkpoint.catalog(path).unreadable) == ["extra.seed", "rng"]
    for name in ("rng", "extra.seed"):
        with pytest.raises(CheckpointError, match="differs between ranks"):
            checkpoint.read(path, [name])
    for dim in (0, 1):
        target = {"model": blank(state["model"], dim), "plain": torch.zeros(9), "large": torch.zeros(1 << 19)}
        target |= {"second": torch.zeros(2), "name": "", "extra": {"step": 0, "list": None}}
        again = {**target, "model": blank(state["model"], dim), "extra": {"step": 0, "list": [{"a": 0}, {"b": 0}]}}
        checkpoint.load(path, target, strict=False)
        dcp.load(again, checkpoint_id=path)
        for found in (target, again):
            assert is_right(found["model"]), dim
            assert torch.equal(found["plain"], state["plain"])
            assert torch.equal(found["large"], state["large"])
            assert found["second"].tolist() == [2.0, 2.0]
            assert found["extra"] == {"step": 3, "list": [{"a": 1}, {"b": 2}]}
            assert found["name"] == "b"
    dist.barrier()
    if rank == 0:
        damage(path)


def damage(path: Path) -> None:
    """Leftovers of a save by more ranks, a large replica that differs at its end, and a rank that is missing."""
    stale = path.with_name("stale")
    shutil.copytree(path, stale)
    shutil.copy(stale / "__0.metadata", stale / "__2.metadata")
    checkpoint.read(stale, ["model.rows"])
    entry = torch_dcp.FileSystemReader(path).read_metadata(rank=1).storage_data
    place = next(info for index, info in entry.items() if index.fqn == "large")
    with open(path / place.relative_path, "r+b") as file:
        file.seek(place.offset + (1 << 21) - 100)
        file.write(b"\1")
    with pytest.raises(CheckpointError, match="differs between ranks"):
        checkpoint.read(path, ["large"])
    (stale / "__1.metadata").unlink()
    with pytest.raises(CorruptError, match="no __1.metadata"):
        checkpoint.read(stale)
