"""A checkpoint whose catalog refers to files of another one: read like any other, kept by all that deletes, and compacted."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.engine.common.step_folders import remove_step
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, MismatchError, StorageError, UsageError
from reshard_ckpt.formats import destination
from reshard_ckpt.formats import source as source_module
from reshard_ckpt.formats.source import open_source
from reshard_ckpt.storage import open_storage, posix
from reshard_ckpt.storage.swap import swap
from tests.checkpoint.references import refer
from tests.cli.running import run as run_command
from tests.cli.states import save_trained
from tests.launch import run_ranks
from tests.storage.faulty import FaultyStorage, StopAt, Stopped


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with two checkpoints of four ranks; step 100 has the files of ranks 1 and 2 from step 90."""
    path = tmp_path / "run"
    save_trained(path / "step_90", dp=2, tp=2, step=90)
    refer(path / "step_100", path / "step_90", "../step_90", {1, 2})
    return path


def read(path: object) -> dict[str, Any]:
    return checkpoint.read(str(path))


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(np.all(a == b))

    return found.keys() == wanted.keys() and all(equal(found[name], wanted[name]) for name in wanted)


def victim(root: Path) -> Path:
    """A file of step 90 that step 100 refers to."""
    return next((root / "step_90").glob("*/rank00002-0.safetensors"))


# --- reading ---


def test_everything_reads_it_like_any_other(root: Path, tmp_path: Path):
    wanted = read(root / "step_90")
    assert same(read(root / "step_100"), wanted)
    report = checkpoint.verify(root / "step_100")
    assert (report.ok, report.num_files) == (True, 4)
    assert checkpoint.diff(root / "step_90", root / "step_100").equal
    assert not checkpoint.inspect(root / "step_100", stats=True).stats[0].num_nan
    for options in ({}, {"verify": False}, {"verify_first": True}, {"read_once": True}):
        state = {"model": {name[6:]: torch.zeros_like(t) for name, t in wanted.items() if name.startswith("model.")}}
        checkpoint.load(root / "step_100", state, ignore=["optimizer", "extra"], **options)
        assert all(torch.equal(tensor, wanted[f"model.{name}"]) for name, tensor in state["model"].items())
    checkpoint.reshard(root / "step_100", tmp_path / "resharded", mesh={"dp": 1, "tp": 3})
    assert checkpoint.diff(root / "step_90", tmp_path / "resharded").equal
    assert not any(file.checkpoint for file in checkpoint.catalog(tmp_path / "resharded").files)
    files = checkpoint.catalog(root / "step_100").files
    assert [file.checkpoint for file in sorted(files, key=lambda file: file.rank)] == ["", "../step_90", "../step_90", ""]
    assert all((root / "step_100" / file.key).stat().st_size == file.size for file in files)


def test_a_run_that_is_moved_as_a_whole_stays_readable_also_by_links(root: Path, tmp_path: Path):
    wanted = read(root / "step_90")
    root.rename(tmp_path / "moved")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "newest").symlink_to(tmp_path / "moved" / "step_100")
    (tmp_path / "moved" / "latest").symlink_to("step_100")
    for path in ("moved/step_100", "moved/latest", "links/newest"):
        assert same(read(tmp_path / path), wanted)


def test_the_catalog_of_the_other_one_is_not_needed(root: Path):
    """One level alone is followed: what the other checkpoint is by now, or refers to itself, does not matter."""
    wanted = read(root / "step_90")
    (root / "step_90" / "catalog.msgpack").write_bytes(b"damaged")
    assert same(read(root / "step_100"), wanted)


def test_a_missing_file_of_the_other_one_is_named(root: Path):
    lost = victim(root)
    lost.unlink()
    with pytest.raises(CorruptError, match=rf"\.\./step_90/.*/{lost.name} is missing.* it is of the checkpoint \.\./step_90"):
        read(root / "step_100")
    report = checkpoint.verify(root / "step_100")
    assert len(report.problems) == 1
    assert f"../step_90/{lost.parent.name}/{lost.name} is missing" in report.problems[0]
    with pytest.raises(CorruptError, match="is missing"):
        checkpoint.compact(root / "step_100")
    shutil.rmtree(root / "step_90")
    with pytest.raises(CorruptError, match="put that back in its place from here"):
        read(root / "step_100")


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_of_the_other_one_are_verified_in_any_case(root: Path, tmp_path: Path, verify: bool):
    file = victim(root)
    data = bytearray(file.read_bytes())
    data[-200:] = bytes(200)
    file.write_bytes(data)
    saved = checkpoint.catalog(root / "step_100")
    state: dict[str, Any] = {name: torch.zeros(saved.shape(saved.index(name))) for name in saved.names}
    with pytest.raises(CorruptError, match=r"\.\./step_90/.* is damaged in bytes"):
        checkpoint.load(root / "step_100", state, strict=False, verify=verify)
    with pytest.raises(CorruptError, match=r"\.\./step_90/.* is damaged in bytes"):
        checkpoint.reshard(root / "step_100", tmp_path / "resharded", mesh={"tp": 3}, verify=verify)
    with pytest.raises(CorruptError, match=r"\.\./step_90/.* is damaged in bytes"):
        checkpoint.convert(root / "step_100", tmp_path / "converted", root="", to="torch", verify=verify)
    assert not checkpoint.verify(root / "step_100").ok
    with pytest.raises(CorruptError, match="damaged in the block"):
        checkpoint.compact(root / "step_100")
    assert len(list((root / "step_100").iterdir())) == 2  # the catalog, and its own files


