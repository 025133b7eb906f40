"""Plain values and containers, objects with a state, values of each rank, and dicts shaped like an optimizer's state."""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import datetime
import pathlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import ValueEntry
from reshard_ckpt.core.catalog.specs import ValueKind
from reshard_ckpt.errors import CorruptError, MismatchError, NameCollisionError, UnsupportedError, UsageError
from reshard_ckpt.format.values import decode_path, decode_value, encode_path, encode_value
from reshard_ckpt.state import FlatShard, PerRank, capture
from reshard_ckpt.state.capture import prepare_load
from tests.helpers import load, position_values, save


def value_names(state: Any) -> list[str]:
    return [spec.name for spec in capture(state).values]


class Counter:
    """Something with a state of its own."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        self.num_loads += 1


class Pair(NamedTuple):
    tensor: torch.Tensor
    step: int


def test_dicts_flatten_and_lists_only_where_a_tensor_is_inside():
    state = {"extra": {"step": 1, "losses": [1, {"a": 2}], "mixed": [torch.zeros(1), {"b": 3}], "none": [], "sub": {}, 7: "x"}}
    captured = capture(state)
    assert [e.spec.name for e in captured.tensors] == ["extra.mixed.0"]
    paths = {decode_path(v.path): decode_value(v.data) for v in captured.values}
    assert paths == {
        ("extra", "step"): 1,
        ("extra", "losses"): [1, {"a": 2}],
        ("extra", "mixed", (1,), "b"): 3,
        ("extra", "none"): [],
        ("extra", "sub"): {},
        ("extra", 7): "x",
    }


def test_values_replace_those_of_the_target_and_are_added_where_it_has_none():
    saved = save([capture({"extra": {"step": 5, "history": [1, 2], "deep": {3: {"x": np.arange(2)}}, "t": (torch.ones(1), 8)}})])
    inner: dict[Any, Any] = {}
    extra = {"step": 0, "deep": inner, "t": (torch.zeros(1), 0)}
    load(saved, {"extra": extra}, wanted=set())
    assert extra["step"] == 5
    assert extra["history"] == [1, 2]
    assert extra["deep"] is inner
    assert inner[3]["x"].tolist() == [0, 1]
    assert extra["t"][0].item() == 1
    assert extra["t"][1] == 8


def test_a_named_tuple_stays_one():
    saved = save([capture({"pair": Pair(torch.ones(2), 4)})])
    state = {"pair": Pair(torch.zeros(2), 0)}
    load(saved, state, wanted=set())
    assert isinstance(state["pair"], Pair)
    assert state["pair"].step == 4
    assert state["pair"].tensor.tolist() == [1, 1]


def test_top_level_values_are_loaded_too():
    state = {"step": 0}
    load(save([capture({"step": 9, "other": 1})]), state)
    assert state == {"step": 9}, "what the caller did not ask for is left alone"


def test_a_missing_value_is_named_before_anything_changes():
    saved = save([capture({"extra": {"a": 1, "t": torch.ones(1)}})])
    extra = {"a": 0, "b": 0, "t": torch.zeros(1)}
    with pytest.raises(MismatchError, match=r"extra.b: missing value"):
        load(saved, {"extra": extra})
    assert extra == {"a": 0, "b": 0, "t": torch.zeros(1)}
    load(saved, {"extra": extra}, strict=False)
    assert (extra["a"], extra["b"]) == (1, 0)


def test_an_empty_container_is_missing_only_if_the_checkpoint_knows_nothing_of_it():
    saved = save([capture({"extra": {"a": {"x": 1}}})])
    extra: dict[str, Any] = {"a": {}}
    load(saved, {"extra": extra})
    assert extra == {"a": {"x": 1}}
    with pytest.raises(MismatchError, match=r"extra.typo: missing value"):
        load(saved, {"extra": {"typo": {}}})
    in_list = save([capture({"extra": {"a": [{"x": 1}, Counter(n=2)]}})])
    for nothing in ({}, [], None):
        with pytest.raises(MismatchError, match=r"extra.a.0.x: saved as a value, for which the state has no place"):
            load(in_list, {"extra": {"a": nothing}})


def test_a_value_where_the_target_has_a_tensor_is_named_and_left_out():
    saved = save([capture({"extra": {"x": 3}})])
    state = {"extra": {"x": torch.zeros(1)}}
    with pytest.raises(MismatchError, match=r"extra.x: saved as a value, wanted as a tensor"):
        load(saved, state)
    load(saved, state, strict=False)
    assert isinstance(state["extra"]["x"], torch.Tensor)


class HasExtraState(nn.Module):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


class OwnState(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return self

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


LOOP: dict[str, Any] = {"x": 1}
LOOP["self"] = LOOP
BAG: list[Any] = [torch.zeros(1)]
BAG.append(BAG)
TWICE = NameCollisionError, r"both state\[.*\] and state\[.*\] have this name"
LOOPS = UsageError, "contains itself"
NO_NAME = UsageError, r"state\[''\]: a module, an optimizer or an object needs a key that is not empty"
NO_TEXT = UnsupportedError, "lone surrogate"
REFUSED: dict[str, tuple[Any, tuple[type[Exception], str]]] = {
    "two values with one name": ({"a": {"b": 1}, "a.b": 2}, TWICE),
    "two keys with one name": ({1: 0, "1": 0}, TWICE),
    "two tensors with one name": ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, TWICE),
    "a part of an object and a value with one name": ({"o": Counter(x=1), "o.x": 2}, TWICE),
    "a dict in itself": ({"extra": LOOP}, LOOPS),
    "a list in itself": ({"extra": BAG}, LOOPS),
    "an object that is its own state": ({"o": OwnState(x=1)}, (UsageError, "OwnState returns the object itself")),
    "no plain value": ({"extra": {"x": [1, object()]}}, (UnsupportedError, r"extra.x\[1\]")),
    "no dict": (nn.Linear(1, 1), (UsageError, "state: wanted a dict")),
    "a module without a name": ({"": nn.Linear(1, 1), "step": 1}, NO_NAME),
    "an optimizer without a name": ({"": torch.optim.SGD([torch.zeros(1)]), "step": 1}, NO_NAME),
    "an object without a name": ({"": Counter(a=1), "step": 1}, NO_NAME),
    "a tensor whose name is no text": ({"x": {"\ud800": torch.zeros(1)}}, NO_TEXT),
    "a value whose name is no text": ({"x": {"\ud800": 1}}, NO_TEXT),
    "a module whose name is no text": ({"\udcff": nn.Linear(1, 1)}, NO_TEXT),
    "a parameter whose name is no text": ({"x": nn.ModuleDict({"a\ud800": nn.Linear(1, 1)})}, NO_TEXT),
    "extra state whose name is no text": ({"x": nn.ModuleDict({"a\ud800": HasExtraState()})}, NO_TEXT),
    "a name that is no text beside a value of each rank": ({"x": PerRank({"a": 1}), "\ud800": 2}, NO_TEXT),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_place_in_a_checkpoint_is_refused_by_name(what: str):
    state, (error, says) = REFUSED[what]
    with pytest.raises(error, match=says):
        capture(state)


def test_what_is_inside_of_an_object_may_have_no_name():
    capture({"x": {"": Counter(a=1)}, "": {"": 1}})


class Picky(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("position")


UNFIT: dict[str, tuple[list[dict[str, Any]], dict[str, Any], type[Exception], str]] = {
    "a dict that cannot be written": (
        [{"extra": {"x": 1}}], {"extra": types.MappingProxyType({"x": 0})},
        UsageError, "extra.x: a mappingproxy cannot take a loaded value",
    ),
    "an object that refuses its state": (
        [{"loader": Counter(a=1)}], {"loader": Picky(a=0)},
        MismatchError, "loader: load_state_dict refused the loaded state: 'position'",
    ),
    "values of three ranks, wanted on two": (
        [{"x": PerRank(r)} for r in range(3)], {"x": PerRank(0)},
        MismatchError, r"x: saved by 3 ranks, wanted on 2; pass PerRank\(value, combine=...\)",
    ),
    "a value of each rank, wanted as one for all": (
        [{"x": PerRank(1)}], {"x": 0},
        MismatchError, "x: saved as a value of each rank, wanted as one for all; pass PerRank",
    ),
    "one value for all, wanted as one of each rank": (
        [{"x": 1}], {"x": PerRank(0)},
        MismatchError, "x: saved as one value for all ranks, wanted as PerRank",
    ),
}  # fmt: skip
"""Columns: the states that the ranks save; the states to load into, of as many ranks or of two; the error."""


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_the_target_is_refused_by_name(what: str):
    ranks, target, error, says = UNFIT[what]
    with pytest.raises(error, match=says):
        load(save([capture(state) for state in ranks]), target, size=min(len(ranks), 2))


def test_mappings_of_other_classes_are_filled_in_place():
    saved = save([capture({"c": collections.Counter(a=3), "o": collections.OrderedDict(b=1)})])
    state = {"c": collections.Counter(a=0), "o": collections.OrderedDict(b=0)}
    load(saved, state)
    assert state == {"c": collections.Counter(a=3), "o": collections.OrderedDict(b=1)}
    assert type(state["c"]) is collections.Counter


def test_an_object_takes_its_whole_state_back_once():
    source = Counter(position=12, order=[3, 1], weights=position_values((2, 2)), nested={"seen": {4: "x"}}, inner=Counter(n=1))
    inner = Counter(n=0)
    target = Counter(position=0, order=[], weights=torch.zeros(2, 2), nested={}, inner=inner)
    load(save([capture({"loader": source})]), {"loader": target}, wanted=set())
    assert target.num_loads == inner.num_loads == 1
    assert torch.equal(target.state["weights"], source.state["weights"])
    assert {k: target.state[k] for k in ("position", "order", "nested")} == {
        "position": 12,
        "order": [3, 1],
        "nested": {"seen": {4: "x"}},
    }
    assert inner.state == {"n": 1}


def test_objects_take_their_state_in_the_order_of_the_state_and_inner_ones_first():
    told: list[str] = []

    class Teller(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            told.append(state["name"])

    state = {name: Teller(name=name) for name in ("loader", "a", "rng")} | {"z": PerRank(Teller(name="z"))}
    state |= {"outer": Teller(name="outer", inner=Teller(name="inner")), "more": [Teller(name="first"), Teller(name="second")]}
    load(save([capture(state)]), state)
    assert told == ["inner", "loader", "a", "rng", "outer", "first", "second", "z"]


def test_an_object_with_an_empty_state_is_filled_from_the_checkpoint():
    lazy = Counter()
    load(save([capture({"loader": Counter(position=3, seen=[1])})]), {"loader": lazy})
    assert lazy.state == {"position": 3, "seen": [1]}
    fresh = Counter(position=None)
    load(save([capture({"loader": Counter(position={"epoch": 3})})]), {"loader": fresh})
    assert fresh.state == {"position": {"epoch": 3}}


def test_schedulers_come_back():
    def made(lr: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[3])

    optimizer, scheduler = made(0.1)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    _, other = made(0.9)
    load(save([capture({"scheduler": scheduler})]), {"scheduler": other})
    assert other.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(("lacking", "has"), [("_is_initial", "verbose"), ("verbose", "_is_initial")])
def test_a_scheduler_of_another_release_of_torch_comes_back(lacking: str, has: str) -> None:
    """Torch 2.6 sets `verbose` and lacks `_is_initial`, and torch 2.13 the other way around."""
    scheduler, other = (torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr), 3) for lr in (0.1, 0.9))
    vars(scheduler)[has] = vars(other)[lacking] = False
    vars(scheduler).pop(lacking, None)
    scheduler.last_epoch = 7
    load(save([capture({"scheduler": scheduler})]), {"scheduler": other})
    assert other.state_dict() == {**scheduler.state_dict(), lacking: False}
    del scheduler.step_size  # any other attribute is wanted
    with pytest.raises(MismatchError, match=r"scheduler\.step_size: missing value"):
        load(save([capture({"scheduler": scheduler})]), {"scheduler": other})


def test_a_generator_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    saved = save([capture({"rng": generator})])
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    load(saved, {"rng": other}, wanted=set())
    assert torch.equal(torch.rand(3, generator=other), expected)


def test_each_rank_gets_its_own_value_back():
    saved = save([capture({"x": {"rng": PerRank(np.arange(r + 1))}}) for r in range(3)])
    holder = PerRank(None)
    load(saved, {"x": {"rng": holder}}, rank=2, size=3)
    assert holder.value.tolist() == [0, 1, 2]


def test_an_object_of_each_rank_takes_what_combine_makes():
    saved = save([capture({"loader": PerRank(Counter(position=p))}) for p in (3, 4)])
    loader = Counter(position=0)
    load(saved, {"loader": PerRank(loader, combine=lambda values: {"position": min(v["position"] for v in values)})}, size=3)
    assert loader.state == {"position": 3}
    again = Counter(position=0)
    load(saved, {"loader": PerRank(again)}, rank=1, size=2)
    assert again.state == {"position": 4}


def test_a_generator_of_each_rank_goes_on_where_it_was():
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    saved = save([capture({"rng": PerRank(generator)}) for generator in generators])
    mine = torch.Generator()
    load(saved, {"rng": PerRank(mine)}, rank=1, size=2)
    assert torch.equal(torch.rand(5, generator=mine), torch.rand(5, generator=generators[1]))


class Copies(collections.abc.Mapping[str, Any]):
    """A mapping that makes what it holds anew each time it is asked, as one that reads files does."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return copy.deepcopy(self.held[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@pytest.mark.parametrize(
    "make",
    [lambda t: Copies({"w": t}), lambda t: {"m": Copies({"n": {"w": t}})}, lambda t: Counter(m=Copies({"w": t}))],
    ids=["mapping", "above a dict", "in an object"],
)
def test_a_mapping_of_copies_is_saved_and_not_loaded_into(make):
    tensor = torch.arange(3.0)
    saved = save([capture({"x": make(tensor)})])
    (name,) = saved.tensors
    assert torch.equal(saved.tensors[name], tensor)
    with pytest.raises(UsageError, match=rf"{name}: a Copies that gives another tensor each time"):
        load(saved, {"x": make(tensor)})


