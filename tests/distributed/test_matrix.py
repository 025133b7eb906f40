"""Each pairing of saved and loaded layout, on 1, 2, 3, 4 and 8 processes: model and AdamW come back bit for bit.

One job of 8 ranks hosts every case: a layout of fewer ranks stands on the first ones, with a process group of its own.
"""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from reshard_ckpt import checkpoint
from tests.distributed.net import (
    FROZEN,
    KEYS,
    STATELESS,
    STEP,
    TIED,
    UNITS,
    FlatAdam,
    Layout,
    Net,
    Place,
    blank,
    groups,
    local,
    named,
    reference,
)
from tests.launch import run_ranks

LAYOUTS = (
    Layout("plain"),
    Layout("dp", dp=2, data="ddp"),
    Layout("dp", dp=3),
    Layout("dp", dp=4, data="ddp"),
    Layout("dp", dp=8),
    Layout("tp", tp=2),
    Layout("tp", tp=3),
    Layout("tp", tp=4),
    Layout("tp", tp=8),
    Layout("pp", pp=2, stages_per_rank=2),
    Layout("pp", pp=3, stages_per_rank=2),
    Layout("pp", pp=4),
    Layout("pp", pp=8),
    Layout("dp×tp", dp=2, tp=2),
    Layout("dp×tp", dp=4, tp=2, data="copies"),
    Layout("dp×tp", dp=2, tp=4),
    Layout("dp×pp", pp=2, dp=2),
    Layout("dp×pp", pp=2, dp=4, data="ddp", stages_per_rank=2),
    Layout("tp×pp", pp=2, tp=2),
    Layout("tp×pp", pp=4, tp=2),
    Layout("dp×tp×pp", pp=2, dp=2, tp=2),
    Layout("dp×tp×pp", pp=2, dp=2, tp=2, data="copies", stages_per_rank=3),
    Layout("flat", flat=True, data="copies"),
    Layout("flat", dp=2, flat=True, data="ddp"),
    Layout("flat", dp=3, flat=True, data="ddp"),
    Layout("flat", dp=4, flat=True, data="copies"),
    Layout("flat", dp=8, flat=True, data="ddp"),
    Layout("flat", dp=2, tp=2, flat=True, data="copies"),
    Layout("flat", dp=3, tp=2, flat=True, data="copies"),
    Layout("flat", pp=2, dp=2, tp=2, flat=True, data="copies"),
)
KINDS = ("dp", "tp", "pp", "dp×tp", "dp×pp", "tp×pp", "dp×tp×pp", "flat")


