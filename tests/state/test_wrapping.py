"""Optimizers that say their state themselves, optimizers' state dicts in dicts, and what numbers in them mean."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

from reshard_ckpt.engine.saving.step_guard import ChangeDetector, StepGuard
from reshard_ckpt.errors import MismatchError, UsageError
from reshard_ckpt.state import LocalShard, capture
from reshard_ckpt.state.optimizers import held_back
from tests.helpers import Saved, load, position_values, save
from tests.wrapping import Combined, Container, Counting, Delegating, Momentum, Scaled


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(position_values((5, 3)) * 0.1).square().mean().backward()
        optimizer.step()
        model.zero_grad()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(child)


def contents(value: Any) -> list[list[float]]:
    return sorted([float(v) for v in tensor.detach().reshape(-1)] for tensor in tensors_in(value))


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "delegating": lambda m: Delegating(torch.optim.AdamW(m.parameters(), lr=0.01)),
    "delegating_twice": lambda m: Delegating(Delegating(torch.optim.AdamW(m.parameters(), lr=0.01))),
    "reordered_inside": lambda m: Delegating(torch.optim.AdamW(reversed(list(m.parameters())), lr=0.01)),
    "counting": lambda m: Counting(torch.optim.AdamW(m.parameters(), lr=0.01)),
    "combined": Combined,
    "combined_in_a_list": lambda m: Combined(m, as_list=True),
    "scaled": lambda m: Scaled(m.parameters(), lr=0.01),
    "container": lambda m: Container([m], lr=0.01),
}


@pytest.mark.parametrize("prepared", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_says_is_saved_whole_and_training_goes_on_bit_by_bit(kind, prepared):
    model = net()
    optimizer = KINDS[kind](model)
    train(model, optimizer)
    saved = save([capture({"model": model, "optimizer": optimizer})])
    kept = [tensor for name, tensor in saved.tensors.items() if name.startswith("optimizer.")]
    said = contents(optimizer.state_dict())
    assert said
    assert contents(kept) == said

    other = net(seed=1)
    fresh = KINDS[kind](other)
    if prepared:
        train(other, fresh, 1)
    load(saved, {"optimizer": fresh, "model": other}, wanted=set())
    assert contents(fresh.state_dict()) == said
    train(model, optimizer)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_names_of_a_wrapped_optimizer_are_those_of_its_parameters():
    model = net()
    for optimizer in (KINDS["reordered_inside"](model), KINDS["container"](model), KINDS["scaled"](model)):
        train(model, optimizer)
        saved = save([capture({"model": model, "optimizer": optimizer})])
        said = optimizer.state_dict()
        expected = said["state.2.bias.exp_avg"] if isinstance(optimizer, Container) else None
        if isinstance(optimizer, Delegating):
            expected = optimizer.inner.state[model[2].bias]["exp_avg"]
        elif isinstance(optimizer, Scaled):
            expected = optimizer.state[model[2].bias]["exp_avg"] / Scaled.SCALE
        assert torch.equal(saved.tensors["optimizer.state.2.bias.exp_avg"], expected)
        assert sum(len(g["params"]) for g in saved.values["optimizer.param_groups"]) == 4


@pytest.mark.parametrize("kind", ["delegating", "reordered_inside", "container"])
def test_a_wrapped_optimizer_and_a_plain_one_load_from_each_other(kind):
    model, other = net(), net(seed=1)
    wrapped, plain = KINDS[kind](model), torch.optim.AdamW(other.parameters(), lr=9.0)
    train(model, wrapped)
    saved = save([capture({"model": model, "optimizer": wrapped})])
    load(saved, {"model": other, "optimizer": plain}, wanted=set())
    assert plain.param_groups[0]["lr"] == 0.01
    again = save([capture({"model": other, "optimizer": plain})])
    assert again.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in saved.tensors.items())

    third = net(seed=2)
    back = KINDS[kind](third)
    load(again, {"model": third, "optimizer": back}, wanted=set())
    assert contents(back.state_dict()) == contents(wrapped.state_dict())


def test_state_in_another_dtype_than_the_parameter_is_not_rounded_by_torchs_load_state_dict():
    model, other = net().bfloat16(), net(seed=1).bfloat16()
    optimizer, fresh = (Delegating(Momentum(m.parameters())) for m in (model, other))
    optimizer.inner.state[model[0].weight]["momentum_buffer"] = position_values((4, 3)) + 1 / 3
    load(save([capture({"model": model, "optimizer": optimizer})]), {"model": other, "optimizer": fresh}, wanted=set())
    assert torch.equal(fresh.inner.state[other[0].weight]["momentum_buffer"], position_values((4, 3)) + 1 / 3)


def test_a_wrapper_without_its_module_is_refused():
    with pytest.raises(UsageError, match=r"optimizer: a parameter of shape \(4, 3\) in group 0 belongs to no module"):
        capture({"optimizer": KINDS["delegating"](net())})


def test_a_wrapper_in_a_list_of_optimizers_is_refused_by_its_class():
    first, second = net(), net()
    optimizers = [torch.optim.AdamW(first.parameters()), KINDS["delegating"](second)]
    with pytest.raises(UsageError, match=r"optimizer: a list of optimizers, among them a Delegating, whose state_dict\(\)"):
        capture({"model": [first], "optimizer": optimizers})


def test_hooks_on_state_dict_are_heard():
    model, other = net(), net(seed=1)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    train(model, optimizer)
    for each, tokens in ((optimizer, 7), (fresh, 0)):
        each.tokens = tokens
        each.register_state_dict_post_hook(lambda o, said: {**said, "tokens": o.tokens})
        each.register_load_state_dict_pre_hook(lambda o, said: setattr(o, "tokens", said["tokens"]))
    saved = save([capture({"model": model, "optimizer": optimizer})])
    assert saved.values["optimizer.tokens"] == 7
    load(saved, {"model": other, "optimizer": fresh}, wanted=set())
    assert fresh.tokens == 7
    assert contents(fresh.state_dict()) == contents(optimizer.state_dict())


def test_state_that_belongs_to_no_parameter_is_kept():
    model, other = net(), net(seed=1)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    train(model, optimizer)
    optimizer.state["seen"] = {"tokens": 5, "sums": position_values((2,))}
    optimizer.state["global_step"] = 12
    saved = save([capture({"model": model, "optimizer": optimizer})])
    with pytest.raises(MismatchError, match=r"optimizer.state.seen.sums|optimizer.state.global_step"):
        load(saved, {"model": other, "optimizer": fresh}, wanted=set())
    fresh.state["seen"] = {"tokens": 0, "sums": torch.zeros(2)}
    load(saved, {"model": other, "optimizer": fresh}, wanted=set())
    assert fresh.state["global_step"] == 12
    assert fresh.state["seen"]["tokens"] == 5
    assert torch.equal(fresh.state["seen"]["sums"], position_values((2,)))
    assert torch.equal(fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


# Dicts: what tutorials save.


def as_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def made(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Groups that torch numbers otherwise than the model orders its parameters."""
    named = sorted(model.named_parameters(), key=lambda pair: pair[1].ndim)
    vectors, matrices = named[:2], named[2:]
    if kind == "unnamed":
        vectors, matrices = [p for _, p in vectors], [p for _, p in matrices]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=lr)


