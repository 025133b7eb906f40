"""The file of the common state, which lies beside the catalog, where Megatron's own load looks for it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import megatron
from reshard_ckpt.engine.saving import commit
from reshard_ckpt.errors import CorruptError, StorageError
from tests.families.megatron.stand_ins import ShardedObject, ShardedTensor
from tests.launch import run_ranks


def test_a_common_state_that_is_an_object_lies_where_megatron_looks_for_it(tmp_path):
    main, other = (
        ShardedObject("common_state", {"iteration": 3, "by number": {3: "three"}}, (1,), (0,), replica_id=rank) for rank in (0, 1)
    )
    for common, elsewhere in ((main, other), (other, main)):
        path = tmp_path / str(common.replica_id)
        weight = ShardedTensor("w", torch.arange(6.0), (6,), (6,), (0,))
        megatron.save({"m": {"w": weight}, "common_state": common, "elsewhere": elsewhere}, str(path))
        assert (path / "common.pt").exists() == (common is main)
        if common is main:
            assert torch.load(path / "common.pt", weights_only=True) == common.data
        assert megatron.load_common_state_dict(str(path)) == common.data


def save_common(path: Any, iteration: int, rank: int = 0) -> None:
    """Save as Megatron 0.19 does: each rank has the common state as an object, and the main replica is rank 0's."""
    common = ShardedObject("common_state", {"iteration": iteration + 10 * rank}, (1,), (0,), replica_id=rank)
    weight = ShardedTensor("w", torch.arange(6.0) + iteration, (6,), (6,), (0,))
    megatron.save({"m": {"w": weight}, "common_state": common}, str(path))


def save_common_here(path: str) -> None:
    save_common(path, 1, dist.get_rank())


def test_the_common_state_of_rank_0_is_saved_for_all_ranks(tmp_path):
    run_ranks(save_common_here, 2, str(tmp_path))
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"iteration": 1}
    assert megatron.load_common_state_dict(str(tmp_path)) == {"iteration": 1}


def test_a_save_that_fails_at_its_commit_leaves_the_common_state_of_before(tmp_path, monkeypatch):
    save_common(tmp_path / "old", 1)

    def full(*args: Any, **options: Any) -> Any:
        raise StorageError("no space left")

    monkeypatch.setattr(commit, "publish", full)
    for path in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(StorageError, match="no space left"):
            save_common(path, 2)
    assert torch.load(tmp_path / "old" / "common.pt", weights_only=True) == {"iteration": 1}
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_megatron_gets_no_common_state_of_a_save_that_was_killed_before_its_commit(tmp_path, monkeypatch):
    def load(path: Any) -> list[float]:
        weight = torch.zeros(6)
        megatron.load({"m": {"w": ShardedTensor("w", weight, (6,), (6,), (0,))}}, str(path), with_common=False)
        return weight.tolist()

    old = tmp_path / "old"
    save_common(old, 1)
    assert load(old) == [1, 2, 3, 4, 5, 6]
    pid = os.fork()
    if not pid:
        commit.publish = lambda *args, **options: os._exit(9)
        save_common(old, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert torch.load(old / "common.pt", weights_only=True) == {"iteration": 2}
    with pytest.raises(CorruptError, match="common.pt: is damaged, or of a save that was cut off"):
        load(old)
    assert megatron.load_common_state_dict(str(old)) == {"iteration": 1}
    save_common(old, 3)
    assert load(old) == [3, 4, 5, 6, 7, 8]
    (old / "common.pt").unlink()  # Megatron says so itself
    assert load(old) == [3, 4, 5, 6, 7, 8]