def once(path: str, whole: torch.Tensor) -> list[bool]:
    """Each rank wants all of it, or its own half, from files of both checkpoints."""
    rank, found = dist.get_rank(), []
    half = whole.shape[0] // 2
    for read_once in (False, True):
        own = LocalShard(torch.zeros(half, whole.shape[1]), tuple(whole.shape), (rank * half, 0))
        for state in ({"emb": torch.zeros_like(whole)}, {"emb": own}):
            checkpoint.load(path, {"model": state}, strict=False, read_once=read_once)
            got = state["emb"]
            part = whole[rank * half : (rank + 1) * half]
            found.append(torch.equal(got, whole) if isinstance(got, torch.Tensor) else torch.equal(got.tensor, part))
    return found


def test_ranks_read_it_together(root: Path):
    whole = read(root / "step_90")["model.emb"]
    assert run_ranks(once, 2, str(root / "step_100"), whole) == [[True] * 4] * 2


# --- what deletes ---


def test_while_it_is_read_the_other_one_is_not_removed(root: Path):
    with open_storage(root) as storage:
        with open_source(root / "step_100"):
            assert not remove_step(storage, "step_90", frozenset)
        assert (root / "step_90" / "catalog.msgpack").exists()


def test_it_survives_the_removal_of_the_other_one(root: Path):
    wanted = read(root / "step_90")
    with Manager(root) as manager:
        manager.delete(90)
        assert manager.steps() == [100]
    Manager(root).close()  # which looks for leftovers
    assert same(read(root / "step_100"), wanted)
    assert checkpoint.verify(root / "step_100").ok
    assert len(list((root / "step_90").rglob("rank*"))) == 4  # two files and their digests
    with Manager(root) as manager:
        manager.delete(100)
    Manager(root).close()
    assert not list(root.glob("step_*"))


@pytest.mark.parametrize("is_moved", [False, True])
def test_it_survives_that_the_other_one_is_saved_anew(root: Path, tmp_path: Path, is_moved: bool):
    wanted = read(root / "step_90")
    if is_moved:  # to another disk
        (root / "step_100").rename(tmp_path / "disk")
        (root / "step_100").symlink_to(tmp_path / "disk")
    checkpoint.save(root / "step_90", {"model": {"other": torch.arange(5)}})
    assert set(read(root / "step_90")) == {"model.other"}
    assert same(read(root / "step_100"), wanted)
    Manager(root).close()
    assert same(read(root / "step_100"), wanted)
    checkpoint.compact(root / "step_100")
    checkpoint.save(root / "step_90", {"model": {"other": torch.arange(6)}})
    assert len(list((root / "step_90").rglob("rank*"))) == 2
    assert same(read(root / "step_100"), wanted)


def test_nothing_replaced_goes_while_nobody_knows_what_refers_to_it(root: Path):
    (root / "step_100" / "catalog.msgpack").write_bytes(b"damaged")
    before = len(list((root / "step_90").rglob("rank*")))
    with pytest.warns(UserWarning, match="what was replaced there stays: .*catalog"):
        checkpoint.save(root / "step_90", {"model": {"other": torch.arange(5)}})
    assert len(list((root / "step_90").rglob("rank*"))) == before + 2


@pytest.mark.parametrize("to", ["reshard", "torch"])
def test_it_survives_that_the_other_one_is_to_be_replaced_by_a_conversion(root: Path, tmp_path: Path, to: str):
    wanted, other = read(root / "step_100"), tmp_path / "other"
    checkpoint.save(other, {"model": {"w": torch.arange(5)}})
    with pytest.raises(
        UsageError, match=r"step_90: is not replaced: step_100 .*; make them self-contained first .*compact.*step_100"
    ):
        checkpoint.convert(other, root / "step_90", to=to, overwrite=True)
    assert same(read(root / "step_100"), wanted)
    assert sorted(path.name for path in root.iterdir()) == ["step_100", "step_90"]
    catalog = (root / "step_100" / "catalog.msgpack").read_bytes()
    (root / "step_100" / "catalog.msgpack").write_bytes(b"damaged")
    with pytest.raises(CorruptError, match="is not replaced, as a step beside it may refer to its files"):
        checkpoint.convert(other, root / "step_90", to=to, overwrite=True)
    (root / "step_100" / "catalog.msgpack").write_bytes(catalog)
    checkpoint.compact(root / "step_100")
    checkpoint.convert(other, root / "step_90", to=to, overwrite=True)
    assert same(read(root / "step_100"), wanted)


