"""Storage for DCP that fails at one of its stages on some ranks, and what each rank then sees."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, LayoutError, StorageError
from reshard_ckpt.storage.local import LocalWriter
from tests.dcp.on_ranks import same_bytes
from tests.helpers import NEWER
from tests.tries import pairs

WRITER_STAGES = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write", "finish")
READER_STAGES = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
COORDINATORS = ("prepare_global_plan", "finish")


class Broken(Exception):
    """What a faulty stage raises."""


def faulty(kind: type, stage: str, ranks: tuple[int, ...]) -> type:
    """A reader or writer that raises at a stage, on these ranks."""

    def fail(*_: Any, **__: Any) -> None:
        raise Broken(f"{stage} on rank {dist.get_rank()}")

    return type(f"Faulty{kind.__name__}", (kind,), {stage: fail} if dist.get_rank() in ranks else {})


@contextmanager
def faulty_files(ranks: tuple[int, ...]) -> Iterator[None]:
    """Make each write into a file fail on these ranks."""

    def fail(*_: Any) -> None:
        raise StorageError(f"write on rank {dist.get_rank()}")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(LocalWriter, "write", fail)
        yield


def ranks_of(stage: str) -> list[tuple[int, ...]]:
    return [(0,)] if stage in COORDINATORS else [(0,), (1,), (0, 1)]


def failure(call: Callable[[], object]) -> set[int] | str:
    """The ranks that failed, by what the call raises; anything else as text."""
    try:
        call()
    except CheckpointException as error:
        return set(error.failures)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    return "raised nothing"


def faulty_job(folder: str) -> list[str]:
    """Break each stage of saving and loading in turn; what went otherwise than it should."""
    warnings.simplefilter("ignore")
    path, wrong = Path(folder, "checkpoint"), []
    state = {"w": torch.arange(10.0), "n": 1}
    mesh = init_device_mesh("cpu", (2,))
    sharded = {"w": distribute_tensor(state["w"], mesh, [Shard(0)]), "n": 1}
    torch_dcp.save(sharded, storage_writer=dcp.ReshardWriter(path))
    for stage in WRITER_STAGES:
        for ranks in ranks_of(stage):
            writer = faulty(dcp.ReshardWriter, stage, ranks)(path)
            with faulty_files(ranks if stage == "write" else ()):
                failed = failure(lambda writer=writer: torch_dcp.save({**sharded, "n": 2}, storage_writer=writer))
            wrong += [f"save, {stage} on {ranks}: {failed}"] if failed != set(ranks) else []
            # The last stage comes after the commit.
            held = {**state, "n": 2} if stage == "finish" else state
            wrong += [f"save, {stage} on {ranks}: not what should be there"] if not is_there(path, held) else []
    for stage in READER_STAGES:
        for ranks in ranks_of(stage):
            reader, target = faulty(dcp.ReshardReader, stage, ranks)(path), {"w": torch.zeros(10), "n": 0}
            failed = failure(lambda reader=reader, target=target: torch_dcp.load(target, storage_reader=reader))
            wrong += [f"load, {stage} on {ranks}: {failed}"] if failed != set(ranks) else []
    # After all of that, the same objects' classes without faults work, and nothing is left over.
    torch_dcp.save(state, storage_writer=dcp.ReshardWriter(path))
    target = {"w": torch.zeros(10), "n": 0}
    torch_dcp.load(target, storage_reader=dcp.ReshardReader(path))
    wrong += [] if torch.equal(target["w"], state["w"]) and target["n"] == 1 else [f"in the end: {target}"]
    return wrong


def is_there(path: Path, state: dict[str, Any]) -> bool:
    read = checkpoint.read(path)
    return checkpoint.verify(path).ok and torch.equal(read["w"], state["w"]) and read["n"] == state["n"]


def damaged_job(folder: str) -> list[str]:
    """Damage a file: the rank that reads it says so, by either call, and no rank goes on."""
    warnings.simplefilter("ignore")
    path, wrong = Path(folder, "damaged"), []
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(200_000.0)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path)
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = path.rglob("rank00001-0.safetensors")
        with open(file, "r+b") as f:
            f.seek(-4, os.SEEK_END)
            f.write(b"\1\2\3\4")
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(200_000), mesh, [Shard(0)])}
    failed = failure(lambda: torch_dcp.load(target, storage_reader=dcp.ReshardReader(path)))
    wrong += [f"ReshardReader: {failed}"] if failed != {1} else []
    error = error_of(lambda: dcp.load(target, checkpoint_id=path))
    wrong += [f"dcp.load: {error!r}"] if "is damaged in bytes" not in str(error) else []
    return wrong


def error_of(call: Callable[[], object]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


class Failing:
    """A `Stateful` that cannot say its state on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state here")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was loaded")


