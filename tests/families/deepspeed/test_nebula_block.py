"""Engines whose config has the block ``nebula``: saved to memory, killed, and gone on with after a node was replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Memory
from reshard_ckpt.errors import CheckpointNotFound
from tests.families.deepspeed import jobs
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Folders that stand for the memory of two nodes."""
    path = Path(tempfile.mkdtemp(prefix="reshard-ckpt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield [str(path / "0"), str(path / "1")]
    shutil.rmtree(path, ignore_errors=True)


def engine_with(out: str, nodes: Sequence[str], stage: int, *, seed: int = 0, **options: Any) -> Any:
    """Build an engine that is attached by its config."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed
    from reshard_ckpt.manager import open_runs

    open_runs.memory_from_environment = lambda: Memory(copies=1, folder=nodes[dist.get_rank()])
    block = {"enabled": True, "persistent_storage_path": f"{out}/store", "persistent_time_interval": 3600, **options}
    deepspeed = jobs.import_deepspeed()
    reshard_deepspeed.install()
    jobs.torch.manual_seed(seed)
    model = jobs.Net()
    wanted = jobs.config(stage, "bf16", extra={"nebula": block})
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]
    assert type(engine.checkpoint_engine).__module__ == "reshard_ckpt.families.deepspeed.engine"
    return engine


def save_and_be_killed(out: str, nodes: Sequence[str]) -> None:
    """Save by DeepSpeed and to memory at the same moment, train on while it is saved, and die."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    engine = engine_with(out, nodes, 2)
    jobs.train(engine, jobs.STEPS)
    reshard_deepspeed.detach(engine)
    engine.save_checkpoint(f"{out}/stock", client_state=jobs.CLIENT)
    reshard_deepspeed.attach(engine)
    assert engine.load_checkpoint(f"{out}/ours") == (None, None)
    engine.save_checkpoint(f"{out}/ours", client_state=jobs.CLIENT)
    losses = jobs.train(engine, 2, jobs.STEPS)
    engine.save_checkpoint(f"{out}/ours", tag="later", client_state={"later": True})
    engine.checkpoint_engine.finish()
    if dist.get_rank() == 0:
        jobs.write_json(f"{out}/losses.json", losses)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(out: str, nodes: Sequence[str]) -> dict[str, Any]:
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    engine = engine_with(out, nodes, 2, seed=9)
    path, client = engine.load_checkpoint(f"{out}/ours")
    found: dict[str, Any] = {"latest": (path, client.get("later"), engine.global_steps)}
    path, client = engine.load_checkpoint(f"{out}/ours", "global_step3")
    found["tag"] = path, {key: client[key] for key in jobs.CLIENT}, engine.global_steps
    try:
        engine.load_checkpoint(f"{out}/ours", "never")
    except CheckpointNotFound as error:
        found["never"] = str(error)
    found["losses"] = jobs.train(engine, 2, jobs.STEPS)
    engine.load_checkpoint(f"{out}/ours", "global_step3")
    engine.save_checkpoint(f"{out}/ours", tag="again")
    engine.destroy()
    other = engine_with(out, nodes, 3, seed=9, enable_nebula_load=False)  # DeepSpeed's own folder, at another stage
    found["stock"] = other.load_checkpoint(f"{out}/stock")[0]
    reshard_deepspeed.detach(other)
    other.save_checkpoint(f"{out}/stock3")
    return found


def test_an_engine_with_the_block_goes_on_from_memory(tmp_path: Path, nodes: list[str]) -> None:
    out = str(tmp_path)
    with pytest.raises(AssertionError) as killed:
        run_ranks(save_and_be_killed, 2, out, nodes, timeout_s=600)
    assert (tmp_path / "losses.json").exists(), killed.value  # else it did not come to its end
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert (tmp_path / "ours" / "latest").read_text() == "later"
    assert not list(tmp_path.glob("store/step_*/catalog.msgpack"))
    shutil.rmtree(nodes[0])
    every = run_ranks(resumed, 2, out, nodes, timeout_s=600)
    for found in every:
        assert found["latest"] == (f"{out}/ours/later", True, 5)
        assert found["tag"] == (f"{out}/ours/global_step3", jobs.CLIENT, 3)
        assert "no checkpoint 'never'" in found["never"]
        assert found["stock"] == f"{out}/stock/global_step3"
    assert every[0]["losses"] == losses
    (stored,) = tmp_path.glob("store/step_*/catalog.msgpack")
    assert checkpoint.verify(stored.parent).ok
    wanted = jobs.digests(tmp_path / "stock")
    assert jobs.digests(stored.parent) == wanted == jobs.digests(tmp_path / "stock3")
