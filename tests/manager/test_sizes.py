"""`sizes` against real saves: bytes on disk of one checkpoint and of a run, host memory of staging and of the memory tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from reshard_ckpt import LocalShard, checkpoint, errors
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.manager.retention import Retention
from tests.cli.running import run
from tests.launch import run_ranks

WIDTH, RANKS, SAVES, KEEP_LAST = 1024, 2, 5, 2
PARAMETERS = WIDTH * WIDTH


def bytes_below(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def make_state(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH, dtype=dtype)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_on_disk_has_the_computed_size(tmp_path: Path, dtype: str):
    checkpoint.save(tmp_path / "ckpt", make_state(getattr(torch, dtype)))
    found = checkpoint.sizes(PARAMETERS, dtype=dtype)
    assert (
        checkpoint.inspect(tmp_path / "ckpt").summary.num_bytes == found.tensor_bytes + 4
    )  # AdamW counts its steps in one number a parameter
    on_top = bytes_below(tmp_path / "ckpt") - found.checkpoint_bytes
    assert 0 <= on_top < 4096 + 300 * 3


def job(folder: str) -> tuple[int, int]:
    """Save to the store, then to memory; return the bytes of this rank's staging memory, and of its node's memory tier."""
    root, rows = Path(folder), WIDTH // RANKS
    state = {
        name: LocalShard(torch.ones(rows, WIDTH), (WIDTH, WIDTH), (rows * dist.get_rank(), 0))
        for name in ("weight", "exp_avg", "exp_avg_sq")
    }
    with checkpoint.Manager(root / "store", keep_last=KEEP_LAST) as manager:
        for step in range(SAVES):
            manager.async_save(step, state).result()
    staging = sum(idle.numel() for idle in POOL._idle.values())
    node = root / f"node{dist.get_rank()}"
    node.mkdir()
    memory = checkpoint.Memory(copies=1, folder=str(node))
    with checkpoint.Manager(root / "tiered", memory=memory, persist_every=10**6) as manager:
        for step in range(SAVES):
            manager.async_save(step, state).result()
        held = bytes_below(node)
    return staging, held


def test_a_run_and_its_host_memory_have_the_computed_sizes(tmp_path: Path):
    held = run_ranks(job, RANKS, str(tmp_path))
    stored = checkpoint.sizes(PARAMETERS, ranks=RANKS, nodes=RANKS, keep_last=KEEP_LAST)
    assert 0 <= bytes_below(tmp_path / "store") - stored.run_bytes < 16384 * KEEP_LAST
    tiered = checkpoint.sizes(PARAMETERS, ranks=RANKS, nodes=RANKS, memory=checkpoint.Memory(copies=1))
    for staging, node in held:
        assert staging == stored.staging_rank_bytes == stored.staging_node_bytes
        assert 0 <= node - tiered.memory_node_bytes < 65536  # small files beside the images
    assert tiered.staging_node_bytes == 0


def test_what_a_run_keeps_is_counted_by_its_rules():
    def kept(**rules: int) -> int:
        return checkpoint.sizes(1e6, **rules).num_kept

    assert kept(keep_last=3) == 3
    assert kept(keep_last=3, keep_best=2) == 5
    assert kept(keep_last=2, keep_every=1000, steps=10_000, save_every=500) == 11  # 1000, 2000, … 10,000 and 9500
    assert kept(keep_last=5, steps=1000, save_every=500) == 2
    found = checkpoint.sizes(1e6, keep_last=3)
    assert (found.run_bytes, found.peak_bytes) == (3 * found.checkpoint_bytes, 4 * found.checkpoint_bytes)


def test_dtypes_optimizers_and_bounds_count():
    assert checkpoint.sizes(1e6, dtype="bfloat16", masters=True).tensor_bytes == 14e6
    assert checkpoint.sizes(1e6, dtype=torch.bfloat16, optimizer_dtype="F32").tensor_bytes == 10e6
    assert checkpoint.sizes(1e6, optimizer="none").tensor_bytes == 4e6
    assert checkpoint.sizes(1e9, host_buffer_bytes=1 << 30).staging_rank_bytes == 1 << 30
    assert checkpoint.sizes(1e9, host_buffer_bytes=1).staging_rank_bytes == 16 << 20


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 7, "nodes": 2}, "ranks=7, nodes=2"),
        ({"ranks": 2.5}, "ranks=2.5"),
        ({"nodes": True}, "nodes=True"),
        ({"parameters": "7e9"}, "parameters='7e9'"),
        ({"steps": -1}, "steps=-1"),
        ({"save_every": 1.5}, "save_every=1.5"),
        ({"keep_last": None}, "keep_last=None"),
        ({"keep_best": -1}, "keep_best=-1"),
        ({"masters": "no"}, "masters='no'"),
        ({"memory": True}, "memory=True"),
        ({"host_buffer_bytes": -5}, "host_buffer_bytes=-5"),
        ({"host_buffer_bytes": "1GB"}, "host_buffer_bytes='1GB'"),
        ({"optimizer_dtype": ""}, "optimizer_dtype=''"),
        ({"optimizer": ["adamw"]}, "adamw"),
        ({"keep_every": 100}, "steps="),
        ({"optimizer": "adamm"}, "adamw"),
        ({"dtype": "fp33"}, "bfloat16"),
        ({"memory": checkpoint.Memory(copies=1)}, "copies=1, nodes=1"),
    ],
)
def test_an_impossible_job_is_refused(options: dict[str, Any], named: str):
    with pytest.raises(errors.UsageError, match=named):
        checkpoint.sizes(**{"parameters": 1e6, **options})


@given(steps=st.integers(0, 60), save_every=st.integers(1, 9), keep_last=st.integers(1, 9), keep_every=st.integers(1, 20))
def test_as_many_are_kept_as_a_run_keeps(steps: int, save_every: int, keep_last: int, keep_every: int):
    saved = range(save_every, steps + 1, save_every)
    assume(saved)
    kept = Retention(keep_last, keep_every).kept(saved, {})
    options = {"steps": steps, "save_every": save_every, "keep_last": keep_last, "keep_every": keep_every}
    assert checkpoint.sizes(1e6, **options).num_kept == len(kept)


def test_a_run_of_any_length_is_counted_at_once():
    assert checkpoint.sizes(1e6, keep_every=10**9, steps=10**30).num_kept == 10**21


def test_the_command_refuses_by_the_names_of_its_own_options():
    said = run("sizes", "--parameters", "7e9", "--host-buffer-bytes", -5).err
    assert "--host-buffer-bytes -5" in said


def test_the_command_prints_what_the_function_returns():
    said = run("sizes", "--parameters", "7e9", "--ranks", 64, "--nodes", 8, "--copies", 1, "--json").json
    assert said["memory_node_bytes"] == checkpoint.sizes(7e9, ranks=64, nodes=8, memory=checkpoint.Memory()).memory_node_bytes
