"""What the simulated device cannot show: CUDA graphs, compiled steps, forks beside pinned memory, dtypes, and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.errors import CheckpointError
from tests.gpu import on_cuda
from tests.gpu.training import Training, assert_saved
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False here")

FRESH = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""For ranks: a process that has counted devices by CUDA forks none that can use them."""


def graphed(training: Training) -> Callable[[], None]:
    """Capture whole steps in a CUDA graph; returns what replays one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        training.model(training.data).square().mean().backward()
        training.optimizer.step()
    return graph.replay


def is_refused(handle: checkpoint.SaveHandle) -> bool:
    """Whether a save ends with the error that its state changed while it was saved."""
    try:
        handle.result(600)
    except CheckpointError as error:
        if "changed" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_a_step_in_a_graph_is_saved_as_at_the_call(tmp_path: Path, staging: str) -> None:
    training = Training("cuda", width=1024, plain=True, capturable=True)
    replay = graphed(training)
    replay()
    expected = training.expected()
    handle = checkpoint.async_save(tmp_path, training.state(), staging=staging)
    for _ in range(20):
        replay()
    handle.result(600)
    assert_saved(tmp_path, expected)


def test_steps_in_a_graph_that_no_guard_sees_are_saved_right_or_refused(tmp_path: Path) -> None:
    outcomes = set()
    for number in range(5):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        training = Training("cuda", width=1024, plain=True)
        training.model, training.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        training.step()
        replay = graphed(training)
        replay()
        expected = training.expected()
        handle = checkpoint.async_save(tmp_path / str(number), training.state(), staging="lazy")
        for _ in range(number * 20):
            replay()
        if is_refused(handle):
            outcomes.add("refused")
        else:
            assert_saved(tmp_path / str(number), expected)
            outcomes.add("saved")
    assert "saved" in outcomes


def test_a_compiled_step_is_saved_as_at_the_call(tmp_path: Path) -> None:
    training = Training("cuda", width=256, plain=True)
    step = torch.compile(training.optimizer.step)
    for _ in range(2):
        training.model(training.data).square().mean().backward()
        step()
    expected = training.expected()
    handle = checkpoint.async_save(tmp_path, training.state(), staging="lazy")
    step()
    if not is_refused(handle):
        assert_saved(tmp_path, expected)


def test_workers_forked_beside_pinned_memory_change_no_save(tmp_path: Path) -> None:
    training = Training("cuda", width=2048)
    checkpoint.prepare(training.state())
    for number in range(2):
        loader = torch.utils.data.DataLoader(torch.arange(64), num_workers=2, multiprocessing_context="fork", batch_size=8)
        items = iter(loader)
        training.step()
        expected = training.expected()
        handle = checkpoint.async_save(tmp_path / str(number), training.state(), staging="lazy")
        assert sum(int(batch.sum()) for batch in items) == 2016
        training.step()
        handle.result(600)
        assert_saved(tmp_path / str(number), expected)
    ring = POOL.take(1, pinned=True)
    assert ring.is_pinned()
    POOL.give_back(ring)


def test_every_dtype_is_loaded_into_device_memory(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64]
    raw = torch.randint(0, 2, (4096,), dtype=torch.uint8)
    saved = {str(dtype): (raw if dtype is torch.bool else raw * 37).view(dtype).cuda() for dtype in dtypes}
    saved |= {"scalar": torch.tensor(3.5, device="cuda"), "empty": torch.empty(0, 7, device="cuda")}
    checkpoint.save(tmp_path, {"s": saved})
    target = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.load(tmp_path, {"s": target})
    bits = {
        name: [t.reshape(-1).view(torch.uint8).cpu() for t in (saved[name], target[name])] for name in saved if name != "empty"
    }
    assert [name for name, pair in bits.items() if not torch.equal(*pair)] == []


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_saves_to_memory_are_the_state_at_the_call(tmp_path: Path, staging: str) -> None:
    training = Training("cuda", width=1024)
    memory = Memory(copies=0, folder=str(tmp_path / "memory"))
    with Manager(tmp_path / "run", memory=memory, persist_every=1) as manager:
        for step in range(1, 4):
            for _ in range(5):
                training.step()
            expected = training.expected()
            manager.async_save(step, training.state(), staging=staging).result(600)
            training.step()
        other = Training("cuda", width=1024)
        assert manager.load_latest(other.state()) is not None
    assert [name for name, tensor in other.expected().items() if not torch.equal(tensor, expected[name])] == []
    assert_saved(manager.path(3), expected)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_ranks_that_share_a_device_save_rows_and_load_columns(tmp_path: Path, backend: str) -> None:
    assert run_ranks(on_cuda.rows_to_columns, 2, tmp_path, backend, init=False, env=FRESH) == [[], []]


def test_ranks_that_share_a_device_move_rows_to_columns_live() -> None:
    assert run_ranks(on_cuda.live_rows_to_columns, 2, env=FRESH) == [[], []]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_fsdp2_goes_on_from_a_lazy_save_bit_for_bit(tmp_path: Path, backend: str) -> None:
    (said,) = run_ranks(on_cuda.fsdp2_goes_on, 1, tmp_path, backend, init=False, env=FRESH)
    assert said["resumed"] == said["expected"]
    assert said["live"] == []


def test_dcp_calls_save_and_load_on_nccl(tmp_path: Path) -> None:
    assert run_ranks(on_cuda.dcp_calls, 1, tmp_path, init=False, env=FRESH) == [[]]


def test_cpu_offload_and_random_states_are_loaded(tmp_path: Path) -> None:
    training = Training("cuda", width=256)
    offloaded: dict[str, Any] = {"pinned": torch.arange(100_000.0).pin_memory(), "random": torch.cuda.get_rng_state()}
    checkpoint.save(tmp_path, {**training.state(), "more": offloaded})
    drawn = torch.rand(4, device="cuda")
    target = {"pinned": torch.zeros(100_000).pin_memory(), "random": torch.cuda.get_rng_state()}
    checkpoint.load(tmp_path, {"more": target}, ignore=["model.*", "average.*", "optimizer.*"])
    torch.cuda.set_rng_state(target["random"])
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    assert torch.equal(target["pinned"], offloaded["pinned"])
