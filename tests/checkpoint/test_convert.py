"""What is converted is the same in the other format, to this library and to those whose format it is; or nothing is there."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import zipfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import converting
from reshard_ckpt.checkpoint.converting import parse_size
from reshard_ckpt.core.catalog.specs import CODES
from reshard_ckpt.errors import (
    CheckpointNotFound,
    CorruptError,
    MismatchError,
    NameCollisionError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.formats import destination
from reshard_ckpt.storage import LocalStorage, LocksUnsupported, local, open_storage
from reshard_ckpt.storage.posix import FileLock
from reshard_ckpt.torchfile.mapped import read_records
from tests.checkpoint.test_resharding import files_of
from tests.families.vescale import writing as vescale
from tests.jobs import save_job
from tests.launch import ROOT, run_ranks
from tests.layouts import filled, layouts, shapes, spec_of, values_of
from tests.tries import examples
from tests.warm_python import warm_python

IN_A_FOLDER = examples(40, usual=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
FORMATS = ["safetensors", "torch", "dcp", "reshard"]


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert as_bytes(got) == as_bytes(wanted)


def fresh(folder: Path, name: str = "out") -> Path:
    return folder / f"{name}{len(list(folder.iterdir()))}"


NAMES = st.text("ab.1", min_size=1, max_size=5).filter(lambda name: "" not in name.split("."))


@st.composite
def whole_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    return {
        f"model.{name}": values_of(draw(shapes(7)), draw(st.sampled_from(CODES)), salt)
        for salt, name in enumerate(draw(st.lists(NAMES, unique=True, min_size=1, max_size=6)))
    }


@pytest.mark.slow
@given(st.data(), whole_tensors(), st.integers(1, 3), st.integers(1, 400))
@IN_A_FOLDER
def test_any_layout_becomes_any_format(
    tmp_path: Path, data: st.DataObject, whole: dict[str, torch.Tensor], ranks: int, limit: int
):
    placed = {name: data.draw(layouts(tuple(tensor.shape), ranks)) for name, tensor in whole.items()}
    codes = {dtype: code for code, dtype in TORCH_DTYPES.items()}
    src, out = fresh(tmp_path, "src"), fresh(tmp_path)
    out.mkdir()
    with open_storage(src) as storage:
        held = [
            [(spec_of(placed[n], rank, n, codes[t.dtype]), filled(placed[n], rank, t)) for n, t in whole.items()]
            for rank in range(ranks)
        ]
        save_job(storage, held)
    report = checkpoint.convert(src, out / "hf", max_shard_size=limit)
    assert report.num_tensors == len(whole)
    stored = {name: t for file in (out / "hf").glob("*.safetensors") for name, t in load_file(file).items()}
    assert {f"model.{name}" for name in stored} == set(whole)
    checkpoint.convert(src, out / "x.pt", to="torch")
    checkpoint.convert(out / "x.pt", out / "dcp", to="dcp")
    checkpoint.convert(out / "hf", out / "native", to="reshard")
    assert checkpoint.verify(out / "native").ok
    for path in (out / "hf", out / "x.pt", out / "dcp", out / "native"):
        found = checkpoint.read(path)
        assert set(found) == set(whole)
        for name, tensor in whole.items():
            assert_same(found[name], tensor)
    loaded = torch.load(out / "x.pt", weights_only=True, mmap=True)["model"]
    for name, tensor in whole.items():
        assert_same(stored[name.removeprefix("model.")], tensor)
        assert_same(loaded[name.removeprefix("model.")], tensor)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6, bias=False))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.25}])
    for _ in range(2):
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_torch_file_is_what_torch_would_have_saved(tmp_path: Path):
    model, optimizer = trained()
    rng = torch.get_rng_state()
    extra = {"step": 7, "nested": {"a": [1, (2, "b")], 3: None}, "rng": checkpoint.PerRank(rng), "lr": torch.tensor(0.5)}
    checkpoint.save(tmp_path / "n", {"model": model, "optimizer": optimizer, "extra": extra})
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    for options in ({}, {"mmap": True}):
        found = torch.load(tmp_path / "x.pt", weights_only=True, **options)
        assert list(found) == ["extra", "model", "optimizer"]
        other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6, bias=False))
        other.load_state_dict(found["model"])
        assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
        params = list(other.parameters())
        loaded = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
        loaded.load_state_dict(found["optimizer"])
        wanted = optimizer.state_dict()
        for group, theirs in zip(loaded.state_dict()["param_groups"], wanted["param_groups"], strict=True):
            assert {key: group[key] for key in theirs} == theirs
        for number, state in wanted["state"].items():
            assert all(torch.equal(loaded.state_dict()["state"][number][key], value) for key, value in state.items())
        assert (found["extra"]["step"], found["extra"]["nested"]) == (7, {"a": [1, (2, "b")], 3: None})
        assert torch.equal(found["extra"]["rng"][0], rng)
        assert found["extra"]["lr"].item() == 0.5


@pytest.mark.parametrize("between", ["torch", "reshard", "dcp"])
def test_an_optimizer_that_was_saved_by_number_stays_so_in_a_torch_file(between: str, tmp_path: Path) -> None:
    _, optimizer = trained()
    _, other = trained()
    wanted = optimizer.state_dict()
    for state in wanted["state"].values():
        state["step"] = int(state["step"])  # a value, as old releases of torch have it
        state["exp_avg"] += 1
    torch.save({"optimizer": wanted}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "between", to=between)
    checkpoint.convert(tmp_path / "between", tmp_path / "x.pt", to="torch")
    other.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True)["optimizer"])
    found = other.state_dict()["state"]
    assert found.keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(found[number][key])) for key, value in state.items())


def test_a_torch_file_of_a_part_is_what_the_file_of_all_has_below_its_key(tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"step": 7, "nested": {"a": [1, (2, "b")]}, "w.x.y": torch.ones(2), "many": [torch.ones(1), 3]}
    checkpoint.save(tmp_path / "n", {"model": model, "optimizer": optimizer, "extra": extra})
    checkpoint.convert(tmp_path / "n", tmp_path / "whole.pt", to="torch")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for key, state in whole.items():
        checkpoint.convert(tmp_path / "n", tmp_path / "part.pt", to="torch", root=key, overwrite=True)
        part = torch.load(tmp_path / "part.pt", weights_only=True)
        assert list(part) == list(state)
        assert str(part) == str(state)
        if key == "model":
            model.load_state_dict(part)


def test_a_torch_file_is_a_sound_zip_with_aligned_records(tmp_path: Path):
    state = {f"w{i}": values_of((i * 7 + 1,), "BF16", i) for i in range(9)} | {"none": torch.zeros(0, 4)}
    checkpoint.save(tmp_path / "n", {"model": state})
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
    records, _ = read_records(str(tmp_path / "x.pt"))
    assert len(records) == 9
    assert all(begin % 64 == 0 for begin, _ in records)
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(records))


def test_a_conversion_declares_no_axes(tmp_path: Path):
    checkpoint.save(tmp_path / "n", {"model": {"w": torch.arange(12.0).reshape(3, 4)}})
    checkpoint.convert(tmp_path / "n", tmp_path / "d", to="dcp")
    checkpoint.convert(tmp_path / "d", tmp_path / "r", to="reshard")
    saved, found = checkpoint.catalog(tmp_path / "n"), checkpoint.catalog(tmp_path / "r")
    assert (found.mesh, found.tensor("model.w").placement) == (saved.mesh, saved.tensor("model.w").placement)


def test_a_state_comes_back_from_every_format(tmp_path: Path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "n", {"model": model, "optimizer": optimizer, "extra": {"step": 7}})
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    checkpoint.convert(tmp_path / "x.pt", tmp_path / "d", to="dcp")
    checkpoint.convert(tmp_path / "d", tmp_path / "r", to="reshard")
    for path in (tmp_path / "x.pt", tmp_path / "d", tmp_path / "r"):
        assert checkpoint.diff(tmp_path / "n", path, values=True).equal
        other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6, bias=False))
        params = list(other.parameters())
        loaded = torch.optim.AdamW([{"params": params[2:]}, {"params": params[:2]}])
        extra: dict[str, Any] = {}
        checkpoint.load(path, {"model": other, "optimizer": loaded, "extra": extra})
        assert extra == {"step": 7}
        assert [group["lr"] for group in loaded.param_groups] == [0.25, 0.5]
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(loaded.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    plain: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    torch_dcp.load(plain, checkpoint_id=str(tmp_path / "d"))
    assert all(torch.equal(plain["model"][name], t) for name, t in model.state_dict().items())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_known_by_both_names(tmp_path: Path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.head(model.embed(torch.arange(3))).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "n", {"model": model, "optimizer": optimizer})
    checkpoint.convert(tmp_path / "n", tmp_path / "hf")
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["embed.weight"]
        assert file.metadata()["format"] == "pt"
    again = Tied()
    load_model(again, tmp_path / "hf" / "model.safetensors")  # safetensors' own
    assert torch.equal(again.head.weight, model.head.weight)
    for path in (tmp_path / "hf", tmp_path / "x.pt"):
        tied, untied = Tied(), Tied()
        untied.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
        for target in (tied, untied):
            checkpoint.load(path, {"model": target})
            assert torch.equal(target.embed.weight, model.embed.weight)
            assert torch.equal(target.head.weight, model.embed.weight)
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["model"]["embed.weight"].data_ptr() == found["model"]["head.weight"].data_ptr()
    checkpoint.convert(tmp_path / "n", tmp_path / "alone.pt", to="torch", select="optimizer")
    alone = torch.load(tmp_path / "alone.pt", weights_only=True)
    assert alone["optimizer"]["param_groups"] == found["optimizer"]["param_groups"]
    other = torch.optim.SGD(again.parameters(), momentum=0.9)
    other.load_state_dict(found["optimizer"])
    assert torch.equal(other.state[again.embed.weight]["momentum_buffer"], optimizer.state[model.embed.weight]["momentum_buffer"])


def save_some(path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layers.{i}.{n}": torch.randn(20, 10) + i for i in (0, 1, 2, 10) for n in ("a", "b")}
    checkpoint.save(path, {"model": tensors, "ema": {"w": torch.ones(3)}, "extra": {"step": 3}})
    return tensors


def test_shards_follow_the_order_of_layers_and_the_index_says_what_is_where(tmp_path: Path):
    tensors = save_some(tmp_path / "n")
    report = checkpoint.convert(tmp_path / "n", tmp_path / "hf", max_shard_size="2.4kB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.num_bytes == sum(t.nbytes for t in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert report.files == (*files, "model.safetensors.index.json")
    in_order = [f"layers.{i}.{n}" for i in (0, 1, 2, 10) for n in ("a", "b")]
    assert [index["weight_map"][name] for name in in_order] == sorted(index["weight_map"].values())
    for file in files:
        found = load_file(tmp_path / "hf" / file)
        assert sum(t.nbytes for t in found.values()) <= 2400
        assert all(torch.equal(t, tensors[name]) and index["weight_map"][name] == file for name, t in found.items())
    assert set(report.left_out) == {"ema.w", "extra.step"}


def test_what_is_chosen_renamed_and_cast_is_what_arrives(tmp_path: Path):
    tensors = save_some(tmp_path / "n")
    checkpoint.convert(
        tmp_path / "n",
        tmp_path / "hf",
        rename={"model.layers": "model.h"},
        select="model.h.*",
        exclude=["model.h.10", "*.b"],
        cast={"model.h.1.a": "bfloat16", "model.*": torch.float64},
    )
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(found) == {f"h.{i}.a" for i in (0, 1, 2)}
    assert_same(found["h.1.a"], tensors["layers.1.a"].to(torch.bfloat16))
    assert_same(found["h.2.a"], tensors["layers.2.a"].double())
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch", root="model.layers")
    assert set(torch.load(tmp_path / "x.pt", weights_only=True)) == {f"{i}.{n}" for i in (0, 1, 2, 10) for n in ("a", "b")}
    checkpoint.convert(tmp_path / "n", tmp_path / "r", to="reshard", root="model", exclude="*.b", cast={"*.1.a": "bfloat16"})
    assert checkpoint.catalog(tmp_path / "r").names == ("layers.0.a", "layers.1.a", "layers.10.a", "layers.2.a")
    assert_same(checkpoint.read(tmp_path / "r")["layers.1.a"], tensors["layers.1.a"].bfloat16())
    checkpoint.convert(tmp_path / "n", tmp_path / "all", root="")
    assert "ema.w" in load_file(tmp_path / "all" / "model.safetensors")


@pytest.mark.parametrize(
    "call",
    [
        lambda src, dst: checkpoint.convert(src, dst, to="reshard", rename={"a.extra": "an_extra"}),
        lambda src, dst: checkpoint.convert(src, dst, to="reshard", root="a", rename=lambda name: name.replace("ext", "an_ext")),
        lambda src, dst: checkpoint.reshard(src, dst, mesh={"dp": 1}, rename={"a.extra": "an_extra"}),
    ],
)
def test_values_keep_their_keys_below_another_name(tmp_path: Path, call: Any):
    below = {3: "x", "b.c": 5, "n": {7: 2}, "of": OrderedDict(z=1, a={1.5: 2})}
    checkpoint.save(tmp_path / "n", {"a": {"extra": {**below, "l": [torch.ones(1), 4]}}})
    call(tmp_path / "n", tmp_path / "r")
    state: dict[str, Any] = {"an_extra": {"l": [torch.zeros(1), 0]}}
    checkpoint.load(tmp_path / "r", state)
    assert (state["an_extra"].pop("l")[1], state["an_extra"]) == (4, below)
    assert type(state["an_extra"]["of"]) is OrderedDict


@pytest.mark.parametrize(
    ("select", "chosen"),
    [("[a]", {"[a].x"}), ("w[0]", {"w[0]"}), ("w*", {"w*"}), ("w?", {"w*", "w0"}), ("[ab]", {"a", "b"})],
)
def test_a_pattern_that_is_a_name_is_that_name_alone(tmp_path: Path, select: str, chosen: set[str]):
    state = {"[a]": {"x": torch.ones(1)}, "a": 5, "w[0]": torch.ones(2), "w0": 1, "w*": 3, "b": torch.zeros(1)}
    checkpoint.save(tmp_path / "n", state)
    assert checkpoint.read(tmp_path / "n", [select]).keys() == chosen
    checkpoint.convert(tmp_path / "n", tmp_path / "chosen", to="reshard", select=select)
    assert checkpoint.read(tmp_path / "chosen").keys() == chosen
    checkpoint.convert(tmp_path / "n", tmp_path / "others", to="reshard", exclude=select)
    assert checkpoint.read(tmp_path / "others").keys() == checkpoint.read(tmp_path / "n").keys() - chosen


@pytest.mark.parametrize("new", ["b", "s.b"])
def test_a_list_with_a_tensor_is_a_list_below_another_name(tmp_path: Path, new: str):
    checkpoint.save(tmp_path / "n", {"a": [1, torch.ones(2), [2, torch.ones(1)]], "s": {"x": 1}})
    checkpoint.convert(tmp_path / "n", tmp_path / "dcp", to="dcp", rename={"a": new})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "from_dcp")
    found = torch.load(tmp_path / "from_dcp")
    wanted = [1, torch.ones(2), [2, torch.ones(1)]]
    torch.testing.assert_close(found, {"b": wanted, "s": {"x": 1}} if new == "b" else {"s": {"x": 1, "b": wanted}})


def test_a_tied_tensor_of_another_dtype_is_tied_no_more(tmp_path: Path):
    checkpoint.save(tmp_path / "n", {"model": Tied()})
    whole = checkpoint.read(tmp_path / "n")["model.embed.weight"]
    checkpoint.convert(tmp_path / "n", tmp_path / "hf", cast={"model.head.*": "float16"})
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same(found["embed.weight"], whole)
    assert_same(found["head.weight"], whole.half())
    checkpoint.convert(tmp_path / "n", tmp_path / "one", exclude="model.embed")
    assert_same(load_file(tmp_path / "one" / "model.safetensors")["head.weight"], whole)
    with pytest.raises(UsageError, match="format: a tied tensor cannot have this name"):  # its place in the header is taken
        checkpoint.convert(tmp_path / "n", tmp_path / "x", rename={"model.head.weight": "model.format"})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"to": "gguf"}, UsageError, "pass one of 'safetensors', 'torch'"),
        ({"root": "net"}, UsageError, "root='net': nothing.*'ema', 'extra', 'model'"),
        ({"select": "nets.*"}, MismatchError, "nets.*: not in the checkpoint"),
        ({"select": "extra"}, UsageError, "nothing that was selected"),
        ({"cast": {"model.*": "int8"}}, UsageError, "not a floating-point dtype"),
        ({"cast": {"model.x": "float16"}}, UsageError, "correct the pattern"),
        ({"max_shard_size": "5 gigs"}, UsageError, "with a unit"),
        ({"max_shard_size": 0}, UsageError, "with a unit"),
        ({"rename": {"model.layers.0": "model.layers.1"}}, NameCollisionError, "the same name"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str):
    save_some(tmp_path / "n")
    with pytest.raises(error, match=match):
        checkpoint.convert(tmp_path / "n", tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["n"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("4 GiB", 4 << 30), ("1.5kb", 1500), ("7", 7), (8, 8), ("0.1", 1)]
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int):
    assert parse_size(text) == size


def test_a_value_that_torch_would_not_load_is_named(tmp_path: Path):
    checkpoint.save(tmp_path / "n", {"extra": {"fine": 3, "bad": {3: torch.device("cpu"), 4: __import__("numpy").ones(3)}}})
    with pytest.raises(UnsupportedError, match=r"extra\.bad"):
        checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch", exclude="extra.bad")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {"extra": {"fine": 3}}
    checkpoint.save(tmp_path / "k", {"extra": {frozenset([1]): {"key": 3}}})
    with pytest.raises(UnsupportedError, match=r"extra\.frozenset.*\.key: torch.load refuses .* a key that leads to it"):
        checkpoint.convert(tmp_path / "k", tmp_path / "k.pt", to="torch")


@pytest.mark.parametrize("state", [{}, {"w": {}}])
def test_an_optimizer_of_no_parameters_or_of_no_state_becomes_a_torch_file(tmp_path: Path, state: dict[str, Any]):
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(state)}]}
    checkpoint.save(tmp_path / "n", {"optimizer": optimizer})
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)["optimizer"]
    assert found["state"] == state
    assert [group["lr"] for group in found["param_groups"]] == [0.5]


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_is_replaced_only_when_asked_and_only_if_it_is_a_checkpoint(tmp_path: Path, to: str):
    tensors, out = save_some(tmp_path / "n"), tmp_path / "out"
    checkpoint.convert(tmp_path / "n", out, to=to)
    before = {path: path.read_bytes() for path in ([out] if out.is_file() else out.rglob("*")) if path.is_file()}
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.convert(tmp_path / "n", out, to=to)
    assert {path: path.read_bytes() for path in before} == before
    checkpoint.convert(tmp_path / "n", out, to=to, overwrite=True, cast={"model.*": "float64"})
    assert checkpoint.read(out)["model.layers.0.a"].equal(tensors["layers.0.a"].double())
    assert sorted(os.listdir(tmp_path)) == ["n", "out"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint.convert(tmp_path / "n", precious, to=to, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"
    for where in (tmp_path / "n", tmp_path):
        with pytest.raises(UsageError):
            checkpoint.convert(tmp_path / "n", where, to=to, overwrite=True)
    assert checkpoint.verify(tmp_path / "n").ok


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("spelled", ["{}/m.pt", "{}/../{name}/m.pt", "{}/link.pt", "file://{}/m.pt"])
def test_a_file_that_is_read_is_not_replaced(tmp_path: Path, to: str, spelled: str):
    state = {"model": {"a": torch.arange(6.0), "b": torch.ones(3)}}
    torch.save(state, tmp_path / "m.pt")
    (tmp_path / "link.pt").symlink_to("m.pt")
    with pytest.raises(UsageError, match=r"m.pt: is, or holds, the checkpoint to be read; write to another path"):
        checkpoint.convert(
            spelled.format(tmp_path, name=tmp_path.name), tmp_path / "m.pt", to=to, select="model.a", root="", overwrite=True
        )
    assert torch.load(tmp_path / "m.pt")["model"]["b"].equal(torch.ones(3))


def test_a_part_of_a_checkpoint_is_not_replaced(tmp_path: Path):
    """Neither one of the files that are read, nor a folder or file that is no checkpoint without those beside it."""
    tensors = save_some(tmp_path / "n")
    checkpoint.convert(tmp_path / "n", tmp_path / "hf", max_shard_size=40)
    vescale.write_folder(tmp_path / "vescale" / "model", {"w": torch.ones(2)})
    (inner,) = (path for path in (tmp_path / "n").iterdir() if path.is_dir())
    shard = min((tmp_path / "hf").glob("*.safetensors"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for src, dst, to in [
        ("n", inner, "safetensors"),
        ("n", min(inner.glob("*.safetensors")), "torch"),
        ("hf", inner, "dcp"),
        ("hf", shard, "torch"),
        ("vescale", tmp_path / "vescale" / "model", "dcp"),
        ("n", tmp_path / "vescale" / "model", "dcp"),
    ]:
        with pytest.raises(UsageError, match=r"is, or holds, the checkpoint to be read|is not replaced; remove it, or pass"):
            checkpoint.convert(tmp_path / src, dst, to=to, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    checkpoint.convert(tmp_path / "n", tmp_path / "n" / "hf")  # beside the source's own files
    checkpoint.convert(tmp_path / "n", tmp_path / "n" / "hf", overwrite=True)
    assert checkpoint.read(tmp_path / "n" / "hf").keys() == {f"model.{name}" for name in tensors}


def test_the_root_of_a_run_of_another_library_is_not_replaced_as_its_newest_checkpoint(tmp_path: Path):
    save_some(tmp_path / "n")
    for step in (1, 2):
        checkpoint.convert(tmp_path / "n", tmp_path / "run" / f"global_step{step}", to="reshard")
    for newest in ("global_step2", "lost"):
        (tmp_path / "run" / "latest").write_text(newest)
        with pytest.raises(UsageError, match="run: has the file latest, so it is the root of a run, which is never replaced"):
            checkpoint.convert(tmp_path / "n", tmp_path / "run", overwrite=True)
    assert checkpoint.diff(tmp_path / "run" / "global_step1", tmp_path / "run" / "global_step2").equal


def test_a_damaged_checkpoint_beside_a_new_path_is_in_nobodys_way(tmp_path: Path):
    tensors = save_some(tmp_path / "n")
    save_some(tmp_path / "damaged")
    catalog = tmp_path / "damaged" / "catalog.msgpack"
    catalog.write_bytes(catalog.read_bytes()[:-9])
    checkpoint.convert(tmp_path / "n", tmp_path / "hf")
    checkpoint.convert(tmp_path / "n", tmp_path / "x.pt")
    (tmp_path / "empty").mkdir()
    checkpoint.convert(tmp_path / "n", tmp_path / "empty")
    for path in ("hf", "x.pt", "empty"):
        assert {*checkpoint.catalog(tmp_path / path).names} >= {f"model.{name}" for name in tensors}
    with pytest.raises(CorruptError, match="hf: is not replaced, as a step beside it may refer to its files"):
        checkpoint.convert(tmp_path / "n", tmp_path / "hf", overwrite=True)


def test_a_checkpoint_with_others_in_its_folder_is_not_replaced(tmp_path: Path):
    save_some(tmp_path / "n")
    save_some(tmp_path / "run")
    save_some(tmp_path / "run" / "step_1")
    with pytest.raises(UsageError, match=r"run: holds other checkpoints \(step_1\), which are never replaced"):
        checkpoint.convert(tmp_path / "n", tmp_path / "run", overwrite=True)
    assert checkpoint.verify(tmp_path / "run" / "step_1").ok
    (tmp_path / "link").symlink_to("run")
    checkpoint.convert(tmp_path / "n", tmp_path / "link", to="reshard", overwrite=True)
    assert checkpoint.verify(tmp_path / "run" / "step_1").ok


def save_on_two(folder: str) -> None:
    """Rank 0 has a tensor and a value, where rank 1 has an empty dict and None."""
    own = {"t": {"w": torch.arange(3)}, "v": {"a": [1]}} if dist.get_rank() == 0 else {"t": {}, "v": None}
    checkpoint.save(f"{folder}/n", {**own, "e": {}, "l": [{}, [{}]]})


def test_what_stands_for_things_of_other_ranks_is_not_written(tmp_path: Path):
    run_ranks(save_on_two, 2, str(tmp_path))
    for to in ("torch", "dcp", "reshard"):
        report = checkpoint.convert(tmp_path / "n", tmp_path / to, to=to)
        assert report.left_out == (("e", "l") if to == "dcp" else ())
        found = checkpoint.read(tmp_path / to)
        empty = (None, None) if to == "dcp" else ({}, [{}, [{}]])
        assert (found["t.w"].tolist(), found["v.a"], found.get("e"), found.get("l")) == ([0, 1, 2], [1], *empty)
        assert report.num_values == (1 if to == "dcp" else 3 if to == "torch" else 5)


@pytest.mark.parametrize(
    "state",
    [
        {"a": [], "a.b": torch.arange(3)},
        {"a": 5, "a.b": torch.arange(3), "a.b.c": torch.ones(1)},
        {"a": [], "a.b": 3},
        {"a": {}, "a.b": [1]},
        {"s": {"a": [], "a.b": torch.arange(3)}},
        {"s": {"a": (), "a.b": 3}},
    ],
    ids=repr,
)
def test_a_key_with_a_dot_is_not_in_the_value_whose_name_it_begins_with(tmp_path: Path, state: dict[str, Any]):
    checkpoint.save(tmp_path / "n", state)
    assert checkpoint.convert(tmp_path / "n", tmp_path / "torch", to="torch").left_out == ()
    torch.testing.assert_close(torch.load(tmp_path / "torch", weights_only=True), state)
    if {} not in state.values():  # DCP has no entry for an empty dict
        checkpoint.convert(tmp_path / "n", tmp_path / "dcp", to="dcp")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "from_dcp")
        torch.testing.assert_close(torch.load(tmp_path / "from_dcp"), state)


def test_an_empty_folder_may_be_filled_and_a_scheme_may_not(tmp_path: Path):
    save_some(tmp_path / "n")
    (tmp_path / "out").mkdir()
    checkpoint.convert(tmp_path / "n", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="is a folder, and the result is one file"):
        checkpoint.convert(tmp_path / "n", tmp_path / "folder", to="torch")
    with pytest.raises(UsageError, match="conversions are written to files or objects"):
        checkpoint.convert(tmp_path / "n", "memory://x")
    checkpoint.convert(tmp_path / "n", f"file://{tmp_path}/deep/er/x.pt", to="torch")
    assert torch.load(tmp_path / "deep" / "er" / "x.pt", weights_only=True)["extra"] == {"step": 3}


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path, to: str):
    checkpoint.save(tmp_path / "n", {"model": {f"w{i}": torch.randn(100_000) for i in range(30)}})
    (file,) = (tmp_path / "n").glob("*/*.safetensors")
    with open(file, "r+b") as data:
        data.seek(11_000_000)
        data.write(b"damage")
    with pytest.raises(CorruptError, match="is damaged"):
        checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to)
    assert os.listdir(tmp_path) == ["n"]
    checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to, verify=False)


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_or_an_interrupt_leaves_nothing_behind(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch):
    save_some(tmp_path / "n")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to)
    assert os.listdir(tmp_path) == ["n"]

    def interrupt(step: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to, progress=interrupt)
    assert os.listdir(tmp_path) == ["n"]


KILLED = """
import os, signal, sys
from reshard_ckpt import checkpoint

