"""`diff` finds what was changed and nothing else, and no layout is a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.cli.running import run
from tests.cli.states import save_trained, weights

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(60.0).reshape(10, 6), "b": torch.zeros(4), "h": torch.ones(3).bfloat16()},
    "extra": {"step": 3, "lr": float("nan"), "big": list(range(4000))},
}


def saved(path: Path, **changed: Any) -> Path:
    """STATE with some of it changed: ``model__w=…``; None takes it away."""
    state = {key: dict(part) for key, part in STATE.items()}
    for name, value in changed.items():
        part, key = name.split("__")
        if value is None:
            del state[part][key]
        else:
            state[part][key] = value
    checkpoint.save(path, state)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("diff") / "base")


def test_same_state_saved_twice_is_equal(base: Path, tmp_path: Path):
    shown = run("diff", base, saved(tmp_path / "b"), "--values")
    assert (shown.code, shown.out) == (0, "equal: 3 tensors bit by bit, and all values\n")
    shown = run("diff", base, tmp_path / "b")
    assert (shown.code, shown.out) == (0, "the same names, shapes and dtypes; --values compares what is in them\n")


@pytest.mark.parametrize(
    ("changed", "field", "name", "line"),
    [
        ({"model__b": None}, "removed", "model.b", "only in A  model.b"),
        ({"extra__lr": None}, "removed", "extra.lr", "only in A  extra.lr"),
        ({"model__new": torch.ones(2)}, "added", "model.new", "only in B  model.new"),
        ({"model__b": torch.zeros(5)}, "shape", "model.b", "shape  model.b  4  →  5"),
        ({"model__h": torch.ones(3)}, "dtype", "model.h", "dtype  model.h  BF16  →  F32"),
        ({"model__b": 3}, "kind", "model.b", "kind  model.b  tensor  →  value"),
    ],
)
def test_structure_that_changed_is_found_without_reading_values(
    changed: dict[str, Any], field: str, name: str, line: str, base: Path, tmp_path: Path
):
    other = saved(tmp_path / "b", **changed)
    said = run("diff", base, other, "--json")
    assert (said.code, said.json["equal"]) == (1, False)
    found = {key: value for key, value in said.json.items() if isinstance(value, list) and value}
    assert list(found) == [field]
    assert [of if isinstance(of, str) else of["name"] for of in found[field]] == [name]
    assert line.split() in [text.split() for text in run("diff", base, other).out.splitlines()]
    assert checkpoint.diff(base, base, values=True).equal


@pytest.mark.parametrize(
    ("changed", "name", "line"),
    [
        ({"extra__step": 4}, "extra.step", "value  extra.step  3  →  4"),
        ({"extra__step": 3.0}, "extra.step", "value  extra.step  3  →  3.0"),
        ({"extra__big": [*range(3999), -1]}, "extra.big", None),
    ],
)
def test_values_that_differ_are_found_when_asked_for(
    changed: dict[str, Any], name: str, line: str | None, base: Path, tmp_path: Path
):
    other = saved(tmp_path / "b", **changed)
    assert run("diff", base, other).code == 0
    said = run("diff", base, other, "--values", "--json")
    assert (said.code, [change["name"] for change in said.json["values"]]) == (1, [name])
    if line:
        assert line.split() in [text.split() for text in run("diff", base, other, "--values").out.splitlines()]


def test_tensors_that_differ_say_how_far_apart_they_are(base: Path, tmp_path: Path):
    w = STATE["model"]["w"].clone()
    w[3, 2], w[9, 5] = 25.0, float("nan")  # was 20 and 59
    shown = run("diff", base, saved(tmp_path / "b", model__w=w), "--values")
    assert shown.code == 1
    assert ["model.w", "2", "60", "5", "0.2", "1"] in [line.split() for line in shown.out.splitlines()]
    assert shown.out.splitlines()[-1] == "different: 1 with other numbers"


def test_equal_values_under_other_layouts_are_equal_and_the_layouts_are_said(tmp_path: Path):
    save_trained(tmp_path / "a", pp=2, dp=2, tp=2, step=5)
    save_trained(tmp_path / "b", pp=1, dp=3, tp=4, step=5)
    shown = run("diff", tmp_path / "a", tmp_path / "b", "--values")
    assert shown.code == 0
    assert shown.out.splitlines()[-1] == "equal under different layouts: 26 tensors bit by bit, and all values"
    moved = [line.split() for line in shown.out.splitlines() if line.startswith("placement")]
    assert "placement model.layers.0-1.up ×2 pp=on(0) dp=replicate tp=shard(0) → pp=replicate dp=replicate tp=shard(0)" in [
        " ".join(line) for line in moved
    ]
    assert "placement extra.rng 8 ranks → 12 ranks" in [" ".join(line) for line in moved]


def test_one_wrong_element_under_another_layout_is_found(tmp_path: Path):
    save_trained(tmp_path / "a", pp=2, dp=2, tp=2)
    wrong = weights()["model.layers.2.down"][0].clone()
    wrong[-1, -1] += 0.25
    save_trained(tmp_path / "b", tp=4, **{"model.layers.2.down": wrong})
    found = checkpoint.diff(tmp_path / "a", tmp_path / "b", values=True)
    assert [(d.name, d.num_different) for d in found.tensors] == [
        ("model.layers.2.down", 1),
        ("optimizer.state.layers.2.down.exp_avg", 1),
    ]
    assert (found.values, found.removed, found.added, found.num_compared) == ((), (), (), 26)


def test_ranks_own_values_differ_where_any_rank_s_does(tmp_path: Path):
    for name, last in (("a", 1), ("b", 2)):
        save_trained(tmp_path / name, dp=2, step=last)
    said = run("diff", tmp_path / "a", tmp_path / "b", "--values", "--json").json
    assert [change["name"] for change in said["values"]] == ["extra.step"]


def test_layers_that_changed_alike_share_a_line(tmp_path: Path):
    save_trained(tmp_path / "a", tp=2)
    save_trained(tmp_path / "b", tp=2, **{f"model.layers.{i}.extra": torch.zeros(3) for i in range(4)})
    lines = [line.split() for line in run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()]
    assert ["only", "in", "B", "model.layers.0-3.extra", "×4"] in lines


def test_layers_that_differ_share_a_line_with_the_largest_distance(tmp_path: Path):
    save_trained(tmp_path / "a")
    apart = {f"model.layers.{i}.norm": weights()[f"model.layers.{i}.norm"][0] + 2**i for i in range(4)}
    save_trained(tmp_path / "b", **apart)
    lines = [" ".join(line.split()) for line in run("diff", tmp_path / "a", tmp_path / "b", "--values").out.splitlines()]
    assert any(line.startswith("model.layers.0-3.norm ×4 32 32 8 ") for line in lines)


def test_damage_is_no_difference(base: Path, tmp_path: Path):
    other = saved(tmp_path / "b")
    (file,) = other.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    shown = run("diff", base, other, "--values")
    assert (shown.code, shown.out) == (1, "")
    assert "CorruptError" in shown.err
    assert run("diff", base, tmp_path / "none").code == 1
