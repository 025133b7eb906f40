"""Damage anywhere is found: by loads of what it hit, by default, and always by `verify`, which name file, bytes and tensors."""

from __future__ import annotations

import random
import re
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import Replication, TensorSpec, ValueKind, ValueSpec, box_piece
from reshard_ckpt.errors import CheckpointError, CorruptError, UsageError
from reshard_ckpt.format.values import encode_path, encode_value
from reshard_ckpt.storage import open_storage
from tests.jobs import save_job
from tests.layouts import values_of
from tests.tries import times

RANKS, ROWS, COLUMNS = 3, 6, 20_000
LONG = bytes(7 * place % 251 for place in range(26_000))
RANGE = re.compile(r"in bytes (\d+):(\d+), which hold ([^;]+)")


@cache
def wide(salt: int) -> torch.Tensor:
    return values_of((ROWS, COLUMNS), "F32", salt)


def small(salt: int) -> torch.Tensor:
    return values_of((5, 7), "BF16", salt)


@dataclass
class Saved:
    """A checkpoint of three ranks in memory, the bytes of its files, and who lies where."""

    url: str
    salt: int

    def __post_init__(self) -> None:
        ranks = []
        for rank in range(RANKS):
            rows = box_piece((2 * rank, 0), (2, COLUMNS), 0, (COLUMNS, 1))
            tensors = [
                (
                    TensorSpec("t.wide", "F32", (ROWS, COLUMNS), (rows,), Replication.DECLARED),
                    wide(self.salt)[2 * rank : 2 * rank + 2],
                )
            ]
            if rank == 1:
                whole = box_piece((0, 0), (5, 7), 0, (7, 1))
                tensors.append((TensorSpec("t.small", "BF16", (5, 7), (whole,), Replication.PLAIN), small(self.salt)))
            ranks.append([(spec, tensor.contiguous()) for spec, tensor in tensors])
        values = [
            [
                ValueSpec("extra.step", encode_path(["extra", "step"]), ValueKind.PLAIN, encode_value(7, "")),
                ValueSpec("extra.long", encode_path(["extra", "long"]), ValueKind.PLAIN, encode_value(LONG, "")),
                ValueSpec("extra.own", encode_path(["extra", "own"]), ValueKind.PER_RANK, encode_value([rank] * 50, "")),
            ]
            for rank in range(RANKS)
        ]
        with open_storage(self.url) as storage:
            save_job(storage, ranks, values)
            self.good = {key: storage.read(key, 1 << 30) for key, _ in storage.list()}
        self.catalog = checkpoint.catalog(self.url)

    def put(self, key: str, data: bytes | None) -> None:
        with open_storage(self.url) as storage:
            storage.delete([key]) if data is None else storage.publish(key, data)

    def restore(self) -> None:
        for key, data in self.good.items():
            self.put(key, data)

    def files(self, kind: str) -> list[str]:
        return sorted(key for key in self.good if key.endswith(kind))

    def owners(self, key: str, at: int) -> set[str]:
        """What lies at a byte, by plain search."""
        out = set()
        for info in self.catalog.tensors():
            for shard in info.shards:
                num_bytes = shard.count * (2 if info.name == "t.small" else 4)
                if shard.file.key == key and shard.offset <= at < shard.offset + num_bytes:
                    out.add(info.name)
        return out

    def is_whole(self) -> bool:
        """Whether everything reads back as saved; damage that is noticed is an error."""
        found = checkpoint.read(self.url)
        return (
            torch.equal(found["t.wide"].view(torch.int32), wide(self.salt).view(torch.int32))
            and torch.equal(found["t.small"].view(torch.int16), small(self.salt).view(torch.int16))
            and (found["extra.step"], found["extra.long"]) == (7, LONG)
            and found["extra.own"] == [[rank] * 50 for rank in range(RANKS)]
        )


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    yield from fresh(5)


@pytest.fixture(scope="module")
def other() -> Iterator[Saved]:
    """Another save of the same layout, with other numbers."""
    yield from fresh(6)


def fresh(salt: int) -> Iterator[Saved]:
    saved = Saved(f"memory://{uuid.uuid4().hex}", salt)
    assert saved.is_whole()
    assert checkpoint.verify(saved.url).ok
    yield saved
    for key in saved.good:
        saved.put(key, None)


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(CorruptError) as caught:
        act()
    return str(caught.value)


def test_a_flipped_bit_of_the_catalog_is_found(saved: Saved):
    data, chance = saved.good["catalog.msgpack"], random.Random(1)
    for bit in chance.sample(range(8 * len(data)), min(times(600), 8 * len(data))):
        saved.put("catalog.msgpack", flipped(data, bit))
        error_of(lambda: checkpoint.catalog(saved.url))
    error_of(lambda: checkpoint.read(saved.url))
    assert len(checkpoint.verify(saved.url).problems) == 1
    saved.restore()


