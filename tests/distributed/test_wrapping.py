"""Optimizers that say their state themselves, and state dicts by number, from each layout into each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from tests.distributed.test_optimizers import as_it_is, held_of, kinds_of, plain_name, same_here, stepped, trainable, whole
from tests.launch import run_ranks
from tests.wrapping import Combined, Container, Counting, Scaled


def kept_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, Combined):
        return list(optimizer.parts.values())
    if isinstance(optimizer, Container):
        return optimizer.optimizers
    return [getattr(optimizer, "inner", optimizer)]


def states(net: nn.Module, optimizer: Any, made: Callable[[Any], Any] = whole) -> dict[str, Any]:
    """All state by name and key, each tensor whole, or what else is made of it."""
    named = {plain_name(name): p for name, p in net.named_parameters()}
    return {
        f"{name}.{key}": made(value)
        for name, p in named.items()
        for inner in kept_in(optimizer)
        if p in inner.state
        for key, value in sorted(inner.state[p].items())
    }


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "counting": lambda net: Counting(torch.optim.AdamW(reversed(trainable(net)), lr=0.01)),
    "combined": Combined,
    "container": lambda net: Container([net], lr=0.01),
    "scaled": lambda net: Scaled(trainable(net), lr=0.01),
}


def wrapping_job(folder: str) -> list[str]:
    kinds = kinds_of(dist.get_world_size())
    wrong: list[str] = []
    for name, make in MAKERS.items():
        for saved in kinds:
            net = kinds[saved]("")
            optimizer = make(net)
            stepped(net, optimizer)
            path = Path(folder, f"{name}-{saved}")
            checkpoint.async_save(path, {"model": net, "optimizer": optimizer}, staging="lazy").result()
            wanted = states(net, optimizer)
            assert wanted
            for loaded in kinds:
                target = kinds[loaded]("other")
                held, fresh = held_of(target), make(target)
                checkpoint.load(path, {"model": target, "optimizer": fresh})
                wrong += [] if same_here(states(target, fresh, as_it_is), wanted, held) else [f"{path.name} to {loaded}"]
    return wrong


@pytest.mark.slow
def test_what_an_optimizer_says_goes_from_any_layout_to_any(tmp_path: Path):
    assert run_ranks(wrapping_job, 2, str(tmp_path)) == [[], []]


def dicts_job(folder: str) -> list[str]:
    """Also parameters of which a rank holds nothing, and which it must find by their empty memory."""
    kinds = kinds_of(dist.get_world_size())
    wrong: list[str] = []
    for saved in ("fsdp", "plain"):
        net = kinds[saved]("")
        optimizer = torch.optim.AdamW([(n, p) for n, p in net.named_parameters() if p.requires_grad], lr=0.01)
        stepped(net, optimizer)
        wanted = states(net, optimizer)
        forms = {
            "dicts": {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
            "object": {"model": net.state_dict(), "optimizer": optimizer},
        }
        for form, state in forms.items():
            path = Path(folder, f"{saved}-{form}")
            checkpoint.save(path, state)
            for loaded in ("fsdp", "plain"):
                target = kinds[loaded]("other")
                held = held_of(target)
                fresh = torch.optim.AdamW([(n, p) for n, p in target.named_parameters() if p.requires_grad], lr=1.0)
                checkpoint.load(path, {"model": target, "optimizer": fresh})
                wrong += [] if same_here(states(target, fresh, as_it_is), wanted, held) else [f"{path.name} to {loaded}"]
                again = kinds[loaded]("other")
                last = torch.optim.AdamW([(n, p) for n, p in again.named_parameters() if p.requires_grad], lr=1.0)
                dicts = {"model": again.state_dict(), "optimizer": last.state_dict()}
                checkpoint.load(path, dicts)
                last.load_state_dict(dicts["optimizer"])
                wrong += [] if same_here(states(again, last, as_it_is), wanted, held) else [f"{path.name} to dicts of {loaded}"]
    return wrong


@pytest.mark.slow
def test_state_dicts_with_names_go_from_any_layout_to_any(tmp_path: Path):
    assert run_ranks(dicts_job, 3, str(tmp_path)) == [[], [], []]