class Views(Copies):
    """A mapping whose values are views, made anew, of one memory."""

    def __getitem__(self, key: str) -> Any:
        return self.held[key][:]


@pytest.mark.parametrize("make", [types.MappingProxyType, collections.UserDict, collections.ChainMap, Views])
def test_other_mappings_of_tensors_are_loaded_into(make):
    tensor = torch.arange(3.0)
    saved = save([capture({"x": make({"w": tensor})})])
    into = torch.zeros(3)
    load(saved, {"x": make({"w": into})})
    assert torch.equal(into, tensor)


def test_a_loader_goes_on_from_four_ranks_to_three_without_losing_a_sample():
    def rest_of(values: list[list[int]], rank: int, size: int) -> list[int]:
        read = {sample for part in values for sample in part}
        return [sample for sample in range(20) if sample not in read][rank::size]

    saved = save([capture({"loader": PerRank(list(range(rank, 20, 4))[:2])}) for rank in range(4)])
    rest = []
    for rank in range(3):
        loader = PerRank([], combine=rest_of)
        load(saved, {"loader": loader}, rank=rank, size=3)
        rest += loader.value
    assert sorted(rest) == list(range(8, 20))


def test_a_value_of_each_rank_that_the_target_lacks_is_added_as_such():
    extra: dict[str, Any] = {"a": 0}
    load(save([capture({"extra": {"a": 1, "rng": PerRank(5)}})]), {"extra": extra})
    assert extra["rng"].value == 5


