"""`verify` finds every kind of damage, and names it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.storage import LocalStorage
from tests.launch import run_ranks


def save_some(path: Path) -> Path:
    state = {f"w{i}": torch.arange(300_000, dtype=torch.float32) * (i + 1) for i in range(10)}
    checkpoint.save(path, {"t": state, "extra": {"long": list(range(3000)), "rng": checkpoint.PerRank(b"seed")}})
    (file,) = path.glob("*/*.safetensors")
    return file


def test_a_whole_checkpoint_is_fine(tmp_path: Path) -> None:
    file = save_some(tmp_path)
    report = checkpoint.verify(tmp_path)
    assert report.ok
    assert (report.num_files, report.num_bytes) == (1, file.stat().st_size)


def test_every_flipped_bit_of_data_is_found_where_it_is(tmp_path: Path) -> None:
    file = save_some(tmp_path)
    good = file.read_bytes()
    generator = random.Random(3)
    for _ in range(20):
        at = generator.randrange(len(good))
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        (line,) = checkpoint.verify(tmp_path).problems
        low, high = map(int, line.split("in bytes ")[1].split(",")[0].split(":"))
        assert low <= at < high
        assert "which hold " in line
    file.write_bytes(good)
    assert checkpoint.verify(tmp_path).ok


def test_lost_and_cut_files_are_named(tmp_path: Path) -> None:
    file = save_some(tmp_path)
    good = file.read_bytes()
    file.write_bytes(good[:-5])
    assert "the catalog says" in checkpoint.verify(tmp_path).problems[0]
    file.write_bytes(good)
    digests = next(tmp_path.glob("*/*.digests"))
    digests.write_bytes(digests.read_bytes()[:-1] + b"\0")
    assert "digests is damaged" in checkpoint.verify(tmp_path).problems[0]
    digests.unlink()
    assert not checkpoint.verify(tmp_path).ok
    (tmp_path / "catalog.msgpack").write_bytes(b"nonsense")
    report = checkpoint.verify(tmp_path)
    assert not report.ok
    assert "catalog" in report.problems[0]
    (tmp_path / "catalog.msgpack").unlink()
    with pytest.raises(CheckpointNotFound):
        checkpoint.verify(tmp_path)


def verify_together(path: str) -> tuple[tuple[str, ...], int, int]:
    reads: list[int] = []
    read_into = LocalStorage.read_into

    def noting(self: LocalStorage, key: str, offset: int, buffers: Any) -> None:
        reads.append(sum(map(len, buffers)))
        read_into(self, key, offset, buffers)

    with mock.patch.object(LocalStorage, "read_into", noting):
        report = checkpoint.verify(path, process_group=None)
    return report.problems, report.num_bytes, sum(reads)


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_share_the_bytes_and_all_get_the_report_of_one_process(tmp_path: Path, damaged: bool) -> None:
    state = {f"w{i}": torch.arange(3_000_000, dtype=torch.float32) * (i + 1) for i in range(8)}
    checkpoint.save(tmp_path, {"t": state, "empty": torch.zeros(0)})
    (file,) = tmp_path.glob("*/*.safetensors")
    if damaged:  # also on both sides of the border between two shares
        data, at = bytearray(file.read_bytes()), -(-file.stat().st_size // 3 // (8 << 20)) * (8 << 20)
        data[5_000] ^= 1
        data[at - 200_000 : at + 200_000] = bytes(400_000)
        file.write_bytes(data)
    alone = checkpoint.verify(tmp_path)
    assert len(alone.problems) == (2 if damaged else 0)
    answers = run_ranks(verify_together, 3, str(tmp_path))
    assert {problems for problems, _, _ in answers} == {alone.problems}
    assert {num_bytes for _, num_bytes, _ in answers} == {alone.num_bytes}
    read = [num_bytes for *_, num_bytes in answers]
    assert max(read) - min(read) <= 8 << 20
    assert sum(read) == alone.num_bytes
