"""A reshard writes what a job of the new topology would have saved: the same files, the same catalog."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import Catalog, ShardView, TensorView, ValueEntry
from reshard_ckpt.core.catalog.specs import AxisPlacement, ValueKind, piece_columns
from reshard_ckpt.core.planning.load_plan import plan_load
from reshard_ckpt.core.planning.read_plan import plan_reads
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.engine.resharding import read_back, reshard
from reshard_ckpt.errors import CorruptError, UsageError
from reshard_ckpt.format.catalog import encode_catalog
from reshard_ckpt.format.values import decode_value, encode_value
from reshard_ckpt.storage import LocalStorage, open_storage
from reshard_ckpt.storage.local import LocalWriter
from tests.damage import flip
from tests.jobs import load_job
from tests.launch import ROOT, run_ranks
from tests.topologies import Job, cleared, hold_rank, save, transformer
from tests.tries import examples
from tests.warm_python import run_torchrun, warm_python

SRC, DST, WANTED = "memory://reshard/src", "memory://reshard/dst", "memory://reshard/wanted"


def assert_same(found: Catalog, wanted: Catalog, got, expected) -> None:
    """Equal but for the save's id and time; every file, byte for byte."""
    for a, b in zip(found.files, wanted.files, strict=True):
        assert a.key.split("/")[1] == b.key.split("/")[1]
        assert (a.rank, a.size) == (b.rank, b.size), a.key
        assert got.read(a.key, a.size) == expected.read(b.key, b.size), a.key
        assert a.digest == b.digest
    for table in ("tensors_table", "boxes", "rows"):
        one, other = getattr(found, table), getattr(wanted, table)
        for name in set(one.__slots__) - {"placement"}:
            assert np.array_equal(getattr(one, name), getattr(other, name)), f"{table}.{name}"
    for a, b in zip(found.tensors(), wanted.tensors(), strict=True):
        assert shown(found, a) == shown(wanted, b), a.name
    assert list(map(unordered, found.values_table)) == list(map(unordered, wanted.values_table))
    assert (found.mesh, found.metadata) == (wanted.mesh, wanted.metadata)


def shown(catalog: Catalog, tensor: TensorView) -> list[AxisPlacement] | None:
    """What a job's own pieces show of a placement: no sections along an axis of one coordinate."""
    sizes = dict(zip(catalog.mesh.axes, catalog.mesh.sizes, strict=True))
    placed = tensor.placement
    return None if placed is None else [p if sizes[p.axis] > 1 else replace(p, sections=()) for p in placed]


def unordered(value: ValueEntry) -> ValueEntry:
    """Ranks that hold other experts list them in another order."""
    if value.kind is not ValueKind.PARAM_GROUPS:
        return value
    groups = decode_value(value.data or b"")
    return replace(value, data=encode_value([{**group, "params": sorted(group["params"])} for group in groups], ""))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Job, Job, dict[str, dict[str, object]]]:
    """Two jobs of one model on two meshes, and rules for what the first one's checkpoint cannot tell."""
    zero = draw(st.sampled_from([None, None, "vector", "each"]))
    fsdp = zero is None and draw(st.booleans())
    layers, hidden, vocab = draw(st.integers(3, 5)), draw(st.integers(3, 6)), draw(st.integers(1, 13))
    # A vector is in the order in which the ranks list their parameters, which experts on other ranks change.
    experts = draw(st.sampled_from([0, 0, 3])) if zero is None else 0
    fused, tied = draw(st.booleans()), draw(st.booleans())
    axes = ["pp", "dp", "tp", *(["ep"] if experts else [])]
    old_mesh, new_mesh = ({axis: draw(st.integers(1, 3)) for axis in axes} for _ in range(2))
    rules: dict[str, dict[str, object]] = {}
    if zero and old_mesh["dp"] == 1:  # nothing shows that this was ZeRO
        zero = "vector"
        rules["optimizer.state.*"] = {"dp": "flat"}
    if zero == "vector":  # where tp ranks have unequal shares, each cuts its vector elsewhere, and placements are told by chance
        hidden, vocab = 6, 12
    if fused and old_mesh["tp"] == 1:
        rules["model.layers.*.qkv.weight"] = {"sections": {0: [2 * hidden, hidden, hidden]}}
    weights = transformer(layers, hidden, vocab, fused=fused, experts=experts)
    same_size = prod(old_mesh.values()) == prod(new_mesh.values())
    aliases = {"head.weight": "emb.weight"} if tied else {}
    old = Job(old_mesh, weights, layers, fsdp, zero, experts=max(experts, 1), own_values=same_size, aliases=aliases)
    return old, replace(old, mesh=new_mesh), rules


