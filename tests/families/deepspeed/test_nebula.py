"""The run of a DeepSpeed engine in memory, without DeepSpeed: which checkpoint a load takes, and from where."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Memory
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.families.deepspeed.engine import write_latest
from reshard_ckpt.families.deepspeed.loading import _values, saved_at
from reshard_ckpt.families.deepspeed.nebula import NebulaBlock, NebulaRun
from reshard_ckpt.manager import open_runs
from tests.launch import run_ranks
from tests.layouts import values_of

SHAPE = (6, 5)


def test_values_of_a_user_keep_dicts_with_numbers_and_lists_apart(tmp_path: Path) -> None:
    client = {"rates": {0: 0.5, 1: 0.25}, "seen": [1, [2]], "counts": [torch.ones(2), 3]}
    checkpoint.save(tmp_path, {"deepspeed": {"client": client}})
    (tree, _) = _values(saved_at(str(tmp_path)), {})
    found = tree["deepspeed"]["client"]
    assert found["rates"] == client["rates"]
    assert found["seen"] == client["seen"]


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Folders that stand for the memory of two nodes."""
    path = Path(tempfile.mkdtemp(prefix="reshard-ckpt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield [str(path / "0"), str(path / "1")]
    shutil.rmtree(path, ignore_errors=True)


def state_of(number: int) -> dict[str, Any]:
    """What an engine saves: rows of a tensor on each rank, and values on the first."""
    rank = dist.get_rank()
    rows = values_of(SHAPE, "F32", number)[3 * rank :][:3].clone()
    values = {"step": number, "user": {"seen": torch.full((3,), number), "note": "n" * number}}
    groups = {"state": {}, "param_groups": [{"lr": number / 8, "params": ["w"]}]}
    return {
        "model": {"w": LocalShard(rows, SHAPE, (3 * rank, 0))},
        "optimizer": groups,
        **({"deepspeed": values} if rank == 0 else {}),
    }


def open_run(root: str, nodes: Sequence[str], **options: Any) -> NebulaRun:
    open_runs.memory_from_environment = lambda: Memory(copies=1, folder=nodes[dist.get_rank()])
    return NebulaRun(NebulaBlock(f"{root}/store", interval_s=3600, **options))


def save(run: NebulaRun, root: str, tag: str, number: int) -> None:
    run.save(tag, state_of(number)).result()
    if dist.get_rank() == 0:
        write_latest(f"{root}/out", tag)
    dist.barrier()


def found(run: NebulaRun, root: str, tag: str | None = None) -> tuple[str, int, bool, Any]:
    """Load what a run finds: its path, the number it was saved with, whether each byte is right, and its values."""
    saved = run.find(f"{root}/out", tag)
    assert saved is not None
    names = ["deepspeed.step", "deepspeed.user.seen", "deepspeed.user.note"]
    values = saved.read([*names, "optimizer.param_groups"])
    assert values["optimizer.param_groups"][0]["lr"] == values["deepspeed.step"] / 8
    wanted, target = state_of(values["deepspeed.step"])["model"]["w"], state_of(0)["model"]["w"]
    saved.load({"model": {"w": target}}, strict=True, cast=True)
    return saved.path, values["deepspeed.step"], torch.equal(target.tensor, wanted.tensor), [values[name] for name in names[1:]]


def save_and_be_killed(root: str, nodes: Sequence[str]) -> None:
    """Save five times, the fourth under a name without a number and the fifth with a number that is behind; then all die."""
    run = open_run(root, nodes)
    assert run.find(f"{root}/out", None) is None
    for tag, number in (("global_step1", 1), ("global_step2", 2), ("global_step3", 3), ("best", 4), ("epoch_1", 5)):
        save(run, root, tag, number)
    os.kill(os.getpid(), signal.SIGKILL)


def restored(root: str, nodes: Sequence[str]) -> dict[str, Any]:
    run = open_run(root, nodes)
    out: dict[str, Any] = {"newest": found(run, root), "tag": found(run, root, "best")}
    try:
        run.find(f"{root}/out", "global_step9")
    except CheckpointNotFound as error:
        out["no such tag"] = str(error)
    save(run, root, "global_step6", 6)
    out["tags"] = run._tags(run._manager)
    run.close()
    return out


def test_a_killed_run_goes_on_from_memory_also_where_a_node_was_replaced(tmp_path: Path, nodes: list[str]):
    root = str(tmp_path)
    with pytest.raises(AssertionError):
        run_ranks(save_and_be_killed, 2, root, nodes)
    assert not list(tmp_path.glob("store/step_*/catalog.msgpack"))  # its interval had not come
    shutil.rmtree(nodes[0])
    for got in run_ranks(restored, 2, root, nodes):
        path, number, is_right, (seen, note) = got["newest"]
        assert (path, number, is_right, note) == (f"{root}/out/epoch_1", 5, True, "nnnnn")
        assert torch.equal(seen, torch.full((3,), 5))
        assert got["tag"][:3] == (f"{root}/out/best", 4, True)
        assert "'global_step9'" in got["no such tag"]
        assert "best" in got["no such tag"]
        assert got["tags"] == {4: "best", 6: "global_step6"}  # epoch_1, beyond what was gone back to, no longer counts
    assert checkpoint.read(tmp_path / "store" / "step_6", ["deepspeed.step"]) == {"deepspeed.step": 6}  # by close


def fall_back(root: str, nodes: Sequence[str]) -> dict[str, Any]:
    """Loads where ``latest`` names what is nowhere, is not looked at, or another run is to be begun from."""
    logging.disable(logging.WARNING)
    rank, out = dist.get_rank(), {}
    run = open_run(root, nodes)
    save(run, root, "global_step1", 1)
    save(run, root, "global_step2", 2)
    run.close()
    checkpoint.save(f"{root}/out/plain", state_of(7))
    if rank == 0:
        write_latest(f"{root}/out", "global_step8")  # its memory was lost before its interval had come
        Path(root, "out", "global_step8").mkdir()  # as DeepSpeed makes it
    dist.barrier()
    run = open_run(root, nodes)
    out["latest is gone"] = found(run, root)
    out["of the folder"] = found(run, root, "plain")
    run.close()
    if rank == 0:
        write_latest(f"{root}/out", "plain")
    dist.barrier()
    run = open_run(root, nodes)
    out["latest is of the folder"] = found(run, root)
    run.close()
    run = open_run(root, nodes, loads=False)
    out["not of the run"] = found(run, root)
    run.close()
    run = open_run(f"{root}/second", nodes, load_path=f"{root}/store")
    out["begins"] = found(run, f"{root}/second")
    out["begins at"] = found(run, f"{root}/second", "global_step2")
    save(run, f"{root}/second", "global_step3", 3)
    out["goes on"] = found(run, f"{root}/second")
    run.close()
    return out


def test_where_a_load_looks(tmp_path: Path, nodes: list[str]):
    root = str(tmp_path)
    for got in run_ranks(fall_back, 2, root, nodes):
        assert got["latest is gone"][:3] == (f"{root}/out/global_step2", 2, True)
        assert got["of the folder"][:3] == (f"{root}/out/plain", 7, True)
        assert got["latest is of the folder"][:3] == (f"{root}/out/plain", 7, True)
        assert got["not of the run"][:3] == (f"{root}/out/plain", 7, True)
        assert got["begins"][:3] == (f"{root}/store/step_2", 2, True)
        assert got["begins at"][:3] == (f"{root}/store/step_2", 2, True)
        assert got["goes on"][:3] == (f"{root}/second/out/global_step3", 3, True)
