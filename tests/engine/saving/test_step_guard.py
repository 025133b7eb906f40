"""An optimizer steps again only when all is copied, by whatever way it steps; and a step that comes through is found."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.saving import async_save
from reshard_ckpt.engine.saving.step_guard import ChangeDetector, GuardedStep, StepGuard, _put_in_front
from reshard_ckpt.errors import UsageError
from reshard_ckpt.state.optimizers import owned_tensors

Optimizer = torch.optim.Optimizer


def stepped(kind: type[Optimizer] = torch.optim.AdamW, **options: Any) -> Optimizer:
    weight = torch.nn.Parameter(torch.arange(300.0).reshape(3, 100))
    weight.grad = torch.ones(3, 100)
    optimizer = kind([weight], lr=0.1, **options)
    optimizer.step()
    return optimizer


def weight_of(optimizer: Optimizer) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0]


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    model = torch.nn.Module()
    model.weight = weight_of(optimizer)
    return {"model": model, "optimizer": optimizer}


def guarded(optimizer: Optimizer, wait: Callable[[], None] = lambda: None) -> StepGuard:
    return StepGuard([optimizer], ChangeDetector(owned_tensors([optimizer])), wait)


# --- every way to step is met, before anything else happens ---


class Negates(Optimizer):
    """A wrapper with a step of its own, which never runs torch's hooks."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            weight_of(self.inner).neg_()
        self.inner.step(closure)


def changing(optimizer: Optimizer, *_: Any) -> None:
    """A user's step hook."""
    weight_of(optimizer).data.mul_(2)


def plain(optimizer: Optimizer) -> Callable[[], Any]:
    return lambda: optimizer.step()


def bound_before(optimizer: Optimizer) -> Callable[[], Any]:
    return optimizer.step


def scheduled(optimizer: Optimizer) -> Callable[[], Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return lambda: (optimizer.step(), scheduler.step())


def scheduled_and_bound_before(optimizer: Optimizer) -> Callable[[], Any]:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer.step


def scaled(optimizer: Optimizer) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def replaced_on_the_instance(optimizer: Optimizer) -> Callable[[], Any]:
    def step() -> None:
        weight_of(optimizer).data.add_(1)

    optimizer.step = step  # type: ignore[method-assign]
    return lambda: optimizer.step()


def with_a_hook(optimizer: Optimizer) -> Callable[[], Any]:
    optimizer.register_step_pre_hook(changing)
    return lambda: optimizer.step()


def with_a_hook_and_bound_before(optimizer: Optimizer) -> Callable[[], Any]:
    with_a_hook(optimizer)
    return optimizer.step


def put_back_for_each_step(optimizer: Optimizer) -> Callable[[], Any]:
    """As Accelerate does around its scaler."""
    before = optimizer.step

    def step() -> None:
        optimizer.step = before  # type: ignore[method-assign]
        optimizer.step()

    return step


def compiled_forward(optimizer: Optimizer) -> Callable[[], Any]:
    """Of old, to compile anything took the hooks away from all of torch's optimizers."""
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))
    return lambda: optimizer.step()


WAYS = [
    plain,
    bound_before,
    scheduled,
    scheduled_and_bound_before,
    scaled,
    replaced_on_the_instance,
    with_a_hook,
    with_a_hook_and_bound_before,
    put_back_for_each_step,
    compiled_forward,
]


@pytest.fixture
def global_hook() -> Iterator[None]:
    """A hook for all optimizers, which changes their parameters."""
    handle = register_optimizer_step_pre_hook(changing)
    yield
    handle.remove()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("global_hook")
def test_the_wait_comes_before_anything_is_changed(way: Callable[[Optimizer], Callable[[], Any]]) -> None:
    optimizer = stepped(torch.optim.SGD)
    step = way(optimizer)
    before, seen = weight_of(optimizer).detach().clone(), []

    def wait() -> None:
        seen.append(torch.equal(weight_of(optimizer), before))
        guard.close()

    guard = guarded(optimizer, wait)
    step()
    assert seen == [True]
    assert not torch.equal(weight_of(optimizer), before)
    step()
    assert seen == [True]


