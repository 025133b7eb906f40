"""DCP saves and this library loads, and the other way round: random DTensors, and real models with optimizers in each form."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import MismatchError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from tests.distributed.cases import Case
from tests.distributed.net import STATELESS, TIED, Layout, blank, named
from tests.helpers import NEWER
from tests.launch import run_ranks
from tests.layouts import chunk, values_of
from tests.tries import is_long, times

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """How one tensor lies on a mesh; the whole of it is `values_of`."""

    shape: Shape
    code: str
    salt: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def box(self) -> tuple[slice, ...]:
        """The region of this rank: each mesh axis cuts what the axes before it left."""
        begin, size = [0] * len(self.shape), list(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                offset, length = chunk(size[placement.dim], self.mesh.size(axis), self.mesh.get_local_rank(axis))
                begin[placement.dim] += offset
                size[placement.dim] = length
        return tuple(slice(low, low + length) for low, length in zip(begin, size, strict=True))

    def tensor(self, *, full: bool) -> torch.Tensor:
        """The DTensor, with its values or blank."""
        whole = values_of(self.shape, self.code, self.salt)
        part = whole[self.box()].clone() if full else torch.zeros_like(whole[self.box()])
        stride = whole.stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=whole.shape, stride=stride)

    def is_right(self, tensor: torch.Tensor) -> bool:
        """Whether this rank's part is, in every byte, that of the whole."""
        assert isinstance(tensor, DTensor)
        got, wanted = tensor.to_local(), values_of(self.shape, self.code, self.salt)[self.box()].contiguous()
        return got.shape == wanted.shape and torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


