"""Random layouts of DTensors, made by the plainest means, and every route to save and load them with DCP's calls."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import CODES
from tests.layouts import values_of

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # a private name: without it, strided cases are left out
    _StridedShard = None

MESHES = ((4,), (2, 2), (1, 4), (3,), (2,), (2, 1))


@dataclass(frozen=True)
class Case:
    """One tensor, and how it lies on a mesh; no placements: a plain tensor that all ranks have."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    salt: int
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()

    @property
    def whole(self) -> torch.Tensor:
        return values_of(self.shape, self.dtype, self.salt)

    @property
    def is_strided(self) -> bool:
        return any(type(p).__name__ == "_StridedShard" for p in self.placements)

    @property
    def suits_torch(self) -> bool:
        """Whether torch works out the offsets of such a tensor rightly: strided shards only if they are even."""
        if not self.is_strided:
            return True
        dim = self.placements[1].dim
        return self.shape[dim] % (self.mesh[0] * self.mesh[1]) == 0


def local_part(case: Case, coordinate: list[int] | None) -> torch.Tensor:
    """What one rank holds, cut as ``torch.chunk`` cuts; of strided shards the later axis cuts first."""
    local = case.whole
    if coordinate is None:
        return local.new_empty((0,) if local.ndim else ())  # torch takes the shape of a 0-dim tensor from here
    axes = list(range(len(case.mesh)))
    for axis in reversed(axes) if case.is_strided else axes:
        dim = getattr(case.placements[axis], "dim", None)
        if dim is not None:
            local = part(local, case.mesh[axis], coordinate[axis], dim)
    return local


def part(tensor: torch.Tensor, num: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(num, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


class Meshes:
    """The meshes of the job, made once: making one is collective."""

    def __init__(self) -> None:
        size = dist.get_world_size()
        self.of = {
            shape: DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))
            for shape in MESHES
            if torch.Size(shape).numel() <= size
        }

    def tensor(self, case: Case, *, blank: bool) -> torch.Tensor:
        """The tensor of a case on this rank; all zero if blank."""
        if not case.placements:
            return torch.zeros_like(case.whole) if blank else case.whole
        mesh = self.of[case.mesh]
        local = local_part(case, mesh.get_coordinate()).contiguous()
        local = torch.zeros_like(local) if blank else local.clone()
        stride = torch.empty(case.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, case.placements, run_check=False, shape=torch.Size(case.shape), stride=stride)

    def is_right(self, case: Case, tensor: torch.Tensor) -> bool:
        """Whether a tensor on this rank has just the bytes that it should."""
        if not case.placements:
            return same_bytes(tensor, case.whole)
        coordinate = self.of[case.mesh].get_coordinate()
        return coordinate is None or same_bytes(tensor.to_local(), local_part(case, coordinate))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [t.contiguous().reshape(-1) for t in (one, other)]
    return not flat[0].numel() or torch.equal(*(t.view(torch.uint8) for t in flat))


def random_case(draw: random.Random, name: str, meshes: Meshes) -> Case:
    ndim = draw.choice([0, 1, 1, 2, 2, 2, 3])
    case = Case(
        name, tuple(draw.choice([0, 1, 2, 3, 5, 7, 8, 12, 13]) for _ in range(ndim)), draw.choice(CODES), draw.randrange(999)
    )
    return laid_out(draw, case, meshes)


def laid_out(draw: random.Random, case: Case, meshes: Meshes) -> Case:
    """The same tensor on some other layout."""
    if draw.random() < 0.15:
        return Case(case.name, case.shape, case.dtype, case.salt)
    mesh = draw.choice(list(meshes.of))
    dims = [None, *range(len(case.shape))]
    if _StridedShard is not None and len(mesh) == 2 and case.shape and draw.random() < 0.4:
        dim = draw.randrange(len(case.shape))
        placements: tuple[Placement, ...] = (_StridedShard(dim, split_factor=mesh[1]), Shard(dim))
    else:
        chosen = [draw.choice(dims) for _ in mesh]
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in chosen)
    return Case(case.name, case.shape, case.dtype, case.salt, mesh, placements)


def values(seed: int) -> dict[str, Any]:
    """Values of all sorts: small, nested, larger than what is kept in the catalog."""
    return {"step": seed, "list": [{"a": seed, "b": [1.5, None]}, {"a": "x"}], "pair": (1, "b"), "text": "é" * 9000, "none": None}