class Flat(torch.optim.Optimizer):
    """An optimizer of its own kind: one flat range of every parameter, which its state_dict declares by FQN."""

    def __init__(self, named: dict[str, torch.Size], rank: int, size: int, *, value: bool) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": 0.1})
        self.shards, self.lr, self.step_count = {}, 0.1, torch.tensor(3.0 if value else 0.0)
        for fqn, shape in named.items():
            first, last = shape.numel() * rank // size, shape.numel() * (rank + 1) // size
            memory = position_values((shape.numel(),))[first:last].clone() if value else torch.zeros(last - first)
            self.shards[fqn] = FlatShard(memory, shape, first)

    def state_dict(self) -> dict[str, Any]:
        state = {fqn: {"exp_avg": shard, "step": self.step_count} for fqn, shard in self.shards.items()}
        return {"state": state, "param_groups": [{"lr": self.lr, "params": list(self.shards)}], "kind": "flat"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["state"]["w"]["exp_avg"] is self.shards["w"]
        self.lr, self.kind = state["param_groups"][0]["lr"], state["kind"]


SHAPES = {"w": torch.Size((4, 3)), "b": torch.Size((5,))}


def test_flat_ranges_of_an_optimizer_have_the_names_of_any_other():
    saved = save([capture({"optimizer": Flat(SHAPES, r, 3, value=True)}) for r in range(3)])
    assert sorted(saved.tensors) == [f"optimizer.state.{f}.{k}" for f in ("b", "w") for k in ("exp_avg", "step")]
    assert torch.equal(saved.tensors["optimizer.state.w.exp_avg"], position_values((4, 3)))
    assert {v.name: v.kind for v in saved.catalog.values_table}["optimizer.param_groups"] == ValueKind.PARAM_GROUPS

    fresh = [Flat(SHAPES, r, 2, value=False) for r in range(2)]
    for rank, optimizer in enumerate(fresh):
        optimizer.lr = 7
        load(saved, {"optimizer": optimizer}, rank=rank, size=2, wanted=set())
        assert (optimizer.lr, optimizer.kind) == (0.1, "flat")
    assert torch.cat([o.shards["w"].tensor for o in fresh]).tolist() == position_values((12,)).tolist()

    model = nn.ParameterDict({"w": torch.zeros(4, 3), "b": torch.zeros(5)})
    adam = torch.optim.Adam(model.parameters(), lr=3)
    load(saved, {"optimizer": adam, "model": model}, strict=False)  # the model itself was not saved
    assert torch.equal(adam.state[model["w"]]["exp_avg"], position_values((4, 3)))
    assert adam.param_groups[0]["lr"] == 0.1


def test_groups_that_do_not_hold_the_targets_parameters_are_named():
    saved = save([capture({"optimizer": Flat({"w": SHAPES["w"]}, 0, 1, value=True)})])
    with pytest.raises(MismatchError, match=r"optimizer.param_groups\[0\]: no saved group holds parameter b"):
        load(saved, {"optimizer": Flat(SHAPES, 0, 1, value=False)})


@pytest.mark.parametrize(
    "extra",
    [
        {"d": {(0,): "a", 0: "b2", "t": 1}},
        {"d": {((0,),): 1, (("x",),): 2, ("x",): 3, (True,): 4, (0, 1): 5}},
        {"o": collections.OrderedDict([("z", 1), ("a", 2), ("m", collections.OrderedDict([(2, 0), (1, 0)]))])},
        {"c": collections.Counter("hello"), "d": collections.defaultdict(int, {"a": 1, (0,): collections.OrderedDict(b=1, a=2)})},
        {"path": pathlib.PurePosixPath("a"), "when": {datetime.date(2026, 1, 2): datetime.timedelta(1)}},
    ],
    ids=["tuples", "deeper tuples", "ordered", "counting", "objects"],
)
@pytest.mark.parametrize("nothing", [{}, dict.fromkeys("cdo"), {"c": [], "d": (), "o": []}], ids=["absent", "None", "empty"])
def test_what_is_added_in_an_absent_place_is_as_it_was_saved(extra: dict[str, Any], nothing: dict[str, Any]):
    saved = save([capture({"extra": extra})])
    target = {key: nothing[key] for key in extra if key in nothing}
    load(saved, {"extra": target}, wanted=set())
    assert target == extra
    assert encode_value(target["o"], "o") == encode_value(extra["o"], "o") if "o" in extra else True
    for key, value in extra.items():
        assert type(target[key]) is type(value)
        assert (
            [type(part) for part in target[key].values()] == [type(target[key][k]) for k in target[key]] if key in "dc" else True
        )
    if isinstance(extra.get("d"), collections.defaultdict):
        assert target["d"]["new"] == 0
        assert list(target["d"][(0,)]) == ["b", "a"]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_values_beside_tensors_lose_what_wrappers_add_too(kind: type[dict[str, Any]]):
    """As ``torch.compile(module).state_dict()`` has them if a module has extra state."""
    compiled = kind({"_orig_mod.w": torch.ones(2), "_orig_mod._extra_state": collections.OrderedDict(b=1, a={"n": 2})})
    saved = save([capture({"model": compiled})])
    assert sorted(saved.values) == ["model._extra_state.a.n", "model._extra_state.b"]
    target = kind({"_orig_mod.w": torch.zeros(2), "_orig_mod._extra_state": {"a": {"n": 0}, "b": 0}})
    load(saved, {"model": target}, wanted=set())
    assert target["_orig_mod._extra_state"] == {"b": 1, "a": {"n": 2}}
    lacks = kind({"w": torch.zeros(2)})
    load(saved, {"model": lacks}, wanted=set())
    assert encode_value(lacks["_extra_state"], "") == encode_value(compiled["_orig_mod._extra_state"], "")


def test_a_defaultdict_of_a_factory_of_ones_own_is_made_without():
    saved = save([capture({"extra": {"d": collections.defaultdict(lambda: 5, a=1)}})])
    target: dict[str, Any] = {}
    load(saved, {"extra": target}, wanted=set())
    assert type(target["d"]) is collections.defaultdict
    assert target["d"].default_factory is None


def nested(wrap: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("inner", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,)], ids=["dicts", "lists", "tuples"])
def test_what_is_nested_too_deep_is_refused_by_name(inner: Any):
    with pytest.raises(UnsupportedError, match=r"^extra.*nested deeper than 256 levels"):
        capture({"extra": nested(inner, 3000)})
    with pytest.raises(UnsupportedError, match="nested deeper than 256 levels"):
        load(save([capture({"extra": {"a": 1}})]), {"extra": {"x": nested(inner, 3000)}})


