"""`reshard_ckpt.dcp` in one process: the calls of torch's module mean the same, on checkpoints of this library."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
import io
import pickle
import re
import threading
import warnings
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two classes of this name
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.dcp import torch_calls
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, MismatchError, StorageError, UnsupportedError, UsageError
from reshard_ckpt.storage.local import LocalWriter


class Counter:
    """A `Stateful` that notes how it is called."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.calls = count, []
        self.weight = torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"count": self.count, "weight": self.weight, "inner": {"names": ["a", "b"]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.count = state["count"]
        assert state["weight"] is self.weight  # loaded in place


def model_and_optimizer(seed: int, steps: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1 + seed},
        {"params": list(model[2].parameters()), "lr": 0.2 + seed},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same_training(one: tuple, other: tuple) -> bool:
    tensors = [list(m.state_dict().values()) for m, _ in (one, other)]
    states = [
        [o.state[p][k] for g in o.param_groups for p in g["params"] for k in ("step", "exp_avg", "exp_avg_sq")]
        for _, o in (one, other)
    ]
    lrs = [[g["lr"] for g in o.param_groups] for _, o in (one, other)]
    pairs = [*zip(*tensors, strict=True), *zip(*states, strict=True)]
    return lrs[0] == lrs[1] and all(torch.equal(a, b) for a, b in pairs)


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_every_argument_of_torch_is_taken(name: str):
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (dcp, torch_dcp))
    assert set(theirs) <= set(ours)
    assert all(ours[p].kind == theirs[p].kind for p in theirs)
    assert all(ours[p].default == theirs[p].default for p in theirs)


def test_nested_state_comes_back_in_place_and_values_are_put_into_the_dict(tmp_path: Path):
    state = {
        "a": {"w": torch.arange(6).reshape(2, 3), "n": 1},
        "list": [torch.ones(2), {"x": 5}],
        "t": (1, "b"),
        "b": io.BytesIO(b"z"),
    }
    dcp.save(state_dict=state, checkpoint_id=tmp_path)
    w, one = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)
    inner, elements = collections.OrderedDict(w=w, n=0), [one, {"x": 0}]
    target = {"a": inner, "list": elements, "t": None, "b": io.BytesIO()}
    assert dcp.load(target, checkpoint_id=str(tmp_path)) is None
    assert target["a"] is inner
    assert target["list"] is elements
    assert inner["w"] is w
    assert elements[0] is one
    assert torch.equal(w, state["a"]["w"])
    assert torch.equal(one, torch.ones(2))
    assert (inner["n"], elements[1], target["t"], target["b"].getvalue()) == (1, {"x": 5}, (1, "b"), b"z")


def test_stateful_objects_are_asked_and_given_their_state_once(tmp_path: Path):
    saved = Counter(7)
    dcp.save({"c": saved, "d": {"n": 1}}, checkpoint_id=tmp_path)
    assert saved.calls == ["state_dict"]
    loaded = Counter()
    target = {"d": {"n": 0}, "c": loaded}
    dcp.load(target, checkpoint_id=tmp_path)
    assert loaded.calls == ["state_dict", "load_state_dict"]
    assert (loaded.count, target["d"]["n"], target["c"] is loaded) == (7, 1, True)
    assert torch.equal(loaded.weight, torch.full((3,), 7.0))
    assert checkpoint.catalog(tmp_path).value_names == ("c.count", "c.inner.names", "d.n")