class Case:
    """One layout: the reference on it, and a target to load into."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.place = layout, Place(layout)
        if self.place.mine:
            self.modules = self.place.modules()
            self.parts = {key: self.place.modules(key) for key in KEYS}
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

    def adam(self, modules: list[nn.Module], parts: dict[str, list[nn.Module]], full: bool) -> torch.optim.AdamW:
        chosen = groups(modules)
        if not full:
            chosen = [{"params": g["params"], "lr": 9.0, "weight_decay": 9.0} for g in chosen]
        optimizer = torch.optim.AdamW(chosen)
        if full:
            sources = {key: dict(named(parts[key])) for key in KEYS}
            for name, p in named(modules):
                if p.requires_grad and name != STATELESS:
                    optimizer.state[p] = {"step": torch.tensor(STEP), **{key: sources[key][name].detach() for key in KEYS}}
        return optimizer

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
        sources = {key: dict(named(self.parts[key])) for key in KEYS}
        all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        names = {id(p): name for name, p in reversed(list(named(self.target)))}
        for optimizer in all_optimizers:
            for group, wanted in zip(optimizer.param_groups, groups(self.target), strict=True):
                if group["params"] and (group["lr"], group["weight_decay"]) != (wanted["lr"], wanted["weight_decay"]):
                    wrong.append(f"group: {group['lr']}, {group['weight_decay']}")
                for p in group["params"]:
                    wrong += self.wrong_state(names[id(p)], p, optimizer.state.get(p), sources)
        return wrong

    def wrong_state(self, name: str, p: torch.Tensor, state: Any, sources: dict[str, dict[str, nn.Parameter]]) -> list[str]:
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


def expected_whole() -> dict[str, torch.Tensor]:
    """The whole checkpoint, from the reference alone."""
    net = Net(UNITS)
    out = {f"model.{name}": reference(name, t.shape) for name, t in net.state_dict().items()}
    for name, p in net.named_parameters(remove_duplicate=False):
        if name not in (FROZEN, STATELESS):
            prefix = f"optimizer.state.{name}"
            out |= {f"{prefix}.{key}": reference(name, p.shape, key) for key in KEYS} | {f"{prefix}.step": torch.tensor(STEP)}
    return out


def wrong_whole(path: Path, layout: Layout) -> list[str]:
    """What a single process reads, against the reference."""
    whole, wanted = checkpoint.read(path), expected_whole()
    tensors = {name: t for name, t in whole.items() if isinstance(t, torch.Tensor)}
    wrong = [f"{layout}: {name}" for name in tensors.keys() ^ wanted.keys()]
    wrong += [f"{layout}: {n}" for n in tensors.keys() & wanted.keys() if not torch.equal(tensors[n], wanted[n])]
    saved = whole["optimizer.param_groups"]
    if [g["lr"] for g in saved] != [0.25, 0.125] or {n for g in saved for n in g["params"]} != {
        name for name, _ in Net(UNITS).named_parameters(remove_duplicate=False) if name != FROZEN
    }:
        wrong.append(f"{layout}: {saved}")
    return wrong


def pairings() -> list[tuple[int, int]]:
    """Every kind to every kind, in turn between other members of the kinds; and every pairing of sizes."""
    by_kind = {kind: [i for i, layout in enumerate(LAYOUTS) if layout.kind == kind] for kind in KINDS}
    sources, targets = ({kind: cycle(members) for kind, members in by_kind.items()} for _ in range(2))
    chosen = [(next(sources[saved]), next(targets[loaded])) for saved, loaded in product(KINDS, KINDS)]
    chosen += [(next(sources[saved]), next(targets[loaded])) for loaded, saved in product(KINDS, KINDS)][::2]
    sizes = {(LAYOUTS[a].size, LAYOUTS[b].size) for a, b in chosen}
    for want in product((1, 2, 3, 4, 8), repeat=2):
        if want not in sizes:
            chosen.append(tuple(next(i for i, layout in enumerate(LAYOUTS) if layout.size == n) for n in want))
    return list(dict.fromkeys(chosen))


def matrix_job(folder: str) -> list[str]:
    cases = [Case(layout) for layout in LAYOUTS]
    wrong: list[str] = []
    for i, case in enumerate(cases):
        if case.place.mine:
            checkpoint.save(Path(folder, str(i)), case.saved_state(), mesh=case.place.mesh, process_group=case.place.group)
    dist.barrier()
    for i, case in enumerate(cases):
        if i % dist.get_world_size() == dist.get_rank():
            wrong += wrong_whole(Path(folder, str(i)), case.layout)
    for saved, loaded in pairings():
        if cases[loaded].place.mine:
            problems = cases[loaded].load(Path(folder, str(saved)))
            wrong += [f"{LAYOUTS[saved]} to {LAYOUTS[loaded]}: rank {dist.get_rank()}: {problem}" for problem in problems]
    return wrong


def test_pairings_cover_all_kinds_and_all_sizes():
    chosen = pairings()
    assert {(LAYOUTS[a].kind, LAYOUTS[b].kind) for a, b in chosen} >= set(product(KINDS, KINDS))
    assert {(LAYOUTS[a].size, LAYOUTS[b].size) for a, b in chosen} >= set(product((1, 2, 3, 4, 8), repeat=2))


def test_pairings_save_and_load_every_layout_of_those_kinds():
    parallel = {i for i, layout in enumerate(LAYOUTS) if layout.kind in KINDS}
    assert parallel <= {a for a, _ in pairings()}
    assert parallel <= {b for _, b in pairings()}


def test_every_layout_loads_every_other_bit_for_bit(tmp_path: Path):
    wrong = [line for rank in run_ranks(matrix_job, 8, str(tmp_path), timeout_s=300) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])


def test_reference_differs_at_every_position_and_between_names():
    whole = expected_whole()
    assert all(t.unique().numel() == t.numel() for t in whole.values() if t.ndim)
    firsts = [float(t.flatten()[0]) for name, t in whole.items() if t.ndim and TIED[1] not in name]
    assert len(set(firsts)) == len(firsts)
