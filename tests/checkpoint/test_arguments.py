"""Arguments that no call takes: each is a `UsageError` that names the option and the value, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import LocalShard, Shards, checkpoint, register_placement
from reshard_ckpt.errors import UsageError
from reshard_ckpt.manager.run_steps import checked_step


def state() -> dict[str, Any]:
    return {"w": torch.arange(6.0), "step": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "ckpt", state())
    return tmp_path / "ckpt"


def beside(path: Path) -> str:
    return str(path.with_name("new"))


CALLS: dict[str, Callable[..., Any]] = {
    "save": lambda path, **options: checkpoint.save(beside(path), state(), **options),
    "load": lambda path, **options: checkpoint.load(path, state(), **options),
    "read": checkpoint.read,
    "inspect": checkpoint.inspect,
    "verify": checkpoint.verify,
    "convert": lambda path, **options: checkpoint.convert(path, beside(path), root="", **options),
    "reshard": lambda path, **options: checkpoint.reshard(path, beside(path), mesh={"dp": 2}, **options),
    "reshard_live": lambda path, **options: checkpoint.reshard_live(state(), state(), **options),
}


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [
        ("save", "rows", torch.nn.Embedding(2, 2)),
        ("save", "sha256", None),
        ("save", "timeline", "no"),
        ("save", "verify_base", 1),
        pytest.param("save", "grace", 10**400, id="save-grace-huge"),
        ("save", "exclude", ["\ud800"]),
        ("save", "mesh", {"dp": None}),
        ("save", "mesh", {"dp": 1.5}),
        ("save", "mesh", {1: 1}),
        ("load", "rename", {"w": None}),
        ("load", "rename", lambda name: None),
        ("read", "names", 3),
        ("read", "names", [None]),
        ("read", "names", b"w"),
        ("inspect", "names", ["w", 1]),
        ("verify", "workers", 10**6),
        ("convert", "cast", True),
        ("convert", "cast", "bfloat16"),
        ("convert", "exclude", [1]),
        ("reshard", "cast", ["w"]),
        ("reshard", "rename", {1: "w"}),
        ("reshard", "stages", 3),
        ("reshard", "rules", "a\0b"),
        ("reshard_live", "memory_bytes", None),
        ("reshard_live", "memory_bytes", math.nan),
        ("reshard_live", "staged", "no"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_named(saved: Path, call: str, option: str, value: object):
    with pytest.raises(UsageError, match="text" if option == "names" or (call, option) == ("convert", "exclude") else option):
        CALLS[call](saved, **{option: value})
    assert not Path(beside(saved)).exists()


@pytest.mark.parametrize(
    ("call", "option"),
    [("read", "names"), ("inspect", "names"), ("convert", "select"), ("convert", "exclude"), ("reshard", "select")],
)
def test_a_generator_of_names_never_stands_for_no_names(saved: Path, call: str, option: str):
    with pytest.raises(UsageError, match="pass a list of names"):
        CALLS[call](saved, **{option: (name for name in ["w"])})


@pytest.mark.parametrize(
    "step", [torch.tensor(2.5), torch.tensor([1, 2]), torch.tensor(1, device="meta"), True, 2.0, -1, 1 << 63]
)
def test_a_step_that_is_no_whole_number_is_refused(step: Any):
    with pytest.raises(UsageError, match="step="):
        checked_step(step)


def test_a_step_may_be_a_tensor_of_one_whole_number():
    assert checked_step(torch.tensor(7)) == 7


def test_a_result_may_be_waited_for_without_an_end(tmp_path: Path):
    handle = checkpoint.async_save(tmp_path / "ckpt", state())
    assert handle.result(timeout=math.inf).bytes_written > 0


def test_a_format_without_a_place_for_the_only_value_is_named(tmp_path: Path):
    checkpoint.save(tmp_path / "ckpt", {"extra": {"x": {}}})
    with pytest.raises(UsageError, match=r"extra.x: .*to='dcp' has no place"):
        checkpoint.convert(tmp_path / "ckpt", tmp_path / "dcp", to="dcp")


def test_a_key_that_cannot_be_saved_names_its_dict(tmp_path: Path):
    with pytest.raises(UsageError, match=r"^extra\.<object object at \w+>: its keys\[1\]: a builtins.object cannot be saved"):
        checkpoint.save(tmp_path / "ckpt", {"extra": {object(): 1}})


@pytest.mark.parametrize("value", [None, "x", math.nan, True, [1], pytest.param(10**400, id="huge")])
@pytest.mark.parametrize(
    "option", ["state_gb", "write_gbps", "copy_gbps", "stall", "nodes", "copies", "node_share", "max_overhead"]
)
def test_goodput_names_what_is_no_number(option: str, value: Any):
    if (option, value) == ("copies", None):
        return
    figures: dict[str, Any] = {"state_gb": 1, "write_gbps": 1, "mtbf": "1h", option: value}
    with pytest.raises(UsageError, match=f"^{option}="):
        checkpoint.goodput(**figures)


def test_goodput_takes_numbers_of_numpy():
    job = checkpoint.goodput(state_gb=np.float32(2), write_gbps=np.float64(1), mtbf="1h", nodes=np.int64(4), copies=np.int32(1))
    assert job == checkpoint.goodput(state_gb=2, write_gbps=1, mtbf="1h", nodes=4, copies=1)


@pytest.mark.parametrize("cast", [None, False, {}])
def test_no_cast_is_none_of_an_offline_reshard_too(saved: Path, cast: Any):
    checkpoint.reshard(saved, beside(saved), mesh={"dp": 2}, cast=cast)
    assert checkpoint.read(beside(saved))["w"].dtype is torch.float32


def test_names_in_an_array_are_plain_text_in_the_result(saved: Path):
    assert {type(name) for name in checkpoint.read(saved, np.array(["w", "step"]))} == {str}  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["", None, 3, "a\0b", b"x", "memory://x", "s3://bucket/x"], ids=repr)
def test_a_folder_of_memory_is_a_path(folder: Any):
    with pytest.raises(UsageError, match="path"):
        checkpoint.Memory(folder=folder)


def test_a_folder_of_memory_may_be_a_path_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("~/fast", tmp_path / "fast"):
        assert checkpoint.Memory(folder=folder).folder == str(tmp_path / "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "declare",
    [
        lambda: LocalShard(torch.ones(2), (torch.tensor(2, device="meta"),), (0,)),
        lambda: LocalShard(torch.ones(2), (2,), pieces=3),  # type: ignore[arg-type]
        lambda: Shards(3),  # type: ignore[arg-type]
        lambda: Shards(None),  # type: ignore[arg-type]
        lambda: register_placement(None, recognize=print, cut=print),  # type: ignore[arg-type]
        lambda: register_placement("no_function", recognize=3, cut=print),  # type: ignore[arg-type]
        lambda: checkpoint.TouchedRows(None),  # type: ignore[arg-type]
        lambda: checkpoint.TouchedRows(torch.ones(3, 2)),
        lambda: checkpoint.TouchedRows(torch.nn.Embedding(2, 2), policy=["touched"]),  # type: ignore[arg-type]
        lambda: checkpoint.TouchedRows(torch.nn.Embedding(2, 2), policy="sampled", fraction="x"),  # type: ignore[arg-type]
    ],
)
def test_a_declaration_of_wrong_types_is_refused(declare: Callable[[], Any]):
    with pytest.raises(UsageError):
        declare()
