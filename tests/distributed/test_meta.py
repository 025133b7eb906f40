"""A model that FSDP2 sharded on the meta device has no memory: the error says how it gets some, and then it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UnsupportedError
from tests.helpers import position_values
from tests.launch import on_ranks


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


@on_ranks(2)
def test_fsdp2_on_the_meta_device_loads_after_the_lines_of_the_error(tmp_path: Path):
    whole = make_model()
    for i, parameter in enumerate(whole.parameters()):
        parameter.data = position_values(parameter.shape, salt=i)
    checkpoint.save(tmp_path, {"model": whole, "optimizer": torch.optim.AdamW(whole.parameters())})
    with torch.device("meta"):
        model = make_model()
    for part in (*model, model):
        fully_shard(part)
    early = torch.optim.AdamW(model.parameters())
    says = r'model: 4 of 4 tensors are on the meta device(?s:.*)model.to_empty\(device="cuda"\)'
    with pytest.raises(UnsupportedError, match=says):
        checkpoint.load(tmp_path, {"model": model})
    model.to_empty(device="cpu")
    checkpoint.load(tmp_path, {"model": model, "optimizer": early})
    for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), wanted)
    model(torch.ones(2, 7)).sum().backward()
    early.step()  # of the parameters that the model has
    assert not torch.equal(model[0].weight.full_tensor(), whole[0].weight)
