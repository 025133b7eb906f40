"""DCP's calls on two ranks: storage that fails at one of its stages on some ranks, pairs of layouts, and torch's modes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
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
from tests.launch import on_ranks
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


@contextmanager
def fails_on(ranks: set[int]) -> Iterator[None]:
    """Expect torch's error, which names just these ranks."""
    with pytest.raises(CheckpointException) as raised:
        yield
    assert set(raised.value.failures) == ranks


@on_ranks(2, timeout_s=800)
def test_a_stage_that_fails_on_some_ranks_is_an_error_of_those_on_all_and_leaves_what_was_there(tmp_path: Path):
    warnings.simplefilter("ignore")
    path, state, mesh = tmp_path, {"w": torch.arange(10.0), "n": 1}, init_device_mesh("cpu", (2,))
    sharded = {"w": distribute_tensor(state["w"], mesh, [Shard(0)]), "n": 1}
    torch_dcp.save(sharded, storage_writer=dcp.ReshardWriter(path))
    for stage in WRITER_STAGES:
        for ranks in ranks_of(stage):
            writer = faulty(dcp.ReshardWriter, stage, ranks)(path)
            with faulty_files(ranks if stage == "write" else ()), fails_on({*ranks}):
                torch_dcp.save({**sharded, "n": 2}, storage_writer=writer)
            # The last stage comes after the commit.
            assert is_there(path, {**state, "n": 2} if stage == "finish" else state), (stage, ranks)
    for stage in READER_STAGES:
        for ranks in ranks_of(stage):
            with fails_on({*ranks}):
                reader = faulty(dcp.ReshardReader, stage, ranks)(path)
                torch_dcp.load({"w": torch.zeros(10), "n": 0}, storage_reader=reader)
    # After all of that, the same objects' classes without faults work, and nothing is left over.
    torch_dcp.save(state, storage_writer=dcp.ReshardWriter(path))
    target = {"w": torch.zeros(10), "n": 0}
    torch_dcp.load(target, storage_reader=dcp.ReshardReader(path))
    assert torch.equal(target["w"], state["w"])
    assert target["n"] == 1


def is_there(path: Path, state: dict[str, Any]) -> bool:
    read = checkpoint.read(path)
    return checkpoint.verify(path).ok and torch.equal(read["w"], state["w"]) and read["n"] == state["n"]


@on_ranks(2, timeout_s=800)
def test_damage_is_told_by_the_rank_that_reads_it_and_no_rank_goes_on(tmp_path: Path):
    warnings.simplefilter("ignore")
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(200_000.0)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=tmp_path)
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = tmp_path.rglob("rank00001-0.safetensors")
        with open(file, "r+b") as f:
            f.seek(-4, os.SEEK_END)
            f.write(b"\1\2\3\4")
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(200_000), mesh, [Shard(0)])}
    with fails_on({1}):
        torch_dcp.load(target, storage_reader=dcp.ReshardReader(tmp_path))
    with pytest.raises(CheckpointError, match="is damaged in bytes"):
        dcp.load(target, checkpoint_id=tmp_path)


