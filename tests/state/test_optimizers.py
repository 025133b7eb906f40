"""Optimizer state by FQN: names, layouts, groups, and optimizers that never stepped."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError, MismatchError, UnsupportedError, UsageError
from reshard_ckpt.state import LocalShard, capture, prepare_load
from reshard_ckpt.state.shards import Value
from tests.factored import Factored
from tests.helpers import Saved, load, position_values, save


def net(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(position_values((5, 3)) * 0.1).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else (loss(), optimizer.step())


def saved_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    return save([capture({"model": model, "optimizer": optimizer})])


def saved_after_training() -> Saved:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return saved_of(model, optimizer)


def assert_goes_on_equally(make: Any, *, prepared: bool) -> None:
    """Train, save, load into a new one (that has stepped if `prepared`), and train both on: they stay bit-identical."""
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer)
    saved = saved_of(model, optimizer)
    other = net(seed=1)
    fresh = make(other.parameters())
    if prepared:
        train(other, fresh, 1)
    load(saved, {"optimizer": fresh, "model": other}, wanted=set())
    again = saved_of(other, fresh)
    assert again.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in saved.tensors.items())
    train(model, optimizer)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Fused(nn.Module):
    """Two layers in one weight, which its state dict has as two weights, like the fused projections of torchtitan."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.both = nn.Linear(3, 8)

        def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for kind in ("weight", "bias"):
                for half, part in zip("ab", state.pop(f"{prefix}both.{kind}").chunk(2), strict=True):
                    state[f"{prefix}{half}.{kind}"] = part.clone() if copies else part

        def join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for kind in ("weight", "bias"):
                state[f"{prefix}both.{kind}"] = torch.cat([state.pop(f"{prefix}{half}.{kind}") for half in "ab"])

        self.register_state_dict_post_hook(split)
        self.register_load_state_dict_pre_hook(join)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x).square()


@pytest.mark.parametrize("wrap", [lambda module: module, torch.nn.DataParallel])
@pytest.mark.parametrize("copies", [True, False])
def test_a_parameter_that_a_hook_splits_has_its_own_name_in_the_optimizer(copies: bool, wrap: Any, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = wrap(nn.Sequential(Fused(copies=copies), nn.Linear(8, 2)))
        return model, torch.optim.AdamW([{"params": [p]} for p in model.parameters()], amsgrad=True)

    model, optimizer = made(0)
    train(model, optimizer)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    names = checkpoint.catalog(tmp_path).names
    assert {"model.0.a.weight", "model.0.b.bias", "optimizer.state.0.both.weight.exp_avg"} <= {*names}
    assert "model.0.both.weight" not in names
    other, fresh = made(1)
    checkpoint.load(tmp_path, {"model": other, "optimizer": fresh})
    for each in ((model, optimizer), (other, fresh)):
        train(*each)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "factored": lambda p: Factored(p, lr=0.01),
}


@pytest.mark.parametrize("prepared", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_by_bit(kind, prepared):
    assert_goes_on_equally(OPTIMIZERS[kind], prepared=prepared)


def test_state_is_named_by_fqn_whatever_the_order_of_parameters():
    model = net()
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    train(model, optimizer)
    saved = saved_of(model, optimizer)
    assert torch.equal(saved.tensors["optimizer.state.2.bias.exp_avg"], optimizer.state[model[2].bias]["exp_avg"])
    assert saved.tensors["optimizer.state.0.weight.step"].shape == ()


def test_groups_are_matched_by_their_parameters_and_not_by_position():
    model = net()
    weights, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3.0}], lr=0.5)
    saved = saved_of(model, optimizer)

    other = net(seed=1)
    groups = [{"params": [other[2].bias]}, {"params": [other[0].bias]}, {"params": [other[2].weight, other[0].weight]}]
    fresh = torch.optim.AdamW(groups, lr=9.0, betas=(0.1, 0.1))
    kept = fresh.param_groups[2]
    load(saved, {"model": other, "optimizer": fresh})
    assert [g["lr"] for g in fresh.param_groups] == [3.0, 3.0, 0.5]
    assert [g["weight_decay"] for g in fresh.param_groups] == [0.01, 0.01, 0.1]
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)
    assert fresh.param_groups[2] is kept, "a scheduler may hold on to the group"