@given(pairs(), st.integers(0, 1000))
@examples(30, usual=20)
def test_a_reshard_is_what_that_job_would_have_saved(pair: tuple[Job, Job, dict[str, dict[str, object]]], some: int) -> None:
    old, new, rules = pair
    save(old, cleared(SRC))
    wanted = save(new, cleared(WANTED))
    cleared(DST)
    checkpoint.reshard(SRC, DST, mesh=new.mesh, rules=rules)
    storage = open_storage(DST)
    assert_same(open_catalog(storage), wanted, storage, open_storage(WANTED))
    held = [(spec, memory) for spec, memory in hold_rank(new, some % new.size)[0] if spec.alias_of is None]
    target = [(spec, torch.zeros_like(memory)) for spec, memory in held]
    load_job(storage, target)
    for (spec, got), (_, memory) in zip(target, held, strict=True):
        assert torch.equal(got.view(torch.uint8), memory.view(torch.uint8)), spec.name


KILLED = """
import os, signal, sys
from reshard_ckpt import checkpoint
from reshard_ckpt.storage.local import LocalWriter

write, left = LocalWriter.write, int(sys.argv[3])

def counted(self, data):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, data)

LocalWriter.write = counted
checkpoint.reshard(sys.argv[1], sys.argv[2], mesh={"dp": 4, "tp": 1})
"""