def test_what_is_not_asked_for_is_passed_over_and_nothing_is_added(tmp_path: Path):
    dcp.save({"a": {"x": 1, "y": 2, "w": torch.ones(2)}, "b": torch.ones(3)}, checkpoint_id=tmp_path)
    target = {"a": {"x": 0}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target == {"a": {"x": 1}}


@pytest.mark.parametrize(
    "wanted",
    [
        *({"a": {"z": 0}}, {"a": {"x": 0}, "c": torch.zeros(2)}, {"b": torch.zeros(4)}, {"b": 3}, {"a": torch.zeros(1)}),
        *({"a": None}, {"a": []}, {"l": [{"z": 0}]}, {"e*": {}, "eq": 0}),
    ],
)
def test_what_is_missing_or_of_another_shape_changes_nothing(tmp_path: Path, wanted: dict[str, Any]):
    dcp.save({"a": {"x": 1}, "b": torch.ones(3), "l": [{"x": 1}]}, checkpoint_id=tmp_path)
    kept = torch.zeros(3)
    with pytest.raises(MismatchError):
        dcp.load({**wanted, "b": wanted.get("b", kept)}, checkpoint_id=tmp_path)
    assert not kept.any()


def test_partial_load_is_advised_only_where_it_helps(tmp_path: Path):
    dcp.save({"b": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(MismatchError, match=r"Missing key.*, Size mismatch: 2 problems; change the state dict"):
        dcp.load({"b": torch.zeros(4), "new": 0}, checkpoint_id=tmp_path)


def test_partial_load_of_a_default_planner_leaves_what_is_missing(tmp_path: Path):
    dcp.save({"a": {"x": 1}, "b": torch.ones(3), "l": [{"x": 1}]}, checkpoint_id=tmp_path)
    target = {"a": {"x": 0, "new": 5}, "b": torch.zeros(3), "c": torch.full((2,), 9.0), "l": [{"x": 0, "new": 5}]}
    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert (target["a"], target["l"]) == ({"x": 1, "new": 5}, [{"x": 1, "new": 5}])
    assert torch.equal(target["b"], torch.ones(3))
    assert torch.equal(target["c"], torch.full((2,), 9.0))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"b": torch.zeros(4)}, r"Size mismatch: b: saved with global shape \(3,\), wanted \(4,\); change the state dict"),
        ({"b": 3}, "b: saved as a tensor, wanted as a value"),
        ({"a": {"x": torch.zeros(1)}}, "a.x: saved as a value, wanted as a tensor"),
        ({"b": (torch.zeros(3),)}, "b: saved as a tensor, wanted as a value"),
        ({"odd": (torch.zeros(1),)}, "odd is a value that cannot be read without executing code"),
        ({"odd": 0}, "odd is a value that cannot be read without executing code"),
    ],
)
def test_partial_load_passes_over_nothing_that_the_checkpoint_has(tmp_path: Path, wanted: dict[str, Any], message: str):
    torch_dcp.save({"a": {"x": 1}, "b": torch.ones(3), "c": torch.ones(2), "odd": collections.deque([1])}, checkpoint_id=tmp_path)
    target = {**wanted, "c": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=message):
        dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert not target["c"].any()


def test_empty_dicts_load_from_the_folders_of_torch_which_have_no_entry_for_them(tmp_path: Path):
    def state(x: int, tensor: torch.Tensor) -> dict[str, Any]:
        lists = {"l": [{"x": x, "e": {"f": {}}}], "t": [{"x": tensor, "e": {"f": {}}}]}
        return {"a": x, "e": {}, "o": {"state": {}, "lr": x}, **lists}

    torch_dcp.save(state(1, torch.ones(1)), checkpoint_id=tmp_path)
    target = state(0, torch.zeros(1))
    dcp.load(target, checkpoint_id=tmp_path)
    assert str(target) == str(state(1, torch.ones(1)))


def test_another_dtype_is_converted_as_torch_does_and_said(tmp_path: Path):
    dcp.save({"w": torch.tensor([1.5, 2.25])}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match="w: saved as torch.float32, loaded as torch.bfloat16"):
        dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], torch.tensor([1.5, 2.25], dtype=torch.bfloat16))


@pytest.mark.parametrize("partial", [False, True])
def test_tuples_of_tensors_load_from_the_folders_of_torch_as_torch_loads_them(tmp_path: Path, partial: bool):
    def state(x: float) -> dict[str, Any]:
        w = torch.full((3,), x)
        apart = {"list": [w, (w + 1, w)], "dict in a list": [{"t": (w,)}, x], "plain": (x, x)}
        return {"t": (w, w + 1), "n": {"t": (w, x)}, "in a list": [(w, w), {"a": x}], "nested": ((w,), [w]), **apart}

    torch_dcp.save(state(1), checkpoint_id=tmp_path)
    target, wanted = state(5), state(5)
    kept = target["list"], target["list"][0], target["in a list"][1]
    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=partial))
    torch_dcp.load(wanted, checkpoint_id=tmp_path)
    torch.testing.assert_close(target, wanted, rtol=0, atol=0)
    now = target["list"], target["list"][0], target["in a list"][1]
    assert all(a is b for a, b in zip(kept, now, strict=True))  # lists, dicts, and tensors outside of tuples
    target = {"t": (torch.zeros(3), torch.zeros(3, device="meta")), "more": (torch.ones(2),)}
    if partial:
        dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        torch.testing.assert_close(target, {"t": wanted["t"], "more": (torch.ones(2),)}, rtol=0, atol=0)
    else:
        with pytest.raises(MismatchError, match=r"more\.0: not in the checkpoint"):
            dcp.load(target, checkpoint_id=tmp_path)


