"""Sharded optimizers and fused weights: ragged flat ranges, ZeroRedundancyOptimizer, and local tensors made of several boxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from reshard_ckpt import LocalShard, checkpoint
from tests.distributed.net import Net, reference
from tests.launch import on_ranks


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    """The same batches on every rank, so that gradients are equal without any exchange."""
    for step in steps:
        net(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
def test_zero_redundancy_optimizer_on_other_numbers_of_ranks_and_plain(tmp_path: Path):
    rank = dist.get_rank()
    groups = {num: dist.new_group(list(range(num))) for num in (1, 2, 3, 4)}

    def made(num: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = Net(("embedding", 0, 1, "head"))
        chosen = [
            {"params": [p for p in net.parameters() if p.ndim == 2], "weight_decay": 0.25},
            {"params": [p for p in net.parameters() if p.ndim < 2 and p.requires_grad]},
        ]
        if num == 1:
            return net, torch.optim.AdamW(chosen, lr=lr)
        return net, ZeroRedundancyOptimizer(chosen, torch.optim.AdamW, process_group=groups[num], lr=lr)

    plain, adam = made(1, 0.01)
    train(plain, adam, range(2))
    adam.param_groups[1]["lr"] = 0.002
    names = {p: name for name, p in plain.named_parameters()}
    expected = {f"optimizer.state.{names[p]}.{k}": v.clone() for p, s in adam.state.items() for k, v in s.items()}
    wrong: list[str] = []
    for num in (1, 3, 4):
        if rank < num:
            net, optimizer = made(num, 0.01)
            train(net, optimizer, range(2))
            optimizer.param_groups[1]["lr"] = 0.002
            checkpoint.save(tmp_path / str(num), {"model": net, "optimizer": optimizer}, process_group=groups[num])
    dist.barrier()
    train(plain, adam, range(2, 4))
    for saved in (1, 3, 4):
        read = checkpoint.read(tmp_path / str(saved))
        wrong += [f"read {saved}: {name}" for name, value in expected.items() if not torch.equal(read[name], value)]
        for num in (1, 2, 3, 4):
            if rank < num:
                net, optimizer = made(num, 9.0)
                checkpoint.load(tmp_path / str(saved), {"model": net, "optimizer": optimizer}, process_group=groups[num])
                if [g["lr"] for g in optimizer.param_groups] != [0.01, 0.002] or optimizer.param_groups[0][
                    "weight_decay"
                ] != 0.25:
                    wrong.append(f"{saved} to {num}: {[g['lr'] for g in optimizer.param_groups]}")
                train(net, optimizer, range(2, 4))
                pairs = zip(net.named_parameters(), plain.parameters(), strict=True)
                wrong += [f"{saved} to {num}: rank {rank}: {name}" for (name, p), q in pairs if not torch.equal(p, q)]
                if num > 1 and len(optimizer.optim.state) >= len(names):
                    wrong.append(f"{saved} to {num}: rank {rank} holds the state of all parameters")
    assert not wrong


DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 6, 8, 4, 3, 12
SECTIONS = {"qkv": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), "swiglu": (HIDDEN, HIDDEN)}


def fused_pieces(name: str, tp: int, rank: int) -> tuple[list[tuple[Any, Any, Any]], torch.Tensor]:
    """The pieces of a rank's fused weight, and the index of its rows in the global one: a part of every section."""
    pieces, rows, at, base = [], [], 0, 0
    for size in SECTIONS[name]:
        each = size // tp
        pieces.append(((at, 0), (base + rank * each, 0), (each, DIM)))
        rows.append(torch.arange(base + rank * each, base + (rank + 1) * each))
        at, base = at + each, base + size
    return pieces, torch.cat(rows)


def fused_state(tp: int, rank: int, *, full: bool) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Parameters declared by `LocalShard`, an AdamW that knows nothing of it, and each tensor with what it must be."""
    model, state, checks = {}, {}, []
    for name, sections in SECTIONS.items():
        pieces, rows = fused_pieces(name, tp, rank)
        shape = (sum(sections), DIM)
        param = nn.Parameter(torch.full((len(rows), DIM), -1.0))
        model[name] = LocalShard(param, shape, pieces=pieces)
        state[param] = {key: reference(name, shape, key)[rows] for key in ("exp_avg", "exp_avg_sq")}
        checks.append((name, param.detach(), reference(name, shape)[rows]))
    optimizer = torch.optim.AdamW(list(state))
    if full:
        for _, tensor, wanted in checks:
            tensor.copy_(wanted)
        for param, entries in state.items():
            optimizer.state[param] = {"step": torch.tensor(3.0), **entries}
    return {"model": model, "optimizer": optimizer, "wanted": state}, checks


@on_ranks(4)
def test_fused_qkv_and_swiglu_on_tp_2_4_1(tmp_path: Path):
    rank = dist.get_rank()
    groups = {num: dist.new_group(list(range(num))) for num in (1, 2, 4)}
    wrong: list[str] = []
    previous = ""
    for tp in (2, 4, 1, 4):
        path = tmp_path / f"{previous or 'first'}-{tp}"
        if rank < tp:
            made, checks = fused_state(tp, rank, full=not previous)
            wanted = made.pop("wanted")
            if previous:
                checkpoint.load(previous, made, process_group=groups[tp])
            wrong += [f"{path.name}: rank {rank}: {name}" for name, got, value in checks if not torch.equal(got, value)]
            for param, entries in wanted.items():
                held = made["optimizer"].state[param]
                wrong += [f"{path.name}: rank {rank}: {k}" for k, value in entries.items() if not torch.equal(held[k], value)]
            path = tmp_path / f"tp{tp}-{len(previous)}"
            checkpoint.save(path, made, mesh={"tp": tp}, process_group=groups[tp])
        dist.barrier()
        previous = str(tmp_path / f"tp{tp}-{len(previous)}")
        read = checkpoint.read(previous)
        for name, sections in SECTIONS.items():
            for key in ("", "exp_avg", "exp_avg_sq"):
                full = f"optimizer.state.{name}.{key}" if key else f"model.{name}"
                if not torch.equal(read[full], reference(name, (sum(sections), DIM), key)):
                    wrong.append(f"tp {tp}: {full}")
    assert not wrong
