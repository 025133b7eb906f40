"""``reshard-ckpt reshard``, as a user runs it: the options it takes, what it prints, and how it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import StorageError, UsageError
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
        (["--mesh", "tp"], "--mesh 'tp' is not a mesh: write axes and their sizes, outermost first, as in dp=2,tp=4"),
        (["--mesh", ""], "is not a mesh"),
        (["--mesh", "tp=x"], "is not a mesh"),
        (["--mesh", "tp=0"], "is not a mesh"),
        (["--mesh", "tp=-1"], "is not a mesh"),
        (["--mesh", "t p=2"], "is not a mesh"),
        (["--mesh", "tp=2,"], "is not a mesh"),
        (["--mesh", "tp=99999999999999999999"], "ranks, over the 131,072 that are planned for; name fewer"),
        (["--mesh", "dp=512,tp=512"], "262,144 ranks, over the 131,072"),
        (["--mesh", "pp=2", "--stages", "1,"], "--stages '1,': wanted numbers with commas between them"),
        (["--mesh", "pp=2", "--stages", "one"], "wanted numbers with commas between them"),
        (["--mesh", "tp=2", "--rename", "model"], "--rename 'model': wanted two parts with = between them"),
        (["--mesh", "tp=2", "--rename", "model=a", "--rename", "model=b"], "--rename: 'model' is given twice"),
        (["--mesh", "tp=2", "--rename", "nodel=weights"], "--rename 'nodel=…': the checkpoint has no such name"),
        (["--mesh", "tp=2", "--rename", "model.emb.weigh=x"], "the checkpoint has no such name"),
        (["--mesh", "tp=2,tp=2"], "'tp' is given twice"),
        (["--mesh", "tp=2", "--stages", "2"], "has no axis pp"),
        (["--mesh", "pp=3", "--stages", "2"], "3 pipeline stages have 2 boundaries"),
        (["--mesh", "pp=3", "--stages", "3,2"], "ascending"),
        (["--mesh", "pp=3", "--stages", "2,9"], "stage 2 would hold no layer"),
        (["--mesh", "pp=9"], "no stack of at least 9 numbered layers"),
        (["--mesh", "tp=2", "--cast", "model.*=int8"], "not a floating-point dtype"),
        (["--mesh", "tp=2", "--cast", "extra.*=bfloat16"], "no tensor of such a name is floating-point"),
        (["--mesh", "tp=2", "--drop", "model", "--drop", "optimizer", "--drop", "extra"], "nothing is left"),
        (["--mesh", "tp=2", "--rules", "/nowhere.yaml"], "rules: /nowhere.yaml: cannot be read: No such file or directory"),
        (["--mesh", "tp=2", "--rules", "/dev/zero"], "rules: /dev/zero: has over 16777216 bytes; pass a YAML file of rules"),
        (["--mesh", "tp=2", "--rules", "/"], "rules: /: cannot be read: Is a directory"),
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
    assert "mdoel: not in the checkpoint, which has 'extra', 'model', 'optimizer'; inspect lists all" in ran.err


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"model.*": {"tq": "replicate"}}, "'tq' is not an axis of the mesh, which has pp, tp"),
        ({"nodel.*": {"tp": "replicate"}}, "'nodel.*': no tensor has such a name"),
        ({"model.*": {"tp": "shard"}}, "'shard' is not a placement"),
        ({"model.*": {"tp": "shard(1)"}}, r"shard(1), but its shape is (8,)"),
        ({"model.emb.*": {"pp": "resident(2)"}}, "coordinates of this axis are 0 to 1"),
        ({"model.emb.*": {"sections": {0: [3, 4]}}}, "do not add up to its shape (16, 8)"),
        ({"optimizer.*": {"pp": "flat", "tp": "flat"}}, "a rule must replicate it on all but one, as {'tp': 'replicate'}"),
        ({"model.*": "replicate"}, "wanted a pattern and a map"),
        (["model"], "wanted a map of name patterns"),
        ({"model.*": {"order": ["dp"]}}, "'dp' is not an axis of the mesh"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"model.*": {tp: shard(0)', "line 1, column 25: expected ',' or '}', but got '<stream end>': not YAML; correct the"),
        ("*.weight: {tp: replicate}", "line 1, column 2: .*put quotes round a pattern that begins with \\*"),
        ('"model.*": {tp: replicate}\n"model.*": {tp: shard(0)}', "line 1: 'model.\\*' is given twice"),
        ('- "model.*": {tp: replicate, tp: shard(0)}', "line 1: 'tp' is given twice"),
        ("\xff", "save it as UTF-8"),
        ("x: !!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        ("x: 2020-99-99", "cannot be read as YAML"),
        ("[" * 5000, "cannot be read as YAML|not YAML"),
        ("\x00", "cannot be read as YAML"),
        ("a: &a [*a]", "wanted a pattern and a map|recursi"),
        ("42", "wanted a map of name patterns"),
    ],
)
def test_files_of_rules_that_are_none_are_named_with_the_line(src: Path, tmp_path: Path, text: str, said: str) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_bytes(text.encode("latin-1"))
    ran = run("reshard", src, tmp_path / "dst", "--mesh", "tp=2", "--rules", rules)
    assert ran.code == 2
    assert re.search(said, ran.err)
    assert not (tmp_path / "dst").exists()


def test_an_empty_file_of_rules_says_nothing(src: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("# none yet\n")
    assert run("reshard", src, tmp_path / "dst", "--mesh", "tp=2", "--rules", tmp_path / "rules.yaml", "--dry-run").code == 0


def test_an_axis_that_divides_nothing_is_said_as_it_may_be_a_slip(src: Path, tmp_path: Path) -> None:
    ran = run("reshard", src, tmp_path / "dst", "--mesh", "dp=2,tq=2", "--dry-run", "--json")
    assert (ran.code, ran.json["idle_axes"]) == (0, ["tq"])
    said = "--mesh dp=2,tq=2: the checkpoint knows no axis tq, so all ranks along it hold the same; --rules divides tensors\n"
    assert ran.err == said
    for mesh in ("dp=2", "pp=2,dp=1,tp=2", "cp=1", "dp=4"):
        ran = run("reshard", src, tmp_path / "dst", "--mesh", mesh, "--dry-run", "--json")
        assert (ran.code, ran.err, ran.json["idle_axes"]) == (0, "", [])
    rules = tmp_path / "rules.yaml"
    rules.write_text('"model.emb.weight": {tq: shard(0)}')
    ran = run("reshard", src, tmp_path / "dst", "--mesh", "tq=2", "--rules", rules, "--dry-run", "--json")
    assert (ran.code, ran.err, ran.json["idle_axes"]) == (0, "", [])


def test_a_destination_where_nothing_can_stay_is_refused(src: Path, tmp_path: Path) -> None:
    ran = run("reshard", src, "memory://x", "--mesh", "tp=2")
    assert (ran.code, "memory ends with this command" in ran.err) == (2, True)
    (tmp_path / "file").write_text("mine")
    ran = run("reshard", src, tmp_path / "file", "--mesh", "tp=2")
    assert (ran.code, "file: is a file; pass the path of a folder" in ran.err) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_same_reshard_started_twice_is_refused_and_another_one_is_not(src: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def again(step: str, done: int, total: int) -> None:
        if done and not said:
            with pytest.raises(StorageError) as error:
                checkpoint.reshard(src, tmp_path / "dst", mesh={"tp": 2})
            said.append(str(error.value))
            checkpoint.reshard(src, tmp_path / "dst", mesh={"tp": 2}, dry_run=True)

    checkpoint.reshard(src, tmp_path / "dst", mesh={"tp": 2}, progress=again)
    assert said == [f"{tmp_path / 'dst'}: the same reshard is under way there; wait for its end, or pass another path"]
    assert checkpoint.verify(tmp_path / "dst").ok
    checkpoint.reshard(src, tmp_path / "alone", mesh={"tp": 2})
    names = [sorted(p.relative_to(tmp_path / of).as_posix() for p in (tmp_path / of).rglob("*")) for of in ("dst", "alone")]
    assert names[0] == names[1]