@pytest.mark.parametrize("saver", [dcp, torch_dcp], ids=["ours", "torch"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ([{"x": 1}, {"x": 2}], [{"x": 0}, {"x": 0}, {"x": 0}]),
        ([{"x": 1}, {"x": 2}], [{"x": 0}]),
        ([{"x": 1}, 5], [{"x": 0}, 0, 7]),
        ([{"x": 1}, 5], [{"x": 0}]),
        ([[{"x": 1}], [{"x": 2}]], [[{"x": 0}, {"x": 7}]]),
        ([{"l": [1, 2]}, 3], [{"l": [0]}]),
        ([1, 2], [0, 0, 0]),
        ([1, 2], [0]),
        ([], [0]),
        ([torch.ones(1), torch.ones(2)], [torch.zeros(1)]),
        ([torch.ones(1), torch.ones(2)], [torch.zeros(1), torch.zeros(2), 3]),
    ],
)
def test_a_list_of_another_length_loads_as_torch_loads_it(tmp_path: Path, saver: Any, partial: bool, saved: Any, wanted: Any):
    saver.save({"l": saved}, checkpoint_id=tmp_path / "made")
    torch_dcp.save({"l": saved}, checkpoint_id=tmp_path / "torch")
    of_torch, ours = {"l": copy.deepcopy(wanted)}, {"l": copy.deepcopy(wanted)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    try:
        torch_dcp.load(of_torch, checkpoint_id=tmp_path / "torch", planner=planner)
    except torch_dcp.CheckpointException as error:
        missing = re.findall(r"Missing key in checkpoint state_dict: (l.*)\.", str(error))[0]
        with pytest.raises(MismatchError, match=f"Missing key in checkpoint: {missing}: not in the checkpoint"):
            dcp.load(ours, checkpoint_id=tmp_path / "made", planner=planner)
        return
    dcp.load(ours, checkpoint_id=tmp_path / "made", planner=planner)
    torch.testing.assert_close(ours, of_torch, rtol=0, atol=0)


def test_an_empty_place_for_saved_state_is_said(tmp_path: Path):
    model, optimizer = model_and_optimizer(0, steps=1)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    fresh = model_and_optimizer(1)[1]
    with pytest.warns(UserWarning, match=r"below optimizer.state, where the state dict is empty"):
        dcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert [g["lr"] for g in fresh.param_groups] == [0.1, 0.2]
    # One that has its state takes it, in torch's order of parameters.
    stepped = model_and_optimizer(2, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dcp.load({"optimizer": stepped[1]}, checkpoint_id=tmp_path)
    assert same_training((model, stepped[1]), (model, optimizer))


def test_tensors_on_meta_are_made_and_loaded(tmp_path: Path):
    dcp.save({"m": {"w": torch.arange(4.0)}}, checkpoint_id=tmp_path)
    target = {"m": {"w": torch.empty(4, device="meta")}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["m"]["w"], torch.arange(4.0))


@pytest.mark.parametrize("how", ["dcp", "writer", "async", "async_writer"])
@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_state_is_keyed_by_name_whatever_its_form(tmp_path: Path, how: str, flat: bool):
    trained = model_and_optimizer(0, steps=3)
    state = training_state(*trained, flat=flat)
    if how == "dcp":
        dcp.save(state, checkpoint_id=tmp_path)
    elif how == "writer":
        torch_dcp.save(state, storage_writer=dcp.ReshardWriter(tmp_path))
    elif how == "async":
        dcp.async_save(state, checkpoint_id=tmp_path).result()
    else:
        torch_dcp.async_save(state, storage_writer=dcp.ReshardWriter(tmp_path)).result()
    assert checkpoint.verify(tmp_path).ok
    assert checkpoint.catalog(tmp_path).value_names == ("optimizer.param_groups",)
    other = model_and_optimizer(1)
    checkpoint.load(tmp_path, {"model": other[0], "optimizer": other[1]})
    assert same_training(other, trained)
    for wanted_flat in (False, True):
        for reader in (None, dcp.ReshardReader(tmp_path)):
            other = model_and_optimizer(2)
            target = training_state(*other, flat=wanted_flat)
            if reader is None:
                dcp.load(target, checkpoint_id=tmp_path)
            else:
                torch_dcp.load(target, storage_reader=reader)
            put_back(*other, target, flat=wanted_flat)
            assert same_training(other, trained), (wanted_flat, reader)


def test_checkpoints_of_save_are_read_by_torchs_load(tmp_path: Path):
    trained = model_and_optimizer(0, steps=2)
    extra = {"step": 5, "nested": [{"a": (1, 2)}, [3]], "none": None, "rng": np.arange(3)}
    checkpoint.save(tmp_path, {"model": trained[0], "optimizer": trained[1], "extra": extra})
    other = model_and_optimizer(1)
    target = {**training_state(*other, flat=False), "extra": {"step": 0, "nested": [{"a": ()}, [0]], "none": 1, "rng": None}}
    torch_dcp.load(target, storage_reader=dcp.ReshardReader(tmp_path))
    put_back(*other, target, flat=False)
    assert same_training(other, trained)
    assert np.array_equal(target["extra"].pop("rng"), extra.pop("rng"))
    assert target["extra"] == extra


class Gate:
    """Holds the files of a save back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.call_state_dicts = threading.Event()
        write = LocalWriter.write

        def held(writer: LocalWriter, data: Any) -> None:
            assert self.call_state_dicts.wait(600)
            write(writer, data)

        monkeypatch.setattr(LocalWriter, "write", held)


def test_async_save_returns_a_future_that_behaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    w = torch.ones(1000)
    future = dcp.async_save({"w": w}, checkpoint_id=tmp_path)
    w.zero_()
    told: list[Future] = []
    future.add_done_callback(told.append)
    assert isinstance(future, Future)
    assert not future.done()
    assert future.running()
    assert not future.cancel()
    assert not told
    with pytest.raises(FutureTimeout):
        future.result(timeout=0.01)
    gate.call_state_dicts.set()
    assert list(future.result(600).state_dict_metadata) == ["w"]
    assert future.done()
    assert future.exception() is None
    assert told == [future]
    assert wait([future], 1).done == {future}
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(1000))


def test_async_save_with_an_asynchronous_stager_returns_both_futures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    if not hasattr(staging, "DefaultStager"):
        pytest.skip("this torch has no DefaultStager")
    gate = Gate(monkeypatch)
    options = staging.StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
    stager = staging.DefaultStager(options)
    w = torch.ones(1000)
    response = dcp.async_save({"w": w}, checkpoint_id=tmp_path, async_stager=stager)
    assert isinstance(response, dcp.AsyncSaveResponse)
    assert response.staging_completion.result(600) is None
    w.zero_()
    assert not response.upload_completion.done()
    gate.call_state_dicts.set()
    assert list(response.upload_completion.result(600).state_dict_metadata) == ["w"]
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(1000))
    stager.close()
    plain = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    future = dcp.async_save({"w": w}, checkpoint_id=tmp_path, async_stager=plain)
    assert isinstance(future, Future)
    future.result(600)


@pytest.mark.parametrize("kind", list(dcp.AsyncCheckpointerType))
def test_either_checkpointer_type_is_taken(tmp_path: Path, kind: Any):
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path, async_checkpointer_type=kind).result()
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(3))


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(LocalWriter, "write", refuse)


@pytest.mark.parametrize("ask", [lambda f: f.result(), lambda f: f.exception()])
def test_error_of_an_async_save_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any):
    with monkeypatch.context() as patched:
        fail_to_write(patched)
        future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
        assert wait([future], 600).done
    with contextlib.suppress(StorageError):
        assert isinstance(ask(future), StorageError)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)


def test_error_that_nobody_asked_for_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        fail_to_write(patched)
        assert wait([dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path)], 600).done
    with pytest.raises(Exception, match="the save before this one failed in the background.*no space left"):
        dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path)


class HalvingPlanner(torch_dcp.DefaultSavePlanner):
    """Writes half of each float."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object / 2 if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)


class DoublingPlanner(torch_dcp.DefaultLoadPlanner):
    """Doubles what it loads."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def finished(made: Any) -> Any:
    """The result of `save`, or of the future of `async_save`."""
    return made.result(600) if isinstance(made, Future) else made


class RenamingPlanner(torch_dcp.DefaultSavePlanner):
    """Saves the state below another key."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({"all": state_dict}, *args, **kwargs)


class ChoosingPlanner(torch_dcp.DefaultSavePlanner):
    """Plans tensors alone."""

    def create_local_plan(self) -> torch_dcp.SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.tensor_data is not None])