HAS_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def both(saved: Saved) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in saved.tensors.items() if name not in saved.aliases}


@pytest.mark.skipif(not HAS_NAMES, reason="torch puts names into groups from 2.6 on")
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_dicts_with_the_names_of_parameters_and_objects_load_from_each_other(stepped):
    model = net()
    optimizer = made("named", model, 0.3)
    train(model, optimizer)
    from_dicts = save([capture(as_dicts(model, optimizer))])
    from_objects = save([capture({"model": model, "optimizer": optimizer})])
    assert both(from_dicts).keys() == both(from_objects).keys()
    assert all(torch.equal(both(from_objects)[name], tensor) for name, tensor in both(from_dicts).items())
    assert from_dicts.values == from_objects.values
    assert capture(as_dicts(model, optimizer)).warnings == ()

    other = net(seed=1)
    fresh = made("unnamed", other, 9.0)
    load(from_dicts, {"model": other, "optimizer": fresh}, wanted=set())
    third = net(seed=2)
    last = made("named", third, 9.0)
    if stepped:
        train(third, last)
    state = as_dicts(third, last)
    load(from_objects, state, wanted=set())
    third.load_state_dict(state["model"])
    last.load_state_dict(state["optimizer"])
    for m, o in ((other, fresh), (third, last)):
        assert [g["lr"] for g in o.param_groups] == [0.3, 0.3]
        assert [g["weight_decay"] for g in o.param_groups] == [0.0, 0.01]
        for mine, theirs in zip(m.parameters(), model.parameters(), strict=True):
            assert torch.equal(o.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_a_dict_is_named_by_the_optimizer_that_a_scheduler_shows():
    model = net()
    optimizer = made("unnamed", model, 0.3)
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {**as_dicts(model, optimizer), "scheduler": scheduler}
    saved = save([capture(state)])
    assert capture(state).warnings == ()
    assert torch.equal(saved.tensors["optimizer.state.2.bias.exp_avg"], optimizer.state[model[2].bias]["exp_avg"])


def test_an_optimizer_finds_its_parameters_in_a_state_dict_by_their_memory():
    model = net()
    optimizer = made("unnamed", model, 0.3)
    train(model, optimizer)
    saved = save([capture({"model": model.state_dict(), "optimizer": optimizer})])
    assert torch.equal(saved.tensors["optimizer.state.2.bias.exp_avg"], optimizer.state[model[2].bias]["exp_avg"])
    other = net(seed=1)
    fresh = made("unnamed", other, 9.0)
    load(saved, {"model": other.state_dict(), "optimizer": fresh}, wanted=set())
    assert torch.equal(fresh.state[other[2].bias]["exp_avg"], optimizer.state[model[2].bias]["exp_avg"])
    assert torch.equal(other[2].bias, model[2].bias)


def test_a_copy_of_the_parameters_is_not_taken_for_them():
    model = net()
    copied = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="belongs to no module in the state"):
        capture({"ema": copied, "optimizer": made("unnamed", model, 0.3)})


