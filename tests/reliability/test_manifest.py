"""The SHA-256 manifest: made while saving, always that of the catalog in place, read by other tools, and it finds forgery."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, StorageError, UsageError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.format.files import BlockHasher, decode_manifest, digest128, encode_manifest, manifest_key
from reshard_ckpt.storage.local import LocalStorage
from tests.damage import flip
from tests.reliability.faults import fails, faulty
from tests.reliability.ranks import Job
from tests.reliability.states import NEW, OLD, held, plain
from tests.reliability.test_disk_errors import attempt
from tests.reliability.test_sick_ranks import SIZE, save


def manifest_of(path: Path) -> Path:
    return path / manifest_key(checkpoint.catalog(path).save_id)


def by_hashlib(path: Path) -> str:
    """What the manifest must be, by the plainest means."""
    catalog = checkpoint.catalog(path)
    keys = sorted(["catalog.msgpack", *(key for f in catalog.files for key in (f.key, f.digests_key))])
    return "".join(f"{hashlib.sha256((path / key).read_bytes()).hexdigest()}  {key}\n" for key in keys)


def check(path: Path) -> None:
    """The manifest is right, and every judge says so."""
    assert manifest_of(path).read_text() == by_hashlib(path)
    assert checkpoint.verify(path, sha256=True).ok
    if shutil.which("sha256sum"):
        name = manifest_of(path).relative_to(path)
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", str(name)], cwd=path, check=True)


def test_every_rank_hashes_what_it_writes(job: Job, tmp_path: Path):
    for number in (OLD, NEW):
        assert job.run(save(tmp_path, number, sha256=True)) == [None] * SIZE
        check(tmp_path)
        assert len(list(tmp_path.glob("*/manifest.sha256"))) == 1
        assert len(manifest_of(tmp_path).read_text().splitlines()) == 1 + 2 * SIZE
    assert held(tmp_path) == NEW


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_an_async_save_keeps_one_too(tmp_path: Path, staging: str):
    checkpoint.async_save(tmp_path, plain(NEW), sha256=True, staging=staging).result(600)
    check(tmp_path)


def test_a_checkpoint_without_tensors_has_one(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": 1}, sha256=True)
    check(tmp_path)


def test_a_save_without_leaves_no_manifest_of_the_one_before(tmp_path: Path):
    checkpoint.save(tmp_path, plain(OLD), sha256=True)
    checkpoint.save(tmp_path, plain(NEW))
    assert list(tmp_path.rglob("manifest.sha256")) == []
    (problem,) = checkpoint.verify(tmp_path, sha256=True).problems
    assert "manifest.sha256: no such file: this was saved without sha256=True, or somebody" in problem
    assert checkpoint.verify(tmp_path).ok


def test_what_else_lies_with_it_stays_such_as_its_signature(tmp_path: Path):
    checkpoint.save(tmp_path, plain(OLD), sha256=True)
    signature = manifest_of(tmp_path).with_name("manifest.sha256.sig")
    signature.write_text("signed")
    check(tmp_path)
    checkpoint.save(tmp_path, plain(NEW), sha256=True)
    assert not signature.exists()
    check(tmp_path)


@pytest.mark.parametrize("hashing", [[0], [1, 2, 3]])
def test_ranks_that_do_not_agree_to_hash_are_told(job: Job, tmp_path: Path, hashing: list[int]):
    assert job.run(save(tmp_path, OLD, sha256=True)) == [None] * SIZE
    outcomes = job.run(lambda rank: save(tmp_path, NEW, sha256=rank in hashing)(rank))
    for error in outcomes:
        assert isinstance(error, UsageError), outcomes
        assert "pass the same on every rank" in str(error)
    assert held(tmp_path) == OLD
    check(tmp_path)


@pytest.mark.parametrize("name", ["mkdir", "write", "fsync", "replace"])
def test_whatever_call_fails_the_manifest_is_that_of_the_catalog(tmp_path: Path, name: str):
    """Over all points of a save: the manifest beside the catalog in place matches, whether that is the old or the new one."""
    n = 0
    while True:
        checkpoint.save(tmp_path, plain(OLD), sha256=True)
        with faulty(name, n, fails(5)) as fault:
            error = attempt(lambda: checkpoint.save(tmp_path, plain(NEW), sha256=True))
        assert error is None or isinstance(error, StorageError)
        check(tmp_path)
        assert held(tmp_path) == OLD or error is None or name in ("fsync", "close", "open")
        if not fault.happened:
            break
        n += 1
    assert n


def forge(path: Path) -> str:
    """Change a weight, and everything that the block checksums prove it by; the file's name."""
    catalog = decode_catalog((path / "catalog.msgpack").read_bytes())
    (file,) = catalog.files
    flip(path / file.key, -3)
    hasher = BlockHasher()
    hasher.update((path / file.key).read_bytes())
    digests = hasher.finish()
    (path / file.digests_key).write_bytes(digests)
    object.__setattr__(file, "digest", digest128(digests))
    (path / "catalog.msgpack").write_bytes(encode_catalog(catalog))
    return file.key


