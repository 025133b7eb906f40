"""On any device: what is saved is the state at the call, whatever streams the training uses and however soon it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.engine.saving.staging import MIN_RING_BYTES
from tests import device as simulated
from tests.gpu.training import Training, assert_saved


@pytest.fixture
def slow(device: str) -> Iterator[str]:
    """A device that is long behind the host."""
    if simulated.is_loaded():
        simulated.set_speed(kernel_us=100)
    yield device
    if simulated.is_loaded():
        simulated.set_speed()


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    yield
    torch.accelerator.set_stream(before)


@pytest.mark.parametrize("on_a_stream", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("staging", ["sync", "eager", "lazy", "bounded", "caller"])
def test_checkpoint_is_the_state_at_the_call_while_training_goes_on(
    tmp_path: Path, slow: str, staging: str, on_a_stream: bool
) -> None:
    stream = torch.Stream(device=f"{slow}:0") if on_a_stream else torch.accelerator.current_stream()
    with current(stream):
        training = Training(slow, width=1024) if slow == "cuda" else Training(slow)
        for number in range(2):
            # Much queued work, so that a copy which does not wait for the stream would read what was there before.
            for _ in range(5):
                training.step()
            expected = training.expected()
            path = tmp_path / str(number)
            if staging == "sync":
                checkpoint.save(path, training.state())
                handle = None
            elif staging == "bounded":
                handle = checkpoint.async_save(path, training.state(), host_buffer_bytes=MIN_RING_BYTES)
            elif staging == "caller":
                handle = checkpoint.async_save(path, training.state(), staging="lazy", hold="caller")
                handle.staged()
            else:
                handle = checkpoint.async_save(path, training.state(), staging=staging)
            for _ in range(2):  # forward changes the statistics at once, and the average; the steps are held back
                training.step()
            if handle is not None:
                handle.result(600)
            assert_saved(path, expected)


@pytest.mark.parametrize("on_a_stream", [False, True], ids=["default stream", "stream of its own"])
def test_loads_into_device_memory_behind_what_is_queued(tmp_path: Path, slow: str, on_a_stream: bool) -> None:
    training = Training(slow)
    expected = training.expected()
    checkpoint.save(tmp_path, training.state())
    with current(torch.Stream(device=f"{slow}:0") if on_a_stream else torch.accelerator.current_stream()):
        other = Training(slow)
        for _ in range(3):
            other.step()
        checkpoint.load(tmp_path, other.state())
        loaded = other.expected()
        assert [name for name, t in loaded.items() if not torch.equal(t.cpu(), expected[name].cpu())] == []


def test_strided_targets_and_casts_are_in_place_when_a_load_returns(tmp_path: Path, slow: str) -> None:
    whole = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)
    checkpoint.save(tmp_path, {"s": {"t": whole, "half": whole / 8, "row": whole[3]}})
    base = torch.zeros(400, 400, device=slow)
    state = {"t": base[:300, :200].t(), "half": torch.zeros(200, 300, device=slow).bfloat16(), "row": base[-1, :300]}
    other = torch.Stream(device=f"{slow}:0")
    checkpoint.load(tmp_path, {"s": state}, cast=["s.half"])
    with current(other):  # which nothing has told to wait
        assert torch.equal(state["t"].cpu(), whole)
        assert torch.equal(state["half"].cpu(), (whole / 8).bfloat16())
        assert torch.equal(state["row"].cpu(), whole[3])


def test_staging_memory_is_pinned_and_reused(tmp_path: Path, device: str) -> None:
    training = Training(device)
    POOL.clear()
    checkpoint.prepare(training.state())
    ring = POOL.take(1, pinned=True)
    assert ring.is_pinned()
    address = ring.data_ptr()
    POOL.give_back(ring)
    checkpoint.async_save(tmp_path, training.state()).result(600)
    again = POOL.take(1, pinned=True)
    assert again.data_ptr() == address
    POOL.give_back(again)


@pytest.mark.parametrize("how", ["sync", "eager"])
def test_strided_and_tiny_device_tensors_are_saved_whole(tmp_path: Path, device: str, how: str) -> None:
    base = torch.arange(4_000_000, dtype=torch.float32).reshape(2000, 2000)
    there = base.to(device)
    state = {"t": there.t(), "every other": there[::2, ::3], "scalar": there[3, 5], "half": there.to(torch.bfloat16)}
    state |= {f"tiny {i}": there[i, : i % 7] for i in range(50)}
    # Of the host, between them in the file.
    state |= {f"tiny {i} beside": base[i, : i % 5].clone() for i in range(50)}
    checkpoint.save(tmp_path, {"s": state}) if how == "sync" else checkpoint.async_save(tmp_path, {"s": state}).result(600)
    read = checkpoint.read(tmp_path)
    assert [name for name, tensor in state.items() if not torch.equal(read[f"s.{name}"], tensor.cpu())] == []


def test_numbers_of_steps_on_the_host_lie_between_state_on_the_device(tmp_path: Path, device: str) -> None:
    training = Training(device, layers=20, foreach=False)
    assert next(iter(training.optimizer.state.values()))["step"].device.type == "cpu"
    expected = training.expected()
    handle = checkpoint.async_save(tmp_path, training.state(), staging="lazy")
    training.step()
    handle.result(600)
    assert_saved(tmp_path, expected)