@pytest.mark.slow
def test_a_flipped_bit_of_a_shard_file_is_found_where_it_is(saved: Saved):
    chance = random.Random(2)
    for i in range(times(300)):
        key = chance.choice(saved.files(".safetensors"))
        data = saved.good[key]
        # A third of them in the header and the small members behind it, which random places would hardly hit.
        at = (
            chance.randrange(len(data))
            if i % 3
            else chance.choice([chance.randrange(600), len(data) - 1 - chance.randrange(400)])
        )
        saved.put(key, flipped(data, 8 * at + chance.randrange(8)))
        (line,) = checkpoint.verify(saved.url).problems
        for message in (line, error_of(lambda: checkpoint.read(saved.url))):
            low, high, names = RANGE.search(message).groups()  # type: ignore[union-attr]
            assert key in message
            assert int(low) <= at < int(high)
            assert saved.owners(key, at) <= set(names.split(", "))
        saved.put(key, data)
    assert saved.is_whole()


def test_a_flipped_bit_of_a_digests_file_is_found(saved: Saved):
    chance = random.Random(3)
    for _ in range(200):
        key = chance.choice(saved.files(".digests"))
        saved.put(key, flipped(saved.good[key], chance.randrange(8 * len(saved.good[key]))))
        (line,) = checkpoint.verify(saved.url).problems
        for message in (line, error_of(lambda: checkpoint.read(saved.url))):
            assert f"{key} is damaged" in message
            assert "t.wide" in message
        saved.put(key, saved.good[key])


def test_a_load_of_part_finds_what_it_reads_and_never_a_wrong_byte(saved: Saved):
    chance, found = random.Random(4), 0
    for _ in range(300):
        key = chance.choice(saved.files(".safetensors"))
        saved.put(key, flipped(saved.good[key], chance.randrange(8 * len(saved.good[key]))))
        assert not checkpoint.verify(saved.url).ok
        try:
            assert torch.equal(checkpoint.read(saved.url, ["t.small"])["t.small"].view(torch.int16), small(5).view(torch.int16))
        except CorruptError:
            found += 1
        saved.put(key, saved.good[key])
    assert 0 < found < 150


def swap(saved: Saved, other: Saved, kind: str) -> dict[str, bytes | None]:
    """What a kind of mix-up puts in the place of which files."""
    data, digests = saved.files(".safetensors"), saved.files(".digests")
    good, theirs = saved.good, dict(zip(sorted(saved.good), (other.good[key] for key in sorted(other.good)), strict=True))
    return {
        "a missing file": {data[1]: None},
        "missing digests": {digests[1]: None},
        "all files missing": dict.fromkeys([*data, *digests]),
        "files swapped": {data[0]: good[data[2]], data[2]: good[data[0]]},
        "files swapped with their digests": {
            data[0]: good[data[2]],
            data[2]: good[data[0]],
            digests[0]: good[digests[2]],
            digests[2]: good[digests[0]],
        },
        "digests swapped": {digests[0]: good[digests[2]], digests[2]: good[digests[0]]},
        "a file twice": {data[2]: good[data[0]], digests[2]: good[digests[0]]},
        "a file of another save": {data[1]: theirs[data[1]]},
        "a file of another save with its digests": {data[1]: theirs[data[1]], digests[1]: theirs[digests[1]]},
        "a longer file": {data[1]: good[data[1]] + b"\0"},
        "longer digests": {digests[1]: good[digests[1]] + bytes(1 << 20)},
        "an empty file": {data[1]: b""},
    }[kind]


KINDS = [
    "a missing file", "missing digests", "all files missing", "files swapped", "files swapped with their digests",
    "digests swapped", "a file twice", "a file of another save", "a file of another save with its digests", "a longer file",
    "longer digests", "an empty file",
]  # fmt: skip
SEEN_WITHOUT_CHECKSUMS = {"a missing file", "all files missing", "a longer file", "an empty file"}


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_up_files_are_found_and_named(saved: Saved, other: Saved, kind: str):
    damage = swap(saved, other, kind)
    for key, data in damage.items():
        saved.put(key, data)
    report = checkpoint.verify(saved.url)
    shards = {key.rsplit(".", 1)[0] for key in damage}
    assert all(any(shard in line for line in report.problems) for shard in shards)
    assert all("t.wide" in line for line in report.problems)
    message = error_of(lambda: checkpoint.read(saved.url))
    assert any(shard in message for shard in shards)
    target = {"t": {"wide": torch.zeros(ROWS, COLUMNS)}}
    if kind in SEEN_WITHOUT_CHECKSUMS:
        error_of(lambda: checkpoint.load(saved.url, target, strict=False, verify=False))
        assert not target["t"]["wide"].any()
    saved.restore()
    assert saved.is_whole()