def test_a_forger_who_corrects_all_checksums_is_found_by_the_manifest(tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.arange(100.0)}, sha256=True)
    key = forge(tmp_path)
    assert checkpoint.verify(tmp_path).ok
    report = checkpoint.verify(tmp_path, sha256=True)
    assert len(report.problems) == 3
    assert all("it was changed" in line for line in report.problems)
    for part in (f"{key} has SHA-256 ", "catalog.msgpack has SHA-256 ", ".digests has SHA-256 "):
        assert any(part in line for line in report.problems)


def test_files_that_are_not_listed_not_there_or_not_the_catalogs_are_named(tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.arange(100.0)}, sha256=True)
    manifest = manifest_of(tmp_path)
    whole = manifest.read_text()
    first, *rest = whole.splitlines(keepends=True)
    assert first.endswith(".digests\n")
    manifest.write_text("".join(rest) + f"{'0' * 64}  ../../etc/passwd\n")
    problems = checkpoint.verify(tmp_path, sha256=True).problems
    assert len(problems) == 2
    assert f"does not list {first[66:-1]}, which the catalog refers to" in problems[0]
    assert "lists '../../etc/passwd', which the catalog does not refer to" in problems[1]
    manifest.write_text(whole)
    (file,) = checkpoint.catalog(tmp_path).files
    (tmp_path / file.key).unlink()
    problems = checkpoint.verify(tmp_path, sha256=True).problems
    assert len(problems) == 2
    assert all(file.key in line for line in problems)


@pytest.mark.parametrize(
    "text", ["hello\n", "", "00  f\n", f"{'g' * 64}  f\n", f"{'0' * 64} f\n", f"{'0' * 64}  f\n" * 2, "\xff"]
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str):
    checkpoint.save(tmp_path, {"w": torch.arange(100.0)}, sha256=True)
    manifest_of(tmp_path).write_bytes(text.encode("latin-1"))
    if text:
        (problem,) = checkpoint.verify(tmp_path, sha256=True).problems
        assert re.search(r"manifest.sha256: (line 1|line 2|is not text)", problem)
    else:
        assert len(checkpoint.verify(tmp_path, sha256=True).problems) == 3


@given(st.dictionaries(st.text("abc/-.0", min_size=1, max_size=20), st.binary(min_size=32, max_size=32), max_size=5))
def test_manifests_come_back(digests: dict[str, bytes]):
    text = encode_manifest(digests)
    assert decode_manifest(text, where="here") == digests
    assert decode_manifest(text.replace(b"  ", b" *"), where="here") == digests


def test_an_old_checkpoint_gets_a_manifest_if_it_is_whole(tmp_path: Path):
    checkpoint.save(tmp_path, plain(OLD))
    where = checkpoint.write_manifest(tmp_path, workers=2)
    assert Path(where) == manifest_of(tmp_path)
    check(tmp_path)
    assert checkpoint.write_manifest(tmp_path) == where
    (file,) = checkpoint.catalog(tmp_path).files
    flip(tmp_path / file.key)
    before = Path(where).read_text()
    with pytest.raises(CorruptError, match="no manifest is made of a damaged checkpoint"):
        checkpoint.write_manifest(tmp_path)
    assert Path(where).read_text() == before
    with pytest.raises(CheckpointNotFound):
        checkpoint.write_manifest(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="workers=0"):
        checkpoint.write_manifest(tmp_path, workers=0)


def test_foreign_checkpoints_have_none(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    for call in (lambda: checkpoint.verify(tmp_path, sha256=True), lambda: checkpoint.write_manifest(tmp_path)):
        with pytest.raises(UsageError, match="a manifest is made of this library's checkpoints"):
            call()


def test_bytes_are_counted_while_they_are_hashed(tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.zeros(5_000_000)}, sha256=True)
    told: list[tuple[str, int, int]] = []
    checkpoint.verify(tmp_path, sha256=True, workers=1, progress=lambda *step: told.append(step))
    steps: dict[str, Any] = {step: (done, total) for step, done, total in told}
    total = sum(
        p.stat().st_size for p in tmp_path.rglob("*") if p.name not in ("manifest.sha256", "timeline.msgpack") and p.is_file()
    )
    assert steps["sha256"] == (total, total)
    assert list(steps) == ["verify", "sha256"]
    assert LocalStorage(tmp_path).size("catalog.msgpack")
