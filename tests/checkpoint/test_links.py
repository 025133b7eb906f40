"""State finds its parameter by the recorded link, whatever the parameters are called and whatever form the checkpoint has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import StateLink

ODD = ("state.x.exp_avg", "state.x.step", "param_groups.w", "x", "exp_avg", "optimizer.state.x.exp_avg")


def module_of(names: tuple[str, ...], salt: int) -> nn.Module:
    """A module with parameters of these names, whose values depend on name and position."""
    root = nn.Module()
    for number, name in enumerate(names):
        *above, last = name.split(".")
        node = root
        for part in above:
            if not hasattr(node, part):
                node.add_module(part, nn.Module())
            node = getattr(node, part)
        values = torch.arange(12.0).reshape(4, 3) + 100 * number + 1000 * salt
        node.register_parameter(last, nn.Parameter(values))
    return root


def trained(module: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer = kind(module.named_parameters(), lr=0.125, **options)
    for number, param in enumerate(module.parameters()):
        param.grad = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape) * (number + 1)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def assert_same(mine: Any, other: Any, where: str = "") -> None:
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other), where
    elif isinstance(mine, Mapping):
        assert mine.keys() == other.keys(), where
        for key in mine:
            assert_same(mine[key], other[key], f"{where}.{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other), where
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert mine == other, where


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The model, and the state of the optimizer by name."""
    by_name = {name: optimizer.state[param] for name, param in module.named_parameters()}
    groups = optimizer.state_dict()["param_groups"]
    return copy.deepcopy({"model": module.state_dict(), "state": by_name, "groups": groups})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    module = module_of(ODD, 1)
    optimizer = trained(module)
    checkpoint.save(tmp_path / "saved", {"model": module, "optimizer": optimizer})
    return tmp_path / "saved", state_of(module, optimizer)


def loaded(path: Path, names: tuple[str, ...] = ODD, **options: Any) -> dict[str, Any]:
    module = module_of(names, 7)
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.5)
    checkpoint.load(path, {"model": module, "optimizer": optimizer}, **options)
    return state_of(module, optimizer)


def test_every_entry_is_linked_to_its_parameter(saved: tuple[Path, dict[str, Any]]):
    catalog = checkpoint.catalog(saved[0])
    wanted = [StateLink("optimizer", fqn, key, f"model.{fqn}") for fqn in ODD for key in ("exp_avg", "exp_avg_sq", "step")]
    assert catalog.links() == {link.name: link for link in wanted}
    assert checkpoint.inspect(saved[0]).summary.num_parameters == 12 * len(ODD)


def test_names_like_state_load(saved: tuple[Path, dict[str, Any]]):
    assert_same(loaded(saved[0]), saved[1])


def test_names_like_state_reshard(saved: tuple[Path, dict[str, Any]], tmp_path: Path):
    checkpoint.reshard(saved[0], tmp_path / "two", mesh={"dp": 2}, rules={"model.*": {"dp": "shard(0)"}})
    assert checkpoint.catalog(tmp_path / "two").links() == checkpoint.catalog(saved[0]).links()
    placed = {
        name: checkpoint.catalog(tmp_path / "two").tensor(name).placement for name in ("model.x", "optimizer.state.x.exp_avg")
    }
    assert [p.kind for axes in placed.values() for p in axes or ()] == ["shard", "shard"]
    assert_same(loaded(tmp_path / "two"), saved[1])


@pytest.mark.parametrize(("to", "options"), [("torch", {}), ("dcp", {"optimizer": "nested"}), ("dcp", {"optimizer": "flat"})])
def test_names_like_state_convert_there_and_back(
    saved: tuple[Path, dict[str, Any]], to: str, options: dict[str, Any], tmp_path: Path
):
    checkpoint.convert(saved[0], tmp_path / "there", to=to, **options)
    assert_same(loaded(tmp_path / "there"), saved[1])
    checkpoint.convert(tmp_path / "there", tmp_path / "back", to="reshard")
    assert checkpoint.catalog(tmp_path / "back").links() == checkpoint.catalog(saved[0]).links()
    assert_same(loaded(tmp_path / "back"), saved[1])


def test_torch_itself_takes_what_was_converted(saved: tuple[Path, dict[str, Any]], tmp_path: Path):
    checkpoint.convert(saved[0], tmp_path / "there.pt", to="torch")
    found = torch.load(tmp_path / "there.pt", weights_only=True)
    module = module_of(ODD, 7)
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.5)
    module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert_same(state_of(module, optimizer), saved[1])


def test_state_follows_a_renamed_parameter(saved: tuple[Path, dict[str, Any]]):
    names = tuple(name.replace("state.x", "block.y") if name.startswith("state.x") else name for name in ODD)
    got = loaded(saved[0], names, rename={"model.state.x": "model.block.y"})
    new = dict(zip(ODD, names, strict=True))
    assert_same(got["model"], {new[name]: value for name, value in saved[1]["model"].items()})
    assert_same(got["state"], {new[name]: entry for name, entry in saved[1]["state"].items()})
    assert got["groups"][0]["lr"] == 0.125