def test_numbers_that_nothing_names_stay_and_are_told():
    model = net()
    optimizer = made("unnamed", model, 0.3)
    train(model, optimizer)
    captured = capture(as_dicts(model, optimizer))
    assert [w.partition(":")[0] for w in captured.warnings] == ["optimizer"]
    saved = save([captured])
    assert torch.equal(saved.tensors["optimizer.state.3.exp_avg"], optimizer.state[model[2].weight]["exp_avg"])
    other = net(seed=1)
    last = made("unnamed", other, 9.0)
    train(other, last)
    state = as_dicts(other, last)
    load(saved, state, wanted=set())
    last.load_state_dict(state["optimizer"])
    assert torch.equal(last.state[other[2].weight]["exp_avg"], optimizer.state[model[2].weight]["exp_avg"])


def test_a_state_dict_alone_is_saved_under_the_names_that_it_says():
    """Its tensors lie as they look: nothing in the state shows their parameters."""
    model = net()
    optimizer = made("named", model, 0.1)
    train(model, optimizer)
    saved = save([capture({"optimizer": optimizer.state_dict()})])
    assert torch.equal(saved.tensors["optimizer.state.2.weight.exp_avg"], optimizer.state[model[2].weight]["exp_avg"])


def test_numbers_never_stand_for_names_that_are_numbers():
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizer = torch.optim.SGD(reversed(list(model)), lr=0.1, momentum=0.9)
    for i, p in enumerate(model):
        optimizer.state[p]["momentum_buffer"] = torch.full((2,), float(i))
    saved = save([capture({"model": model.state_dict(), "optimizer": optimizer.state_dict()})])
    fresh = torch.optim.SGD(model, lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError, match="no saved group holds parameter 0"):
        load(saved, {"model": model, "optimizer": fresh})


