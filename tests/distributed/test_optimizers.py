"""Optimizers as users have them: groups, tied, frozen and stateless parameters, SGD, factored state, from any layout to any."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from reshard_ckpt import checkpoint
from tests.distributed.net import Net


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        net(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_state_of_a_tied_weight_reaches_a_fresh_optimizer(tmp_path: Path):
    net = Net(("embedding", 0, "head"))
    optimizer = torch.optim.AdamW(net.parameters())
    stepped(net, optimizer)
    checkpoint.save(tmp_path / "a", {"model": net, "optimizer": optimizer})
    other = Net(("embedding", 0, "head"), "other")
    fresh = torch.optim.AdamW(other.parameters())
    checkpoint.load(tmp_path / "a", {"model": other, "optimizer": fresh})
    assert len(fresh.state) == len(optimizer.state)
    assert torch.equal(fresh.state[other.head.weight]["exp_avg"], optimizer.state[net.head.weight]["exp_avg"])
    assert float(fresh.state[other.head.weight]["step"]) == 2