class AddingPlanner(torch_dcp.DefaultSavePlanner):
    """Plans an item that no state dict has."""

    def create_local_plan(self) -> torch_dcp.SavePlan:
        plan = super().create_local_plan()
        more = dataclasses.replace(plan.items[0], index=torch_dcp.metadata.MetadataIndex("more"))
        return dataclasses.replace(plan, items=[*plan.items, more])


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save])
@pytest.mark.parametrize("named_by", ["id", "writer"])
@pytest.mark.parametrize(
    ("planner", "saved"), [(RenamingPlanner, {"all.w", "all.a.n"}), (ChoosingPlanner, {"w"})], ids=["renaming", "choosing"]
)
def test_a_planner_of_ones_own_renames_and_chooses(tmp_path: Path, call: Any, named_by: str, planner: Any, saved: set[str]):
    where = {"checkpoint_id": tmp_path} if named_by == "id" else {"storage_writer": dcp.FileSystemWriter(tmp_path)}
    finished(call({"w": torch.arange(4.0), "a": {"n": 3}}, planner=planner(), **where))
    assert checkpoint.verify(tmp_path).ok
    found = checkpoint.catalog(tmp_path)
    assert {*found.names, *found.value_names} == saved
    target = {"w": torch.zeros(4)} if planner is ChoosingPlanner else {"all": {"w": torch.zeros(4)}}
    dcp.load(target, checkpoint_id=tmp_path, planner=DoublingPlanner())
    assert torch.equal(target.get("w", target.get("all", {}).get("w")), torch.arange(4.0) * 2)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (HalvingPlanner(), "planner=HalvingPlanner: its transform_object changes what is saved"),
        (AddingPlanner(), "more: planned, but not in the planner's state dict"),
        *(
            (type("Own", (torch_dcp.DefaultSavePlanner,), {method: lambda *_: None})(), f"planner=Own: its {method} changes")
            for method in ("lookup_object", "resolve_data")
        ),
    ],
)
@pytest.mark.parametrize("call", [dcp.save, dcp.async_save])
def test_a_planner_that_saves_more_than_its_state_dict_is_refused_by_name(tmp_path: Path, call: Any, planner: Any, message: str):
    with pytest.raises(dcp.CheckpointException) as told:
        finished(call({"w": torch.arange(4.0)}, checkpoint_id=tmp_path, planner=planner))
    (error, _) = told.value.failures[0]
    assert isinstance(error, UnsupportedError)
    assert message in str(error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_writer_tells_its_save_and_refuses_a_planner_that_does_not_flatten(tmp_path: Path):
    state, writer = {"a": {"w": torch.ones(2)}}, dcp.ReshardWriter(tmp_path)
    assert torch_dcp.save(state, storage_writer=writer).storage_meta.save_id == checkpoint.catalog(tmp_path).save_id
    with pytest.raises(dcp.CheckpointException) as told:
        torch_dcp.save(state, storage_writer=writer, planner=torch_dcp.DefaultSavePlanner(flatten_state_dict=False))
    assert "nested dicts are always opened here" in str(told.value.failures[0][0])


def test_a_planner_that_chooses_and_keeps_its_plans_is_refused_once_it_does(tmp_path: Path):
    if "enable_plan_caching" not in inspect.signature(torch_dcp.DefaultSavePlanner).parameters:
        pytest.skip("this torch keeps no plans")
    planners = [ChoosingPlanner(enable_plan_caching=True) for _ in range(2)]
    torch_dcp.save({"w": torch.ones(2), "n": 1}, storage_writer=dcp.ReshardWriter(tmp_path), planner=planners[0])
    with pytest.raises(dcp.CheckpointException) as told:
        torch_dcp.save({"w": torch.zeros(2), "n": 1}, storage_writer=dcp.ReshardWriter(tmp_path), planner=planners[1])
    assert "leave out enable_plan_caching" in str(told.value.failures[0][0])
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(2))