def test_a_group_without_parameters_comes_back():
    model = net()
    optimizer = torch.optim.SGD([{"params": [], "lr": 0.5}, {"params": model.parameters()}], lr=0.1)
    fresh = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=9.0)
    load(saved_of(model, optimizer), {"model": model, "optimizer": fresh})
    assert fresh.state_dict() == optimizer.state_dict()


def test_a_group_that_draws_from_groups_that_differ_is_named_and_nothing_changes():
    model = net()
    train_groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[2].parameters(), "lr": 2.0}]
    optimizer = torch.optim.AdamW(train_groups)
    train(model, optimizer, 1)
    saved = saved_of(model, optimizer)
    other = net(seed=1)
    before = copy.deepcopy(other.state_dict())
    fresh = torch.optim.AdamW(other.parameters(), lr=7.0)
    with pytest.raises(
        MismatchError, match=r"draws from saved groups 0 \(0.weight\) and 1 \(2.weight\), whose lr differs: 1.0 and 2.0"
    ):
        load(saved, {"model": other, "optimizer": fresh})
    assert not fresh.state
    assert all(torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values(), strict=True))
    load(saved, {"model": other, "optimizer": fresh}, strict=False)
    assert fresh.param_groups[0]["lr"] == 7.0
    assert len(fresh.state) == 4


def test_each_of_several_optimizers_gets_its_own_state():
    """Their names have the same length, or one begins with the other; each holds the same parameters."""
    model = net()
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name in ("a", "b", "a.state")}
    for steps, optimizer in enumerate(optimizers.values(), 1):
        train(model, optimizer, steps)
    saved = save([capture({"model": model, **optimizers})])
    fresh = {name: torch.optim.AdamW(model.parameters()) for name in optimizers}
    load(saved, {"model": model, **fresh}, wanted=set())
    for name, optimizer in optimizers.items():
        for mine, theirs in zip(fresh[name].state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(mine[key], value) for key, value in theirs.items())