def test_what_refers_to_it_since_a_conversion_began_survives(root: Path, tmp_path: Path):
    wanted, other, later = read(root / "step_100"), tmp_path / "other", tmp_path / "later"
    checkpoint.save(other, {"model": {"w": torch.arange(5)}})
    (root / "step_100").rename(later)
    with pytest.raises(UsageError, match="step_90: is not replaced: step_100"):
        checkpoint.convert(
            other, root / "step_90", overwrite=True, progress=lambda *_: later.exists() and later.rename(root / "step_100")
        )
    assert same(read(root / "step_100"), wanted)


@pytest.mark.parametrize("swaps", [True, False])
def test_what_refers_to_it_in_the_last_moment_of_a_conversion_survives(root: Path, tmp_path: Path, swaps: bool):
    """The save finds its base whole, and the conversion has found nothing that refers to it."""
    step, other = root / "step_90", tmp_path / "other"
    wanted, state = read(step), {"model": {"w": torch.arange(5)}}
    checkpoint.save(other, state)
    checkpoint.compact(root / "step_100")
    (root / "step_100").rename(tmp_path / "away")

    def late(made: str, path: str) -> bool:
        if not (root / "late").exists():
            refer(root / "late", step, "../step_90", {1, 2})
        return swaps and swap(made, path)

    with mock.patch.object(destination, "swap", late), pytest.raises(UsageError, match="step_90: is not replaced: late"):
        checkpoint.convert(other, step, to="reshard", overwrite=True)
    assert same(read(step), wanted)
    assert same(read(root / "late"), wanted)
    assert sorted(path.name for path in root.iterdir()) == ["late", "step_90"]


def test_a_step_with_no_folder_above_it_is_replaced_as_ever():
    for step in range(2):
        checkpoint.save("memory://step_7", {"w": torch.arange(3) + step})
    with open_storage("memory://step_7") as storage:
        assert len(storage.folders()) == 1
        storage.delete([key for key, _ in storage.list()])


# --- compacting ---


def test_compacted_it_needs_no_other(root: Path, tmp_path: Path):
    wanted = read(root / "step_90")
    old = checkpoint.catalog(root / "step_100")
    report = checkpoint.compact(root / "step_100")
    moved = [file for file in old.files if file.checkpoint]
    assert (report.num_files, report.num_bytes, report.checkpoints) == (2, sum(f.size for f in moved), ("../step_90",))
    shutil.rmtree(root / "step_90")
    (root / "step_100").rename(tmp_path / "alone")
    assert same(read(tmp_path / "alone"), wanted)
    assert checkpoint.verify(tmp_path / "alone").ok
    new = checkpoint.catalog(tmp_path / "alone")
    assert new.save_id == report.save_id != old.save_id
    assert [(f.rank, f.size, f.digest, f.save_id) for f in new.files] == [
        (f.rank, f.size, f.digest, f.save_id) for f in old.files
    ]
    assert {f"{p.parent.name}/{p.name}" for p in (tmp_path / "alone").glob("*/*")} == {
        key for file in new.files for key in (file.key, file.digests_key)
    }
    assert checkpoint.compact(tmp_path / "alone").num_files == 0
    assert checkpoint.catalog(tmp_path / "alone").save_id == new.save_id


def test_its_manifest_and_its_timeline_go_along(root: Path):
    path = root / "step_100"
    checkpoint.write_manifest(path)
    assert checkpoint.verify(path, sha256=True).ok
    command = f"sha256sum --check --strict --quiet {checkpoint.catalog(path).save_id}/manifest.sha256"
    assert subprocess.run(command.split(), cwd=path, check=False).returncode == 0
    (path / checkpoint.catalog(path).save_id / "timeline.msgpack").write_text("{}")
    save_id = checkpoint.compact(path).save_id
    shutil.rmtree(root / "step_90")
    assert checkpoint.verify(path, sha256=True).ok
    assert (path / save_id / "timeline.msgpack").read_text() == "{}"
    assert len(list(path.glob("*/manifest.sha256"))) == len(list(path.glob("*/timeline.msgpack"))) == 1