def die(step, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

for to in sys.argv[2:]:
    child = os.fork()
    if not child:
        checkpoint.convert(f"{sys.argv[1]}/n", f"{sys.argv[1]}/{to}/out", to=to, max_shard_size="9MB", progress=die)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def killed(tmp_path: Path, *formats: str) -> dict[str, torch.Tensor]:
    """What is saved at "n"; a conversion of it to each of the formats was killed when more than half was done."""
    state = {f"w{i}": torch.randn(1 << 20) for i in range(8)}
    checkpoint.save(tmp_path / "n", {"model": state})
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([warm_python(), "-c", KILLED, str(tmp_path), *formats], env=env, check=True)
    return state


def test_a_conversion_that_is_killed_is_never_taken_for_a_whole_one_and_the_next_leaves_nothing_of_it(tmp_path: Path):
    killed(tmp_path, *FORMATS)
    for to in FORMATS:
        (left,) = os.listdir(tmp_path / to)
        assert left.endswith(".partial")
        for folder in (tmp_path / to, tmp_path / to / left):
            with pytest.raises((CheckpointNotFound, CorruptError)):
                checkpoint.catalog(folder)
        report = checkpoint.convert(tmp_path / "n", tmp_path / to / "out", to=to)  # not in the way that was killed
        assert report.bytes_kept == 0
        assert checkpoint.verify(tmp_path / to / "out").ok
        assert os.listdir(tmp_path / to) == ["out"]


def test_a_conversion_that_was_killed_goes_on_and_keeps_what_it_had_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = killed(tmp_path, "safetensors")
    (partial,) = (tmp_path / "safetensors").iterdir()
    finished = {note.name.removesuffix(".digests") for note in (partial / "notes").iterdir()}
    assert finished == {"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"}
    damaged = partial / "result" / "model-00002-of-00004.safetensors"
    with damaged.open("r+b") as data:
        data.seek(5_000_000)
        data.write(b"damage")
    created: list[str] = []
    create = LocalStorage.create
    monkeypatch.setattr(LocalStorage, "create", lambda self, key, *a, **k: created.append(key) or create(self, key, *a, **k))
    out = tmp_path / "safetensors" / "out"
    said: list[tuple[str, int, int]] = []
    report = checkpoint.convert(tmp_path / "n", out, max_shard_size="9MB", progress=lambda *args: said.append(args))
    assert created == [f"model-0000{i}-of-00004.safetensors" for i in (2, 3, 4)]
    assert report.bytes_kept == (out / "model-00001-of-00004.safetensors").stat().st_size
    assert said[1] == ("convert", report.num_bytes // 4, report.num_bytes)
    assert said[-1] == ("convert", report.num_bytes, report.num_bytes)
    assert os.listdir(out.parent) == ["out"]
    checkpoint.convert(tmp_path / "n", tmp_path / "whole", max_shard_size="9MB")
    assert files_of(out) == files_of(tmp_path / "whole")
    assert all(torch.equal(tensor, state[name.removeprefix("model.")]) for name, tensor in checkpoint.read(out).items())


def test_what_a_killed_conversion_of_another_state_or_without_checksums_left_is_not_kept(tmp_path: Path):
    killed(tmp_path, "safetensors")
    checkpoint.save(tmp_path / "n", {"model": {f"w{i}": torch.zeros(1 << 20) for i in range(8)}})
    report = checkpoint.convert(tmp_path / "n", tmp_path / "safetensors" / "out", max_shard_size="9MB")
    assert report.bytes_kept == 0
    assert not any(tensor.any() for tensor in checkpoint.read(tmp_path / "safetensors" / "out").values())
    assert os.listdir(tmp_path / "safetensors") == ["out"]


CHANGES: dict[str, list[dict[str, Any]]] = {
    "to": [{"to": "reshard", "root": "model"}],
    "max_shard_size": [{"max_shard_size": 200}],
    "optimizer": [{"to": "dcp", "optimizer": form} for form in ("nested", "flat")],
    "unstack": [{"unstack": True}],
    "root": [{"root": ""}, {"root": "model.layers"}],
    "select": [{"select": "model.layers.0"}],
    "exclude": [{"exclude": "model.layers.0"}],
    "rename": [{"rename": {"model": "old", "ema": "model"}}],
    "cast": [{"cast": {"*": "bfloat16"}}, {"cast": {"*": "float16"}}],
    "verify": [{"verify": False}],
}
WITHOUT_EFFECT = {
    "src": "its catalog counts, which has the digests of all files",
    "dst": "what is kept lies beside it",
    "overwrite": "says what may be replaced by the same bytes",
    "progress": "is told, and decides nothing",
    "process_group": "any number of processes write the same files",
    "timeout_s": "a limit of waiting",
}


def test_every_option_that_decides_bytes_decides_which_attempt_is_taken_up(tmp_path: Path):
    assert CHANGES.keys() | WITHOUT_EFFECT.keys() == inspect.signature(checkpoint.convert).parameters.keys()
    assert not CHANGES.keys() & WITHOUT_EFFECT.keys()
    layers = {"layers.mlp.weight": torch.arange(128.0).reshape(2, 8, 8), "layers.0": torch.ones(3)}
    checkpoint.save(tmp_path / "n", {"model": layers, "ema": {name: w + 9 for name, w in layers.items()}})
    requests = [{}, *(options for each in CHANGES.values() for options in each)]

    def identities() -> list[str]:
        with patch.object(converting, "new_folder", side_effect=InterruptedError) as folder:
            for options in requests:
                with pytest.raises(InterruptedError):
                    checkpoint.convert(tmp_path / "n", tmp_path / "out", **options)
        return [call.kwargs["identity"] for call in folder.call_args_list]

    found = identities()
    assert None not in found
    assert len(set(found)) == len(found)
    assert identities() == found


@pytest.mark.parametrize("to", FORMATS)
def test_names_that_come_in_another_order_by_a_rename_arrive(tmp_path: Path, to: str):
    checkpoint.save(
        tmp_path / "n", {"model": {"a": torch.ones(3), "b": torch.zeros(4), "c": torch.zeros(2)}, "x": {"s": 1, "t": 2}}
    )
    rename = {"model.a": "model.z", "model.b": "model.a", "x.s": "x.u"}
    checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to, rename=rename)
    found = checkpoint.read(tmp_path / "out")
    assert {name: tuple(found[name].shape) for name in found if name.startswith("model")} == {
        "model.a": (4,), "model.c": (2,), "model.z": (3,)
    }  # fmt: skip
    assert to == "safetensors" or (found["x.t"], found["x.u"]) == (2, 1)


@pytest.mark.parametrize("to", FORMATS)
def test_two_conversions_to_one_place_do_not_meet(tmp_path: Path, to: str):
    save_some(tmp_path / "n")
    others: list[str] = []

    def another(step: str, done: int, total: int) -> None:
        if done and not others:
            for options in ({"to": to}, {"to": to, "overwrite": True}, {"to": to, "cast": {"model.*": "float64"}}):
                with pytest.raises(StorageError, match="another conversion writes there now") as error:
                    checkpoint.convert(tmp_path / "n", tmp_path / "out", **options)
                others.append(str(error.value))
            checkpoint.convert(tmp_path / "n", tmp_path / "out2", to=to)  # beside it

    checkpoint.convert(tmp_path / "n", tmp_path / "out", to=to, progress=another)
    assert len(others) == 3
    assert sorted(os.listdir(tmp_path)) == ["n", "out", "out2"]
    assert checkpoint.diff(tmp_path / "out", tmp_path / "out2", values=True).equal


def test_a_place_that_was_taken_meanwhile_is_not_taken_away(tmp_path: Path):
    save_some(tmp_path / "n")
    real, calls = destination._check_destination, []

    def checked(*args: Any, **options: Any) -> str:
        calls.append(args)
        if len(calls) == 2:
            (tmp_path / "x.pt").write_text("somebody was quicker")
        return real(*args, **options)

    with patch.object(destination, "_check_destination", checked), pytest.raises(UsageError, match="already exists"):
        checkpoint.convert(tmp_path / "n", tmp_path / "x.pt", to="torch")
    assert (tmp_path / "x.pt").read_text() == "somebody was quicker"
    assert sorted(os.listdir(tmp_path)) == ["n", "x.pt"]


class Cut(BaseException):
    """The end of a process, as far as the file system can tell."""


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("was", FORMATS)
def test_there_is_a_whole_checkpoint_at_every_moment_of_a_replacement(tmp_path: Path, to: str, was: str):
    tensors, out = save_some(tmp_path / "n"), tmp_path / "out"
    checkpoint.convert(tmp_path / "n", out, to=was, cast={"model.*": "float64"})
    moves: list[bool] = []

    def watched(real: Any) -> Any:
        def move(*args: Any, **options: Any) -> Any:
            done = real(*args, **options)
            moves.append(checkpoint.read(out, ["model.layers.0.a"])["model.layers.0.a"].dtype == torch.float32)
            return done

        return move

    with patch.object(os, "rename", watched(os.rename)), patch.object(destination, "swap", watched(destination.swap)):
        checkpoint.convert(tmp_path / "n", out, to=to, overwrite=True)
    assert moves[-1]
    assert sorted(os.listdir(tmp_path)) == ["n", "out"]
    assert torch.equal(checkpoint.read(out)["model.layers.0.a"], tensors["layers.0.a"])


@pytest.mark.parametrize("is_made_anew", [False, True], ids=["", "a job has made the folder since"])
def test_where_nothing_can_be_swapped_a_cut_between_the_two_moves_is_mended_by_the_next(tmp_path: Path, is_made_anew: bool):
    tensors, out = save_some(tmp_path / "n"), tmp_path / "out"
    checkpoint.convert(tmp_path / "n", out, cast={"model.*": "float64"})
    rename = os.rename

    def cut(old: str, new: str) -> None:
        if new == str(out):
            raise Cut
        rename(old, new)

    with patch.object(destination, "swap", lambda one, other: False):
        with patch.object(os, "rename", cut), pytest.raises(Cut):
            checkpoint.convert(tmp_path / "n", out, overwrite=True)
        assert not out.exists()
        if is_made_anew:
            out.mkdir()
        with pytest.raises(UsageError, match="already exists"):  # it is there again
            checkpoint.convert(tmp_path / "n", out)
        assert torch.equal(checkpoint.read(out)["model.layers.0.a"], tensors["layers.0.a"].double())
        checkpoint.convert(tmp_path / "n", out, overwrite=True)
    assert torch.equal(checkpoint.read(out)["model.layers.0.a"], tensors["layers.0.a"])
    assert sorted(os.listdir(tmp_path)) == ["n", "out"]


@pytest.mark.parametrize("raised", [OSError("stale"), KeyboardInterrupt()])
def test_where_nothing_can_be_swapped_the_old_is_put_back_if_the_second_move_fails(tmp_path: Path, raised: BaseException):
    tensors, out, rename = save_some(tmp_path / "n"), tmp_path / "out", os.rename
    checkpoint.convert(tmp_path / "n", out)
    errors = [raised]

    def fails_once(old: str, new: str) -> None:
        if new == str(out) and errors:
            raise errors.pop()
        rename(old, new)

    with (
        patch.object(destination, "swap", lambda one, other: False),
        patch.object(os, "rename", fails_once),
        pytest.raises((StorageError, KeyboardInterrupt)),
    ):
        checkpoint.convert(tmp_path / "n", out, overwrite=True, cast={"model.*": "float64"})
    assert torch.equal(checkpoint.read(out)["model.layers.0.a"], tensors["layers.0.a"])
    assert sorted(os.listdir(tmp_path)) == ["n", "out"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_where_an_open_file_cannot_be_deleted_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool):
    """NFS gives such a file another name in its folder until it is closed."""
    save_some(tmp_path / "n")
    unlink, close = os.unlink, FileLock.close

    def renamed(path: str, *, dir_fd: int | None = None) -> None:
        if path == "lock":
            os.rename(path, ".nfs1", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    def closed(lock: FileLock) -> None:
        close(lock)
        for file in tmp_path.glob(".*/.nfs1"):
            unlink(file)

    monkeypatch.setattr(os, "unlink", renamed)
    monkeypatch.setattr(FileLock, "close", closed)
    if is_cut:
        (tmp_path / f".out.{32 * '0'}.partial").mkdir()  # of another attempt
    checkpoint.convert(tmp_path / "n", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["n", "out"]


def test_where_there_are_no_locks_conversions_work_alone_and_leave_the_folders_of_others(tmp_path: Path):
    save_some(tmp_path / "n")
    checkpoint.convert(tmp_path / "n", tmp_path / "out")
    other = tmp_path / ".out.0123456789ab.partial"
    other.mkdir()

    def unsupported(*args: Any, **options: Any) -> None:
        raise LocksUnsupported("no locks here")

    with patch.object(LocalStorage, "lock", unsupported):
        checkpoint.convert(tmp_path / "n", tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [other.name, "n", "out"]


def test_the_folders_above_a_new_place_are_durable(tmp_path: Path):
    checkpoint.save(tmp_path / "n", {"model": {"w": torch.ones(3)}})
    with patch.object(local, "sync_folder") as synced:
        checkpoint.convert(tmp_path / "n", tmp_path / "a" / "b" / "out")
    assert {str(tmp_path), str(tmp_path / "a")} <= {call.args[0] for call in synced.call_args_list}


@pytest.mark.parametrize("config", ['{"dtype": null}', "[1]", "[" * 100_000], ids=["no dtype", "no dict", "too deep"])
def test_config_and_tokenizer_go_along(tmp_path: Path, config: str):
    source = tmp_path / "hub"
    source.mkdir()
    save_file({"w": torch.ones(3), "v": torch.ones(2).half(), "i": torch.ones(9).int()}, source / "model.safetensors")
    kept = {"config.json": config, "tokenizer.json": '{"dtype": "float32"}', "merges.txt": "a b", "spiece.model": "x"}
    indices = ("old.bin.index.json", "model.safetensors.index.fp16.json")
    for name, text in {**kept, **dict.fromkeys(("train.log", "x.py", *indices), "no")}.items():
        (source / name).write_text(text)
    checkpoint.convert(source, tmp_path / "out", cast={"*": "bfloat16"})
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors"} == kept
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cast", "w", "v"),
    [
        (None, "float32", "float16"),
        ({"*": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"w": "bfloat16"}, "bfloat16", "float16"),
        ({"v": "float64"}, "float32", "float64"),
    ],
)
def test_the_config_names_the_dtypes_of_the_weights(tmp_path: Path, cast: Any, w: str, v: str):
    def config(w: str, v: str, other: str) -> dict[str, Any]:
        parts = {"text_config": {"dtype": w}, "vision_config": {"torch_dtype": v}, "quantization_config": {"dtype": "float32"}}
        parts["audio_config"] = {"dtype": other}  # none of the saved ones: it becomes that of most weights
        return {"torch_dtype": w, "dtype": {"": w, "vision_config": v}, "x": 1.5, "vocabulary": {"dtype": "float32"}, **parts}

    source = tmp_path / "hub"
    source.mkdir()
    few = {"v": torch.ones(2).half(), "t": torch.ones(3), "u": torch.ones(3)}
    save_file({"w": torch.ones(30), **few, "i": torch.ones(99).int()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config("float32", "float16", "float64")))
    checkpoint.convert(source, tmp_path / "out", cast=cast and {f"model.{name}": dtype for name, dtype in cast.items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config(w, v, w if cast else "float64")


def test_progress_counts_every_byte(tmp_path: Path):
    save_some(tmp_path / "n")
    said: list[tuple[str, int, int]] = []
    report = checkpoint.convert(tmp_path / "n", tmp_path / "out", progress=lambda *args: said.append(args))
    assert said[0] == ("convert", 0, report.num_bytes)
    assert said[-1] == ("convert", report.num_bytes, report.num_bytes)