def test_named_parameters_keep_the_targets_own_names():
    model = net()
    saved = saved_of(model, torch.optim.AdamW(model.named_parameters(), lr=0.3))
    fresh = torch.optim.AdamW([(f"other.{n}", p) for n, p in model.named_parameters()], lr=1)
    load(saved, {"model": model, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] == 0.3
    assert fresh.param_groups[0].get("param_names", ["other.0.weight"])[0] == "other.0.weight"
    assert all("param_names" not in g for g in saved.values["optimizer.param_groups"])


def test_how_an_optimizer_computes_stays_the_targets_choice():
    model = net()
    saved = saved_of(model, torch.optim.AdamW(model.parameters(), fused=True, lr=0.3))
    fresh = torch.optim.AdamW(model.parameters(), foreach=False)
    load(saved, {"model": model, "optimizer": fresh})
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"], fresh.param_groups[0]["lr"]) == (None, False, 0.3)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_that_is_a_tensor_is_set_in_place(shape: tuple[int, ...]):
    """Torch takes a tensor of one element in any shape."""
    model = net()
    saved = saved_of(model, torch.optim.AdamW(model.parameters(), lr=torch.full(shape, 0.25), foreach=False))
    rate = torch.tensor(9.0)
    fresh = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    load(saved, {"model": model, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    plain = torch.optim.AdamW(model.parameters(), lr=9.0)
    load(saved, {"model": model, "optimizer": plain})
    assert plain.param_groups[0]["lr"] == 0.25
    assert isinstance(plain.param_groups[0]["lr"], float)


@pytest.mark.parametrize(
    ("saved_value", "held"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.zeros(4)),
        (torch.tensor([1.0, 2.0]), 0.5),
        (0.5, torch.tensor(1)),
        (None, torch.zeros(2)),
        ("cosine", torch.zeros(())),
    ],
    ids=["another shape", "a number", "another kind of number", "nothing", "text"],
)
def test_a_hyperparameter_that_does_not_fit_into_the_tensor_there_takes_its_place(saved_value: Any, held: Any):
    def optimizer(value: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.param_groups[0]["own"] = value
        return made

    model = net()
    fresh = optimizer(held)
    load(saved_of(model, optimizer(saved_value)), {"model": model, "optimizer": fresh})
    own = fresh.param_groups[0]["own"]
    assert torch.equal(own, saved_value) if isinstance(saved_value, torch.Tensor) else own == saved_value


@pytest.mark.parametrize("prepared", [False, True])
def test_hooks_that_run_after_load_state_dict_see_the_loaded_state(prepared: bool):
    model, seen = net(), []
    optimizer = torch.optim.Adam(model.parameters())
    if prepared:
        train(model, optimizer, 1)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append([state["exp_avg"].tolist() for state in loaded.state.values()])
    )
    saved = saved_after_training()
    load(saved, {"model": model, "optimizer": optimizer})
    assert seen == [[saved.tensors[f"optimizer.state.{fqn}.exp_avg"].tolist() for fqn, _ in model.named_parameters()]]


@pytest.mark.parametrize("second", [0.5, torch.tensor(0.1, dtype=torch.float64)])
def test_groups_that_share_a_tensor_get_their_own_learning_rates(second: float | torch.Tensor):
    model = net()
    groups = [{"params": list(model[i].parameters())} for i in (0, 2)]
    rates = zip(groups, (0.1, second), strict=True)
    saved = saved_of(model, torch.optim.AdamW([{**group, "lr": lr} for group, lr in rates], foreach=False))
    for rate in (torch.tensor(9.0), torch.tensor(9.0, requires_grad=True)):
        fresh: Any = torch.optim.AdamW([dict(group) for group in groups], lr=rate, foreach=False)  # both groups hold the tensor
        load(saved, {"model": model, "optimizer": fresh})
        assert [group["lr"].item() for group in fresh.param_groups] == pytest.approx([0.1, float(second)])
        assert [group["lr"] is rate for group in fresh.param_groups] == [True, second == 0.1]
        # As a ZeroRedundancyOptimizer has one inside: its groups get the rates of the groups that have their parameters.
        inner: Any = torch.optim.AdamW([dict(group) for group in groups], lr=rate, foreach=False)
        fresh.optim, fresh.consolidate_state_dict = inner, None
        load(saved, {"model": model, "optimizer": fresh})
        assert [group["lr"].item() for group in (*fresh.param_groups, *inner.param_groups)] == pytest.approx(
            [0.1, float(second)] * 2
        )


def test_optimizers_that_share_a_tensor_get_their_own_learning_rates():
    model = net()

    def optimizers(*rates: Any) -> dict[str, torch.optim.Optimizer]:
        pairs = zip(("first", "second"), (0, 2), rates, strict=True)
        return {key: torch.optim.AdamW(model[i].parameters(), lr=rate, foreach=False) for key, i, rate in pairs}

    saved = save([capture({"model": model, **optimizers(0.25, 0.5)})])
    rate = torch.tensor(9.0)
    fresh = optimizers(rate, rate)
    load(saved, {"model": model, **fresh})
    assert [optimizer.param_groups[0]["lr"].item() for optimizer in fresh.values()] == [0.25, 0.5]
    assert fresh["first"].param_groups[0]["lr"] is rate


def test_frozen_and_not_yet_stepped_parameters_have_no_state_before_and_after():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = saved_of(model, optimizer)
    assert "optimizer.state.0.weight.step" not in saved.tensors

    other = net(seed=1)  # here the parameter is trained, and has state, which the checkpoint knows not to exist
    fresh = torch.optim.AdamW(other.parameters())
    train(other, fresh)
    assert other[0].weight in fresh.state
    load(saved, {"model": other, "optimizer": fresh}, wanted=set())
    assert other[0].weight not in fresh.state
    assert len(fresh.state) == 3


def test_nothing_is_put_into_the_optimizer_before_the_end():
    saved = saved_after_training()
    other = net(seed=1)
    fresh = torch.optim.AdamW(other.parameters())
    target = prepare_load({"model": other, "optimizer": fresh}, saved.catalog, rank=0, size=1)
    target.check(saved.values)
    assert not fresh.state
    assert all(p.grad is None for p in other.parameters())


def test_a_new_parameter_is_named_with_strict_and_left_alone_without():
    small = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})
    saved = saved_of(small, torch.optim.AdamW(small.parameters(), lr=0.5))
    large = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    fresh = torch.optim.AdamW(large.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match=r"no saved group holds parameter b.weight"):
        load(saved, {"model": large, "optimizer": fresh})
    load(saved, {"model": large, "optimizer": fresh}, strict=False)
    assert fresh.param_groups[0]["lr"] == 0.5