class NotingWriter(torch_dcp.FileSystemWriter):
    """A storage of the caller's own, in torch's format."""

    def finish(self, *args: Any, **options: Any) -> None:
        self.finished = True
        super().finish(*args, **options)


class NotingReader(torch_dcp.FileSystemReader):
    def read_data(self, *args: Any, **options: Any) -> Any:
        self.was_read = True
        return super().read_data(*args, **options)


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save])
def test_a_storage_of_ones_own_is_used_by_torchs_own_call_with_a_warning(tmp_path: Path, call: Any):
    writer = NotingWriter(tmp_path)
    with pytest.warns(UserWarning, match=f"storage_writer=NotingWriter: torch's own {call.__name__} runs"):
        finished(call({"w": torch.arange(3.0)}, storage_writer=writer))
    assert writer.finished
    for options in ({"checkpoint_id": tmp_path}, {"storage_reader": NotingReader(tmp_path)}):
        target = {"w": torch.zeros(3)}
        dcp.load(target, **options)
        assert torch.equal(target["w"], torch.arange(3.0))
    assert options["storage_reader"].was_read


@pytest.mark.filterwarnings("ignore:.*torch's own save runs")
def test_a_storage_of_ones_own_fails_as_with_torch(tmp_path: Path):
    class Faulty(NotingWriter):
        def write_data(self, *_: Any) -> Any:
            raise ValueError("broken")

    with pytest.raises(dcp.CheckpointException) as told:
        dcp.save({"w": torch.ones(2)}, storage_writer=Faulty(tmp_path))
    assert type(told.value.failures[0][0]) is ValueError