def test_a_state_dict_by_name_takes_the_layout_of_a_declared_shard():
    full = position_values((4, 3))
    parts = []
    for rank in range(2):
        rows = full[2 * rank : 2 * rank + 2].clone()
        param = nn.Parameter(rows)
        optimizer = torch.optim.SGD([("w", param)], lr=0.1, momentum=0.9)
        optimizer.state[param] = {"momentum_buffer": rows * 10}
        parts.append(capture({"model": {"w": LocalShard(rows, (4, 3), (2 * rank, 0))}, "optimizer": optimizer.state_dict()}))
    assert torch.equal(save(parts).tensors["optimizer.state.w.momentum_buffer"], full * 10)


class App:
    """A trainer's state, as tutorials of DCP write it, but by number."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def test_an_object_that_holds_model_and_optimizer_is_named_and_loads_into_a_fresh_one():
    model, other = net(), net(seed=1)
    optimizer, fresh = made("unnamed", model, 0.3), made("unnamed", other, 9.0)
    train(model, optimizer)
    saved = save([capture({"app": App(model, optimizer)})])
    assert "app.optim.state.model.2.bias.exp_avg" in saved.tensors
    load(saved, {"app": App(other, fresh)}, wanted=set())
    assert torch.equal(fresh.state[other[2].bias]["exp_avg"], optimizer.state[model[2].bias]["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 0.3


# Lazy staging.


class Bare(torch.optim.Optimizer):
    """A wrapper that never called ``Optimizer.__init__``, as accelerate's: torch runs no hooks for it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_a_step_of_an_optimizer_inside_of_another_is_held_back_too():
    model = net()
    optimizer = Combined(model)
    train(model, optimizer)
    held, owned = held_back({"model": model, "again": [optimizer], "optimizer": optimizer})
    assert {id(o) for o in held} == {id(o) for o in (optimizer, *optimizer.parts.values())}
    assert len(held) == 3
    buffer = optimizer.parts["momentum"].state[model[0].weight]["momentum_buffer"]
    assert {id(buffer), id(model[0].weight)} <= {id(tensor) for tensor in owned}
    waits: list[int] = []
    guard = StepGuard(held, ChangeDetector([]), lambda: waits.append(1))
    for part in optimizer.parts.values():
        waits.clear()
        part.step()
        assert waits
    guard.close()