class Meshes:
    """Every mesh of all ranks, made once."""

    def __init__(self) -> None:
        size = dist.get_world_size()
        grids = [(size,), *((n, size // n) for n in range(1, size + 1) if size % n == 0), (1, 2, size // 2)]
        self.all = [DeviceMesh("cpu", torch.arange(size).view(grid)) for grid in grids]

    def spread(self, rng: random.Random, shape: Shape, code: str, salt: int) -> Spread:
        mesh = rng.choice(self.all)
        choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        return Spread(shape, code, salt, mesh, tuple(rng.choice(choices) for _ in range(mesh.ndim)))


def random_shape(rng: random.Random) -> Shape:
    ndim = rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
    return tuple(rng.choice([0, 1, 2, 3, 5, 8, 13]) if ndim < 3 else rng.choice([1, 2, 3, 5]) for _ in range(ndim))


def random_meshes(folder: str, num_cases: int, num_tensors: int) -> list[str]:
    """Save random tensors with DCP and load them with this library, and the other way round; what came out wrong."""
    warnings.simplefilter("ignore")
    meshes, wrong = Meshes(), []
    for case in range(num_cases):
        rng = random.Random(case)
        tensors = [(random_shape(rng), rng.choice(sorted(TORCH_DTYPES)), i) for i in range(num_tensors)]
        saved, loaded, again = ([meshes.spread(rng, *tensor) for tensor in tensors] for _ in range(3))
        theirs, ours, back = (Path(folder, f"{case}-{name}") for name in ("dcp", "ours", "back"))
        options = {"single_file_per_rank": case % 3 > 0, "thread_count": 1 + case % 2}
        try:
            dcp.save({"model": full(saved)}, storage_writer=dcp.FileSystemWriter(theirs, sync_files=False, **options))
        except CheckpointException as error:
            wrong += [f"{case}: DCP refused: {error}"] if NEWER else []
        else:
            found = blanks(loaded)
            checkpoint.load(theirs, {"model": found})
            bad = [spread for i, spread in enumerate(loaded) if not right(spread, found, i)]
            wrong += [f"{case}: DCP to ours: {spread}" for spread in bad]
        checkpoint.save(ours, {"model": full(loaded), "extra": {"case": case}})
        if dist.get_rank() == 0:
            checkpoint.convert(ours, back, to="dcp")
        dist.barrier()
        state = {"model": blanks(again), "extra": {"case": None}}
        dcp.load(state, checkpoint_id=back)
        found = state["model"]
        wrong += [
            f"{case}: ours to DCP: {loaded[i]} to {spread}" for i, spread in enumerate(again) if not right(spread, found, i)
        ]
        wrong += [] if state["extra"] == {"case": case} else [f"{case}: {state['extra']}"]
    return wrong


def full(spreads: list[Spread]) -> dict[str, torch.Tensor]:
    return {f"t{i}": spread.tensor(full=True) for i, spread in enumerate(spreads)}


def blanks(spreads: list[Spread]) -> dict[str, torch.Tensor]:
    return {f"t{i}": spread.tensor(full=False) for i, spread in enumerate(spreads)}


def right(spread: Spread, found: dict[str, torch.Tensor], i: int) -> bool:
    # A scalar or an empty tensor is blank and full alike in too few ways to tell; the others fill it out.
    return prod(spread.shape) == 0 or spread.is_right(found[f"t{i}"])


SOURCES = (
    (Layout("plain"), "nested"),
    (Layout("plain"), "flat"),
    (Layout("ddp", dp=2, data="ddp"), "nested"),
    (Layout("fsdp", dp=4), "nested"),
    (Layout("fsdp", dp=3), "flat"),
    (Layout("tp", tp=2), "nested"),
    (Layout("tp", tp=4), "flat"),
    (Layout("hsdp", rep=2, dp=2), "nested"),
    (Layout("hsdp", rep=2, dp=2), "flat"),
    *([(Layout("fsdp×tp", dp=2, tp=2), "flat")] if NEWER else []),
    (Layout("pp", pp=2), "flat"),
)
"""Layouts that DCP saves, and the form of the optimizer state; a stage's groups are whole in the flat form alone."""

TARGETS = (
    Layout("plain"),
    Layout("ddp", dp=2, data="ddp"),
    Layout("fsdp", dp=4),
    Layout("fsdp", dp=3),
    Layout("tp", tp=3),
    *([Layout("fsdp×tp", dp=2, tp=2)] if NEWER else []),
    Layout("hsdp", rep=2, dp=2),
    Layout("pp", pp=2, stages_per_rank=2),
)


def options(form: str, *, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat", strict=strict)


def dcp_state(case: Case, modules: list[Any], optimizers: list[Any], form: str) -> dict[str, Any]:
    """What a trainer hands to dcp.save: the state dicts of all modules and optimizers of this rank."""
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for module, one in zip(modules, optimizers, strict=True):
        model.update(get_model_state_dict(module))
        optimizer.update(get_optimizer_state_dict(module, one, options=options(form)))
    return {"model": model, "optimizer": optimizer}


def save_with_dcp(case: Case, path: Path, form: str) -> None:
    optimizers = case.optimizers(case.modules, full=True)
    state = dcp_state(case, case.modules, optimizers if isinstance(optimizers, list) else [optimizers], form)
    dcp.save(state, checkpoint_id=path, process_group=case.place.group)


def load_with_dcp(case: Case, path: Path, form: str) -> list[str]:
    """Load into a target that is blank before, and say what came wrong."""
    blank(case.target)
    optimizers = case.optimizers(case.target, full=False)
    every = optimizers if isinstance(optimizers, list) else [optimizers]
    state = dcp_state(case, case.target, every, form)
    # torch makes state for every parameter; the one that has none in the reference is not in the checkpoint.
    dcp.load(state, checkpoint_id=path, process_group=case.place.group, planner=DefaultLoadPlanner(allow_partial_load=True))
    for module, one in zip(case.target, every, strict=True):
        set_model_state_dict(module, state["model"], options=StateDictOptions(strict=case.layout.pp == 1))
        # Not strict: torch looks for the state of a tied weight under both of its names, though it returns one of them.
        set_optimizer_state_dict(module, one, state["optimizer"], options=options(form, strict=False))
        for name, p in named([module]):
            if name == STATELESS:
                one.state.pop(p, None)
    return [*case.wrong_model(), *case.wrong_adam(optimizers)]


def load_or_say_why(case: Case, path: Path, saved: Layout) -> list[str]:
    """Load; where that cannot work, nothing is wrong if the error says why.

    DCP keeps the optimizer state of a tied weight under one of its names. Stages that hold the two names apart need both.
    """
    if case.layout.pp == 1 or saved.pp > 1:
        return case.load(path)
    try:
        case.load(path)
    except MismatchError as error:
        return [] if f"no saved group holds parameter {TIED[1]}" in str(error) else [str(error)]
    return ["state that DCP did not save was loaded"]


def models(folder: str) -> list[str]:
    """Save models and optimizers with DCP and load them with this library in every layout, and the other way round."""
    warnings.simplefilter("ignore")
    sources = [(Case(layout), form) for layout, form in SOURCES]
    targets = [Case(layout) for layout in TARGETS]
    wrong: list[str] = []
    for i, (case, form) in enumerate(sources):
        if case.place.mine:
            save_with_dcp(case, Path(folder, str(i)), form)
    dist.barrier()
    for i, (source, form) in enumerate(sources):
        for j, case in enumerate(targets):
            # Long, each into each; usually each into a quarter of them, by turns, and stages into all.
            if case.place.mine and (is_long() or (i + j) % 4 == 0 or source.layout.pp > 1):
                what = f"{source.layout} {form} to {case.layout}: rank {dist.get_rank()}: "
                wrong += [what + problem for problem in load_or_say_why(case, Path(folder, str(i)), source.layout)]
    saved = Path(folder, "ours")
    targets[2].save(saved)
    dist.barrier()
    for form in ("nested", "flat"):
        if dist.get_rank() == 0:
            checkpoint.convert(saved, Path(folder, form), to="dcp", optimizer=form)
    dist.barrier()
    for case, form in sources:
        if case.place.mine and case.layout.pp == 1 and (NEWER or form == "nested"):
            problems = load_with_dcp(case, Path(folder, form), form)
            wrong += [f"ours to DCP {form} on {case.layout}: rank {dist.get_rank()}: {problem}" for problem in problems]
    return wrong


CASES, TENSORS = times(6), 15


@pytest.mark.slow
def test_random_tensors_on_random_meshes(tmp_path: Path):
    """180 random pairs of a saved and a loaded layout: 90 from DCP's folders, 90 into them."""
    ranks = run_ranks(random_meshes, 4, str(tmp_path), CASES, TENSORS, timeout_s=times(800))
    wrong = [line for rank in ranks for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:20]])


@pytest.mark.slow
def test_models_and_optimizers_in_each_form(tmp_path: Path):
    wrong = [line for rank in run_ranks(models, 4, str(tmp_path), timeout_s=800) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])
