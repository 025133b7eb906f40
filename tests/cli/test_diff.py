"""`diff` finds what was changed and nothing else, and no layout is a difference."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint.comparing import is_identical, value_changes
from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.storage import LocalStorage
from tests.cli.running import run
from tests.cli.states import save_trained, weights
from tests.damage import flip
from tests.launch import run_ranks

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
    assert (shown.code, shown.out) == (
        0,
        "the same names, shapes, dtypes and small values; --values compares all that is in them\n",
    )


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
        ({"extra__step": 1004}, "extra.step", "value  extra.step  3  →  1004 +1,001 0.997"),
        ({"extra__step": 3.0}, "extra.step", "value  extra.step  3  →  3.0 +0 0"),
        ({"extra__step": True}, "extra.step", "value  extra.step  3  →  True"),
        ({"extra__lr": 0.25}, "extra.lr", "value  extra.lr  nan  →  0.25"),
    ],
)
def test_small_values_that_differ_are_found_always(changed: dict[str, Any], name: str, line: str, base: Path, tmp_path: Path):
    other = saved(tmp_path / "b", **changed)
    for options in ([], ["--values"]):
        said = run("diff", base, other, *options, "--json")
        assert (said.code, [change["name"] for change in said.json["values"]]) == (1, [name])
        shown = run("diff", base, other, *options).out.splitlines()
        assert line.split() in [text.split() for text in shown]
        assert shown[-1] == "different: 1 with another value"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([1 << 24, (1 << 24) + 1]), torch.tensor([float(1 << 24)] * 2)),  # equal in float32
        (torch.tensor([2048, 2049], dtype=torch.int16), torch.tensor([2048.0, 2048.0], dtype=torch.float16)),
        (torch.tensor([1, 1 + 1j]), torch.tensor([1, 1], dtype=torch.uint16)),  # equal in their real parts
        (torch.tensor([1, 1 + 1j]), torch.tensor([1.0, 1.0], dtype=torch.float64)),  # nothing holds both
        (torch.tensor([3, 4], dtype=torch.uint16), torch.tensor([3, -1], dtype=torch.int8)),
    ],
    ids=["i64-f32", "i16-f16", "c64-u16", "c64-f64", "u16-i8"],
)
def test_tensors_of_two_dtypes_are_compared_as_the_numbers_that_they_are(a: torch.Tensor, b: torch.Tensor, tmp_path: Path):
    checkpoint.save(tmp_path / "a", {"x": a})
    checkpoint.save(tmp_path / "b", {"x": b})
    for one, other in (("a", "b"), ("b", "a")):
        (found,) = checkpoint.diff(tmp_path / one, tmp_path / other, values=True).tensors
        assert (found.name, found.num_different) == ("x", 1)


def test_large_values_are_compared_when_asked_for(base: Path, tmp_path: Path):
    other = saved(tmp_path / "b", extra__big=[*range(3999), -1])
    assert run("diff", base, other).code == 0
    ran = run("diff", base, other, "--values")
    assert ran.code == 1
    assert ["value", "extra.big[3999]", "3999", "→", "-1", "-4,000", "1"] in [line.split() for line in ran.out.splitlines()]
    (change,) = run("diff", base, other, "--values", "--json").json["values"]
    assert change == {"name": "extra.big", "where": "[3999]", "a": 3999, "b": -1, "by": -4000, "relative": 4000 / 3999}


def test_what_differs_within_a_value_is_said_and_nothing_else(tmp_path: Path):
    for name, lr, step in (("a", 0.1, 1), ("b", 0.05, 1)):
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
        groups = [{"params": parameters[:1], "lr": lr, "betas": (0.9, 1 - lr)}, {"params": parameters[1:], "lr": 0.5}]
        model = torch.nn.ParameterList(parameters)
        state = {"model": model, "optimizer": torch.optim.AdamW(groups), "extra": {"plan": {"at": [1, {"n": step}]}}}
        checkpoint.save(tmp_path / name, state)
    found = checkpoint.diff(tmp_path / "a", tmp_path / "b")
    said = {(change.name, change.where): (change.a, change.b, change.by, change.relative) for change in found.values}
    assert said == {
        ("optimizer.param_groups", "[0]['lr']"): (0.1, 0.05, -0.05, 0.5),
        ("optimizer.param_groups", "[0]['betas'][1]"): (0.9, 0.95, pytest.approx(0.05), pytest.approx(0.05 / 0.95)),
    }
    lines = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert ["value", "optimizer.param_groups[0]['lr']", "0.1", "→", "0.05", "-0.05", "0.5"] in [line.split() for line in lines]
    assert lines[-1] == "different: 1 with another value"


LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab", max_size=2) | st.integers(0, 3), inner, max_size=4)
    ),
    max_leaves=20,
)


def reached(value: Any, where: str) -> Any:
    return eval(f"value{where}", {"value": value})


@given(VALUES, VALUES, st.booleans())
def test_every_difference_is_under_one_of_the_places_and_each_place_differs(a: Any, b: Any, twin: bool):
    b = copy.deepcopy(a) if twin else b
    found = value_changes("x", a, b)
    assert bool(found) == (not is_identical(a, b))
    for change in found:
        assert is_identical(reached(a, change.where), change.a)
        assert is_identical(reached(b, change.where), change.b)
        assert not is_identical(change.a, change.b)
    if not found or found[0].where == "":
        return
    put = copy.deepcopy(a)
    for change in found:  # what was said to differ is put right, and nothing differs
        put = replaced(put, change.where, change.b)
    assert is_identical(put, b)


def replaced(value: Any, where: str, by: Any) -> Any:
    """The value with another part at a place; tuples are made anew."""
    if not where:
        return by
    (key,) = ast.literal_eval(where[: _end(where)])
    part = replaced(value[key], where[_end(where) :], by)
    if isinstance(value, tuple):
        return (*value[:key], part, *value[key + 1 :])
    value[key] = part
    return value


def _end(where: str) -> int:
    """Where the first pair of brackets ends; keys are of the letters a and b."""
    return where.index("]") + 1


def test_of_a_value_that_differs_everywhere_the_whole_is_said():
    (change,) = value_changes("x", list(range(100)), list(range(1, 101)))
    assert (change.where, change.b[-1], change.by) == ("", 100, None)


def test_attributes_of_an_ordered_dict_are_compared_beside_its_items():
    a, b = torch.nn.Linear(1, 1, bias=False).state_dict(), torch.nn.Linear(1, 1, bias=False).state_dict()
    b["weight"] = a["weight"] = torch.zeros(1, 1)
    assert value_changes("x", a, b) == []
    b._metadata[""]["version"] = 2
    (change,) = value_changes("x", [a], [b])
    assert (change.where, change.a, change.b) == ("[0].__dict__['_metadata']['']['version']", 1, 2)
    b["weight"] = torch.ones(1, 1)
    assert [change.where for change in value_changes("x", a, b)] == ["['weight']", ".__dict__['_metadata']['']['version']"]


def test_arrays_and_odd_numbers_say_how_far_apart_they_are_where_that_is_a_number():
    (change,) = value_changes("x", {"k": np.array([1.0, 4.0])}, {"k": np.array([1.0, 2.0])})
    assert (change.where, change.by, change.relative) == ("['k']", 2.0, 0.5)
    for a, b in (
        (1.0, float("inf")),
        (float("nan"), 1),
        (np.ones(2), np.ones(3)),
        (np.array(["a"]), np.array(["b"])),
        ("1", 1),
        (1.5, 10**400),
    ):
        (change,) = value_changes("x", a, b)
        assert (change.by, change.relative) == (None, None)
    (change,) = value_changes("x", np.float32(1), np.float32(2))
    assert change.by == 1.0
    (change,) = value_changes("x", 10**400, 0)
    assert change.by == -(10**400)


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
    flip(file, -9)
    shown = run("diff", base, other, "--values")
    assert (shown.code, shown.out) == (1, "")
    assert "CorruptError" in shown.err
    assert run("diff", base, tmp_path / "none").code == 1


def diff_together(a: str, b: str) -> tuple[str, int, int]:
    """Return the result on this rank, the bytes of tensors that it read, and how many lines the command printed."""
    reads: list[int] = []
    read_into = LocalStorage.read_into

    def noting(self: LocalStorage, key: str, offset: int, buffers: Any) -> None:
        if key.endswith(".safetensors"):
            reads.append(sum(map(len, buffers)))
        read_into(self, key, offset, buffers)

    with mock.patch.object(LocalStorage, "read_into", noting):
        found = checkpoint.diff(a, b, values=True, process_group=None)
    return repr(found), sum(reads), len(run("diff", a, b, "--values").out.splitlines())


@pytest.mark.parametrize("changed", [False, True])
def test_ranks_share_the_bytes_and_all_get_the_differences_of_one_process(tmp_path: Path, changed: bool):
    tied = torch.arange(1000.0)
    one = {f"w{i}": torch.arange(500_000, dtype=torch.float32) * (i + 1) for i in range(3)}
    one |= {"tied": tied, "twin": tied, "empty": torch.zeros(0, 3), "half": torch.ones(7).bfloat16(), "values": list(range(4000))}
    two = {**one, "half": one["half"].double()}
    if changed:  # the border between two ranks, and between three, is within w1; each has the largest difference of one kind
        far = one["w1"].clone()
        far[:2], far[100_000:400_000], far[-1] = torch.tensor([float("nan"), 1e9]), -1.0, float("nan")
        two |= {"w1": far, "tied": tied + 1, "twin": tied + 1, "half": one["half"].double() + 0.5, "values": list(range(1, 4001))}
    checkpoint.save(tmp_path / "a", {"t": one})
    checkpoint.save(tmp_path / "b", {"t": two})
    alone = checkpoint.diff(tmp_path / "a", tmp_path / "b", values=True)
    assert [d.name for d in alone.tensors] == (["t.half", "t.tied", "t.twin", "t.w1"] if changed else [])
    lines = len(run("diff", tmp_path / "a", tmp_path / "b", "--values").out.splitlines())
    answers = run_ranks(diff_together, 2, str(tmp_path / "a"), str(tmp_path / "b"))
    assert {found for found, *_ in answers} == {repr(alone)}
    read = [num_bytes for _, num_bytes, _ in answers]
    assert max(read) - min(read) <= 1 << 20
    assert sum(read) <= sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) + (1 << 20)
    assert [printed for *_, printed in answers] == [lines, 0]


def test_an_error_of_one_rank_ends_a_diff_on_all(tmp_path: Path):
    for name in "ab":
        checkpoint.save(tmp_path / name, {"w": torch.arange(500_000.0)})
    (file,) = (tmp_path / "b").rglob("*.safetensors")
    flip(file, -9)  # in the part of rank 1
    answers = run_ranks(refusal, 2, str(tmp_path / "a"), str(tmp_path / "b"))
    assert answers[0] == answers[1].replace("CorruptError: ", "CorruptError: rank 1: ", 1)
    assert "is damaged" in answers[1]


def refusal(a: str, b: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        checkpoint.diff(a, b, values=True, process_group=None)
    return f"{type(refused.value).__name__}: {refused.value}"