@pytest.mark.parametrize("held", ["wrapper", "inner", "both"])
def test_a_wrapper_with_a_step_of_its_own_is_met(held: str) -> None:
    inner = stepped(torch.optim.SGD)
    wrapper = Negates(inner)
    before, seen = weight_of(inner).detach().clone(), []

    def wait() -> None:
        seen.append(torch.equal(weight_of(inner), before))
        guard.release()

    optimizers = {"wrapper": [wrapper], "inner": [inner], "both": [wrapper, inner]}[held]
    guard = StepGuard(optimizers, ChangeDetector(owned_tensors([inner])), wait)
    wrapper.step()
    # The wrapper changes something before it steps the inner one: to hold that one alone is too late.
    assert seen == [held != "inner"]


def test_one_optimizer_that_is_held_twice_is_let_go_of_once(tmp_path: Path) -> None:
    optimizer = stepped(torch.optim.SGD)
    waits: list[int] = []
    guard = StepGuard([optimizer, optimizer], ChangeDetector(owned_tensors([optimizer] * 2)), lambda: waits.append(1))
    guard.close()
    optimizer.step()
    assert waits == []
    for _ in range(3):
        state = {**state_of(optimizer), "again": {"and": [optimizer]}}
        handle = checkpoint.async_save(tmp_path, state, staging="lazy")
        optimizer.step()
        handle.result(600)


# --- what comes through is found ---


def compiled(optimizer: Optimizer) -> Callable[[], Any]:
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    step()
    return step


def unwrapped(optimizer: Optimizer) -> Callable[[], Any]:
    return lambda: type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def through_data(optimizer: Optimizer) -> Callable[[], Any]:
    return lambda: weight_of(optimizer).data.mul_(2)


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd, fused": (torch.optim.SGD, {"fused": True}),
    "sgd, momentum, fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "sgd, foreach": (torch.optim.SGD, {"foreach": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw, fused": (torch.optim.AdamW, {"fused": True}),
    "adamw, that learns nothing yet": (torch.optim.AdamW, {"fused": True, "weight_decay": 0}),
    "adagrad, fused": (torch.optim.Adagrad, {"fused": True}),
}


@pytest.mark.parametrize(
    ("name", "way"), [*product(OPTIMIZERS, [unwrapped, through_data]), ("sgd", compiled), ("adamw, fused", compiled)]
)
def test_a_change_that_came_through_is_found(name: str, way: Callable[[Optimizer], Callable[[], Any]]) -> None:
    kind, options = OPTIMIZERS[name]
    optimizer = stepped(kind, **options)
    if "nothing" in name and way is not through_data:
        optimizer.param_groups[0]["lr"] = 0.0
    change = way(optimizer)
    guarded(optimizer).close()  # what came before is no fault
    held: list[int] = []
    guard = guarded(optimizer, lambda: held.append(1))
    change()
    with pytest.raises(
        UsageError, match=rf"parameters or state of {kind.__name__} changed while they were copied.*staging='eager'"
    ):
        guard.close()
    optimizer.step()
    assert held == []  # let go all the same


@pytest.mark.parametrize("num_rows", [1000, 1 << 20], ids=["small enough to be compared whole", "not in the samples"])
def test_a_change_of_few_rows_is_found(num_rows: int) -> None:
    weight = torch.nn.Parameter(torch.empty(num_rows, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = guarded(optimizer)
    with torch.no_grad():
        (weight.data if num_rows == 1000 else weight)[0] = 1
    with pytest.raises(UsageError, match="state of SGD changed"):
        guard.close()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 5), (1, 40)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2])
@pytest.mark.parametrize("others_bytes", [0, 8 << 20], ids=["compared whole", "sampled"])
def test_changes_are_detected_in_any_tensor(shape: tuple[int, ...], dtype: torch.dtype, others_bytes: int) -> None:
    tensors = [torch.zeros(shape, dtype=dtype), torch.zeros(7, 9).to(dtype).t(), torch.zeros(1, dtype=dtype).expand(4)]
    # Parts of one element with another stride than 1: a slice of a column, and a 1 × 1 convolution in channels_last.
    tensors += [torch.zeros(3, 4).to(dtype)[:1, 1], torch.zeros(6, 5, 1, 1).to(dtype).to(memory_format=torch.channels_last)]
    tensors.append(torch.zeros(others_bytes, dtype=torch.uint8))
    with torch.inference_mode():
        tensors.append(torch.zeros(5, dtype=dtype))
    detector = ChangeDetector(tensors)
    assert not detector.has_changed()
    tensors[1].data.fill_(1)
    assert detector.has_changed()


