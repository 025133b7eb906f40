"""What `inspect` says, as text and as JSON, is what the checkpoint has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard_ckpt import checkpoint
from reshard_ckpt.cli import inspect as command
from reshard_ckpt.errors import MismatchError, UsageError
from tests.cli.running import run
from tests.cli.states import HIDDEN, LAYERS, VOCAB, save_trained, weights
from tests.damage import flip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "ckpt"
    save_trained(folder, pp=2, dp=2, tp=2, step=30)
    return folder


def test_summary_counts_what_was_saved(trained: Path):
    of = run("inspect", trained, "--json").json["summary"]
    num = VOCAB * HIDDEN + LAYERS * (4 * HIDDEN * HIDDEN + HIDDEN)
    assert of["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert (of["step"], of["num_tensors"], of["num_values"], of["num_ranks"]) == (30, 2 * (1 + 3 * LAYERS), 3, 8)
    assert (of["num_parameters"], of["num_bytes"]) == (num, 2 * 4 * num)
    assert of["dtypes"] == {"F32": {"num_tensors": 26, "num_elements": 2 * num, "num_bytes": 8 * num}}
    assert of["roots"]["model"] == {"num_tensors": 13, "num_elements": num, "num_bytes": 4 * num}
    assert of["file_bytes"] == sum(path.stat().st_size for path in trained.rglob("*.safetensors"))


def test_tree_folds_the_layers_of_each_stage(trained: Path):
    lines = run("inspect", trained).out.splitlines()
    tree = [line.split() for line in lines[next(i for i, line in enumerate(lines) if line.startswith("name")) :]]
    assert ["│", "├─", "0-1", "×2"] in tree
    assert ["│", "└─", "2-3", "×2"] in tree
    up = next(line for line in tree if "up" in line)
    assert " ".join(up[up.index("up") :]) == "up ×2 F32 16 × 8 pp=on(0) dp=replicate tp=shard(0) 2 1.02 kB"
    moment = next(line for line in lines if "exp_avg" in line and "24 × 8" in line)
    assert "dp=flat" in moment


def test_every_tensor_is_in_the_tree_and_in_json(trained: Path):
    found = checkpoint.inspect(trained)
    said = run("inspect", trained, "--json").json
    assert [line["name"] for line in said["tensors"]] == list(checkpoint.catalog(trained).names)
    assert len(found.lines) == len(said["tensors"]) + len(said["values"])


def test_one_tensor_shows_each_shard_and_where_its_bytes_are(trained: Path):
    name = "optimizer.state.layers.3.down.exp_avg"
    (line,) = run("inspect", trained, name, "--json").json["tensors"]
    whole = (weights(30)["model.layers.3.down"][0] + 0.5).numpy()
    assert len(line["shards"]) == 4
    seen = 0
    for shard in line["shards"]:
        (row, column), (rows, columns) = shard["offsets"], shard["lengths"]
        box = whole[row : row + rows, column : column + columns].reshape(-1)
        data = (trained / shard["file"]).read_bytes()[shard["offset"] : shard["offset"] + shard["num_bytes"]]
        assert data == box[shard["start"] : shard["start"] + shard["count"]].tobytes()
        assert shard["coordinates"]["pp"] == 1
        seen += shard["count"]
    assert seen == whole.size
    shown = run("inspect", trained, name).out
    assert all(shard["file"] in shown and f" {shard['offset']:,} " in shown for shard in line["shards"])
    assert "elements of that box" in shown


def test_many_shards_are_listed_when_asked_for(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "MAX_SHARDS", 1)
    name = "optimizer.state.layers.3.down.exp_avg"
    assert "… and 3 shards more; --all lists them" in run("inspect", trained, name).out
    assert "more" not in run("inspect", trained, name, "--all").out


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.layers.0"], ["model.layers.0.down", "model.layers.0.norm", "model.layers.0.up"]),
        (["*.0.norm"], ["model.layers.0.norm"]),
        (["model.emb", "extra"], ["model.emb"]),
    ],
)
def test_names_prefixes_and_patterns_choose(names: list[str], chosen: list[str], trained: Path):
    assert [line["name"] for line in run("inspect", trained, *names, "--json").json["tensors"]] == chosen


def test_value_is_shown_whole_when_it_is_named(trained: Path):
    assert run("inspect", trained, "extra.rng").out == f"extra.rng = {[bytes([i]) for i in range(8)]!r}\n"
    assert run("inspect", trained, "extra.step", "--json").json["values"][0]["value"] == 30


def test_statistics_are_those_of_the_tensors(trained: Path, tmp_path: Path):
    odd = torch.tensor([1.0, float("nan"), float("inf"), -3.0, -float("inf")], dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "odd", {"odd": odd, "empty": torch.zeros(0, 3)})
    said = {line["name"]: line["stats"] for line in run("inspect", tmp_path / "odd", "--stats", "--json").json["tensors"]}
    odd_stats = {"name": "odd", "num_elements": 5, "min": -3.0, "max": 1.0, "mean": -1.0, "num_nan": 1, "num_inf": 2}
    assert said["odd"] == odd_stats
    assert (said["empty"]["min"], said["empty"]["mean"]) == (None, None)
    whole = weights(30)["model.layers.2.down"][0]
    last = run("inspect", trained, "model.layers.2.down", "--stats").out.splitlines()[-1].split()
    assert last == ["model.layers.2.down", "128", *(f"{n:.6g}" for n in (whole.min(), whole.max(), whole.mean())), "0", "0"]


def test_statistics_prove_what_they_read(trained: Path, tmp_path: Path):
    checkpoint.save(tmp_path / "bad", {"w": torch.zeros(1000)})
    (file,) = (tmp_path / "bad").rglob("*.safetensors")
    flip(file)
    shown = run("inspect", tmp_path / "bad", "--stats")
    assert (shown.code, shown.out) == (1, "")
    assert "CorruptError" in shown.err
    assert run("inspect", tmp_path / "bad").code == 0  # which reads no tensor


def test_absent_name_is_an_error_and_a_string_is_no_list_of_names(trained: Path):
    shown = run("inspect", trained, "model.embb")
    assert shown.code == 1
    assert "model.embb: not in the checkpoint" in shown.err
    with pytest.raises(MismatchError, match="nothing"):
        checkpoint.inspect(trained, ["nothing"])
    with pytest.raises(UsageError, match="list"):
        checkpoint.inspect(trained, "model")


def test_folder_of_checkpoints_lists_those_of_other_names_and_formats(tmp_path: Path):
    for name in ("last", "epoch_3", "step_20"):
        checkpoint.save(tmp_path / name, {"model": torch.nn.Linear(2, 2)})
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step_3")
    (tmp_path / "logs").mkdir()
    (tmp_path / "step_30").mkdir()
    listed = run("inspect", tmp_path, "--json").json["steps"]
    assert [(line["step"], Path(line["path"]).name, line["format"], line["problem"]) for line in listed] == [
        (3, "step_3", "dcp", None),
        (20, "step_20", "reshard_ckpt", None),
        (30, "step_30", None, "not committed"),
        (None, "last", "reshard_ckpt", None),
        (None, "epoch_3", "reshard_ckpt", None),
    ]
    shown = run("inspect", tmp_path).out
    assert all(name in shown for name in ("last", "epoch_3", "step_3"))


def test_paths_in_a_listing_begin_as_the_root_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint.save(tmp_path / "run" / "step_1", {"w": torch.ones(2)})
    monkeypatch.chdir(tmp_path)
    assert [line["path"] for line in run("inspect", "run/", "--json").json["steps"]] == ["run/step_1"]
    assert run("inspect", "run").out.split()[-1] == "run/step_1"


def test_second_name_of_a_tensor_says_whose_bytes_it_has(tmp_path: Path):
    shared = torch.ones(4)
    checkpoint.save(tmp_path / "tied", {"a": shared, "b": shared})
    assert "= a" in run("inspect", tmp_path / "tied").out
    shown = run("inspect", tmp_path / "tied", "b", "--json").json
    assert (shown["summary"]["num_aliases"], shown["summary"]["num_bytes"]) == (1, 16)
    assert (shown["tensors"][0]["alias_of"], len(shown["tensors"][0]["shards"])) == ("a", 1)
    both = run("inspect", tmp_path / "tied", "--stats", "--json").json["tensors"]
    assert [line["stats"]["mean"] for line in both] == [1.0, 1.0]


def test_names_do_not_steer_the_terminal(tmp_path: Path):
    name = "\x1b[2J\x9b31mw\nx"
    checkpoint.save(tmp_path / "odd", {name: torch.ones(2), "value": "\x1b[31m"})
    for arguments in ([], [name], ["--stats"], ["\x1bnone"], ["--json"]):
        shown = run("inspect", tmp_path / "odd", *arguments)
        assert "\x1b" not in shown.out + shown.err
        assert "\x9b" not in shown.out + shown.err
    assert run("inspect", tmp_path / "odd", "--json").json["tensors"][0]["name"] == name


@pytest.mark.parametrize(
    ("state", "metadata", "step"),
    [
        ({"a": {"step": 3}, "step": 7}, None, 7),
        ({"a": {"global_step": 3}}, None, 3),
        ({"extra": {"step": 3}}, {"step": 9}, 9),
        ({"extra": {"step": "three", "done": True}}, None, None),
        ({"extra": {"step": True}}, None, None),
    ],
)
def test_step_is_what_says_it_most_plainly(state: dict[str, object], metadata: object, step: int | None, tmp_path: Path):
    checkpoint.save(tmp_path, state, metadata=metadata)
    assert checkpoint.inspect(tmp_path).summary.step == step


def test_checkpoint_of_values_alone_and_an_empty_one_are_no_trouble(tmp_path: Path):
    for i, state in enumerate([{"extra": {"lr": math.inf}}, {}]):
        checkpoint.save(tmp_path / str(i), state)
        assert run("inspect", tmp_path / str(i)).code == 0
        assert run("inspect", tmp_path / str(i), "--json").json["tensors"] == []