def test_a_wrapper_that_runs_no_hooks_is_held_back_and_saved():
    model = net()
    optimizer = Bare(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    held, owned = held_back({"model": model, "optimizer": optimizer})
    assert {id(o) for o in held} == {id(optimizer), id(optimizer.inner)}
    assert {id(p) for p in model.parameters()} < {id(tensor) for tensor in owned}
    waits: list[int] = []
    guard = StepGuard([optimizer], ChangeDetector([]), lambda: waits.append(1))
    optimizer.step()
    assert waits
    guard.close()
    saved = save([capture({"model": model, "optimizer": optimizer})])
    assert torch.equal(saved.tensors["optimizer.state.2.bias.exp_avg"], optimizer.inner.state[model[2].bias]["exp_avg"])


class Closed(Bare):
    """A wrapper whose own optimizer no attribute leads to, so that it is the first one found."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.given = lambda: inner

    inner = property(lambda self: self.given())  # type: ignore[assignment]


def test_a_wrapper_that_runs_no_hooks_is_saved_inside_an_object():
    model = net()
    optimizer = Closed(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    saved = save([capture({"app": App(model, optimizer)})])
    assert torch.equal(saved.tensors["app.optim.state.model.0.weight.exp_avg"], optimizer.inner.state[model[0].weight]["exp_avg"])


def test_what_an_optimizer_may_change_that_cannot_be_held_is_not_left_for_later():
    model = net()
    matrices = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 2])
    captured = torch.optim.AdamW(model.parameters(), capturable=True)
    held, owned = held_back({"model": model, "optimizers": [matrices, captured]})
    assert [id(o) for o in held] == [id(matrices)]
    assert owned == []


class Sharp(torch.optim.Optimizer):
    """As the usual sharpness-aware one: its inner optimizer shares its groups, but keeps a state that it does not say."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_state_inside_that_torchs_state_dict_leaves_out_is_named():
    model = net()
    optimizer = Sharp(model.parameters())
    assert capture({"model": model, "optimizer": optimizer}).warnings == ()
    train(model, optimizer)
    (text,) = capture({"model": model, "optimizer": optimizer}).warnings
    assert text.startswith("optimizer: Sharp holds a SGD whose state is not in its state_dict(), so it is not saved")


def test_torchs_own_wrapper_keeps_what_it_counts():
    model, other = net(), net(seed=1)

    class Averager:
        step = 0

        def average_parameters(self, params: Any) -> None:
            self.step += 1

    optimizer, fresh = (PostLocalSGDOptimizer(torch.optim.SGD(m.parameters(), 0.1, 0.9), Averager()) for m in (model, other))
    train(model, optimizer)
    saved = save([capture({"model": model, "optimizer": optimizer})])
    assert saved.values["optimizer.step"] == 2
    load(saved, {"model": other, "optimizer": fresh}, wanted=set())
    assert fresh.averager.step == 2
    assert contents(fresh.state_dict()) == contents(optimizer.state_dict())


# Modules, schedulers and samplers that say their state themselves.


class Renaming(nn.Module):
    """Says its weight under another name, and two things more, one of them a dict; takes no arguments, as many do not."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(position_values((3, 2)) * scale)
        self.version, self.average = scale, {"mean": torch.full((2,), scale)}

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": super().state_dict()["weight"], "version": self.version, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict({"weight": state["w"]})
        self.version, self.average = state["version"], state["average"]


def test_a_module_that_says_its_state_itself_comes_back_with_its_optimizer():
    model, other = Renaming(2.0), Renaming(0.0)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, other))
    optimizer.state[model.weight]["momentum_buffer"] = position_values((3, 2), salt=1)
    saved = save([capture({"model": model, "optimizer": optimizer})])
    assert torch.equal(saved.tensors["model.w"], position_values((3, 2)) * 2)
    load(saved, {"model": other, "optimizer": fresh})
    assert torch.equal(other.weight, model.weight)
    assert other.version == 2.0
    assert torch.equal(other.average["mean"], torch.full((2,), 2.0))
    assert torch.equal(fresh.state[other.weight]["momentum_buffer"], position_values((3, 2), salt=1))


class Sampler:
    """A sampler whose state has tensors, tuples and a list of dicts."""

    def __init__(self, at: int) -> None:
        self.at, self.order, self.log = at, torch.arange(6) * at, [{"epoch": at, "seen": torch.full((2,), at)}]

    def state_dict(self) -> tuple[Any, ...]:
        return self.at, {"order": self.order, "log": self.log}

    def load_state_dict(self, state: tuple[Any, ...]) -> None:
        self.at, (self.order, self.log) = state[0], state[1].values()


class Warmup(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "peak": torch.tensor([float(self.last_epoch)])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["inner"])
        self.peak = state["peak"]


def test_schedulers_and_samplers_that_say_their_state_themselves_come_back():
    def schedule() -> Warmup:
        return Warmup(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), lambda step: 1 / (step + 1))

    scheduler, other = schedule(), schedule()
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step()
    sampler, fresh = Sampler(3), Sampler(0)
    load(save([capture({"s": scheduler, "d": sampler})]), {"s": other, "d": fresh}, wanted=set())
    assert (other.last_epoch, other.peak.item(), fresh.at, fresh.log[0]["epoch"]) == (3, 3.0, 3, 3)
    assert torch.equal(fresh.order, sampler.order)
    assert torch.equal(fresh.log[0]["seen"], torch.full((2,), 3))


def test_an_optimizer_in_the_state_of_an_object_is_asked_too():
    class Holder:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["optimizer"] is self.optimizer

    model, other = net(), net(seed=1)
    optimizer, fresh = (KINDS["counting"](m) for m in (model, other))
    train(model, optimizer)
    saved = save([capture({"model": model, "holder": Holder(optimizer)})])
    load(saved, {"model": other, "holder": Holder(fresh)}, wanted=set())
    assert contents(fresh.state_dict()) == contents(optimizer.state_dict())
    assert fresh.count == 2
