"""Loading with `read_once`: the same bytes as ever, each read from storage once for all ranks, damage raised on each."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import Exchange
from reshard_ckpt.engine.loading import load, read_once
from reshard_ckpt.errors import CorruptError, PeerError
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.storage.local import LocalStorage
from reshard_ckpt.storage.protocol import DISK
from tests.helpers import position_values
from tests.launch import on_ranks, run_ranks
from tests.machines import Machines

ROWS, COLUMNS = 1600, 1024
"""6.5 MB: several blocks of every window."""


class Reads:
    """What this process reads of shard files, byte range by byte range."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        original = LocalStorage.read_into

        def noting(storage: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
            if key.endswith(".safetensors"):
                self.ranges.append((key, offset, offset + sum(len(b) for b in buffers)))
            original(storage, key, offset, buffers)

        LocalStorage.read_into = noting  # type: ignore[method-assign]


class Crossed:
    """The bytes that this process sends to other ranks in rounds, heads of messages and all."""

    def __init__(self) -> None:
        self.num_bytes = 0
        original, rank = Exchange.start, dist.get_rank()

        def counting(exchange: Exchange, outgoing: Any, sent: Sequence[int], *rest: Any) -> Any:
            self.num_bytes += sum(sent) - sent[rank]
            return original(exchange, outgoing, sent, *rest)

        Exchange.start = counting  # type: ignore[method-assign]


def shard(rank: int, size: int, dim: int, tensor: torch.Tensor) -> LocalShard:
    """One of `size` equal parts of a tensor along a dim."""
    part = tensor.chunk(size, dim)[rank].clone()
    offsets = [0, 0]
    offsets[dim] = rank * part.shape[dim]
    return LocalShard(part, tuple(tensor.shape), tuple(offsets))


@cache
def whole() -> dict[str, torch.Tensor]:
    """The tensors, which nothing changes: jobs copy their parts."""
    return {
        "rows": position_values((ROWS, COLUMNS)),
        "columns": position_values((ROWS, COLUMNS), salt=1),
        "same": position_values((700, 333), torch.float64, salt=2),
        "small": position_values((5,), salt=3),
    }


def layout(rank: int, ways: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """This rank's part on a mesh of any number of replicas, each `ways` ranks; `small` is on rank 0 alone."""
    at = rank % ways
    return {
        "rows": shard(at, ways, 0, tensors["rows"]),
        "columns": shard(at, ways, 1, tensors["columns"]),
        "same": tensors["same"].clone(),
        **({"small": tensors["small"].clone()} if rank == 0 else {}),
    }


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.tensor if isinstance(value, LocalShard) else value for name, value in state.items()}


ONE, TWO, FOUR = (0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 2, 3)
"""The machine of each rank."""

CASES = [
    (1, True, 32 << 20, FOUR),
    (1, True, 300_000, FOUR),
    (1, True, 300_000, ONE),
    (1, False, 300_000, TWO),
    (2, True, 300_000, ONE),
    (4, True, 32 << 20, TWO),
    (4, False, 300_000, FOUR),
]
"""Over how many ranks tensors are sharded, whether blocks are verified, the bytes of a round, and how ranks share memory."""


def load_all_ways(folder: str) -> dict[str, Any]:
    """Save on this job's layout; load on each, alone and with the others."""
    rank = dist.get_rank()
    checkpoint.save(folder, {"t": layout(rank, 2, whole())})
    reads, crossed, machines, out = Reads(), Crossed(), Machines(), {}
    for case in CASES:
        ways, verify, read_once.ROUND_BYTES, machines.of_rank = case
        want = layout(rank, ways, whole())
        for name, options in (("plain", {}), ("once", {"read_once": True})):
            into = layout(rank, ways, {name: torch.full_like(t, -1) for name, t in whole().items()})
            reads.ranges.clear()
            crossed.num_bytes = 0
            told: list[tuple[str, int, int]] = []
            report = checkpoint.load(
                folder, {"t": into}, verify=verify, progress=lambda *what, told=told: told.append(what), **options
            )
            wrong = [key for key, t in tensors_of(into).items() if not torch.equal(t, tensors_of(want)[key])]
            out[case, name] = (wrong, list(reads.ranges), report.bytes_read, told[-1:])
            out[case, "crossed"] = crossed.num_bytes
    return out


@pytest.mark.slow
def test_every_layout_loads_bit_for_bit_and_each_byte_is_read_once(tmp_path: Path) -> None:
    by_rank = run_ranks(load_all_ways, 4, str(tmp_path))
    for case in CASES:
        ways, verify, _, machines = case
        times = {}
        for name in ("plain", "once"):
            outcomes = [result[case, name] for result in by_rank]
            assert [wrong for wrong, _, _, _ in outcomes] == [[]] * 4
            times[name] = times_read(tmp_path, [r for _, ranges, _, _ in outcomes for r in ranges])
            assert [read for _, _, read, _ in outcomes] == [sum(b - a for _, a, b in ranges) for _, ranges, _, _ in outcomes]
            ((_, done, total),) = outcomes[0][3]
            assert done == total
        assert times["once"].max() == 1, "a byte was read twice"
        assert not ((times["plain"] > 0) & (times["once"] == 0)).any()
        if verify:  # without, nearby runs of one rank are read as one, and so may be what lies between
            assert ((times["plain"] > 0) == (times["once"] > 0)).all()
        crossed = sum(result[case, "crossed"] for result in by_rank)
        if ways == 1:
            # Each byte is read by one rank that wants it, and has to reach the three others; `small` is rank 0's alone.
            least = 3 * sum(t.numel() * t.element_size() for name, t in whole().items() if name != "small")
            share = {ONE: 0, TWO: 2 / 3, FOUR: 1}[machines]  # of what each rank sends, to other machines
            assert least * share < crossed < least * (share + 0.01)
            assert times["plain"].max() == 4
            shares = [sum(b - a for _, a, b in result[case, "once"][1]) for result in by_rank]
            assert min(shares) > 0.5 * sum(shares) / 4  # they share the work


def times_read(folder: Path, ranges: Sequence[tuple[str, int, int]]) -> np.ndarray:
    """How often each byte of each shard file was read."""
    files = sorted(folder.rglob("*.safetensors"))
    times = {str(file.relative_to(folder)): np.zeros(file.stat().st_size, np.int8) for file in files}
    for key, low, high in ranges:
        times[key][low:high] += 1
    return np.concatenate(list(times.values()))


@on_ranks(4, timeout_s=800)
def test_damage_is_raised_on_every_rank_and_the_group_lives(tmp_path: Path) -> None:
    rank = dist.get_rank()
    checkpoint.save(tmp_path / "whole", {"x": torch.ones(3)})
    for name in ("w", "more"):
        checkpoint.save(tmp_path / name, {"t": {"w": position_values((ROWS, COLUMNS)), "more": position_values((3000,))}})
        flip_half(tmp_path / name, f"t.{name}")
        for verify_first in (False, True):
            into = {"w": torch.zeros(ROWS, COLUMNS), **({} if rank % 2 else {"more": torch.zeros(3000)})}
            with pytest.raises(CorruptError, match="is damaged in bytes") as raised:
                checkpoint.load(tmp_path / name, {"t": into}, read_once=True, verify_first=verify_first)
            if verify_first:
                assert "no tensor was changed" in str(raised.value)
                assert not into["w"].any()
            again = torch.zeros(3)
            checkpoint.load(tmp_path / "whole", {"x": again}, read_once=True)  # the process group still works
            assert again.all()


def flip_half(path: Path, name: str) -> None:
    """Let rank 0 flip a bit in the middle of the first part of a tensor."""
    dist.barrier()
    if dist.get_rank() == 0:
        row = checkpoint.catalog(path).tensor(name).shards[0]
        data = bytearray((path / row.file.key).read_bytes())
        data[row.offset + row.num_bytes // 2] ^= 4
        (path / row.file.key).write_bytes(data)
    dist.barrier()


@on_ranks(3, timeout_s=800)
def test_rank_that_fails_in_the_middle_of_the_rounds_stops_all(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": position_values((4 * ROWS, COLUMNS))})
    read_once.ROUND_BYTES = 1 << 20
    rank, taken, unpack = dist.get_rank(), iter(range(100)), read_once.Mover.unpack

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        if rank == 2 and next(taken) == 1:
            raise MemoryError("no room on rank 2")
        unpack(self, *args, **kwargs)

    with mock.patch.object(read_once.Mover, "unpack", failing), pytest.raises(PeerError) as raised:
        checkpoint.load(tmp_path, {"w": torch.zeros(4 * ROWS, COLUMNS)}, read_once=True)
    told = "MemoryError: no room on rank 2; already overwritten, wholly or in part: w"
    assert str(raised.value) == (told if rank == 2 else f"rank 2: {told}")


@on_ranks(2)
def test_what_is_still_read_when_the_group_fails_is_named(tmp_path: Path) -> None:
    """The process group fails when round 1 begins, while the windows of round 2 are being read."""
    checkpoint.save(tmp_path, {f"w{i}": position_values((1 << 18,), salt=i + 1) for i in range(8)})
    raised, started = threading.Event(), threading.Event()
    read_once.ROUND_BYTES, load.REQUEST_BYTES = 1 << 19, 1
    LocalStorage.hints = replace(DISK, read_bytes=1 << 20)  # type: ignore[assignment]
    start, read_ahead, read = read_once.Rounds._start, read_once._SharedWindows._read_ahead, LocalStorage.read_into

    def failing(self: Any, number: int, *rest: Any) -> Any:
        if number == 1:
            assert started.wait(60)
            raised.set()
            raise PeerError("the group is gone")
        return start(self, number, *rest)

    def held_up(self: Any, number: int) -> None:
        if number == 2:
            LocalStorage.read_into = late  # type: ignore[method-assign]
        read_ahead(self, number)

    def late(storage: LocalStorage, *rest: Any) -> None:
        started.set()
        assert raised.wait(60)
        read(storage, *rest)

    read_once.Rounds._start, read_once._SharedWindows._read_ahead = failing, held_up  # type: ignore[method-assign]
    into = {f"w{i}": torch.full((1 << 18,), -1.0) for i in range(8)}
    with pytest.raises(PeerError, match="the group is gone; on this rank already overwritten") as failed:
        checkpoint.load(tmp_path, into, read_once=True, timeout_s=60)
    changed, told = [name for name, tensor in into.items() if not bool((tensor == -1).all())], str(failed.value)
    assert 1 < len(changed) < 8
    more = re.search(r"and (\d+) more", told)
    assert sum(name in told for name in changed) + (int(more[1]) if more else 0) == len(changed), told


def test_one_process_reads_as_ever(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": position_values((10, 10))})
    into = torch.zeros(10, 10)
    assert checkpoint.load(tmp_path, {"w": into}, read_once=True).bytes_read > 0
    assert torch.equal(into, position_values((10, 10)))


@on_ranks(2)
def test_what_is_read_with_gaps_is_packed_from_the_right_places(tmp_path: Path) -> None:
    """Two ranks want the same columns of rows that are longer than a block, so that what is read has gaps."""
    for width in (20_000, 33_000, 80_000, 200_000):
        whole, path = position_values((40, width)), tmp_path / str(width)
        checkpoint.save(path, {"w": shard(dist.get_rank(), 2, 0, whole)})
        for verify in (True, False):
            for first, count in ((0, 16), (width // 2 + 3, 7), (width - 5, 5)):
                part = whole[:, first : first + count]
                into = LocalShard(torch.full_like(part, -1), tuple(whole.shape), (0, first))
                checkpoint.load(path, {"w": into}, verify=verify, read_once=True)
                assert torch.equal(into.tensor, part), (width, verify, first)


@on_ranks(4)
def test_ranks_that_share_next_to_nothing_with_others_exchange_among_themselves(tmp_path: Path) -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same halves, and all the same norm; a file of one pair is damaged in the last load."""
    rank, whole, sizes = dist.get_rank(), position_values((ROWS, COLUMNS)), []
    norm = position_values((64,), salt=1)
    checkpoint.save(tmp_path, {"t": shard(rank % 2, 2, 0, whole), "norm": norm.clone()})
    divide = read_once.divide_reads

    def noting(wants: Sequence[Any], *rest: Any) -> Any:
        sizes.append(len(wants))
        return divide(wants, *rest)

    read_once.divide_reads = noting
    reads = Reads()
    for name, value, objects, groups in (
        ("disk", "auto", False, []), ("small", "auto", True, []), ("objects", "auto", True, [2]), ("once", True, False, [2]),
    ):  # fmt: skip
        read_once.SMALL_BYTES = 1 << 30 if name == "small" else 1
        LocalStorage.hints = replace(DISK, has_locks=not objects)  # type: ignore[assignment]
        into, own_norm = shard(rank % 2, 2, 0, torch.full_like(whole, -1)), torch.full_like(norm, -1)
        reads.ranges.clear()
        sizes.clear()
        checkpoint.load(tmp_path, {"t": into, "norm": own_norm}, read_once=value)
        assert torch.equal(into.tensor, shard(rank % 2, 2, 0, whole).tensor)
        assert torch.equal(own_norm, norm)
        assert sizes == groups, name
        of_ranks: list[list[Any]] = [[]] * 4
        dist.all_gather_object(of_ranks, reads.ranges)
        times = times_read(tmp_path, [one for ranges in of_ranks for one in ranges])
        assert times.max() == (2 if groups else 4)
        # Each pair reads the blocks with the norm, and once, if at all, the rest.
        assert not groups or 0 < (times == 2).sum() <= 2 * BLOCK_BYTES
        assert not groups or (times == 1).sum() >= 4 * ROWS * COLUMNS - 2 * BLOCK_BYTES
    flip_half(tmp_path, "t")
    with pytest.raises(CorruptError, match="is damaged in bytes"):
        checkpoint.load(tmp_path, {"t": into}, read_once=True)
