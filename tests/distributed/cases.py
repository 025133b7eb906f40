"""A layout with everything that is on it: the reference to save, a blank target to load into, and what came out wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from reshard_ckpt import checkpoint
from tests.distributed.net import (
    FROZEN,
    HIDDEN,
    KEYS,
    STATELESS,
    STEP,
    UNITS,
    FlatAdam,
    Layout,
    Net,
    Place,
    blank,
    groups,
    local,
    merged,
    named,
    reference,
    share_device,
)


class Case:
    """One layout: the reference on it, and a target to load into."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.place = layout, Place(layout)
        if self.place.mine:
            self.modules = self.place.modules()
            self.parts = {key: self.place.parts(key, self.modules) for key in KEYS}
            self.target = self.place.modules()

    def saved_state(self) -> dict[str, Any]:
        return {"model": self.place.model(self.modules), "optimizer": self.optimizers(self.modules, full=True)}

    def optimizers(self, modules: list[nn.Module], *, full: bool) -> Any:
        """One optimizer, or a list of one for each stage; with the reference in it, or such as never stepped."""
        if self.layout.flat:
            return FlatAdam(self.place, modules, self.parts if full else None)
        if self.layout.pp == 1:
            return self.adam(modules, self.parts, full)
        each = [self.adam([m], {key: [self.parts[key][i]] for key in KEYS}, full) for i, m in enumerate(modules)]
        return each if self.layout.stages_per_rank > 1 or not modules else each[0]

    def adam(self, modules: list[nn.Module], parts: dict[str, list[dict[str, torch.Tensor]]], full: bool) -> torch.optim.AdamW:
        chosen = groups(modules)
        if not full:
            chosen = [{"params": g["params"], "lr": 9.0, "weight_decay": 9.0} for g in chosen]
        optimizer = torch.optim.AdamW(chosen)
        if full:
            sources = {key: merged(parts[key]) for key in KEYS}
            for name, p in named(modules):
                if p.requires_grad and name != STATELESS:
                    optimizer.state[p] = {"step": torch.tensor(STEP), **{key: sources[key][name].detach() for key in KEYS}}
        return optimizer

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.saved_state(), mesh=self.place.mesh, process_group=self.place.group)

    def load(self, path: Path) -> list[str]:
        """Load into the target, blank before, and say what came wrong."""
        blank(self.target)
        optimizers = self.optimizers(self.target, full=False)
        checkpoint.load(path, {"model": self.place.model(self.target), "optimizer": optimizers}, process_group=self.place.group)
        return [*self.wrong_model(), *(self.wrong_flat(optimizers) if self.layout.flat else self.wrong_adam(optimizers))]

    def wrong_model(self) -> list[str]:
        wrong = []
        for got, wanted in zip(self.target, self.modules, strict=True):
            pairs = zip((*got.named_parameters(), *got.named_buffers()), (*wanted.parameters(), *wanted.buffers()), strict=True)
            wrong += [name for (name, one), other in pairs if not torch.equal(local(one), local(other))]
        return wrong

    def wrong_adam(self, optimizers: Any) -> list[str]:
        wrong = []
        sources = {key: merged(self.parts[key]) for key in KEYS}
        all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        names = {id(p): name for name, p in reversed(list(named(self.target)))}
        for optimizer in all_optimizers:
            for group, wanted in zip(optimizer.param_groups, groups(self.target), strict=True):
                if group["params"] and (group["lr"], group["weight_decay"]) != (wanted["lr"], wanted["weight_decay"]):
                    wrong.append(f"group: {group['lr']}, {group['weight_decay']}")
                for p in group["params"]:
                    wrong += self.wrong_state(names[id(p)], p, optimizer.state.get(p), sources)
        return wrong

    def wrong_state(self, name: str, p: torch.Tensor, state: Any, sources: dict[str, dict[str, torch.Tensor]]) -> list[str]:
        if name == STATELESS or state is None:
            return [] if (name == STATELESS) == (state is None) else [f"{name}: state {state}"]
        bad = [f"{name}.{key}" for key in KEYS if not torch.equal(local(state[key]), local(sources[key][name]))]
        bad += [
            f"{name}.{key}: a {type(state[key])}" for key in KEYS if isinstance(state[key], DTensor) != isinstance(p, DTensor)
        ]
        return bad + ([f"{name}: step {state['step']}"] if float(state["step"]) != STEP else [])

    def wrong_flat(self, optimizer: FlatAdam) -> list[str]:
        wanted = FlatAdam(self.place, self.target, self.parts)
        wrong = [
            f"{name}.{key}"
            for name, entry in optimizer.state.items()
            for key in KEYS
            if not torch.equal(entry[key].tensor, wanted.state[name][key].tensor)
        ]
        wrong += [name for name, entry in optimizer.state.items() if float(entry["step"]) != STEP]
        for got, group in zip(optimizer.param_groups, wanted.param_groups, strict=True):
            if (got["lr"], got["weight_decay"]) != (group["lr"], group["weight_decay"]) or got["params"] != group["params"]:
                wrong.append(f"group: {got}")
        return wrong


def expected_whole(hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """The whole checkpoint, from the reference alone."""
    net = Net(UNITS, hidden=hidden)
    out = {f"model.{name}": reference(name, t.shape) for name, t in net.state_dict().items()}
    for name, p in net.named_parameters(remove_duplicate=False):
        if name not in (FROZEN, STATELESS):
            prefix = f"optimizer.state.{name}"
            out |= {f"{prefix}.{key}": reference(name, p.shape, key) for key in KEYS} | {f"{prefix}.step": torch.tensor(STEP)}
    return out


def wrong_whole(path: Path, layout: Layout) -> list[str]:
    """What a single process reads, against the reference."""
    whole, wanted = checkpoint.read(path), expected_whole(layout.hidden)
    tensors = {name: t for name, t in whole.items() if isinstance(t, torch.Tensor)}
    wrong = [f"{layout}: {name}" for name in tensors.keys() ^ wanted.keys()]
    wrong += [f"{layout}: {n}" for n in tensors.keys() & wanted.keys() if not torch.equal(tensors[n], wanted[n])]
    saved = whole["optimizer.param_groups"]
    if [g["lr"] for g in saved] != [0.25, 0.125] or {n for g in saved for n in g["params"]} != {
        name for name, _ in Net(UNITS).named_parameters(remove_duplicate=False) if name != FROZEN
    }:
        wrong.append(f"{layout}: {saved}")
    return wrong


def wrong_pairings(folder: Path, layouts: Sequence[Layout], pairings: Iterable[tuple[int, int]]) -> list[str]:
    """Save each layout; read each as a whole, on ranks by turns; load one into another. What came wrong on this rank."""
    share_device()
    cases = [Case(layout) for layout in layouts]
    wrong: list[str] = []
    for i, case in enumerate(cases):
        if case.place.mine:
            case.save(folder / str(i))
    dist.barrier()
    for i, case in enumerate(cases):
        if i % dist.get_world_size() == dist.get_rank():
            wrong += wrong_whole(folder / str(i), case.layout)
    for saved, loaded in pairings:
        if cases[loaded].place.mine:
            problems = cases[loaded].load(folder / str(saved))
            wrong += [f"{layouts[saved]} to {layouts[loaded]}: rank {dist.get_rank()}: {problem}" for problem in problems]
    return wrong