def test_state_that_the_checkpoint_lacks_is_named_before_anything_changes():
    saved = saved_after_training()
    other = net(seed=1)
    grown = torch.optim.AdamW(other.parameters(), amsgrad=True)
    train(other, grown)
    with pytest.raises(MismatchError, match=r"optimizer.state.0.weight.max_exp_avg_sq: missing"):
        load(saved, {"model": other, "optimizer": grown})


def test_half_a_state_is_not_put_into_a_fresh_optimizer():
    saved = saved_after_training()
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))  # the last layer has another size
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(MismatchError, match=r"optimizer.state.2.weight.exp_avg: shape \(2, 4\), wanted \(5, 4\)"):
        load(saved, {"model": other, "optimizer": fresh})
    load(saved, {"model": other, "optimizer": fresh}, strict=False)
    assert set(fresh.state) == {other[0].weight, other[0].bias}
    train(other, fresh)


def test_resized_state_begins_as_zeros_where_the_checkpoint_has_none():
    saved = saved_after_training()
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    target = prepare_load({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, saved.catalog, rank=0, size=1)
    entry = next(e for e in target.tensors if e.spec.name == "optimizer.state.2.weight.exp_avg")
    assert entry.spec.shape == (5, 4)
    assert not entry.memory.any()


def test_state_of_a_tied_parameter_is_saved_under_each_name_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model["a"].weight] = {"exp_avg": position_values((3, 3)), "step": torch.tensor(4.0)}
    state = {"optimizer": optimizer, "model": model}
    aliases = {e.spec.name: e.spec.alias_of for e in capture(state).tensors if "state" in e.spec.name}
    assert aliases == {
        "optimizer.state.a.weight.exp_avg": None,
        "optimizer.state.b.weight.exp_avg": "optimizer.state.a.weight.exp_avg",
        "optimizer.state.a.weight.step": None,
        "optimizer.state.b.weight.step": "optimizer.state.a.weight.step",
    }
    saved = save([capture(state)])
    assert saved.values["optimizer.param_groups"][0]["params"] == ["a.weight", "b.weight"]

    untied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    fresh = torch.optim.AdamW(untied.parameters())
    load(saved, {"model": untied, "optimizer": fresh}, wanted=set())
    for key in "ab":
        assert torch.equal(fresh.state[untied[key].weight]["exp_avg"], position_values((3, 3)))
    tied = torch.optim.AdamW(model.parameters())
    load(saved, {"model": model, "optimizer": tied}, wanted=set())
    assert torch.equal(tied.state[model["a"].weight]["exp_avg"], position_values((3, 3)))


