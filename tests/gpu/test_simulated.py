"""What is counted on the simulated device: waits, copies, memory, devices; and what happens while its streams are held."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.engine.common.tensor_bytes import streams_of
from reshard_ckpt.engine.loading.read import Reader
from reshard_ckpt.engine.saving import async_save
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.messages import RunColumns
from reshard_ckpt.engine.saving.replicas import all_fingerprints, weighted_sums, with_kind
from reshard_ckpt.engine.saving.staging import MIN_RING_BYTES, Staging
from reshard_ckpt.errors import CorruptError, UsageError
from reshard_ckpt.state.capture import capture
from tests import device as simulated
from tests.gpu.training import Training, assert_saved

pytestmark = pytest.mark.usefixtures("sim")

MIB = 1 << 20


def numbered(mib: float, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + int(mib * MIB) // 4, dtype=torch.int32)


def settle() -> None:
    """Wait until the threads of saves have ended, and let go of what they had, and the device has done all."""
    for thread in threading.enumerate():
        if thread.name.startswith("reshard-ckpt"):
            thread.join(600)
    torch.accelerator.synchronize()


# --- saving ---


def test_lazy_save_of_what_optimizers_own_waits_for_nothing(tmp_path: Path) -> None:
    training = Training("sim", plain=True)
    checkpoint.async_save(tmp_path / "first", training.state(), staging="lazy").result(600)
    let_go = simulated.hold_stream()
    training.step()
    expected = training.expected()
    simulated.reset()
    handle = checkpoint.async_save(tmp_path / "second", training.state(), staging="lazy")
    assert simulated.host_waits() == 0
    assert let_go(), "the call has waited for the stream"
    handle.result(600)
    assert_saved(tmp_path / "second", expected)


def test_held_step_goes_on_at_once_and_stays_behind_the_copies(tmp_path: Path) -> None:
    training = Training("sim", plain=True, width=300)  # too large to be packed
    expected = training.expected()
    torch.accelerator.synchronize()
    let_go = simulated.hold_link()
    handle = checkpoint.async_save(tmp_path, training.state(), staging="lazy")
    simulated.reset()
    for _ in range(3):
        training.step()
    assert simulated.host_waits() == 0
    simulated.let_run(torch.accelerator.current_stream())
    assert not handle.running.staged.done()
    assert let_go(), "a step has waited for the copies"
    handle.result(600)
    assert_saved(tmp_path, expected)
    assert not torch.equal(training.model.layers[0].weight.cpu(), expected["model.layers.0.weight"].cpu())


def test_step_waits_on_the_host_until_all_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("sim", plain=True)
    expected = training.expected()
    stage, may_stage, steps = async_save.SaveThread._stage, threading.Event(), threading.Event()

    def late(self: async_save.SaveThread, fill: Callable[[], None]) -> BaseException | None:
        may_stage.wait(600)
        return stage(self, fill)

    wait_for = async_save.RunningSave.wait_for

    def noted(self: async_save.RunningSave, future: Any) -> None:
        may_stage.set()
        wait_for(self, future)

    monkeypatch.setattr(async_save.SaveThread, "_stage", late)
    monkeypatch.setattr(async_save.RunningSave, "wait_for", noted)
    handle = checkpoint.async_save(tmp_path, training.state(), staging="lazy")
    training.step()
    steps.set()
    torch.accelerator.synchronize()
    may_stage.set()  # had the step not waited
    handle.result(600)
    assert_saved(tmp_path, expected)


def past_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A fused step that the guard does not meet."""
    kernel = torch.optim.AdamW.step
    kernel.__wrapped__(optimizer) if hasattr(kernel, "__wrapped__") else kernel(optimizer)


def numbers_alone(optimizer: torch.optim.Optimizer) -> None:
    """What a fused kernel from elsewhere does where gradients are zero: it counts steps on the device, and torch sees nothing."""
    for held in optimizer.state.values():
        held["step"].data.add_(1)