def calls_job(folder: str) -> list[str]:
    """Calls of `reshard_ckpt.dcp` in which ranks differ."""
    warnings.simplefilter("ignore")
    rank, wrong, path = dist.get_rank(), [], Path(folder, "calls")
    dcp.save({"x": {"n": 0}}, checkpoint_id=path)
    for call in (dcp.save, dcp.async_save, dcp.load):
        try:
            call({"x": Failing()}, checkpoint_id=path)
            wrong.append(f"{call.__name__}: raised nothing")
        except (RuntimeError, CheckpointError) as error:
            if "no state here" not in str(error):
                wrong.append(f"{call.__name__}: {error!r}")
    # Each rank on its own, and a group of one.
    dcp.save({"n": rank, "w": torch.full((3,), float(rank))}, checkpoint_id=Path(folder, f"own {rank}"), no_dist=True)
    own = {"n": -1, "w": torch.zeros(3)}
    dcp.load(own, checkpoint_id=Path(folder, f"own {rank}"), no_dist=True)
    wrong += [f"no_dist: {own}"] if own["n"] != rank or own["w"][0] != rank else []
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    dcp.save({"n": rank}, checkpoint_id=Path(folder, f"group {rank}"), process_group=group)
    dcp.async_save({"n": rank}, checkpoint_id=Path(folder, f"group {rank}"), process_group=group).result()
    dcp.load(own := {"n": -1}, checkpoint_id=Path(folder, f"group {rank}"), process_group=group)
    wrong += [f"process_group: {own}"] if own["n"] != rank else []
    if NEWER:
        # A planner of one's own runs torch's save, with a writer that is told the group.
        planner = type("Own", (torch_dcp.DefaultSavePlanner,), {})()
        dcp.save({"n": rank}, checkpoint_id=Path(folder, f"planned {rank}"), process_group=group, planner=planner)
        dcp.load(own := {"n": -1}, checkpoint_id=Path(folder, f"planned {rank}"), process_group=group)
        wrong += [f"process_group, with a planner: {own}"] if own["n"] != rank else []
        # A value of each rank is counted among the ranks that load.
        checkpoint.save(one := Path(folder, f"per rank {rank}"), {"n": checkpoint.PerRank(rank + 5)}, process_group=group)
        loading = type("OwnLoad", (torch_dcp.DefaultLoadPlanner,), {})()
        torch_dcp.load(own := {"n": -1}, storage_reader=dcp.ReshardReader(one, process_group=group), process_group=group)
        dcp.load(planned := {"n": -1}, checkpoint_id=one, process_group=group, planner=loading)
        dcp.load(alone := {"n": -1}, checkpoint_id=one, no_dist=True, planner=loading)
        wrong += [f"PerRank: {own}, {planned}, {alone}"] if {own["n"], planned["n"], alone["n"]} != {rank + 5} else []
    # What DCP would save from rank 0 alone, without a word, is an error here.
    error = error_of(lambda: dcp.save({"rng": rank}, checkpoint_id=path))
    wrong += [f"values that differ: {error!r}"] if not isinstance(error, LayoutError) else []
    # A rank may ask for less than others.
    dcp.save({"a": 1, "b": torch.ones(3)}, checkpoint_id=path)
    target = {"a": 0} if rank else {"a": 0, "b": torch.zeros(3)}
    dcp.load(target, checkpoint_id=path)
    wrong += [f"other keys: {target}"] if target["a"] != 1 or (not rank and target["b"].sum() != 3) else []
    return wrong


def pairs_job(folder: str) -> list[str]:
    """A checkpoint of each way to hold a tensor on two ranks, loaded in another way, by torch's own calls."""
    warnings.simplefilter("ignore")
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    whole = torch.arange(5 * 7, dtype=torch.float32).reshape(5, 7)
    saved_here = dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 1}, checkpoint_id=Path(folder, "returned"))
    sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in saved_here.state_dict_metadata.items()}
    wrong += [f"save returned {sizes} on rank {dist.get_rank()}"] if sizes != {"w": (5, 7), "n": ()} else []
    specs = {"rows": [Shard(0)], "columns": [Shard(1)], "last": [Shard(-1)], "whole": [Replicate()]}

    def held(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, specs[name]) if name in specs else tensor

    for name in (*specs, "plain"):
        torch_dcp.save({"w": held(whole, name)}, storage_writer=dcp.ReshardWriter(Path(folder, name)))
    for saved, loaded in pairs([*specs, "plain"]):
        target = {"w": held(torch.zeros(5, 7), loaded)}
        torch_dcp.load(target, storage_reader=dcp.ReshardReader(Path(folder, saved)))
        found, expected = (t.to_local() if loaded in specs else t for t in (target["w"], held(whole, loaded)))
        wrong += [f"{saved} to {loaded}"] if not same_bytes(found, expected) else []
    return wrong


def modes_job(folder: str) -> list[str]:
    """torch's own async save in its two modes, and its kept plans."""
    warnings.simplefilter("ignore")
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    kinds = [{}]
    if hasattr(torch_dcp.state_dict_saver, "AsyncCheckpointerType"):
        kinds = [{"async_checkpointer_type": kind} for kind in torch_dcp.state_dict_saver.AsyncCheckpointerType]
    planners = [{}]
    if "enable_plan_caching" in torch_dcp.DefaultSavePlanner.__init__.__code__.co_varnames:
        planners.append({"enable_plan_caching": True})
    number = 0
    for options in planners:
        for kind in kinds:
            for _ in range(2):
                number += 1
                path, whole = Path(folder, f"mode {number % 3}"), torch.arange(9.0) + number
                state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": number}
                # The first of each mode says that its plans are kept; the second one uses them.
                planner = torch_dcp.DefaultSavePlanner(**options)
                writer = dcp.ReshardWriter(path)
                torch_dcp.async_save(state, storage_writer=writer, planner=planner, **kind).result()
                dist.barrier()
                read = checkpoint.read(path)
                if read["n"] != number or not torch.equal(read["w"], whole) or not checkpoint.verify(path).ok:
                    wrong.append(f"{options} {kind}: {read} instead of {number}")
                placement = checkpoint.catalog(path).tensor("w").placement
                if placement is None or [p.kind for p in placement] != ["shard"]:
                    wrong.append(f"{options} {kind}: {placement}")
                dist.barrier()
    return wrong


def two_rank_job(folder: str) -> list[str]:
    """All of the above, on two ranks."""
    jobs = (pairs_job, faulty_job, damaged_job, calls_job, modes_job)
    wrong = [f"{job.__name__}: {line}" for job in jobs for line in job(folder)]
    dist.barrier()
    return wrong
