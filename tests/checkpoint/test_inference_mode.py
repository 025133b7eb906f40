"""Calls within ``torch.inference_mode()``, as in a function for validation, leave nothing that works there alone; its tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import LiveReshard, Manager, Memory
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.engine.saving import async_save

SHAPE = (300, 300)
"""More than what is copied by numpy."""


@pytest.fixture(autouse=True)
def no_idle_buffer() -> None:
    """The pool keeps the buffer that the first save made."""
    POOL.clear()


def values(number: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) * 0.25 + number


def inferred(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(*SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, SHAPE[0])).sum().backward()
    optimizer.step()


def assert_has(path: Path, wanted: torch.Tensor) -> None:
    assert checkpoint.verify(path).ok
    assert torch.equal(checkpoint.read(path)["x"], wanted)


@pytest.mark.parametrize("first", ["prepare", "async_save"])
def test_a_save_in_inference_mode_leaves_a_buffer_that_later_saves_can_fill(tmp_path: Path, first: str):
    state = {"x": values(1)}
    if first == "prepare":
        inferred(lambda: checkpoint.prepare(state))
    else:
        inferred(lambda: checkpoint.async_save(tmp_path / "a", state).result())
        assert_has(tmp_path / "a", state["x"])
    checkpoint.async_save(tmp_path / "b", state).result()
    assert_has(tmp_path / "b", state["x"])


@pytest.mark.parametrize("hold", ["optimizers", "caller"])
def test_a_thread_stages_what_a_caller_in_inference_mode_saves(tmp_path: Path, hold: Any):
    model, optimizer = trained()
    state = {"x": values(1), "model": model, "optimizer": optimizer}
    inferred(lambda: checkpoint.async_save(tmp_path / "a", state, staging="lazy", hold=hold).result())
    assert_has(tmp_path / "a", state["x"])
    step(model, optimizer)


def test_a_lazy_save_copies_tensors_of_inference_mode_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They have no version counter, so the guard could miss a change of a few rows until its thread has copied them."""
    model, may_copy, stage = torch.nn.Linear(1200, 1200), threading.Event(), async_save.SaveThread._stage
    monkeypatch.setattr(async_save.SaveThread, "_stage", lambda self, fill: may_copy.wait(600) and stage(self, fill))
    optimizer = torch.optim.Adagrad(model.parameters())
    held = optimizer.state[model.weight]["sum"] = inferred(lambda: torch.zeros(1200, 1200))
    handle = checkpoint.async_save(tmp_path, {"model": model, "optimizer": optimizer}, staging="lazy")
    inferred(lambda: held[0].fill_(7))
    may_copy.set()
    handle.result(600)
    assert not checkpoint.read(tmp_path)["optimizer.state.weight.sum"].any()


def test_saves_to_memory_in_inference_mode(tmp_path: Path):
    state = {"x": values(0)}
    with Manager(tmp_path / "run", memory=Memory(copies=0, folder=str(tmp_path / "shm"))) as manager:
        inferred(lambda: manager.async_save(1, state, staging="lazy", hold="caller").result())
        state["x"].copy_(values(2))
        manager.async_save(2, state).result()
        state["x"].zero_()
        found = inferred(lambda: manager.load_latest(state))
    assert (found.step, found.tier) == (2, "memory")
    assert torch.equal(state["x"], values(2))


def test_an_optimizer_that_is_loaded_in_inference_mode_can_be_stepped(tmp_path: Path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    other = torch.nn.Linear(*SHAPE)
    fresh = torch.optim.AdamW(other.parameters())
    inferred(lambda: checkpoint.load(tmp_path / "a", {"model": other, "optimizer": fresh}))
    for one in (model, other):
        one.zero_grad()
    step(model, optimizer)
    step(other, fresh)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("loads", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_inference_mode_are_loaded_into(tmp_path: Path, dtype: torch.dtype, loads: bool):
    source = values(3)
    checkpoint.save(tmp_path / "a", {"x": source})
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:]):
        made = inferred(lambda: torch.zeros(SHAPE[0], SHAPE[0], dtype=dtype))
        target = {"x": inferred(lambda: view(made))}  # noqa: B023
        wanted = source[: len(target["x"])].to(dtype)
        checkpoint.save(tmp_path / "a", {"x": source[: len(target["x"])]})
        with torch.inference_mode(loads):
            checkpoint.load(tmp_path / "a", target, cast=True)
        assert torch.equal(target["x"], wanted)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_live_reshard_goes_on_in_and_out_of_inference_mode(dtype: torch.dtype, staged: bool):
    src = {"x": values(0)}
    for made in (torch.zeros(SHAPE, dtype=dtype), inferred(lambda: torch.zeros(SHAPE, dtype=dtype))):
        dst = {"x": made}
        kept = inferred(lambda: LiveReshard(src, dst, cast=True, staged=staged))  # noqa: B023
        for number, mode in enumerate((False, True, False)):
            src["x"].copy_(values(number))
            with torch.inference_mode(mode):
                kept.run()
            assert torch.equal(dst["x"], src["x"].to(dtype))