@pytest.mark.parametrize("then_steps", [False, True], ids=["no step follows", "a step follows"])
@pytest.mark.parametrize("change", [past_hooks, numbers_alone])
def test_a_fused_step_past_the_guard_is_found(
    tmp_path: Path, change: Callable[[torch.optim.Optimizer], None], then_steps: bool
) -> None:
    training = Training("sim", plain=True)
    let_go = simulated.hold_link()
    handle = checkpoint.async_save(tmp_path, training.state(), staging="lazy")
    change(training.optimizer)
    if then_steps:
        training.step()
    else:
        torch.accelerator.current_stream().synchronize()
    assert let_go()
    with pytest.raises(UsageError, match="parameters or state of AdamW changed while they were copied"):
        handle.result(600)


def test_memory_of_the_device_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    there = numbered(12).reshape(1024, -1).to("sim")
    state = {"strided": there.t(), "small": there[0, :100]}
    reserved = []
    for number in range(40):
        checkpoint.async_save(tmp_path / str(number % 2), {"s": state}).result(600)
        settle()
        reserved.append(simulated.counters().reserved)
    assert reserved[1] == reserved[-1]
    assert simulated.counters().largest_temporary == 0


@pytest.mark.parametrize("current", [0, 1], ids=["another device current", "its device current"])
@pytest.mark.parametrize("staging", ["sync", "eager", "lazy", "caller", "bounded", "memory"])
def test_no_thread_reaches_a_device_that_the_caller_did_not_use(tmp_path: Path, staging: str, current: int) -> None:
    torch.accelerator.set_stream(torch.accelerator.current_stream(f"sim:{current}"))
    training = Training("sim:1", plain=staging == "lazy")
    expected = training.expected()
    other = Training("sim:1", plain=staging == "lazy")
    POOL.clear()
    gc.collect()  # memory that tests before this one have pinned on device 0, and that a cycle still holds, is unpinned there
    simulated.reset()
    if staging == "sync":
        checkpoint.save(tmp_path, training.state())
    elif staging == "memory":
        with Manager(tmp_path / "run", memory=Memory(copies=0, folder=str(tmp_path / "memory")), persist_every=1) as manager:
            manager.async_save(1, training.state()).result(600)
        tmp_path = manager.path(1)
    else:
        options: dict[str, dict[str, Any]] = {
            "eager": {},
            "bounded": {"host_buffer_bytes": MIN_RING_BYTES},
            "lazy": {"staging": "lazy"},
            "caller": {"staging": "lazy", "hold": "caller"},
        }
        checkpoint.prepare(training.state())
        handle = checkpoint.async_save(tmp_path, training.state(), **options[staging])
        if staging == "lazy":
            training.step()
        handle.result(600)
    checkpoint.load(tmp_path, other.state())
    POOL.clear()
    assert simulated.devices_set() <= {1}
    assert torch.accelerator.current_stream().device_index == current
    assert_saved(tmp_path, expected)
    assert torch.equal(other.model.layers[1].weight.cpu(), expected["model.layers.1.weight"].cpu())


def test_state_on_two_devices_is_saved_and_loaded(tmp_path: Path) -> None:
    values = {f"t{i}": numbered(0.001 if i % 3 else 1, i) for i in range(12)}
    state = {name: value.to(f"sim:{i % 2}") for i, (name, value) in enumerate(values.items())}
    checkpoint.async_save(tmp_path, {"s": state}).result(600)
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    checkpoint.load(tmp_path, {"s": other})
    assert [name for name, value in values.items() if not torch.equal(other[name].cpu(), value)] == []
    assert torch.accelerator.current_stream().device_index == 0


def test_pinned_memory_is_the_ring_and_is_given_back(tmp_path: Path) -> None:
    POOL.clear()
    before = simulated.counters().pinned
    state = {"a": numbered(33).to("sim")}
    checkpoint.async_save(tmp_path, state).result(600)
    assert simulated.counters().pinned - before <= 34 * MIB + 4 * MIB
    settle()
    POOL.clear()
    assert simulated.counters().pinned == before


