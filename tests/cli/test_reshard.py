"""``reshard-ckpt reshard``, as a user runs it: the options it takes, what it prints, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UsageError
from reshard_ckpt.storage import open_storage
from tests.cli.running import run, run_process
from tests.topologies import Job, save, transformer

JOB = Job({"dp": 2, "tp": 2}, transformer(4, 8, 16), 4)


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reshard") / "src"
    save(JOB, open_storage(path))
    return path


def test_a_checkpoint_for_another_mesh(src: Path, tmp_path: Path) -> None:
    ran = run_process("reshard", src, tmp_path / "dst", "--mesh", "pp=2,tp=4")
    assert (ran.code, ran.err) == (0, "")
    assert "wrote 60 tensors and 4 values" in ran.out
    assert checkpoint.catalog(tmp_path / "dst").mesh == Job({"pp": 2, "tp": 4}, JOB.weights, 4).core_mesh
    before, after = checkpoint.read(src, ["model"]), checkpoint.read(tmp_path / "dst", ["model"])
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


def test_dry_run_writes_nothing_and_says_what_each_rank_would(src: Path, tmp_path: Path) -> None:
    ran = run("reshard", src, tmp_path / "dst", "--mesh", "tp=4", "--dry-run", "--json")
    assert ran.code == 0
    assert not (tmp_path / "dst").exists()
    assert ran.json["dry_run"] is True
    assert [rank["rank"] for rank in ran.json["ranks"]] == [0, 1, 2, 3]
    assert sum(rank["bytes_written"] for rank in ran.json["ranks"]) == ran.json["bytes_written"] > ran.json["bytes_wanted"]
    assert ran.json["placements"]["model.layers.0.out.weight"] == "tp=shard(1)"
    assert "would write" in run("reshard", src, tmp_path / "dst", "--mesh", "tp=4", "--dry-run").out


def test_options_reach_the_function(src: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text('"weights.*.norm.weight": {tp: shard(0)}\n"weights.emb.*": {pp: on(1)}\n')
    dst = tmp_path / "dst"
    options = ["--drop", "optimizer", "--exclude", "extra.large", "--exclude", "extra.rng", "--rename", "model=weights"]
    options += ["--cast", "weights.layers.*=float32", "--stages", "1", "--rules", rules, "--no-verify"]
    ran = run("reshard", src, dst, "--mesh", "pp=2,tp=2", *options)
    assert ran.code == 0, ran.err
    catalog = checkpoint.catalog(dst)
    assert set(catalog.value_names) == {"extra.step"}
    assert all(name.startswith("weights.") for name in catalog.names)
    norm = catalog.tensor("weights.layers.1.norm.weight")
    assert norm.dtype == "F32"
    assert [(p.axis, p.kind) for p in norm.placement or ()] == [("pp", "resident"), ("tp", "shard")]
    assert {p.coords for p in norm.placement or () if p.axis == "pp"} == {(1,)}
    assert (catalog.tensor("weights.emb.weight").placement or ())[0].coords == (1,)
    whole = checkpoint.read(src, ["model.layers.1.norm.weight"])["model.layers.1.norm.weight"]
    cast = checkpoint.read(dst)["weights.layers.1.norm.weight"]
    assert torch.equal(cast.view(torch.uint8), whole.to(torch.float32).view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mesh", "tp"], "--mesh 'tp': wanted the form name=value"),
        (["--mesh", "tp=x"], "'x' is no number"),
        (["--mesh", "tp=0"], "wanted axes and their sizes"),
        (["--mesh", "tp=2,tp=2"], "'tp' is given twice"),
        (["--mesh", "tp=2", "--stages", "2"], "has no axis pp"),
        (["--mesh", "pp=3", "--stages", "2"], "3 pipeline stages have 2 boundaries"),
        (["--mesh", "pp=3", "--stages", "3,2"], "ascending"),
        (["--mesh", "pp=3", "--stages", "2,9"], "stage 2 would hold no layer"),
        (["--mesh", "pp=9"], "no stack of at least 9 numbered layers"),
        (["--mesh", "tp=2", "--cast", "model.*=int8"], "no floating-point dtype"),
        (["--mesh", "tp=2", "--cast", "extra.*=bfloat16"], "no tensor of such a name is floating-point"),
        (["--mesh", "tp=2", "--drop", "model", "--drop", "optimizer", "--drop", "extra"], "nothing is left"),
        (["--mesh", "tp=2", "--rules", "/nowhere.yaml"], "cannot be read as YAML"),
    ],
)
def test_wrong_use_is_named(src: Path, tmp_path: Path, options: list[str], said: str) -> None:
    ran = run("reshard", src, tmp_path / "dst", *options)
    assert ran.code == 2
    assert said in ran.err
    assert not (tmp_path / "dst").exists()


def test_names_that_are_not_there_are_a_problem(src: Path, tmp_path: Path) -> None:
    ran = run("reshard", src, tmp_path / "dst", "--mesh", "tp=2", "--select", "mdoel")
    assert ran.code == 1
    assert "mdoel: not in the checkpoint" in ran.err


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"model.*": {"tq": "replicate"}}, "'tq' is no axis of the mesh, which has pp, tp"),
        ({"nodel.*": {"tp": "replicate"}}, "'nodel.*': no tensor has such a name"),
        ({"model.*": {"tp": "shard"}}, "'shard' is no placement"),
        ({"model.*": {"tp": "shard(1)"}}, r"shard(1), but its shape is (8,)"),
        ({"model.emb.*": {"pp": "resident(2)"}}, "coordinates of this axis are 0 to 1"),
        ({"model.emb.*": {"sections": {0: [3, 4]}}}, "do not add up to its shape (16, 8)"),
        ({"optimizer.*": {"pp": "flat", "tp": "flat"}}, "flat on several axes"),
        ({"model.*": "replicate"}, "wanted a pattern and a map"),
        (["model"], "wanted a map of name patterns"),
        ({"model.*": {"order": ["dp"]}}, "'dp' is no axis of the mesh"),
    ],
)
def test_wrong_rules_are_named(src: Path, tmp_path: Path, rules: object, said: str) -> None:
    with pytest.raises(UsageError) as error:
        checkpoint.reshard(src, tmp_path / "dst", mesh={"pp": 2, "tp": 2}, rules=rules)
    assert said in str(error.value)


def test_writing_over_the_source_is_refused(src: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(src)
    for dst in (src, link, f"{src}/../src"):
        ran = run("reshard", src, dst, "--mesh", "tp=2")
        assert ran.code == 2
        assert "is the checkpoint to be read" in ran.err
    assert checkpoint.verify(src).ok
