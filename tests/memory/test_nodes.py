"""Nodes that are lost with their memory: what is left restores every bit, on other ranks and in another layout."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.memory.node import node_id
from tests.cli.running import run
from tests.launch import RanksFailed, run_ranks
from tests.layouts import values_of
from tests.memory.namespaces import NETWORK, Nodes
from tests.memory.nodes import (
    SHAPE,
    a_save_fails,
    be_damaged,
    lose_nodes,
    one_rank_raises,
    restore,
    save_and_be_killed,
    saves_differ,
)


@pytest.mark.slow
def test_all_ranks_killed_and_a_node_lost(tmp_path: Path, shm: Path):
    """Four ranks on two nodes; then the other node alone with two ranks, or with an empty one and four ranks."""
    root, before = tmp_path / "run", tmp_path / "before"
    with Nodes(tmp_path, shm) as nodes:
        nodes.start("A", "B")
        with pytest.raises(RanksFailed):
            nodes.run("AABB", save_and_be_killed, root, "fsdp", 5, str(tmp_path))
        for rank in range(4):
            copies, stored, steps = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
            assert copies == [1] * 5
            assert stored == [False, True, False, True, None]
            assert {4, 5} <= set(steps)
        shutil.rmtree(root / "step_4")  # the store's newest is older
        nodes.lose("A")
        shutil.copytree(root, before / "root")
        shutil.copytree(nodes.memory("B"), before / "B", symlinks=True)
        nodes.start("C")

        for names, layout, tier in (("BB", "dp", "memory"), ("BBCC", "hsdp", "peer")):
            shutil.rmtree(root)
            shutil.copytree(before / "root", root)
            nodes.lose("B")
            nodes.start("B")
            shutil.copytree(before / "B", nodes.memory("B"), symlinks=True, dirs_exist_ok=True)
            for found in nodes.run(names, restore, root, layout):
                assert (found.step, found.tier, found.is_right, found.passed_over) == (5, tier, True, ())
                assert found.copies == (1 if tier == "peer" else 0)
                assert {5, 6} <= set(found.steps)
            # What was loaded from memory went on to the store, and a clean close sent the newest.
            assert checkpoint.verify(root / "step_5").ok
            assert checkpoint.read(root / "step_6")["extra.step"] == 6
    if nodes.kind != NETWORK:
        pytest.skip(f"passed, but on {nodes.kind}: this system permits no network namespaces (unshare, ip and nsenter, as root)")


def test_three_nodes_with_one_copy_and_with_two(tmp_path: Path, shm: Path):
    found = run_ranks(lose_nodes, 3, str(tmp_path), [str(shm / name) for name in "ABC"])
    assert found[0] == []
    assert found[1] == [(1, 1, 3, "peer", True, [2, 3])]
    assert found[2] == [(1, 1, 3, "peer", True, [2, 3]), (2, 2, 3, "memory", True, [2, 3])]

    # Each node by itself writes what it has; the last one publishes.
    for place, name in enumerate("ABC"):
        ran = run("memory", "persist", tmp_path / "0", "--folder", shm / name / "0", "--json")
        missing = [node_id(str(shm / other / "0")) for other in "ABC"[place + 1 :]]
        assert (ran.code, ran.json["is_published"], ran.json["missing"]) == (int(bool(missing)), not missing, sorted(missing))
    read = checkpoint.read(tmp_path / "0" / "step_7")
    assert read["w"].view(torch.int32).equal(values_of(SHAPE, "F32", 7).view(torch.int32))


def test_no_damaged_copy_is_loaded_and_none_that_is_late_holds_up_training(tmp_path: Path, shm: Path):
    found = run_ranks(be_damaged, 2, str(tmp_path), [str(shm / name) for name in "AB"])
    for rank, one in enumerate(found):
        assert one["copies"] == [1, 1]
        assert one["damaged on the way to a copy"][0] == 0
        assert len(one["damaged on the way to a copy"][1]) == rank
        assert one["late"] == (0, 1)  # and the next save has its copy again
        assert one["one copy damaged"] == (6, "peer", True, ())
        step, tier, is_right, passed_over = one["both copies damaged"]
        assert (step, tier, is_right) == (5, "peer", True)
        assert "step 6 in memory: damaged in every copy that is left" in passed_over[0]
        step, tier, is_right, passed_over = one["damaged on the way back"]
        assert (step, tier, is_right) == (1, "store", True)
        assert [line[:16] for line in passed_over] == ["step 6 in memory", "step 5 in memory"]


def test_a_rank_that_left_by_an_error_is_named_when_another_closes(tmp_path: Path, shm: Path):
    found = run_ranks(one_rank_raises, 2, str(tmp_path), [str(shm / name) for name in "AB"])
    assert all("ranks called different things" in said for said, _ in found), found
    assert [steps for _, steps in found] == [[1], [1]]  # it stays in memory


def test_ranks_that_save_to_memory_and_to_the_store_are_told(tmp_path: Path, shm: Path):
    found = run_ranks(saves_differ, 2, str(tmp_path), [str(shm / name) for name in "AB"])
    assert all("ranks called different things: rank 0: save to memory" in said for said in found), found


def test_a_save_that_fails_on_one_rank_holds_up_none_and_leaves_a_whole_generation(tmp_path: Path, shm: Path):
    found = run_ranks(a_save_fails, 2, str(tmp_path), [str(shm / name) for name in "AB"])
    for rank, one in enumerate(found):
        assert one["one that a rank left out"][-3:] == [4, 5, 6]  # the ranks are in step again
        assert one["read from another rank"] == bytes(range(107 - 100 * rank, 122 - 100 * rank))
        error, warned = one["before its copy"]
        assert "ZeroDivisionError" in error
        assert warned == []  # rank 0 did not begin to wait for a copy
        assert one["the next"] == ("", [2])
        assert one["first"] == ""
        assert "no space" in one["before all have it"][0]
        assert one["before all have it"][1] == [1]
        assert "the store does not answer" in one["once rank 0 may have let the older one go"]
        assert one["then"] == (3, True)