def on_disk(folder: Path) -> tuple[Job, Path, dict[str, bytes]]:
    """A job's checkpoint on a disk, and what a reshard of it to dp 4 comes to."""
    old = Job({"dp": 2, "tp": 2}, transformer(3, 24, 64), 3, fsdp=True)
    save(old, open_storage(folder / "src"))
    checkpoint.reshard(folder / "src", folder / "whole", mesh={"dp": 4, "tp": 1})
    return old, folder / "src", files_of(folder / "whole")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_reshard_that_was_killed_keeps_what_it_had_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, src, whole = on_disk(tmp_path)
    dst = tmp_path / "dst"
    save(Job({"dp": 1}, transformer(3, 4, 8), 3), open_storage(dst))
    before = files_of(dst)
    script = [warm_python(), "-c", KILLED, str(src), str(dst)]
    monkeypatch.setattr(LocalWriter, "write", counting := Counting(LocalWriter.write))
    checkpoint.reshard(src, tmp_path / "count", mesh={"dp": 4, "tp": 1})
    monkeypatch.undo()
    writes = counting.at_digests[1] + 2  # within the third file
    process = subprocess.run([*script, str(writes)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert process.returncode == -signal.SIGKILL
    left = files_of(dst)
    assert before.items() <= left.items(), "the checkpoint that was there is whole"
    finished = {key for key in left if key.endswith(".digests") and key not in before}
    assert len(finished) == 2
    assert checkpoint.verify(dst).ok

    created: list[str] = []
    create = LocalStorage.create
    monkeypatch.setattr(
        LocalStorage, "create", lambda self, key, *rest, **named: created.append(key) or create(self, key, *rest, **named)
    )
    report = checkpoint.reshard(src, dst, mesh={"dp": 4, "tp": 1})
    assert len([key for key in created if key.endswith(".safetensors")]) == 2
    assert not finished & set(created)
    assert report.bytes_kept == sum(len(whole[key.replace(".digests", ".safetensors")]) for key in finished)
    assert files_of(dst) == whole
    again = checkpoint.reshard(src, dst, mesh={"dp": 4, "tp": 1})
    assert (again.bytes_kept, again.bytes_read) == (again.bytes_written, 0)
    assert files_of(dst) == whole


def test_a_finished_file_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    _, src, whole = on_disk(tmp_path)
    folder = tmp_path / "whole"
    first, second = sorted(folder.rglob("*.safetensors"))[:2]
    flip(first)
    second.with_suffix(".digests").unlink()
    report = checkpoint.reshard(src, folder, mesh={"dp": 4, "tp": 1})
    assert 0 < report.bytes_kept < report.bytes_written
    assert files_of(folder) == whole


def test_other_options_share_no_files_with_what_was_left(tmp_path: Path) -> None:
    _, src, whole = on_disk(tmp_path)
    report = checkpoint.reshard(src, tmp_path / "whole", mesh={"dp": 4, "tp": 1}, cast={"model.*": "float32"})
    assert report.bytes_kept == 0
    assert not files_of(tmp_path / "whole").keys() & (whole.keys() - {"catalog.msgpack"})
    assert checkpoint.verify(tmp_path / "whole").ok


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on which every option of `reshard` has an effect."""
    path = tmp_path_factory.mktemp("planned") / "src"
    layers = {f"layers.{i}.weight": torch.arange(16.0).reshape(8, 2) + i for i in range(4)}
    checkpoint.save(path, {"model": layers, "ema": {name: w + 9 for name, w in layers.items()}, "extra": {"step": 1}})
    return path


BASE: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "mesh": [{"mesh": {"pp": 2, "dp": 4}}, {"mesh": {"dp": 2, "pp": 2}}, {"mesh": {"pp": 2, "tp": 2}}],
    "rules": [
        {"rules": {"*": {"dp": "shard(0)"}}},
        {"rules": {"model.*": {"dp": "shard(0)"}}},
        {"rules": {"*": {"dp": "shard(1)"}}},
    ],
    "stages": [{"stages": [1]}, {"stages": [3]}],
    "select": [{"select": ["model"]}, {"select": ["ema"]}, {"select": ["extra"]}],
    "exclude": [{"exclude": ["extra"]}],
    "drop": [{"drop": "model.layers.0"}],
    "rename": [
        {"select": ["model"], "rename": {"model": "old", "ema": "model"}},
        {"select": ["model"], "rename": {"model.layers.0": "model.layers.1", "model.layers.1": "model.layers.0"}},
    ],
    "cast": [{"cast": {"*": "bfloat16"}}, {"cast": {"model.*": "bfloat16"}}, {"cast": {"*": "float16"}}],
    "verify": [{"verify": False}],
}
WITHOUT_EFFECT = {
    "src": "its catalog counts, which has the digests of all files: the same checkpoint elsewhere gives the same bytes",
    "dst": "what is kept lies there",
    "dry_run": "writes nothing",
    "progress": "is told, and decides nothing",
    "process_group": "any number of processes write the same files",
    "timeout_s": "a limit of waiting",
}


def test_every_option_that_decides_bytes_decides_the_id(planned: Path, tmp_path: Path) -> None:
    assert CHANGES.keys() | WITHOUT_EFFECT.keys() == inspect.signature(checkpoint.reshard).parameters.keys()
    assert not CHANGES.keys() & WITHOUT_EFFECT.keys()

    def save_id(src: Path, **options: Any) -> str:
        return checkpoint.reshard(src, tmp_path / "dst", **{**BASE, **options}, dry_run=True).save_id

    requests = [{}, *(options for each in CHANGES.values() for options in each)]
    ids = [save_id(planned, **options) for options in requests]
    assert len(set(ids)) == len(ids), [options for options, one in zip(requests, ids, strict=True) if ids.count(one) > 1]
    assert [save_id(planned, **options) for options in requests] == ids
    shutil.copytree(planned, tmp_path / "copy")
    assert save_id(tmp_path / "copy") == ids[0]


def test_an_attempt_of_another_rename_is_not_kept(planned: Path, tmp_path: Path) -> None:
    """The result has the same names, of the same shapes, which stand for other tensors of the source."""
    dst, options = tmp_path / "dst", {**BASE, "select": ["model"]}
    checkpoint.reshard(planned, dst, **options)
    report = checkpoint.reshard(planned, dst, **options, rename={"model": "old", "ema": "model"})
    assert report.bytes_kept == 0
    saved = checkpoint.read(planned)
    assert all(torch.equal(w, saved[name.replace("model.", "ema.")]) for name, w in checkpoint.read(dst).items())


def test_what_was_not_verified_is_not_kept_where_it_is_to_be(planned: Path, tmp_path: Path) -> None:
    src, dst = shutil.copytree(planned, tmp_path / "src"), tmp_path / "dst"
    (path,) = src.rglob("*.safetensors")
    flip(path)
    checkpoint.reshard(src, dst, **BASE, verify=False)
    with pytest.raises(CorruptError, match="is damaged"):
        checkpoint.reshard(src, dst, **BASE)


class Counting:
    """Counts writes, and at which of them a digests file is written."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.write, self.count, self.at_digests = write, 0, list[int]()

    def __get__(self, writer: LocalWriter, kind: type) -> Callable[..., None]:
        def write(data: bytes) -> None:
            if bytes(memoryview(data)[:8]) == b"RSHDIGST":
                self.at_digests.append(self.count)
            self.count += 1
            self.write(writer, data)

        return write


def test_a_damaged_source_is_named_and_nothing_is_replaced(tmp_path: Path) -> None:
    _, src, _ = on_disk(tmp_path)
    dst = tmp_path / "dst"
    save(Job({"dp": 1}, transformer(3, 4, 8), 3), open_storage(dst))
    before = files_of(dst)
    path = max(src.rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    flip(path, -5)
    with pytest.raises(CorruptError, match=r"is damaged in bytes [^;]*; use another checkpoint$"):
        checkpoint.reshard(src, dst, mesh={"dp": 4, "tp": 1})
    assert before.items() <= files_of(dst).items()
    assert checkpoint.verify(dst).ok


@pytest.mark.parametrize("early", [True, False])
def test_what_was_written_is_read_back(early: bool, tmp_path: Path) -> None:
    """A store that keeps other bytes than it was given, in the middle of a file or at its end."""
    _, src, _ = on_disk(tmp_path)
    write = LocalWriter.write

    def changed(self: LocalWriter, data: memoryview) -> None:
        flipped = bytearray(data)
        if len(flipped) > 100 and bytes(flipped[:8]) != b"RSHDIGST":
            flipped[10 if early else -1] ^= 1
        write(self, bytes(flipped))

    with patch.object(LocalWriter, "write", changed), patch.object(read_back, "STEP_BYTES", 1 << 17):
        with pytest.raises(CorruptError, match="read back differ from what was written"):
            checkpoint.reshard(src, tmp_path / "dst", mesh={"dp": 4, "tp": 1})
        assert not (tmp_path / "dst" / "catalog.msgpack").exists()
        checkpoint.reshard(src, tmp_path / "unproved", mesh={"dp": 4, "tp": 1}, verify=False)
    assert not checkpoint.verify(tmp_path / "unproved").ok


def test_every_byte_is_read_back_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "src", {f"w{i}": torch.arange(300_000 + i) for i in range(3)})
    proved: dict[str, list[tuple[int, int]]] = {}
    inner = read_back.ReadBack._verify

    def prove(self: read_back.ReadBack, part: read_back.WrittenBlocks) -> None:
        inner(self, part)
        proved.setdefault(part.key, []).append((part.low, part.high))

    with patch.object(read_back.ReadBack, "_verify", prove), patch.object(reshard, "WINDOW_BYTES", 1 << 17):
        checkpoint.reshard(tmp_path / "src", tmp_path / "dst", mesh={"dp": 2})
    for entry in open_catalog(open_storage(tmp_path / "dst")).files:
        parts = sorted(part for part in proved[entry.key] if part[0] < part[1])
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])], entry.key
        assert parts[-1][1] == entry.size
        assert len(parts) > 10


