"""Ranks of several machines: those of one machine get the catalog from its first rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import peers, shared_memory
from reshard_ckpt.engine.common import files
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format import catalog
from tests.launch import run_ranks


def state(rank: int, filled: bool) -> dict[str, Any]:
    values = torch.arange(4 * rank, 4 * rank + 4, dtype=torch.float32) if filled else torch.zeros(4)
    return {"w": LocalShard(values, (4 * dist.get_world_size(),), (4 * rank,))}


def load_on_machines(machine_of_rank: list[int], path: str) -> tuple[list[tuple[int, int]], bool, list[str]]:
    """Save, and load twice, the second time without shared memory; then load a damaged catalog.

    Returns how often the catalog was read and how often its contents were checked, in each of the two loads.
    """
    rank, reads, checks = dist.get_rank(), [], []
    peers._machine = lambda: f"machine {machine_of_rank[rank]}"
    read = files.read_catalog_bytes
    files.read_catalog_bytes = lambda storage: (reads.append(storage.url), read(storage))[1]
    check = catalog.problems
    catalog.problems = lambda decoded: (checks.append(decoded.save_id), check(decoded))[1]
    checkpoint.save(path, state(rank, filled=True))
    counts, is_right, raised = [], True, []
    for memory in (shared_memory.Segment, mock.Mock(side_effect=OSError)):
        with mock.patch.object(shared_memory, "Segment", memory):
            reads.clear()
            checks.clear()
            loaded = state(rank, filled=False)
            checkpoint.load(path, loaded)
            counts.append((len(reads), len(checks)))
            is_right &= torch.equal(loaded["w"].tensor, state(rank, filled=True)["w"].tensor)
    decode = files.decode_catalog

    def refuse(data: Any, **options: Any) -> Any:
        if rank == len(machine_of_rank) - 2:
            raise CorruptError("catalog: damaged in memory")
        return decode(data, **options)

    with mock.patch.object(files, "decode_catalog", refuse):
        try:
            checkpoint.load(path, loaded)
        except CorruptError as error:
            raised.append(str(error))
    return counts, is_right, raised


def test_one_rank_of_each_machine_reads_the_catalog_and_checks_it(tmp_path: Path):
    """The first rank of the last machine fails in the end: the one that waits for its catalog raises that too."""
    machines = [0, 0, 1, 1]
    counts, is_right, raised = zip(*run_ranks(load_on_machines, 4, machines, str(tmp_path / "ckpt")), strict=True)
    first, other = [(1, 1), (1, 1)], [(0, 0), (1, 1)]
    assert counts == (first, other, first, other)
    assert all(is_right)
    assert ["damaged in memory" in "".join(lines) for lines in raised] == [True] * 4


def test_ranks_on_machines_of_their_own_each_read_the_catalog(tmp_path: Path):
    counts, is_right, _ = zip(*run_ranks(load_on_machines, 3, [0, 1, 2], str(tmp_path / "ckpt")), strict=True)
    assert counts == ([(1, 1), (1, 1)],) * 3
    assert all(is_right)
