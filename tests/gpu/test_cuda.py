"""On CUDA: what is saved is the state at the call, whatever streams the training uses and however soon it goes on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.engine.saving.staging import MIN_RING_BYTES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False here")


class Net(nn.Module):
    """With a normalization whose statistics every forward changes."""

    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        out: torch.Tensor = self.norm(x)
        return out


class Training:
    """A model, its average and its optimizer, on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.data = torch.randn(256, 1024, device="cuda")
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "average": self.average, "optimizer": self.optimizer}

    def expected(self) -> dict[str, torch.Tensor]:
        """A copy of every tensor, by the stream that trains."""
        out = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        out |= {f"average.{k}": v.clone() for k, v in self.average.state_dict().items()}
        names = {p: n for n, p in self.model.named_parameters()}
        for param, held in self.optimizer.state.items():
            out |= {f"optimizer.state.{names[param]}.{k}": v.clone() for k, v in held.items()}
        return out


def assert_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    read = checkpoint.read(path)
    tensors = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name].cpu())] == []


@pytest.mark.parametrize("on_a_stream", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("staging", ["sync", "eager", "lazy", "bounded"])
def test_checkpoint_is_the_state_at_the_call_while_training_goes_on(tmp_path: Path, staging: str, on_a_stream: bool) -> None:
    stream = torch.cuda.Stream() if on_a_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        training = Training()
        for number in range(3):
            # Much queued work, so that a copy which does not wait for the stream would read what was there before.
            for _ in range(20):
                training.step()
            expected = training.expected()
            path = tmp_path / str(number)
            if staging == "sync":
                checkpoint.save(path, training.state())
                handle = None
            elif staging == "bounded":
                handle = checkpoint.async_save(path, training.state(), host_buffer_bytes=MIN_RING_BYTES)
            else:
                handle = checkpoint.async_save(path, training.state(), staging=staging)
            for _ in range(5):  # forward changes the statistics at once, and the average; the steps are held back
                training.step()
            if handle is not None:
                handle.result(60)
            assert_saved(path, expected)


def test_loads_into_device_memory(tmp_path: Path) -> None:
    training = Training()
    expected = training.expected()
    checkpoint.save(tmp_path, training.state())
    other = Training()
    for _ in range(3):
        other.step()
    checkpoint.load(tmp_path, other.state())
    assert [name for name, t in other.expected().items() if not torch.equal(t, expected[name])] == []


def test_staging_memory_is_pinned_and_reused(tmp_path: Path) -> None:
    training = Training()
    POOL.clear()
    checkpoint.prepare(training.state())
    ring = POOL.take(1, pinned=True)
    assert ring.is_pinned()
    address = ring.data_ptr()
    POOL.give_back(ring)
    checkpoint.async_save(tmp_path, training.state()).result(60)
    again = POOL.take(1, pinned=True)
    assert again.data_ptr() == address
    POOL.give_back(again)


def test_strided_and_tiny_device_tensors_are_saved_whole(tmp_path: Path) -> None:
    base = torch.arange(4_000_000, device="cuda", dtype=torch.float32).reshape(2000, 2000)
    state = {"t": base.t(), "every other": base[::2, ::3], "scalar": base[3, 5], "half": base.to(torch.bfloat16)}
    checkpoint.async_save(tmp_path, {"s": state}).result(60)
    read = checkpoint.read(tmp_path)
    assert all(torch.equal(read[f"s.{name}"], tensor.cpu()) for name, tensor in state.items())