def test_sync_save_and_load_copy_no_pageable_memory(tmp_path: Path) -> None:
    values = {"large": numbered(24), "strided": numbered(8).reshape(512, -1), "small": numbered(0.01)}
    state = {name: value.to("sim") for name, value in values.items()}
    state["strided"] = state["strided"].t().contiguous().t()
    torch.accelerator.synchronize()
    simulated.reset()
    checkpoint.save(tmp_path, {"s": state})
    counted = simulated.counters()
    assert (counted.pageable, counted.blocking, counted.temporaries) == (0, 0, 0)
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    torch.accelerator.synchronize()
    simulated.reset()
    checkpoint.load(tmp_path, {"s": other})
    counted = simulated.counters()
    assert (counted.pageable, counted.blocking, counted.temporaries) == (0, 0, 0)
    assert [name for name, value in values.items() if not torch.equal(other[name].cpu(), value)] == []


def test_saves_to_memory_copy_no_pageable_memory_and_unpin_it_in_the_end(tmp_path: Path) -> None:
    POOL.clear()
    before = simulated.counters().pinned
    state = {
        "large": numbered(24).to("sim"),
        "strided": numbered(8).reshape(512, -1).to("sim").t(),
        "small": numbered(0.01).to("sim"),
    }
    values = {name: value.cpu() for name, value in state.items()}
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    memory = Memory(copies=0, folder=str(tmp_path / "memory"))
    with Manager(tmp_path / "run", memory=memory, persist_every=1000) as manager:
        torch.accelerator.synchronize()
        simulated.reset()
        for step in range(1, 5):
            manager.async_save(step, {"s": state}).result(600)
        counted = simulated.counters()
        assert (counted.pageable, counted.blocking, counted.temporaries) == (0, 0, 0)
        assert 3 * 32 * MIB < counted.pinned - before < 3 * 41 * MIB
        loaded = manager.load_latest({"s": other})
        assert (loaded.step, loaded.tier, simulated.counters().pageable) == (4, "memory", 0)
    assert [name for name, value in values.items() if not torch.equal(other[name].cpu(), value)] == []
    POOL.clear()
    assert simulated.counters().pinned == before


def test_small_tensors_cross_the_link_together(tmp_path: Path) -> None:
    values = numbered(5000 * 256 / MIB).reshape(5000, 64)
    state = {f"t{i:04}": row for i, row in enumerate(values.to("sim").unbind())}
    simulated.reset()
    checkpoint.async_save(tmp_path, {"s": state}).result(600)
    assert simulated.counters().d2h <= 50
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    simulated.reset()
    checkpoint.load(tmp_path, {"s": other})
    assert simulated.counters().h2d <= 50
    assert torch.equal(torch.stack(list(other.values())).cpu(), values)


def test_rows_changed_through_data_behind_their_copy_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.nn.Embedding(2000, 300).to("sim")  # too large to be packed
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    fill = Staging.fill

    def fill_and_change(self: Staging, *args: Any, **options: Any) -> int:
        copied = fill(self, *args, **options)
        torch.accelerator.synchronize()
        embedding.weight.data[:2].fill_(copied)
        torch.accelerator.synchronize()  # or the second look, on a stream of its own, may run first
        return copied

    monkeypatch.setattr(Staging, "fill", fill_and_change)
    handle = checkpoint.async_save(tmp_path, {"model": embedding, "optimizer": optimizer}, staging="lazy")
    with pytest.raises(UsageError, match="parameters or state of SGD changed while they were copied"):
        handle.result(600)