def test_what_is_sampled_is_bounded() -> None:
    tensors = [torch.zeros(2000) for _ in range(1000)]
    detector = ChangeDetector(tensors)
    assert sum(sample.numel() for sample in detector.take_snapshot().samples) <= 64 * 16 * 4


def test_step_that_comes_while_the_guard_looks_is_held_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, held, copied = stepped(), threading.Event(), threading.Event()
    before = weight_of(optimizer).detach().clone()
    training = threading.Thread(target=lambda: (optimizer.step(), held.set()))

    def wait() -> None:
        held.set()
        copied.wait(600)

    guard = guarded(optimizer, wait)
    look = ChangeDetector.has_changed

    def look_late(self: ChangeDetector) -> bool:
        training.start()
        held.wait(600)  # until the step is held back, or made
        return look(self)

    monkeypatch.setattr(ChangeDetector, "has_changed", look_late)
    guard.close()
    assert torch.equal(weight_of(optimizer), before)
    copied.set()
    training.join()
    assert not torch.equal(weight_of(optimizer), before)


# --- it never disturbs training ---


@pytest.mark.parametrize("bound", ["at the step", "before"])
def test_a_save_that_ends_while_torch_iterates_over_hooks_does_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """The save lets go only once a step waits for it, with hooks to come that were registered after the save began."""
    state = state_of(stepped(torch.optim.SGD))
    optimizer, awaited = state["optimizer"], threading.Event()
    step = optimizer.step if bound == "before" else lambda: optimizer.step()
    stage, wait_for = async_save.SaveThread._stage, async_save.RunningSave.wait_for

    def held(self: async_save.SaveThread, fill: Callable[[], None]) -> BaseException | None:
        awaited.wait(600)
        return stage(self, fill)

    def asked(self: async_save.RunningSave, future: Future[None]) -> None:
        awaited.set()
        wait_for(self, future)

    monkeypatch.setattr(async_save.SaveThread, "_stage", held)
    monkeypatch.setattr(async_save.RunningSave, "wait_for", asked)
    handle = checkpoint.async_save(tmp_path, state, staging="lazy")
    ran: list[int] = []

    def while_iterating(*_: object) -> None:
        handle.result(600)
        ran.append(1)

    for _ in range(3):
        optimizer.register_step_pre_hook(while_iterating)
    step()
    assert ran == [1, 1, 1]


def test_a_held_step_looks_like_the_step_that_it_stands_for() -> None:
    optimizer = stepped()
    signature = inspect.signature(optimizer.step)
    _put_in_front(optimizer)
    first = optimizer.step
    _put_in_front(optimizer)
    assert optimizer.step is first
    assert inspect.signature(optimizer.step) == signature
    assert optimizer.step.__name__ == "step"
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
    assert "closure" in inspect.signature(optimizer.step).parameters
    _put_in_front(optimizer)
    assert isinstance(optimizer.step, GuardedStep)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
    before = weight_of(optimizer).detach().clone()
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7
    assert not torch.equal(weight_of(optimizer), before)
    scheduler.step()  # would warn, which is an error here, had it not seen the step


class Pickled(torch.optim.SGD):
    """An optimizer that is copied with all it has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("kind", [torch.optim.SGD, Pickled])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_of_an_optimizer_steps_itself(kind: type[Optimizer], copied: Callable[[Optimizer], Optimizer]) -> None:
    optimizer = stepped(kind)
    _put_in_front(optimizer)
    other = copied(optimizer)
    before = weight_of(optimizer).detach().clone()
    weight_of(other).grad = torch.ones(3, 100)
    other.step()
    assert torch.equal(weight_of(optimizer), before)
    assert not torch.equal(weight_of(other), before)


def test_an_optimizer_that_was_held_goes_when_nobody_has_it() -> None:
    optimizer = stepped()
    guarded(optimizer).close()
    gc.disable()  # not only when cycles are collected: it may hold most of a device's memory
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