@pytest.mark.parametrize(
    ("steps", "lr", "told"),
    [
        ((3.0, 3.0), 0.1, None),
        ((3.0, 4.0), 0.1, r"optimizer.state.b.weight.step: tied to optimizer.state.a.weight.step .* different values"),
        ((3.0, torch.tensor(3.0)), 0.1, r"optimizer.state.b.weight.step: missing value"),
        ((torch.tensor(3.0), 3.0), 0.1, r"optimizer.state.a.weight.step: missing value"),
        ((3.0, 3.0), 0.2, r"draws from saved groups 0 \(a.weight\) and 1 \(b.weight\), whose lr differs"),
    ],
)
def test_a_tied_parameter_takes_only_equal_values_of_its_names(steps: tuple[Any, Any], lr: float, told: str | None):
    untied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    optimizer = torch.optim.AdamW([{"params": [untied["a"].weight], "lr": 0.1}, {"params": [untied["b"].weight], "lr": lr}])
    for key, step in zip("ab", steps, strict=True):
        optimizer.state[untied[key].weight] = {"step": step}
    saved = saved_of(untied, optimizer)
    tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False)})
    tied["b"] = tied["a"]
    fresh = torch.optim.AdamW(tied.parameters())
    with nullcontext() if told is None else pytest.raises(MismatchError, match=told):
        load(saved, {"model": tied, "optimizer": fresh})
    assert fresh.state == ({} if told else {tied["a"].weight: {"step": 3.0}})


def test_an_optimizer_over_declared_shards_has_their_layout():
    full = position_values((4, 3))
    halves = []
    for rank in range(2):
        param = nn.Parameter(full[2 * rank : 2 * rank + 2].clone())
        optimizer = torch.optim.AdamW([param])
        optimizer.state[param] = {"exp_avg": param.detach() * 10, "step": torch.tensor(1.0)}
        halves.append(capture({"model": {"w": LocalShard(param, (4, 3), (2 * rank, 0))}, "optimizer": optimizer}))
    saved = save(halves)
    assert torch.equal(saved.tensors["model.w"], full)
    assert torch.equal(saved.tensors["optimizer.state.w.exp_avg"], full * 10)

    param = nn.Parameter(torch.zeros(3, 3))
    fresh = torch.optim.AdamW([param])
    load(saved, {"model": {"w": LocalShard(param, (4, 3), (1, 0))}, "optimizer": fresh}, wanted=set())
    assert torch.equal(param, full[1:])
    assert torch.equal(fresh.state[param]["exp_avg"], full[1:] * 10)


def test_state_of_another_shape_for_a_declared_shard_is_refused():
    param = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.AdamW([param])
    state = {"model": {"w": LocalShard(param, (4, 3), (0, 0))}, "optimizer": optimizer}
    optimizer.state[param] = {"row": torch.zeros(2)}
    with pytest.raises(UnsupportedError, match=r"optimizer.state.w.row: has shape \(2,\), its parameter w \(2, 3\) of \(4, 3\)"):
        capture(state)
    optimizer.state[param] = {"history": [torch.zeros(2, 3)]}
    with pytest.raises(
        UnsupportedError, match=r"optimizer.state.w.history: a list of tensors for the parameter w, which is sharded"
    ):
        capture(state)
    optimizer.state[param] = {"row": LocalShard(torch.zeros(2), (4,), (0,))}
    assert capture(state).tensors[1].spec.shape == (4,)


@pytest.mark.parametrize("key", ["a.b", 0])  # heavyball has ints, over a dict each
def test_a_state_key_without_a_name_is_refused_and_the_whole_state_is_not(key: str | int):
    model, fresh = net(), torch.optim.SGD(net(seed=1).parameters())
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model[0].weight] = {key: {"sums": position_values((4, 3))}}
    told = rf"the state of 0.weight has the key {key!r}; .* save all of it as checkpoint.Value\(optimizer\)"
    with pytest.raises(UnsupportedError, match=told):
        capture({"model": model, "optimizer": optimizer})
    load(save([capture({"optimizer": Value(optimizer)})]), {"optimizer": Value(fresh)})
    assert torch.equal(fresh.state[fresh.param_groups[0]["params"][0]][key]["sums"], position_values((4, 3)))


def test_an_optimizer_without_its_module_is_refused():
    with pytest.raises(UsageError, match=r"optimizer: a parameter of shape \(4, 3\) in group 0 .*pass the module that holds it"):
        capture({"optimizer": torch.optim.AdamW(net().parameters())})


def test_two_modules_with_the_same_names_in_one_optimizer_are_refused():
    first, second = net(), net()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    with pytest.raises(UsageError, match=r"holds two parameters called 0.weight, of actor and of critic.*ModuleDict"):
        capture({"actor": first, "critic": second, "optimizer": optimizer})