def test_subclasses_of_this_librarys_storage_write_its_format_without_a_warning(tmp_path: Path):
    writer = type("OwnWriter", (dcp.ReshardWriter,), {})(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch's own")
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert checkpoint.verify(tmp_path).ok


class OwnStager(BlockingAsyncStager):
    """Stages by itself: what it gives is what is saved."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {key: value + 1 for key, value in state_dict.items()}


@pytest.mark.skipif("async_stager" not in inspect.signature(torch_dcp.async_save).parameters, reason="torch 2.6 takes no stager")
def test_a_stager_of_ones_own_stages_and_this_library_writes(tmp_path: Path):
    finished(dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=OwnStager()))
    assert checkpoint.verify(tmp_path).ok
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"planner": "mine"},
        {"planner": torch_dcp.DefaultSavePlanner(flatten_state_dict=False)},
        {"storage_writer": "there"},
        {"use_collectives": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, options: dict[str, Any]):
    for call in (dcp.save, dcp.async_save):
        with pytest.raises(UsageError, match=next(iter(options))):
            call({"w": torch.ones(2)}, checkpoint_id=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_other_planners_readers_and_stagers_are_refused(tmp_path: Path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(UsageError, match="planner=HalvingPlanner: wanted a LoadPlanner"):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=HalvingPlanner())
    with pytest.raises(UsageError, match="storage_reader=str"):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path, storage_reader="there")
    with pytest.raises(UsageError, match="async_stager=str"):
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager="later")
    with pytest.raises(ValueError, match="fiber"):
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_checkpointer_type="fiber")
    with pytest.raises(UsageError, match="no_dist"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True, process_group=object())


def test_a_release_of_torch_that_lacks_an_argument_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As torch 2.6 lacks `no_dist`, which a process without a group may be given all the same."""

    def load(state_dict: Any, *, storage_reader: Any, planner: Any = None) -> None:
        torch_dcp.load(state_dict, storage_reader=storage_reader, planner=planner)

    monkeypatch.setitem(torch_calls._CALLS, "load", load)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path, planner=DoublingPlanner(), no_dist=True)
    assert target["w"].tolist() == [2, 2]
    monkeypatch.setattr(torch_calls, "dist", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(UnsupportedError, match=r"no_dist: load of torch .* leave that out, or use a newer torch"):
        dcp.load(target, checkpoint_id=tmp_path, planner=DoublingPlanner(), no_dist=True)


def test_a_store_may_be_the_second_argument_as_in_torchs_older_releases(tmp_path: Path):
    target = {"w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="pass storage_writer by its name"):
        dcp.save({"w": torch.ones(2)}, dcp.FileSystemWriter(tmp_path))
    with pytest.warns(UserWarning, match="pass storage_reader by its name"):
        dcp.load(target, dcp.FileSystemReader(tmp_path))
    assert torch.equal(target["w"], torch.ones(2))
    for more in ((dcp.FileSystemWriter(tmp_path), 3), ()):
        with pytest.raises(TypeError):
            dcp.save(*({"w": torch.ones(2)}, *more), **({} if more else {"state_dict": {}}))


@pytest.mark.parametrize("kind", [Exception, MismatchError, dcp.CheckpointException])
def test_errors_are_caught_as_this_librarys_and_as_torchs(tmp_path: Path, kind: type[BaseException]):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint: v: .*allow_partial_load"):
        dcp.load({"v": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(kind, match="Size mismatch: w: saved with global shape") as told:
        dcp.load({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    error = told.value
    assert error.problems
    assert list(error.failures) == [0]
    assert type(error.failures[0][0]) is MismatchError
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.problems) == (type(error), str(error), error.problems)
        assert list(again.failures) == [0]


def test_the_future_of_a_failed_save_gives_the_error_as_torchs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        fail_to_write(patched)
        future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
        with pytest.raises(dcp.CheckpointException, match="no space left"):
            future.result(600)
    assert isinstance(future.exception(), StorageError)


def test_torch_files_are_written_and_read_as_with_torchs_functions(tmp_path: Path):
    state = {"model": {"a.w": torch.arange(6.0).view(2, 3)}, "step": 3, "list": [1, "x"]}
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    torch_dcp.save(state, checkpoint_id=tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        for _ in range(2):  # over what is there
            dcp.format_utils.dcp_to_torch_save(tmp_path / folder, tmp_path / f"{folder}.pt")
        loaded = torch.load(tmp_path / f"{folder}.pt")
        assert torch.equal(loaded["model"].pop("a.w"), state["model"]["a.w"])
        assert loaded == {"model": {}, "step": 3, "list": [1, "x"]}
    torch_dcp.save(state["model"], checkpoint_id=tmp_path / "model")
    dcp.format_utils.dcp_to_torch_save(tmp_path / "model", tmp_path / "model.pt")
    assert list(torch.load(tmp_path / "model.pt")) == ["a.w"]
    checkpoint.convert(tmp_path / "ours", tmp_path / "hf", to="safetensors", root="model")
    dcp.format_utils.dcp_to_torch_save(tmp_path / "hf", tmp_path / "hf.pt")
    assert list(torch.load(tmp_path / "hf.pt")) == ["a.w"]
    torch_dcp.save({**state["model"], "odd": collections.deque([1])}, checkpoint_id=tmp_path / "odd")
    with pytest.raises(UnsupportedError, match="odd is a value that cannot be read"):  # and not a file without it
        dcp.format_utils.dcp_to_torch_save(tmp_path / "odd", tmp_path / "odd.pt")
    dcp.save({}, checkpoint_id=tmp_path / "empty")
    with pytest.raises(UsageError, match="root='': .*the checkpoint has nothing"):
        dcp.format_utils.dcp_to_torch_save(tmp_path / "empty", tmp_path / "empty.pt")
    torch.save(state, tmp_path / "whole.pt")
    dcp.format_utils.torch_save_to_dcp(tmp_path / "whole.pt", tmp_path)  # beside other files
    target = {"model": {"a.w": torch.zeros(2, 3)}, "step": 0, "list": []}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"].pop("a.w"), state["model"]["a.w"])
    assert target == {"model": {}, "step": 3, "list": [1, "x"]}
    torch.save({"x": Counter()}, tmp_path / "object.pt")
    with pytest.raises(UnsupportedError, match=r"object.pt: is not a file of tensors and plain values alone"):
        dcp.format_utils.torch_save_to_dcp(tmp_path / "object.pt", tmp_path / "new")


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save, dcp.load])
def test_a_folder_must_be_named(call: Any):
    with pytest.raises(UsageError, match="checkpoint_id"):
        call({"w": torch.ones(2)})
    with pytest.raises(UsageError, match="state_dict"):
        call([torch.ones(2)], checkpoint_id="x")


@pytest.mark.parametrize("store", ["Reshard", "FileSystem"])
def test_stores_that_name_a_folder_are_taken_for_it(tmp_path: Path, store: str):
    writer, reader = getattr(dcp, f"{store}Writer"), getattr(dcp, f"{store}Reader")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer(tmp_path / "a"))
    target = {"w": torch.zeros(2)}
    dcp.load(target, storage_reader=reader(tmp_path / "a"))
    assert torch.equal(target["w"], torch.ones(2))
    # As with torch, checkpoint_id counts if both are given.
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=writer(tmp_path / "a"), checkpoint_id=tmp_path / "b")
    dcp.load(target, storage_reader=reader(tmp_path / "a"), checkpoint_id=tmp_path / "b")
    assert torch.equal(target["w"], torch.full((2,), 3.0))
    assert torch.equal(checkpoint.read(tmp_path / "a")["w"], torch.ones(2))


def test_a_writer_that_must_not_overwrite_does_not(tmp_path: Path):
    writer = dcp.FileSystemWriter(tmp_path, overwrite=False)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(UsageError, match="Checkpoint already exists, and overwrite=False"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=writer)
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(2))
    torch_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(UsageError, match="Checkpoint already exists"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs", overwrite=False))


def test_nothing_there_is_said(tmp_path: Path):
    with pytest.raises(CheckpointNotFound):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path)


def test_a_value_that_cannot_be_saved_is_named(tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"a\.object"):
        dcp.save({"a": {"object": object()}}, checkpoint_id=tmp_path)


def test_names_of_torchs_module_are_there_or_say_where_they_are():
    assert dcp.FileSystemReader is torch_dcp.FileSystemReader
    assert dcp.state_dict.get_state_dict is get_state_dict
    with pytest.raises(AttributeError, match="call save"):
        _ = dcp.save_state_dict
    if hasattr(torch_dcp, "HuggingFaceStorageReader"):
        with pytest.raises(AttributeError, match=r"import it from torch\.distributed\.checkpoint"):
            _ = dcp.HuggingFaceStorageReader
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
        _ = dcp.nonsense


def test_objects_that_are_no_plain_values_come_back_through_dcp_alone(tmp_path: Path):
    state = {"w": torch.ones(2), "slice": {"s": slice(1, 2)}, "big": list(range(500_000))}
    torch_dcp.save(state, storage_writer=dcp.ReshardWriter(tmp_path))
    assert checkpoint.verify(tmp_path).ok
    assert set(checkpoint.read(tmp_path)) == {"w", "big"}
    target = {"w": torch.zeros(2), "slice": {"s": None}, "big": None}
    torch_dcp.load(target, storage_reader=dcp.ReshardReader(tmp_path))
    assert target["slice"] == state["slice"]
    assert target["big"] == state["big"]
    assert torch.equal(target["w"], torch.ones(2))
    with pytest.raises(MismatchError, match=r"slice\.s: saved by DCP as a pickled object.*ReshardReader"):
        dcp.load({"slice": {"s": None}}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("flat", [False, True])
def test_dcps_own_folders_load_by_either_call(tmp_path: Path, flat: bool):
    """With the model's own names at the top, as some trainers save it, and objects that only unpickling makes."""
    trained = model_and_optimizer(0, steps=3)
    state = training_state(*trained, flat=flat)
    state = {**state["model"], "optimizer": state["optimizer"], "slice": slice(1, 2), "list": [{"a": 1}, {"a": (2, 3)}]}
    torch_dcp.save(state, checkpoint_id=tmp_path)
    for wanted_flat in (False, True):
        for reader in (None, dcp.ReshardReader(tmp_path)):
            other = model_and_optimizer(2)
            parts = training_state(*other, flat=wanted_flat)
            target = {**parts["model"], "optimizer": parts["optimizer"], "list": [{"a": 0}, {"a": 0}]}
            if reader is None:
                dcp.load(target, checkpoint_id=tmp_path)
            else:
                target["slice"] = None
                torch_dcp.load(target, storage_reader=reader)
                assert target["slice"] == slice(1, 2)
            names = list(parts["model"])
            put_back(*other, {"model": {n: target[n] for n in names}, "optimizer": target["optimizer"]}, flat=wanted_flat)
            assert same_training(other, trained), (wanted_flat, reader)
            assert target["list"] == state["list"]
    with pytest.raises(UnsupportedError, match="slice is a value that cannot be read without executing code"):
        dcp.load({"slice": None}, checkpoint_id=tmp_path)


def test_dcps_own_folders_load_an_optimizer_that_knows_its_parameters_by_number(tmp_path: Path):
    model, optimizer = model_and_optimizer(0, steps=2)
    torch_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    for load in (
        lambda state: dcp.load(state, checkpoint_id=tmp_path),
        lambda state: torch_dcp.load(state, storage_reader=dcp.ReshardReader(tmp_path)),
    ):
        other = model_and_optimizer(1, steps=1)
        load({"model": other[0], "optimizer": other[1]})
        assert same_training(other, (model, optimizer))


def test_an_object_that_is_no_plain_value_is_refused_by_name_in_a_list(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException) as told:
        torch_dcp.save({"l": [{"a": 1}, {"a": slice(1, 2)}]}, storage_writer=dcp.ReshardWriter(tmp_path))
    error = told.value.failures[0][0]
    assert isinstance(error, UnsupportedError)
    assert "l[1]" in str(error), str(error)
    assert "slice" in str(error), str(error)
