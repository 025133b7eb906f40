"""`verify` says that all is well, or what is wrong and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from tests.cli.running import run
from tests.cli.states import save_trained
from tests.damage import flip


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    save_trained(tmp_path / "ckpt", dp=2, tp=2)
    return tmp_path / "ckpt"


def test_whole_checkpoint_is_said_to_be_so(trained: Path):
    shown = run("verify", trained)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{trained}: every byte is as it was written (4 files, ")
    size = sum(file.stat().st_size for file in trained.rglob("*.safetensors"))
    assert run("verify", trained, "--json", "--workers", "3").json == {
        "ok": True,
        "problems": [],
        "num_files": 4,
        "num_bytes": size,
        "bytes_unverified": 0,
    }


def test_one_flipped_bit_is_found_and_named(trained: Path):
    victim = sorted(trained.rglob("*.safetensors"))[2]
    flip(victim, -3)
    shown = run("verify", trained)
    assert shown.code == 1
    problem, verdict = shown.out.splitlines()
    assert str(victim.relative_to(trained)) in problem
    assert "DAMAGED" in verdict
    assert "restore" in shown.err
    said = run("verify", trained, "--json")
    assert (said.code, said.json["ok"], said.json["problems"]) == (1, False, [problem])


def test_missing_file_is_found(trained: Path):
    victim = sorted(trained.rglob("*.safetensors"))[1]
    victim.unlink()
    shown = run("verify", trained, "--json")
    assert shown.code == 1
    assert any(victim.name in problem and "missing" in problem for problem in shown.json["problems"])


@pytest.mark.parametrize("workers", ["0", "-1", "many"])
def test_workers_must_be_a_number_of_threads(workers: str, trained: Path):
    assert run("verify", trained, "--workers", workers).code == 2


def test_a_manifest_tells_what_was_changed_with_its_checksums(trained: Path):
    assert run("verify", trained, "--sha256").code == 1  # it has none
    checkpoint.write_manifest(trained)
    assert run("verify", trained, "--sha256").code == 0
    manifest = next(trained.rglob("manifest.sha256"))
    manifest.write_text(manifest.read_text().replace("a", "b"))
    shown = run("verify", trained, "--sha256", "--json")
    assert (shown.code, shown.json["ok"]) == (1, False)
    assert run("verify", trained).code == 0


@pytest.mark.parametrize("manifest", ["missing", "damaged"])
def test_damage_is_named_also_without_a_sound_manifest(manifest: str, trained: Path):
    if manifest == "damaged":
        checkpoint.write_manifest(trained)
        next(trained.rglob("manifest.sha256")).write_bytes(b"\xff")
    victim = next(trained.rglob("*.safetensors"))
    flip(victim)
    plain, report = checkpoint.verify(trained), checkpoint.verify(trained, sha256=True)
    assert (report.num_files, report.num_bytes, report.problems[:-1]) == (plain.num_files, plain.num_bytes, plain.problems)
    assert "manifest.sha256" in report.problems[-1]


def test_a_damaged_catalog_is_a_problem_as_any_other(trained: Path):
    catalog = trained / "catalog.msgpack"
    flip(catalog, None)
    report = checkpoint.verify(trained)
    assert not report.ok
    assert "catalog" in report.problems[0]
    shown = run("verify", trained)
    assert shown.code == 1
    assert "DAMAGED" in shown.out.splitlines()[-1]
    said = run("verify", trained, "--json")
    assert (said.code, said.json["ok"], said.json["problems"]) == (1, False, list(report.problems))
