"""The groups of Megatron's optimizers, each of which gets the hyperparameters that were saved of its like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reshard_ckpt import megatron
from tests.families.megatron.stand_ins import ChainedOptimizer, DistributedOptimizer, ShardedTensor


class GroupedOptimizer(DistributedOptimizer):
    """A distributed optimizer with these groups."""

    def __init__(self, groups: list[dict[str, Any]], *, stepped: bool) -> None:
        self.param = torch.nn.Parameter(torch.zeros(4))
        super().__init__([self.param], 1, 0, 100, stepped=stepped)
        self.optimizer = torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups])
        self.groups = groups

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [{**group, "step": 7} for group in self.groups]}}


def _group(lr: float, decay: float, *, expert: bool = False) -> dict[str, Any]:
    return {"lr": lr, "wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False}


@pytest.mark.parametrize(
    ("saved", "own", "loaded"),
    [
        ([[(0.1, 1.0), (0.2, 0.0)]], [[(9, 0.0), (9, 1.0)]], [[0.2, 0.1]]),
        ([[(0.1, 1.0), (0.2, 0.0)], [(0.3, 1.0, True)]], [[(9, 0.0), (9, 1.0), (9, 1.0, True)]], [[0.2, 0.1, 0.3]]),
        ([[(0.1, 1.0), (0.2, 0.0)]], [[(9, 0.0), (9, 1.0)], [(9, 1.0, True)]], [[0.2, 0.1], [0.1]]),
        ([[(0.1, 1.0), (0.2, 1.0)]], [[(9, 1.0), (9, 1.0)]], [[0.1, 0.2]]),  # by their places, as nothing tells them apart
    ],
)
def test_groups_of_an_optimizer_are_found_by_what_they_are_for(saved, own, loaded):
    """Some versions of Megatron take them by their places, which differ between ranks and where experts are parallel or not."""

    def tree(of: list[Any], *, stepped: bool) -> dict[str, Any]:
        groups = [[_group(lr, decay, expert=bool(expert)) for lr, decay, *expert in one] for one in of]
        parts = [GroupedOptimizer(one, stepped=stepped) for one in groups]
        model = {f"w{i}": ShardedTensor(f"w{i}", one.param, (4,), (4,), (0,)) for i, one in enumerate(parts)}
        return {"model": model, "optimizer": ChainedOptimizer(parts)}

    megatron.save(tree(saved, stepped=True), "memory://groups")
    new = tree(own, stepped=True)
    megatron.load(new, "memory://groups", strict="ignore_all")
    found = [[group["lr"] for group in one.loaded["optimizer"]["param_groups"]] for one in new["optimizer"].chained_optimizers]
    assert found == loaded