SAVES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "dcp.save": lambda state, path: dcp.save(state, checkpoint_id=path),
    "dcp.async_save": lambda state, path: dcp.async_save(state, checkpoint_id=path).result(),
    "ReshardWriter": lambda state, path: torch_dcp.save(state, storage_writer=dcp.ReshardWriter(path)),
    "ReshardWriter, async": lambda state, path: torch_dcp.async_save(state, storage_writer=dcp.ReshardWriter(path)).result(),
    "torch": lambda state, path: torch_dcp.save(state, checkpoint_id=path),
}


def load_as_dcp(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint as a folder of DCP, and load that with torch alone."""
    folder = path.with_name(f"{path.name} as DCP's")
    if dist.get_rank() == 0:
        checkpoint.convert(path, folder, to="dcp")
    dist.barrier()
    torch_dcp.load(state, checkpoint_id=folder)


LOADS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "dcp.load": lambda state, path: dcp.load(state, checkpoint_id=path),
    "ReshardReader": lambda state, path: torch_dcp.load(state, storage_reader=dcp.ReshardReader(path)),
}


def differential_job(folder: str, rounds: int, tensors: int) -> tuple[list[str], int]:
    """Save random states by every route, load each by every route on other layouts: what is wrong, and how many loaded."""
    warnings.simplefilter("ignore")
    meshes, draw = Meshes(), random.Random(20240607)
    wrong: list[str] = []
    loaded = 0
    for number in range(rounds):
        cases = [random_case(draw, f"t{i}", meshes) for i in range(tensors)]
        for route, save in SAVES.items():
            # torch's planner speaks for the tensors of its own calls.
            mine = [case for case in cases if case.suits_torch or route.startswith("dcp.")]
            path = Path(folder, f"{number} {route}")
            save({"model": {case.name: meshes.tensor(case, blank=False) for case in mine}, "extra": values(number)}, path)
            loads = LOADS if route != "dcp.save" else {**LOADS, "written as DCP's": load_as_dcp}
            for load_route, load in loads.items():
                others = [laid_out(draw, case, meshes) for case in mine]
                others = [case for case in others if case.suits_torch or load_route.startswith("dcp.")]
                blank = {case.name: meshes.tensor(case, blank=True) for case in others}
                target = {"model": dict(blank), "extra": dict.fromkeys(values(number))}
                target["extra"]["list"] = [{"a": None, "b": None}, {"a": None}]
                load(target, path)
                what = f"round {number}, {route} to {load_route}, rank {dist.get_rank()}"
                wrong += [f"{what}: {case}" for case in others if not meshes.is_right(case, target["model"][case.name])]
                wrong += [
                    f"{what}: {case.name} was replaced" for case in others if target["model"][case.name] is not blank[case.name]
                ]
                wrong += [f"{what}: {target['extra']}"] if target["extra"] != values(number) else []
                loaded += len(others)
        if dist.get_rank() == 0:
            wrong += [
                f"round {number}, {route}: {line}" for route in SAVES for line in faults(Path(folder, f"{number} {route}"), cases)
            ]
            wrong += [f"round {number}: {line}" for line in other_placements(folder, number, cases)]
    dist.barrier()  # nobody leaves while another still works
    return wrong, loaded


def other_placements(folder: str, number: int, cases: list[Case]) -> list[str]:
    """Where a writer that serves torch's calls records another mesh or placement than our own calls do."""
    ours = checkpoint.catalog(Path(folder, f"{number} dcp.save"))
    out = []
    for route in ("ReshardWriter", "ReshardWriter, async"):
        theirs = checkpoint.catalog(Path(folder, f"{number} {route}"))
        if ours.mesh == theirs.mesh:
            pairs = {name: (ours.tensor(name).placement, theirs.tensor(name).placement) for name in theirs.names}
            out += [f"{route}: {name}: {b} instead of {a}" for name, (a, b) in pairs.items() if a != b]
        elif all(case.suits_torch for case in cases):  # otherwise the tensor that shows the mesh may be left out there
            out.append(f"{route}: mesh {theirs.mesh} instead of {ours.mesh}")
    return out


def faults(path: Path, cases: list[Case]) -> list[str]:
    """What one process finds wrong with a checkpoint of these tensors."""
    lines = list(checkpoint.verify(path).problems)
    whole = checkpoint.read(path, ["model"]) if checkpoint.catalog(path).names else {}
    return lines + [
        f"{case}" for case in cases if (name := f"model.{case.name}") in whole and not same_bytes(whole[name], case.whole)
    ]
