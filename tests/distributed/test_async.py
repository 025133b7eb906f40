"""Async saves of real jobs: beside the collectives of training, with failures that reach every rank, and to the job's end."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, StorageError
from reshard_ckpt.storage.local import LocalWriter
from tests.launch import on_ranks
from tests.warm_python import WHOLE_END, run_torchrun


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    model(torch.randn(4, 32, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(4)
def test_saves_beside_the_collectives_of_training_hold_the_state_of_the_call(tmp_path: Path) -> None:
    """Train while saves of both kinds are under way; then compare each with the state that it was called on."""
    model, optimizer = make()
    kept: list[tuple[Path, dict[str, torch.Tensor], checkpoint.SaveHandle]] = []
    for i in range(6):
        step(model, optimizer, i)
        path, kind = tmp_path / str(i), ("eager", "lazy")[i % 2]
        before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        kept.append((path, before, checkpoint.async_save(path, {"model": model, "optimizer": optimizer}, staging=kind)))
        for j in range(3):
            step(model, optimizer, 100 + 10 * i + j)
    for path, before, handle in kept:
        handle.result(600)
        saved = checkpoint.read(path, ["model"])
        assert all(torch.equal(saved[f"model.{name}"], tensor) for name, tensor in before.items()), path


@on_ranks(2)
def test_a_save_lets_the_memory_of_the_state_go_at_its_end(tmp_path: Path) -> None:
    def saved(staging: str | None) -> weakref.ref[np.ndarray]:
        array = np.zeros(8, np.float32)
        state = {"t": {f"w{dist.get_rank()}": torch.from_numpy(array)}}
        if staging is None:
            checkpoint.save(tmp_path, state)
        else:
            handle = checkpoint.async_save(tmp_path, state, staging=staging)
            handle.result(600)
            for thread in handle.running.threads:
                thread.join()
        return weakref.ref(array)

    gc.disable()  # not only when cycles are collected: it may be most of a device's memory
    try:
        alive = [staging for staging in (None, "eager", "lazy") if saved(staging)() is not None]
    finally:
        gc.enable()
    assert not alive


@on_ranks(4)
def test_an_error_of_one_rank_in_the_background_reaches_all(tmp_path: Path) -> None:
    """Rank 2's disk is full in the background; everybody hears it at `result`, or at the next save."""
    rank, state = dist.get_rank(), {"x": torch.full((100,), 1.0)}
    checkpoint.save(tmp_path, state)

    def full(*_: object) -> None:
        raise StorageError("no space left")

    def failing_save() -> checkpoint.SaveHandle:
        # Rank 0 writes what is replicated; so rank 2 holds something of its own.
        mine = {"x": state["x"] + 1, f"own{rank}": torch.zeros(10)}
        with patch.object(LocalWriter, "write", full if rank == 2 else LocalWriter.write):
            handle = checkpoint.async_save(tmp_path, mine)
            handle.running.wait(600)
        return handle

    with pytest.raises(StorageError, match="no space left"):
        failing_save().result()
    failing_save()
    with pytest.raises(CheckpointError, match="failed in the background"):
        checkpoint.async_save(tmp_path, {"x": state["x"] + 5})
    checkpoint.async_save(tmp_path, {"x": state["x"] + 9}).result(600)
    assert checkpoint.read(tmp_path)["x"][0] == 10
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1


LEAVES = """
import sys, torch, torch.distributed as dist
from reshard_ckpt import checkpoint
dist.init_process_group("gloo")
state = {"shared": torch.arange(1_000_000), f"own{dist.get_rank()}": torch.full((1_000_000,), dist.get_rank())}
checkpoint.async_save(sys.argv[1], state)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_job_that_ends_at_once_still_commits_its_last_save(tmp_path: Path, nproc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WHOLE_END, "1")
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    run_torchrun(script, nproc, [str(tmp_path / "ckpt")], cold=nproc == 1)
    saved = checkpoint.read(tmp_path / "ckpt")
    assert torch.equal(saved["shared"], torch.arange(1_000_000))
    assert {name for name in saved if name.startswith("own")} == {f"own{r}" for r in range(nproc)}
