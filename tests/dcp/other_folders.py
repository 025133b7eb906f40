"""What else torch's writers make of a distributed state: safetensors of each rank, and metadata of each rank."""

from __future__ import annotations

import inspect
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CorruptError, UsageError
from tests.dcp.on_ranks import same_bytes
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


def wrong_in(found: dict[str, torch.Tensor], what: str) -> list[str]:
    """The tensors that are not what was saved, each rank's own part."""
    out = []
    for name, tensor in found.items():
        expected = whole(name)
        if isinstance(tensor, DTensor):
            parts = expected.chunk(2, tensor.placements[0].dim)
            rank = dist.get_rank()
            expected, tensor = parts[rank] if rank < len(parts) else expected[:0], tensor.to_local()
        if expected.numel() and not same_bytes(tensor, expected.contiguous()):
            out.append(f"{what}: {name} on rank {dist.get_rank()}")
    return out


def hub_job(folder: str) -> list[str]:
    """Safetensors that each rank wrote, alone or in several files, open as one model."""
    wrong: list[str] = []
    state = sharded()
    for number, mapping in enumerate([None, {name: 1 + i % 2 for i, name in enumerate(sorted(state))}]):
        path = Path(folder, f"hub {number}")
        writer = torch_dcp.HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=mapping, save_distributed=True)
        torch_dcp.save(dict(state), storage_writer=writer)
        dist.barrier()
        read = checkpoint.read(path)
        wrong += [f"hub {number}: {set(read)}"] if set(read) != {f"model.{name}" for name in SHAPES} else []
        wrong += wrong_in({name: read[f"model.{name}"] for name in SHAPES}, f"hub {number} read")
        for dim in (0, 1):
            target = blank(state, dim)
            checkpoint.load(path, {"model": target})
            wrong += wrong_in(target, f"hub {number} on dim {dim}")
        wrong += list(checkpoint.verify(path).problems)
        dist.barrier()
        if dist.get_rank() == 0:
            wrong += damaged_hub(path)
    return wrong


def error_of(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def damaged_hub(path: Path) -> list[str]:
    """A file by itself, and a folder without the first one."""
    first = min(path.glob("shard-00001-*"))
    alone = error_of(lambda: checkpoint.read(first))
    first.rename(path / "gone")
    lacking = error_of(lambda: checkpoint.read(path))
    return [
        *([] if alone.startswith(UsageError.__name__) and "pass the folder" in alone else [f"alone: {alone}"]),
        *(
            []
            if "model.both: no saved shard holds some of it, 24 of 48 elements are saved" in lacking
            else [f"lacking: {lacking}"]
        ),
    ]


def own_metadata_job(folder: str) -> list[str]:
    """Ranks that saved without collectives: one checkpoint of all that they do not contradict each other in."""
    warnings.simplefilter("ignore")
    path, rank, wrong = Path(folder, "own"), dist.get_rank(), []
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
    catalog = checkpoint.catalog(path)
    wrong += [f"own: {sorted(catalog.unreadable)}"] if sorted(catalog.unreadable) != ["extra.seed", "rng"] else []
    for name in ("rng", "extra.seed"):
        error = error_of(lambda name=name: checkpoint.read(path, [name]))
        wrong += [f"own: {name}: {error}"] if "differs between ranks" not in error else []
    for dim in (0, 1):
        target = {"model": blank(state["model"], dim), "plain": torch.zeros(9), "large": torch.zeros(1 << 19)}
        target |= {"second": torch.zeros(2), "name": "", "extra": {"step": 0, "list": None}}
        again = {**target, "model": blank(state["model"], dim), "extra": {"step": 0, "list": [{"a": 0}, {"b": 0}]}}
        checkpoint.load(path, target, strict=False)
        dcp.load(again, checkpoint_id=path)
        for found in (target, again):
            wrong += wrong_in(found["model"], f"own, dim {dim}")
            same = torch.equal(found["plain"], state["plain"]) and torch.equal(found["large"], state["large"])
            wrong += [] if same and found["second"].tolist() == [2.0, 2.0] else [f"own: {found}"]
            wrong += [f"own: {found['extra']}"] if found["extra"] != {"step": 3, "list": [{"a": 1}, {"b": 2}]} else []
            wrong += [f"own: {found['name']}"] if found["name"] != "b" else []
    dist.barrier()
    return wrong + (damaged_own(path) if rank == 0 else [])


def damaged_own(path: Path) -> list[str]:
    """Leftovers of a save by more ranks, a large replica that differs at its end, and a rank that is missing."""
    wrong = []
    stale = path.with_name("stale")
    shutil.copytree(path, stale)
    shutil.copy(stale / "__0.metadata", stale / "__2.metadata")
    wrong += [f"stale: {e}"] if (e := error_of(lambda: checkpoint.read(stale, ["model.rows"]))) != "none" else []
    entry = torch_dcp.FileSystemReader(path).read_metadata(rank=1).storage_data
    place = next(info for index, info in entry.items() if index.fqn == "large")
    with open(path / place.relative_path, "r+b") as file:
        file.seek(place.offset + (1 << 21) - 100)
        file.write(b"\1")
    wrong += [f"end: {e}"] if "differs between ranks" not in (e := error_of(lambda: checkpoint.read(path, ["large"]))) else []
    (stale / "__1.metadata").unlink()
    missing = error_of(lambda: checkpoint.read(stale))
    return wrong + ([] if missing.startswith(CorruptError.__name__) and "no __1.metadata" in missing else [f"missing: {missing}"])


def folders_job(folder: str) -> list[str]:
    """All of the above that this torch can write, on two ranks."""
    wrong = hub_job(folder) if HAS_HUB_WRITER else []
    wrong += own_metadata_job(folder) if HAS_OWN_METADATA else []
    dist.barrier()
    return wrong