def test_a_catalog_of_another_save_is_found(saved: Saved, other: Saved):
    renamed = {key.replace(other.catalog.save_id, saved.catalog.save_id): data for key, data in other.good.items()}
    for key in saved.files(".safetensors"):
        saved.put(key, renamed[key])
    assert len(checkpoint.verify(saved.url).problems) == RANKS
    saved.restore()
    saved.put("catalog.msgpack", other.good["catalog.msgpack"])
    assert len(checkpoint.verify(saved.url).problems) == RANKS
    assert "is missing" in error_of(lambda: checkpoint.read(saved.url))
    saved.restore()


def test_a_file_cut_anywhere_is_found_with_and_without_checksums(saved: Saved):
    chance = random.Random(6)
    for _ in range(150):
        key = chance.choice(sorted(saved.good))
        size = chance.randrange(len(saved.good[key]))
        saved.put(key, saved.good[key][:size])
        (line,) = checkpoint.verify(saved.url).problems
        if key == "catalog.msgpack":
            assert "catalog" in line
        else:
            assert key in line
            assert "t.wide" in line or size > 100_000
        message = error_of(lambda: checkpoint.read(saved.url))
        assert key in message or "catalog" in message
        if not key.endswith(".digests"):
            target = {"t": {"wide": torch.zeros(ROWS, COLUMNS)}}
            error_of(lambda: checkpoint.load(saved.url, target, strict=False, verify=False))  # noqa: B023
        saved.put(key, saved.good[key])
    assert saved.is_whole()


def test_without_checksums_a_flipped_bit_of_data_loads_as_it_is(saved: Saved):
    """That is what the option says; the catalog is proved all the same."""
    key = saved.files(".safetensors")[0]
    saved.put(key, saved.good[key][:-1] + b"\xff")
    for digests in saved.files(".digests"):
        saved.put(digests, None)
    target = {"t": {"wide": torch.zeros(ROWS, COLUMNS), "small": torch.zeros(5, 7, dtype=torch.bfloat16)}}
    checkpoint.load(saved.url, target, verify=False)
    same = target["t"]["wide"].view(torch.int32) == wide(5).view(torch.int32)
    assert int((~same).sum()) <= 1
    saved.restore()
    saved.put("catalog.msgpack", flipped(saved.good["catalog.msgpack"], 4000))
    error_of(lambda: checkpoint.load(saved.url, target, verify=False))
    saved.restore()


# --- verify itself ---


def test_neighbouring_damage_is_one_problem_and_any_number_of_workers_says_the_same(saved: Saved):
    key = saved.files(".safetensors")[1]
    saved.put(key, bytes(len(saved.good[key])))
    saved.put(saved.files(".digests")[0], None)
    reports = [checkpoint.verify(saved.url, workers=workers) for workers in (None, 1, 2, 7)]
    assert len(set(reports)) == 1
    missing, damaged = reports[0].problems
    assert f"{key} is damaged in bytes 0:{len(saved.good[key])}, which hold " in damaged
    assert {"t.wide", "t.small", "extra.own"} <= set(damaged.split("hold ")[1].split(", "))
    assert saved.files(".digests")[0] in missing
    saved.restore()


def test_verify_tells_its_progress_to_the_last_byte(saved: Saved):
    key = saved.files(".safetensors")[1]
    for data in (saved.good[key], None):
        saved.put(key, data)
        told: list[tuple[str, int, int]] = []
        checkpoint.verify(saved.url, progress=lambda *what: told.append(what))  # noqa: B023
        total = sum(entry.size for entry in saved.catalog.files)
        assert (told[0], told[-1]) == (("verify", 0, total), ("verify", total, total))
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    saved.restore()


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "2"])
def test_verify_refuses_no_number_of_workers(saved: Saved, workers: object):
    with pytest.raises(UsageError, match="workers="):
        checkpoint.verify(saved.url, workers=workers)  # type: ignore[arg-type]


def test_what_progress_raises_ends_verify(saved: Saved):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.verify(saved.url, progress=stop)


def test_verify_takes_bounded_memory(tmp_path: Path):
    checkpoint.save(tmp_path, {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(20)})
    tracemalloc.start()
    try:
        assert checkpoint.verify(tmp_path, workers=2).ok
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20  # of 80 MiB: a window of 8 MiB for each worker, and a little


def test_every_problem_is_a_checkpoint_error(saved: Saved):
    """Whatever is put in the place of a file, nothing else is raised."""
    chance = random.Random(9)
    for _ in range(100):
        key = chance.choice(sorted(saved.good))
        data = bytearray(saved.good[key])
        for _ in range(chance.randrange(1, 20)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
        saved.put(key, bytes(data))
        with suppress(CheckpointError):
            assert saved.is_whole() == checkpoint.verify(saved.url).ok
        saved.put(key, saved.good[key])