@pytest.mark.parametrize("mesh", [{"pp": 3, "tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_each_rank_reads_files_of_its_replica_group_front_to_back(mesh: dict[str, int]) -> None:
    old = Job({"dp": 3, "tp": 1}, transformer(3, 24, 64), 3, fsdp=True, own_values=False)
    new = replace(old, mesh=mesh)
    save(old, cleared(SRC))
    cleared(DST)
    checkpoint.reshard(SRC, DST, mesh=mesh)
    saved = open_catalog(open_storage(DST))
    holders: dict[tuple[str, object], set[int]] = {}
    for rank in range(new.size):
        for spec, _ in hold_rank(new, rank)[0]:
            holders.setdefault((spec.name, spec.pieces), set()).add(rank)
    for rank in range(new.size):
        specs = [spec for spec, _ in hold_rank(new, rank)[0]]
        source = np.array([saved.index(spec.name) for spec in specs])
        plan = plan_load(saved, source, piece_columns(specs), 1 << 40)
        for dest, file in zip(plan.dest.tolist(), plan.file.tolist(), strict=True):
            spec = specs[dest]
            assert saved.files[file].rank in holders[spec.name, spec.pieces], spec.name
        reads = plan_reads(
            plan, np.zeros(len(saved.files), np.int64), np.array([f.size for f in saved.files]), np.ones(len(specs), bool)
        )
        own = next(i for i, file in enumerate(saved.files) if file.rank == rank)
        mine = np.flatnonzero(reads.file == own)
        # Of its own file it reads all, as one range.
        extents = reads.extent_start[mine[0] + 1] - reads.extent_start[mine[0]]
        assert (len(mine), extents) == (1, 1)
        high = reads.high[reads.extent_start[mine[0]]]
        blobs = sum(spec.num_bytes for value in saved.values_table for spec in _rows_of(saved, value, own))
        assert high + blobs >= saved.files[own].size


def _rows_of(saved: Catalog, value: ValueEntry, file: int) -> list[ShardView]:
    rows = saved.tensors_table.row_start
    return [
        saved._shard(row, 1, 1)
        for blob in value.blobs
        for row in range(rows[blob], rows[blob + 1])
        if saved.rows.file[row] == file
    ]


def reshard_together(src: str, dst: str, read_alone: int) -> bytes:
    """On each of several ranks."""
    checkpoint.reshard(src, dst, mesh={"pp": 2, "dp": 2, "tp": 2})
    written: list[tuple[str, int]] = []
    write_at = LocalStorage.write_at
    with (
        patch.object(reshard, "WINDOW_BYTES", 1 << 18),
        patch.object(LocalStorage, "write_at", lambda self, *part: written.append(part) or write_at(self, *part)),
    ):
        report = checkpoint.reshard(src, f"{dst}-cut", mesh={"tp": 2})
    assert written, "each process writes a part of one file"
    assert report.bytes_read <= read_alone + 4 * (1 << 18), "each row of the source is read by one process"
    with pytest.raises(UsageError, match="were given different options"):
        checkpoint.reshard(src, f"{dst}-other", mesh={"dp": 2 + dist.get_rank() % 2})
    return encode_catalog(checkpoint.catalog(dst))


def test_four_processes_write_what_one_does(tmp_path: Path) -> None:
    src, alone = tmp_path / "src", tmp_path / "alone"
    save(Job({"dp": 2, "tp": 2}, transformer(4, 96, 512), 4, zero="vector"), open_storage(src))
    checkpoint.reshard(src, alone, mesh={"pp": 2, "dp": 2, "tp": 2})
    with patch.object(reshard, "WINDOW_BYTES", 1 << 18):
        cut = checkpoint.reshard(src, tmp_path / "alone-cut", mesh={"tp": 2})
    catalogs = run_ranks(reshard_together, 4, str(src), str(tmp_path / "together"), cut.bytes_read)
    assert set(catalogs) == {encode_catalog(checkpoint.catalog(alone))}
    assert files_of(tmp_path / "together") == files_of(alone)
    assert files_of(tmp_path / "together-cut") == files_of(tmp_path / "alone-cut")
    arguments = ["reshard_ckpt", "reshard", str(src), str(tmp_path / "launched"), "--mesh", "pp=2,dp=2,tp=2"]
    assert run_torchrun("-m", 2, arguments).count("wrote 60 tensors") == 1
    assert files_of(tmp_path / "launched") == files_of(alone)
