"""A model that FSDP2 sharded on the meta device has no memory: the error says how it gets some, and then it loads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UnsupportedError
from tests.helpers import position_values
from tests.launch import run_ranks


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def meta_job(folder: str) -> tuple[str, bool, bool]:
    with torch.device("meta"):
        model = make_model()
    for part in (*model, model):
        fully_shard(part)
    early = torch.optim.AdamW(model.parameters())
    try:
        checkpoint.load(folder, {"model": model})
    except UnsupportedError as error:
        said = str(error)
    model.to_empty(device="cpu")
    checkpoint.load(folder, {"model": model, "optimizer": early})
    right = all(
        torch.equal(parameter.full_tensor(), position_values(parameter.shape, salt=i))
        for i, parameter in enumerate(model.parameters())
    )
    model(torch.ones(2, 7)).sum().backward()
    early.step()  # of the parameters that the model has
    moved = not torch.equal(model[0].weight.full_tensor(), position_values((5, 7)))
    return said, right, moved


def test_fsdp2_on_the_meta_device_loads_after_the_lines_of_the_error(tmp_path: Path):
    model = make_model()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = position_values(parameter.shape, salt=i)
    checkpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    for said, right, moved in run_ranks(meta_job, 2, str(tmp_path)):
        assert "model: 4 of 4 tensors are on the meta device" in said
        assert 'model.to_empty(device="cuda")' in said
        assert right
        assert moved