class Failing:
    """A `Stateful` that cannot say its state on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state here")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was loaded")


@on_ranks(2, timeout_s=800)
def test_ranks_may_differ_in_what_they_call_or_are_told(tmp_path: Path):
    warnings.simplefilter("ignore")
    rank, path = dist.get_rank(), tmp_path / "calls"
    dcp.save({"x": {"n": 0}}, checkpoint_id=path)
    for call in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises((RuntimeError, CheckpointError), match="no state here"):
            call({"x": Failing()}, checkpoint_id=path)
    # Each rank on its own, and a group of one.
    dcp.save({"n": rank, "w": torch.full((3,), float(rank))}, checkpoint_id=tmp_path / f"own {rank}", no_dist=True)
    own = {"n": -1, "w": torch.zeros(3)}
    dcp.load(own, checkpoint_id=tmp_path / f"own {rank}", no_dist=True)
    assert (own["n"], own["w"][0]) == (rank, rank)
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    dcp.save({"n": rank}, checkpoint_id=tmp_path / f"group {rank}", process_group=group)
    dcp.async_save({"n": rank}, checkpoint_id=tmp_path / f"group {rank}", process_group=group).result()
    dcp.load(own := {"n": -1}, checkpoint_id=tmp_path / f"group {rank}", process_group=group)
    assert own["n"] == rank
    if NEWER:
        # A planner of one's own runs torch's save, with a writer that is told the group.
        planner = type("Own", (torch_dcp.DefaultSavePlanner,), {})()
        dcp.save({"n": rank}, checkpoint_id=tmp_path / f"planned {rank}", process_group=group, planner=planner)
        dcp.load(own := {"n": -1}, checkpoint_id=tmp_path / f"planned {rank}", process_group=group)
        assert own["n"] == rank
        # A value of each rank is counted among the ranks that load.
        one = tmp_path / f"per rank {rank}"
        checkpoint.save(one, {"n": checkpoint.PerRank(rank + 5)}, process_group=group)
        loading = type("OwnLoad", (torch_dcp.DefaultLoadPlanner,), {})()
        torch_dcp.load(own := {"n": -1}, storage_reader=dcp.ReshardReader(one, process_group=group), process_group=group)
        dcp.load(planned := {"n": -1}, checkpoint_id=one, process_group=group, planner=loading)
        dcp.load(alone := {"n": -1}, checkpoint_id=one, no_dist=True, planner=loading)
        assert own["n"] == planned["n"] == alone["n"] == rank + 5
        checkpoint.save(both := tmp_path / "per rank", {"n": checkpoint.PerRank(rank)})
        with pytest.raises(CheckpointException, match="n: saved by 2 ranks, wanted on 1"):
            dcp.load({"n": -1}, checkpoint_id=both, no_dist=True, planner=loading)
    # What DCP would save from rank 0 alone, without a word, is an error here.
    with pytest.raises(LayoutError):
        dcp.save({"rng": rank}, checkpoint_id=path)
    # A rank may ask for less than others.
    dcp.save({"a": 1, "b": torch.ones(3)}, checkpoint_id=path)
    target = {"a": 0} if rank else {"a": 0, "b": torch.zeros(3)}
    dcp.load(target, checkpoint_id=path)
    assert target["a"] == 1
    assert rank or target["b"].tolist() == [1, 1, 1]


@on_ranks(2, timeout_s=800)
def test_each_way_to_hold_a_tensor_loads_in_each_other_by_torchs_own_calls(tmp_path: Path):
    warnings.simplefilter("ignore")
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(5 * 7, dtype=torch.float32).reshape(5, 7)
    saved_here = dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 1}, checkpoint_id=tmp_path / "returned")
    sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in saved_here.state_dict_metadata.items()}
    assert sizes == {"w": (5, 7), "n": ()}
    specs = {"rows": [Shard(0)], "columns": [Shard(1)], "last": [Shard(-1)], "whole": [Replicate()]}

    def held(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, specs[name]) if name in specs else tensor

    for name in (*specs, "plain"):
        torch_dcp.save({"w": held(whole, name)}, storage_writer=dcp.ReshardWriter(tmp_path / name))
    for saved, loaded in pairs([*specs, "plain"]):
        target = {"w": held(torch.zeros(5, 7), loaded)}
        torch_dcp.load(target, storage_reader=dcp.ReshardReader(tmp_path / saved))
        found, expected = (t.to_local() if loaded in specs else t for t in (target["w"], held(whole, loaded)))
        assert same_bytes(found, expected), f"{saved} to {loaded}"


KINDS = [{}]
if hasattr(torch_dcp.state_dict_saver, "AsyncCheckpointerType"):
    KINDS = [{"async_checkpointer_type": kind} for kind in torch_dcp.state_dict_saver.AsyncCheckpointerType]
PLANNERS = [{}]
if "enable_plan_caching" in torch_dcp.DefaultSavePlanner.__init__.__code__.co_varnames:
    PLANNERS.append({"enable_plan_caching": True})


@pytest.mark.slow
@on_ranks(2, timeout_s=800)
def test_torchs_own_async_save_in_its_modes_and_with_kept_plans(tmp_path: Path):
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    for number, (options, kind, _) in enumerate(product(PLANNERS, KINDS, range(2)), 1):
        path, whole = tmp_path / f"mode {number % 3}", torch.arange(9.0) + number
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": number}
        # The first of each mode says that its plans are kept; the second one uses them.
        planner = torch_dcp.DefaultSavePlanner(**options)
        torch_dcp.async_save(state, storage_writer=dcp.ReshardWriter(path), planner=planner, **kind).result()
        dist.barrier()
        assert is_there(path, {"w": whole, "n": number}), (options, kind)
        placement = checkpoint.catalog(path).tensor("w").placement
        assert [p.kind for p in placement] == ["shard"], (options, kind)
        dist.barrier()