def test_an_optimizer_of_one_module_among_several_uses_its_names():
    first, second = net(), net(seed=1)
    optimizers = {"actor": torch.optim.SGD(first.parameters(), 0.1), "critic": torch.optim.Adam(second.parameters())}
    train(second, optimizers["critic"])
    captured = capture({"actor": first, "critic": second, "optimizers": optimizers})
    assert {v.name for v in captured.values} == {"optimizers.actor.param_groups", "optimizers.critic.param_groups"}
    assert "optimizers.critic.state.0.weight.exp_avg" in {e.spec.name for e in captured.tensors}


def test_stages_with_different_hyperparameters_for_one_parameter_are_refused():
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(LayoutError, match=r"parameter 0.weight has lr 0.1 on optimizer\[0\] and 0.2 on optimizer\[1\]"):
        capture({"model": model, "optimizer": optimizers})


def test_a_float_step_and_a_tensor_step_are_told_by_the_checkpoint():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight] = {"step": 3, "exp_avg": torch.ones(4, 3)}
    saved = saved_of(model, optimizer)
    assert saved.values["optimizer.state.0.weight.step"] == 3
    fresh = torch.optim.AdamW(model.parameters())
    load(saved, {"model": model, "optimizer": fresh}, wanted=set())
    assert fresh.state[model[0].weight]["step"] == 3
    stepped = torch.optim.AdamW(model.parameters())
    train(model, stepped)
    load(saved, {"model": model, "optimizer": stepped}, strict=False)
    assert stepped.state[model[0].weight]["step"] == 3


@pytest.mark.parametrize("prepared", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", ["adam", "adamw_fused", "adagrad", "nadam"])
def test_training_goes_on_from_numbers_that_an_older_torch_saved(kind: str, prepared: bool):
    """Up to torch 1.11, step counts were ints; ``load_state_dict`` makes tensors of them."""
    model, other = net(), net(seed=1)
    optimizer, fresh = (OPTIMIZERS[kind](m.parameters()) for m in (model, other))
    train(model, optimizer)
    for state in optimizer.state.values():
        state.update({key: value.item() for key, value in state.items() if value.shape == ()})
    saved = saved_of(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    if prepared:
        train(other, fresh, 1)
    load(saved, {"model": other, "optimizer": fresh})
    train(model, optimizer)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_numbers_load_also_beside_state_without_the_keys_of_the_base_class():
    """AdamW's ``__setstate__`` asks each state for a step count; a subclass may keep other state for its matrices."""
    model, other = net(), net(seed=1)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    optimizer.state = {model[0].weight: {"momentum": position_values((4, 3))}, model[0].bias: {"step": 3}}
    load(saved_of(model, optimizer), {"model": other, "optimizer": fresh})
    assert torch.equal(fresh.state[other[0].weight]["momentum"], position_values((4, 3)))
    assert fresh.state[other[0].bias] == {"step": 3}


def test_torchs_own_state_dicts_by_fqn_have_the_same_names():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    train(model, optimizer)
    expected = saved_of(model, optimizer)
    as_dict = get_optimizer_state_dict(model, optimizer)
    saved = save([capture({"optimizer": as_dict})])
    assert sorted(saved.tensors) == sorted(n for n in expected.tensors if n.startswith("optimizer."))

    other = net(seed=1)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    state = get_optimizer_state_dict(other, fresh)
    load(expected, {"optimizer": state}, wanted=set())
    set_optimizer_state_dict(other, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.3
    assert torch.equal(fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])

    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    target = get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert target["state"] == {}
    load(saved_of(model, plain), {"model": other, "optimizer": target}, wanted=set())
    assert target["param_groups"][0]["lr"] == 0.5
    stepped = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(other, stepped)
    load(save([capture({"model": model, "optimizer": target})]), {"model": other, "optimizer": stepped}, wanted=set())
    assert (stepped.param_groups[0]["lr"], len(stepped.state)) == (0.5, 0)