def test_fingerprints_of_replicas_cross_the_link_in_one_copy() -> None:
    values = [numbered(3 if i % 2 else 0.01, i) for i in range(20)]
    values += [values[0].to(torch.bfloat16)[:7], values[1][:0], values[0][:5].to(torch.int8), values[1].double()[:3]]
    host = {f"t{i}": value[: value.numel() // 2 * 2].reshape(2, -1) for i, value in enumerate(values)}
    there = {name: value.to("sim") for name, value in host.items()}
    there |= {name: value.t().contiguous().t() for i, (name, value) in enumerate(there.items()) if i % 3}
    checks = RunColumns(np.arange(len(host)), np.zeros(len(host), np.int64), np.array([t.numel() for t in host.values()]))
    on_host, on_device = (describe_local(capture({"s": s}).tensors, (), None, 0) for s in (host, there))
    expected = weighted_sums(on_host.runs(checks), torch.device("cpu"))
    torch.accelerator.synchronize()
    simulated.reset()
    marks = all_fingerprints(on_device, checks)
    assert marks.tolist() == with_kind(expected.numpy().view(np.uint64), summed=True).tolist()
    counted = simulated.counters()
    assert (counted.d2h, counted.pageable, counted.blocking, counted.temporaries) == (1, 0, 0, 0)
    assert sum(simulated.synchronizations().values()) == 1
    for _ in range(2):
        all_fingerprints(on_device, checks)
    assert simulated.counters().reserved == counted.reserved


def test_bounded_save_streams_though_a_larger_ring_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"strided": numbered(20).reshape(1024, -1).to("sim").t(), "large": numbered(30).to("sim")}
    state |= {f"tiny {i}": numbered(0.001, i).to("sim" if i % 2 else "cpu") for i in range(100)}
    checkpoint.async_save(tmp_path / "whole", {"s": state}).result(600)
    rings: list[int] = []
    take = async_save.take_ring

    def noted(*args: Any) -> torch.Tensor:
        ring = take(*args)
        rings.append(ring.numel())
        return ring

    monkeypatch.setattr(async_save, "take_ring", noted)
    checkpoint.async_save(tmp_path / "bounded", {"s": state}, host_buffer_bytes=MIN_RING_BYTES).result(600)
    assert rings == [MIN_RING_BYTES]
    read = checkpoint.read(tmp_path / "bounded")
    assert [name for name, value in state.items() if not torch.equal(read[f"s.{name}"], value.cpu())] == []


# --- who holds changes back ---


def test_where_the_caller_holds_nothing_is_copied_before_the_call_returns(tmp_path: Path) -> None:
    state = {"s": {"a": numbered(1).to("sim"), "b": {"c": numbered(0.01).to("sim")}}}
    expected = {"s.a": numbered(1), "s.b.c": numbered(0.01)}
    checkpoint.save(tmp_path / "first", state)
    let_go = simulated.hold_stream()
    simulated.reset()
    handle = checkpoint.async_save(tmp_path / "second", state, staging="lazy", hold="caller")
    assert simulated.host_waits() == 0
    assert let_go()
    handle.staged()
    state["s"]["a"].zero_()
    handle.result(600)
    assert_saved(tmp_path / "second", expected)


def test_an_optimizer_that_is_not_in_the_state_is_held(tmp_path: Path) -> None:
    training = Training("sim", plain=True, width=300)  # too large to be packed
    expected = {name: value for name, value in training.expected().items() if name.startswith("model.")}
    torch.accelerator.synchronize()
    let_go = simulated.hold_link()
    simulated.reset()
    handle = checkpoint.async_save(tmp_path, {"model": training.model}, staging="lazy", hold=training.optimizer)
    training.step()
    assert simulated.host_waits() == 0
    simulated.let_run(torch.accelerator.current_stream())
    assert let_go()
    handle.result(600)
    assert_saved(tmp_path, expected)


# --- loading ---


def test_load_comes_after_what_the_callers_stream_has_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"s": {"a": torch.full((1000, 1000), 7.0), "b": torch.full((10,), 7.0)}})
    large = torch.zeros(1000, 1000, device="sim")
    target = {"a": large.t(), "b": torch.zeros(10, device="sim")}
    finish = Reader.finish
    torch.accelerator.set_stream(torch.Stream(device="sim:0"))
    let_go = simulated.hold_stream()
    for tensor in target.values():
        tensor.fill_(-1)

    def opened(self: Reader) -> None:
        simulated.let_run(streams_of(large.device).link)
        assert let_go(), "the load has waited before all was queued"
        torch.accelerator.current_stream().synchronize()
        finish(self)

    monkeypatch.setattr(Reader, "finish", opened)
    checkpoint.load(tmp_path, {"s": target})
    assert torch.equal(large.cpu(), torch.full((1000, 1000), 7.0))
    assert torch.equal(target["b"].cpu(), torch.full((10,), 7.0))


def test_damage_leaves_no_copy_under_way(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": numbered(20)})
    (file,) = tmp_path.rglob("*.safetensors")
    with open(file, "r+b") as opened:
        opened.seek(19 * MIB)
        opened.write(b"damaged")
    target = torch.zeros(20 * MIB // 4, dtype=torch.int32, device="sim")
    with pytest.raises(CorruptError, match="is damaged in bytes"):
        checkpoint.load(tmp_path, {"a": target})
