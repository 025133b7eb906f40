"""Loading with `read_once`: the same bytes as ever, each read from storage once for all ranks, damage raised on each."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import Exchange
from reshard_ckpt.engine.loading import load, read_once
from reshard_ckpt.errors import CheckpointError, PeerError
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.storage.local import LocalStorage
from reshard_ckpt.storage.protocol import DISK
from tests.helpers import position_values
from tests.launch import run_ranks
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
        import torch.distributed as dist

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
    import torch.distributed as dist

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


def load_damaged(folder: str) -> list[tuple[str, str, bool]]:
    import torch.distributed as dist

    outcomes = []
    for name in ("w", "more"):
        for verify_first in (False, True):
            into = {"w": torch.zeros(ROWS, COLUMNS), **({} if dist.get_rank() % 2 else {"more": torch.zeros(3000)})}
            try:
                checkpoint.load(f"{folder}/{name}", {"t": into}, read_once=True, verify_first=verify_first)
            except CheckpointError as error:
                outcome = type(error).__name__, str(error)
            else:
                outcome = "loaded", ""
            again = torch.zeros(3)
            checkpoint.load(f"{folder}/whole", {"x": again}, read_once=True)  # the process group is none the worse for it
            outcomes.append((*outcome, bool(again.all()) and not (verify_first and bool(into["w"].any()))))
    return outcomes


def test_damage_is_raised_on_every_rank_and_the_group_lives(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "whole", {"x": torch.ones(3)})
    for name in ("w", "more"):
        checkpoint.save(tmp_path / name, {"t": {"w": position_values((ROWS, COLUMNS)), "more": position_values((3000,))}})
        row = checkpoint.catalog(tmp_path / name).tensor(f"t.{name}").shards[0]
        file = tmp_path / name / row.file.key
        data = bytearray(file.read_bytes())
        data[row.offset + row.num_bytes // 2] ^= 4
        file.write_bytes(data)
    for outcomes in run_ranks(load_damaged, 4, str(tmp_path), timeout_s=800):
        assert len(outcomes) == 4
        for i, (kind, message, fine) in enumerate(outcomes):
            assert kind == "CorruptError"
            assert "is damaged in bytes" in message
            assert fine
            if i % 2:  # verify_first
                assert "no tensor was changed" in message


def load_with_one_rank_failing(folder: str) -> tuple[str, str]:
    import torch.distributed as dist

    read_once.ROUND_BYTES = 1 << 20
    if dist.get_rank() == 2:
        taken = iter(range(100))
        original = read_once.Mover.unpack

        def failing(self: Any, *args: Any, **kwargs: Any) -> None:
            if next(taken) == 1:
                raise MemoryError("no room on rank 2")
            original(self, *args, **kwargs)

        read_once.Mover.unpack = failing  # type: ignore[method-assign]
    try:
        checkpoint.load(folder, {"w": torch.zeros(4 * ROWS, COLUMNS)}, read_once=True)
    except Exception as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def test_rank_that_fails_in_the_middle_of_the_rounds_stops_all(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": position_values((4 * ROWS, COLUMNS))})
    outcomes = run_ranks(load_with_one_rank_failing, 3, str(tmp_path), timeout_s=800)
    told = "MemoryError: no room on rank 2; already overwritten, wholly or in part: w"
    assert outcomes == [("PeerError", f"rank 2: {told}")] * 2 + [("PeerError", told)]


def load_while_the_group_fails(folder: str) -> tuple[list[str], str]:
    """The process group fails when round 1 begins, while the windows of round 2 are being read: name the tensors that changed."""
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
    told = ""
    try:
        checkpoint.load(folder, into, read_once=True, timeout_s=60)
    except PeerError as error:
        told = str(error)
    return [name for name, tensor in into.items() if not bool((tensor == -1).all())], told


def test_what_is_still_read_when_the_group_fails_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {f"w{i}": position_values((1 << 18,), salt=i + 1) for i in range(8)})
    for changed, told in run_ranks(load_while_the_group_fails, 2, str(tmp_path)):
        assert "the group is gone; on this rank already overwritten" in told
        assert 1 < len(changed) < 8
        more = re.search(r"and (\d+) more", told)
        assert sum(name in told for name in changed) + (int(more[1]) if more else 0) == len(changed), told


def test_one_process_reads_as_ever(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": position_values((10, 10))})
    into = torch.zeros(10, 10)
    assert checkpoint.load(tmp_path, {"w": into}, read_once=True).bytes_read > 0
    assert torch.equal(into, position_values((10, 10)))


def load_few_columns_of_wide_rows(folder: str) -> list[str]:
    """Two ranks want the same columns of rows that are longer than a block, so that what is read has gaps."""
    import torch.distributed as dist

    wrong = []
    for width in (20_000, 33_000, 80_000, 200_000):
        whole = position_values((40, width))
        path = f"{folder}/{width}"
        checkpoint.save(path, {"w": shard(dist.get_rank(), 2, 0, whole)})
        for verify in (True, False):
            for first, count in ((0, 16), (width // 2 + 3, 7), (width - 5, 5)):
                part = whole[:, first : first + count]
                into = LocalShard(torch.full_like(part, -1), tuple(whole.shape), (0, first))
                checkpoint.load(path, {"w": into}, verify=verify, read_once=True)
                if not torch.equal(into.tensor, part):
                    wrong.append(f"{width} {verify} {first}")
    return wrong


def test_what_is_read_with_gaps_is_packed_from_the_right_places(tmp_path: Path) -> None:
    assert run_ranks(load_few_columns_of_wide_rows, 2, str(tmp_path)) == [[], []]


def load_in_groups(folder: str) -> dict[str, Any]:
    """Ranks 0 and 2, and 1 and 3, hold the same halves, and all the same norm; a file of one pair is damaged in the last load."""
    import torch.distributed as dist

    rank, whole, sizes = dist.get_rank(), position_values((ROWS, COLUMNS)), []
    norm = position_values((64,), salt=1)
    checkpoint.save(folder, {"t": shard(rank % 2, 2, 0, whole), "norm": norm.clone()})
    original = read_once.divide_reads

    def noting(wants: Sequence[Any], *rest: Any) -> Any:
        sizes.append(len(wants))
        return original(wants, *rest)

    read_once.divide_reads = noting
    reads, out = Reads(), {}
    for name, value, objects in (
        ("disk", "auto", False), ("small", "auto", True), ("objects", "auto", True), ("once", True, False),
    ):  # fmt: skip
        read_once.SMALL_BYTES = 1 << 30 if name == "small" else 1
        LocalStorage.hints = replace(DISK, has_locks=not objects)  # type: ignore[assignment]
        into, own_norm = shard(rank % 2, 2, 0, torch.full_like(whole, -1)), torch.full_like(norm, -1)
        reads.ranges.clear()
        sizes.clear()
        checkpoint.load(folder, {"t": into, "norm": own_norm}, read_once=value)
        right = torch.equal(into.tensor, shard(rank % 2, 2, 0, whole).tensor) and torch.equal(own_norm, norm)
        out[name] = right, list(sizes), list(reads.ranges)
    dist.barrier()
    if rank == 0:
        row = checkpoint.catalog(folder).tensor("t").shards[0]
        file = Path(folder) / row.file.key
        data = bytearray(file.read_bytes())
        data[row.offset + row.num_bytes // 2] ^= 4
        file.write_bytes(data)
    dist.barrier()
    try:
        checkpoint.load(folder, {"t": into}, read_once=True)
    except CheckpointError as error:
        out["damaged"] = type(error).__name__, str(error)
    return out


def test_ranks_that_share_next_to_nothing_with_others_exchange_among_themselves(tmp_path: Path) -> None:
    by_rank = run_ranks(load_in_groups, 4, str(tmp_path))
    for name, sizes in (("disk", []), ("small", []), ("objects", [2]), ("once", [2])):
        assert [result[name][:2] for result in by_rank] == [(True, sizes)] * 4
        times = times_read(tmp_path, [r for result in by_rank for r in result[name][2]])
        assert times.max() == (2 if sizes else 4)
        # Each pair reads the blocks with the norm, and once, if at all, the rest.
        assert not sizes or 0 < (times == 2).sum() <= 2 * BLOCK_BYTES
        assert not sizes or (times == 1).sum() >= 4 * ROWS * COLUMNS - 2 * BLOCK_BYTES
    for result in by_rank:
        assert result["damaged"][0] == "CorruptError"
        assert "is damaged in bytes" in result["damaged"][1]