def test_dicts_nest_as_deep_as_is_said():
    state = {"extra": nested(lambda v: {"k": v}, 255)}
    saved = save([capture(state)])
    target: dict[str, Any] = {"extra": {}}
    load(saved, target, wanted=set())
    assert target == state


def test_saved_keys_that_collide_are_refused_before_they_meet():
    saved = save([capture({"extra": {"a": 1}})])
    entries = [
        ValueEntry(f"extra.{i}", encode_path(["extra", i * (2**61 - 1)]), ValueKind.PLAIN, encode_value(1, ""))
        for i in range(100)
    ]
    with pytest.raises(CorruptError, match="same hash"):
        prepare_load({"extra": {}}, dataclasses.replace(saved.catalog, values_table=tuple(entries)), rank=0, size=1)


def test_dicts_keep_the_order_of_their_keys(tmp_path: pathlib.Path) -> None:
    pets = {"cat": 1, "dog": {"z": 1, "a": collections.OrderedDict(y=1, x=2), "m": 3}, "ant": {}, "t": torch.ones(2), "bee": [3]}
    checkpoint.save(tmp_path / "a", {"pets": pets, "extra": {"b": 1}, "also": 2})
    checkpoint.reshard(tmp_path / "a", tmp_path / "b", mesh={"dp": 2})
    for path in (tmp_path / "a", tmp_path / "b"):
        values = [name for name, value in checkpoint.read(path).items() if not isinstance(value, torch.Tensor)]
        assert values == [
            *("pets.cat", "pets.dog.z", "pets.dog.a.y", "pets.dog.a.x", "pets.dog.m", "pets.ant", "pets.bee"),
            *("extra.b", "also"),
        ]
        into: dict[str, Any] = {"t": torch.zeros(2)}
        checkpoint.load(path, {"pets": into}, ignore=["extra", "also"])
        assert list(into) == ["t", "cat", "dog", "ant", "bee"]
        assert list(into["dog"]) == ["z", "a", "m"]
        assert list(into["dog"]["a"]) == ["y", "x"]
        held = {"dog": {"m": 0}, "t": torch.zeros(2)}
        checkpoint.load(path, {"pets": held})
        assert list(held) == ["dog", "t", "cat", "ant", "bee"]
        assert list(held["dog"]) == ["m", "z", "a"]