def test_a_function_renames_state_by_its_parameter_too(saved: tuple[Path, dict[str, Any]]):
    names = ("first", *ODD[1:])
    got = loaded(saved[0], names, rename=lambda name: "model.first" if name == "model.state.x.exp_avg" else name)
    assert_same(got["state"], {"first": saved[1]["state"][ODD[0]], **{name: saved[1]["state"][name] for name in ODD[1:]}})


def test_renaming_the_state_itself_goes_first(saved: tuple[Path, dict[str, Any]]):
    rename = {"model.x": "model.y", "optimizer.state.x": "optimizer.state.z"}
    got = loaded(saved[0], tuple("z" if name == "x" else name for name in ODD), rename=rename, strict=False)
    assert_same(got["state"]["z"], saved[1]["state"]["x"])
    assert got["model"]["z"][0, 0] == 7300  # what was saved as x is called y now


@pytest.mark.parametrize("rename", [{"model": "net", "optimizer": "opt"}, lambda name: f"app.{name}"])
def test_everything_moves_below_another_key(saved: tuple[Path, dict[str, Any]], rename: Any):
    module = module_of(ODD, 7)
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.5)
    state: dict[str, Any] = {"net": module, "opt": optimizer}
    if callable(rename):
        state = {"app": {"model": module, "optimizer": optimizer}}
    checkpoint.load(saved[0], state, rename=rename)
    assert_same(state_of(module, optimizer), saved[1])


def deeper(name: str) -> str:
    return name.replace("model.", "model.inner.") if name.startswith("model.") else name


def test_state_follows_a_model_that_moves_into_or_out_of_another_one_in_every_form_of_rename(saved: tuple[Path, dict[str, Any]]):
    renames: list[Any] = [{"model": "model.inner"}, deeper, {f"model.{name}": f"model.inner.{name}" for name in ODD}]
    wrapper, optimizer = nn.Module(), None
    for rename in renames:
        wrapper.inner = module_of(ODD, 7)
        optimizer = torch.optim.AdamW(wrapper.inner.named_parameters(), lr=0.5)
        checkpoint.load(saved[0], {"model": wrapper, "optimizer": optimizer}, rename=rename)
        assert_same(state_of(wrapper.inner, optimizer), saved[1])
    checkpoint.save(saved[0], {"model": wrapper, "optimizer": optimizer})
    for back in ({"model.inner": "model"}, lambda name: name.replace("model.inner.", "model.")):
        module = module_of(ODD, 8)
        optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.5)
        checkpoint.load(saved[0], {"model": module, "optimizer": optimizer}, rename=back)
        assert_same(state_of(module, optimizer), saved[1])


def test_swapped_parameters_take_their_state_along(saved: tuple[Path, dict[str, Any]]):
    got = loaded(saved[0], rename={"model.x": "model.exp_avg", "model.exp_avg": "model.x"})
    assert_same(got["state"]["x"], saved[1]["state"]["exp_avg"])
    assert_same(got["state"]["exp_avg"], saved[1]["state"]["x"])


def test_groups_without_state_follow_the_parameters(tmp_path: Path):
    module = module_of(("old.w", "bias"), 1)
    optimizer = torch.optim.SGD([{"params": [module.bias], "lr": 0.75}, {"params": [module.old.w], "lr": 0.25}])
    checkpoint.save(tmp_path / "saved", {"model": module, "optimizer": optimizer})
    other = module_of(("new.w", "bias"), 2)
    target = torch.optim.SGD([{"params": [other.bias]}, {"params": [other.new.w]}], lr=0.0)
    checkpoint.load(tmp_path / "saved", {"model": other, "optimizer": target}, rename={"model.old": "model.new"})
    assert [group["lr"] for group in target.param_groups] == [0.75, 0.25]


def test_keys_with_dots_and_state_by_name(tmp_path: Path):
    """A state dict by FQN, as DCP's ``get_optimizer_state_dict`` gives it, over keys that modules could not have."""
    weights = {"a.param_groups.state.b": torch.arange(6.0), "state.x.exp_avg": torch.arange(4.0)}
    entries = {fqn: {"exp_avg": w + 0.5, "inner": {"deep": w + 0.25, "count": 3}} for fqn, w in weights.items()}
    groups = [{"lr": 0.5, "params": list(weights)}]
    state = {"model": weights, "optimizer": {"state": entries, "param_groups": groups}}
    checkpoint.save(tmp_path / "saved", state)
    links = checkpoint.catalog(tmp_path / "saved").links()
    keys = ("exp_avg", "inner.deep", "inner.count")
    assert {(link.fqn, link.key) for link in links.values()} == {(fqn, key) for fqn in weights for key in keys}
    assert all(link.parameter == f"model.{link.fqn}" for name, link in links.items() if not name.endswith("count"))
    target = copy.deepcopy(state)
    for tensor in (*target["model"].values(), *(e["exp_avg"] for e in target["optimizer"]["state"].values())):
        tensor.zero_()
    checkpoint.load(tmp_path / "saved", target)
    assert_same(target, state)
    checkpoint.convert(tmp_path / "saved", tmp_path / "dcp", to="dcp")
    back = checkpoint.read(tmp_path / "dcp")
    assert_same(back, checkpoint.read(tmp_path / "saved"))