def test_a_file_that_is_not_the_manifests_is_not_taken_over(root: Path):
    path = root / "step_100"
    manifest = Path(checkpoint.write_manifest(path))
    lines = manifest.read_text().splitlines()
    forged = [("0" * 64 + line[64:]) if "step_90" in line and "safetensors" in line else line for line in lines]
    manifest.write_text("\n".join(forged) + "\n")
    before = sorted(path.rglob("*"))
    with pytest.raises(CorruptError, match="not the file that the manifest lists"):
        checkpoint.compact(path)
    assert sorted(path.rglob("*")) == before


def test_cut_off_anywhere_it_is_whole_and_can_be_compacted_again(memory: str):
    """Between any two operations of the store, none of which happens any more afterwards."""
    name = memory
    save_trained(f"{name}/step_90", tp=2, step=90)
    wanted = read(f"{name}/step_90")
    kinds = []
    for n in range(200):
        path = f"{name}/step_{n + 100}"
        refer(path, f"{name}/step_90", "../step_90", {1})
        stop = StopAt(n)

        def faulty(where: object, stop: StopAt = stop, **options: Any) -> Any:
            return FaultyStorage(open_storage(str(where), **options), stop)

        is_stopped = False
        with mock.patch.object(source_module, "open_storage", faulty):
            try:
                checkpoint.compact(path)
            except Stopped:
                is_stopped = True
        assert same(read(path), wanted), n
        assert checkpoint.verify(path).ok
        kinds.append(any(file.checkpoint for file in checkpoint.catalog(path).files))
        with suppress(CheckpointNotFound):
            checkpoint.compact(path)
        catalog = checkpoint.catalog(path)
        assert not any(file.checkpoint for file in catalog.files)
        if not is_stopped:
            break
    else:
        pytest.fail("compacting has more operations than were tried")
    committed = kinds.index(False)
    assert kinds == [True] * committed + [False] * (len(kinds) - committed)
    assert committed == 9  # the store is asked to copy; of the copy and its digests, each: create, write, finish; sync, publish


def test_it_is_compacted_also_where_nothing_can_be_deleted(root: Path):
    wanted = read(root / "step_100")
    with (
        mock.patch("reshard_ckpt.engine.resharding.compact.clean_up", side_effect=StorageError("read-only")),
        pytest.warns(UserWarning, match="compacted, but what was replaced is not all deleted: read-only"),
    ):
        assert checkpoint.compact(root / "step_100").num_files == 2
    shutil.rmtree(root / "step_90")
    assert same(read(root / "step_100"), wanted)


def test_what_a_killed_one_left_goes_with_the_next(root: Path):
    path = root / "step_100"
    left = path / "20250101T000000Z-0a1b2c3d" / "rank00001-0.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half")
    Manager(root).close()
    assert not left.exists()
    left.parent.mkdir()
    left.write_bytes(b"half")
    checkpoint.compact(path)
    assert not left.exists()


def test_while_it_is_compacted_a_manager_leaves_the_copies_alone(root: Path, monkeypatch: pytest.MonkeyPatch):
    path = root / "step_100"
    copied = path / "20250101T000000Z-0a1b2c3d" / "rank00001-0.safetensors"
    copied.parent.mkdir()
    copied.write_bytes(b"half")
    with open_storage(path) as storage, storage.lock("catalog.msgpack", shared=True):
        Manager(root).close()
    assert copied.exists()
    monkeypatch.setattr(posix, "MOMENTS_S", 0.0)
    with (
        open_storage(path) as storage,
        storage.lock("catalog.msgpack"),
        pytest.raises(StorageError, match="had its lock for 0 s"),
    ):
        checkpoint.compact(path)


def test_there_must_be_room_and_a_checkpoint_of_this_library(root: Path, tmp_path: Path):
    with pytest.raises(CheckpointNotFound):
        checkpoint.compact(tmp_path / "none")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"w\.pt: compact is for .* this is a torch one"):
        checkpoint.compact(tmp_path / "w.pt")
    with pytest.raises(UsageError, match="workers="):
        checkpoint.compact(root / "step_100", workers=0)
    with (
        mock.patch("reshard_ckpt.storage.local.free_bytes_at", return_value=10),
        pytest.raises(StorageError, match="10 are free"),
    ):
        checkpoint.compact(root / "step_100")
    assert any(file.checkpoint for file in checkpoint.catalog(root / "step_100").files)


def test_the_command_says_what_it_did(root: Path):
    shown = run_command("compact", root / "step_100", "--workers", "2")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{root / 'step_100'}: self-contained now (2 files of ../step_90 copied, ")
    assert "self-contained already" in run_command("compact", root / "step_100").out
    assert run_command("compact", root / "step_100", "--json").json["num_files"] == 0


def test_mismatches_are_told_as_ever(root: Path):
    with pytest.raises(MismatchError, match=r"model\.emb: saved with global shape"):
        checkpoint.load(root / "step_100", {"model": {"emb": torch.zeros(3)}}, ignore=["optimizer", "extra", "model.layers"])