@pytest.mark.parametrize(
    "names",
    [
        ("param_groups.params", "state.weight"),
        ("param_groups.params",),
        ("param_groups.0.weight", "state.0.weight"),
        ("param_groups.0.gain", "state.weight"),
    ],
)
def test_names_like_those_of_a_flattened_optimizer_may_be_a_models(names: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    shapes = {name: () if name.endswith("gain") else (2, 3) for name in names}
    model = {name: position_values(shape, salt=salt) for salt, (name, shape) in enumerate(shapes.items())}
    checkpoint.save(tmp_path / "a", {"model": model})
    assert checkpoint.catalog(tmp_path / "a").names == tuple(f"model.{name}" for name in names)
    checkpoint.convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    for path in (tmp_path / "a", tmp_path / "b.pt"):
        into = {name: torch.zeros(shape) for name, shape in shapes.items()}
        checkpoint.load(path, {"model": into})
        assert {name: tensor.tolist() for name, tensor in into.items()} == {name: t.tolist() for name, t in model.items()}


class Settings(dict[str, int]):
    """A subclass of dict."""


@pytest.mark.parametrize("mapping", [Settings(b=1, a=2), types.MappingProxyType({"b": 1, "a": 2})])
def test_a_mapping_of_another_class_is_added_as_a_plain_dict_and_kept_where_it_is(mapping: Any, tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, {"x": {"in": mapping}})
    into: dict[str, Any] = {}
    checkpoint.load(tmp_path, {"x": into})
    assert type(into["in"]) is dict
    assert list(into["in"].items()) == [("b", 1), ("a", 2)]
    there = Settings(b=0, a=0)
    checkpoint.load(tmp_path, {"x": {"in": there}})
    assert (there, type(there)) == ({"b": 1, "a": 2}, Settings)


class Attributes(dict[str, Any]):
    """A dict that gives its items as attributes, and raises KeyError for any other name."""

    __getattr__ = dict.__getitem__


class Growing(dict[str, Any]):
    """A dict that gives its items as attributes, and makes an item of any other name."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Growing())


@pytest.mark.parametrize("kind", [Attributes, Growing])
def test_a_dict_that_gives_its_items_as_attributes_is_a_dict(kind: type[dict[str, Any]]):
    state = {"extra": kind(w=torch.arange(3.0), state_dict=kind(step=3))}
    checkpoint.save("memory://attributes", state)
    assert list(state["extra"]) == ["w", "state_dict"]
    other = kind(extra=kind(w=torch.zeros(3), state_dict=kind(step=0)))
    checkpoint.load("memory://attributes", other)
    assert torch.equal(other["extra"]["w"], torch.arange(3.0))
    assert other["extra"]["state_dict"] == {"step": 3}