def test_an_optimizer_alone_keeps_its_links_without_parameters(tmp_path: Path):
    module = module_of(ODD, 1)
    optimizer = trained(module)
    checkpoint.save(tmp_path / "both", {"model": module, "optimizer": optimizer})
    checkpoint.reshard(tmp_path / "both", tmp_path / "alone", mesh={"dp": 1}, select=["optimizer"])
    links = checkpoint.catalog(tmp_path / "alone").links()
    assert {link.fqn for link in links.values()} == set(ODD)
    assert {link.parameter for link in links.values()} == {None}
    other = module_of(ODD, 7)
    target = torch.optim.AdamW(other.named_parameters(), lr=0.5)
    checkpoint.load(tmp_path / "alone", {"model": other, "optimizer": target}, allow_missing=["model"])
    assert_same(target.state_dict(), optimizer.state_dict())


def test_several_optimizers_over_one_model(tmp_path: Path):
    module = module_of(("state.w", "w"), 1)
    one, two = trained(module), trained(module, torch.optim.SGD, momentum=0.5)
    checkpoint.save(tmp_path / "saved", {"model": module, "one": one, "one.state.two": two})
    links = checkpoint.catalog(tmp_path / "saved").links()
    assert {(link.optimizer, link.fqn, link.parameter) for link in links.values()} == {
        (name, fqn, f"model.{fqn}") for name in ("one", "one.state.two") for fqn in ("state.w", "w")
    }
    other = module_of(("state.v", "w"), 7)
    first = torch.optim.AdamW(other.named_parameters(), lr=0.5)
    second = torch.optim.SGD(other.named_parameters(), lr=0.5, momentum=0.5)
    renamed = {"model.state.w": "model.state.v"}
    checkpoint.load(tmp_path / "saved", {"model": other, "one": first, "one.state.two": second}, rename=renamed)
    assert_same(first.state_dict()["state"], one.state_dict()["state"])
    assert_same(second.state_dict()["state"], two.state_dict()["state"])


def test_tied_parameters_have_a_link_under_each_name(tmp_path: Path):
    def tied(salt: int) -> nn.Module:
        module = module_of(("state.a", "b"), salt)
        module.b = module.state.a
        return module

    module = tied(1)
    optimizer = trained(module)
    checkpoint.save(tmp_path / "saved", {"model": module, "optimizer": optimizer})
    catalog = checkpoint.catalog(tmp_path / "saved")
    assert {link.parameter for link in catalog.links().values()} == {"model.b", "model.state.a"}
    for to in ("torch", "dcp"):
        checkpoint.convert(tmp_path / "saved", tmp_path / to, to=to)
    for name in ("saved", "torch", "dcp"):
        other = tied(7)
        target = torch.optim.AdamW(other.named_parameters(), lr=0.5)
        checkpoint.load(tmp_path / name, {"model": other, "optimizer": target})
        assert_same(state_of(other, target), state_of(module, optimizer), name)


def test_state_saved_by_number_gets_names_and_links(tmp_path: Path):
    module = module_of(ODD, 1)
    optimizer = trained(module)
    numbered = copy.deepcopy(optimizer.state_dict())
    for group in numbered["param_groups"]:
        del group["param_names"]
    with pytest.warns(UserWarning, match="by number"):
        checkpoint.save(tmp_path / "saved", {"model": copy.deepcopy(module.state_dict()), "optimizer": numbered})
    rename = {f"optimizer.state.{i}": f"optimizer.state.{fqn}" for i, fqn in enumerate(dict(module.named_parameters()))}
    assert_same(loaded(tmp_path / "saved", rename=rename), state_of(module, optimizer))
    checkpoint.reshard(tmp_path / "saved", tmp_path / "named", mesh={"dp": 1}, rename=rename)
    links = checkpoint.catalog(tmp_path / "named").links()
    assert {(link.fqn, link.parameter) for link in links.values()} == {(fqn, f"model.{fqn}") for fqn in ODD}


@pytest.mark.parametrize("as_function", [False, True])
def test_a_model_that_was_saved_at_the_root_moves_below_a_key_and_its_state_keeps_its_names(tmp_path: Path, as_function: bool):
    """As trainers in the style of torchtitan save it: the parameters have no key of their own, the optimizer has."""
    module = module_of(("layers.0.w", "layers.1.w"), 1)
    optimizer = trained(module)
    checkpoint.save(tmp_path / "run", {**module.state_dict(), "optimizer": optimizer.state_dict()})
    other = module_of(("layers.0.w", "layers.1.w"), 2)
    empty = torch.optim.AdamW(other.named_parameters(), lr=1.0)
    mapping = {name: f"model.{name}" for name in module.state_dict()}
    rename = (lambda name: mapping.get(name, name)) if as_function else mapping
    checkpoint.load(tmp_path / "run", {"model": other, "optimizer": empty}, rename=rename)
    assert_same(state_of(module, optimizer), state_of(other, empty))
