"""Jobs of two ranks, each with a simulated device of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.common.tensor_bytes import streams_of
from reshard_ckpt.engine.loading.read import Reader
from reshard_ckpt.errors import CheckpointError
from tests import device as simulated
from tests.gpu import link_group
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiler")

WHOLE = torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000)


def on_own_device() -> str:
    """Have each rank use the device of its own number, as training jobs do."""
    simulated.load()
    name = f"sim:{dist.get_rank()}"
    torch.accelerator.set_stream(torch.accelerator.current_stream(name))
    simulated.reset()
    return name


def tensors(*, filled: bool) -> dict[str, DTensor]:
    """Replicas and shards on a mesh of simulated devices."""
    mesh, rank = init_device_mesh("sim", (dist.get_world_size(),)), dist.get_rank()
    half = WHOLE[rank * 1500 : (rank + 1) * 1500]
    local = {"replica": WHOLE, "shard": half, "small": WHOLE[0]}
    placements: dict[str, Any] = {"replica": Replicate(), "shard": Shard(0), "small": Replicate()}
    there = {name: (value if filled else torch.full_like(value, -2)).to(f"sim:{rank}") for name, value in local.items()}
    return {name: DTensor.from_local(value, mesh, [placements[name]], run_check=False) for name, value in there.items()}


@on_ranks(2)
def test_dtensors_on_a_mesh_of_devices_are_saved_and_loaded(tmp_path: Path) -> None:
    on_own_device()
    checkpoint.async_save(tmp_path, {"s": tensors(filled=True)}, staging="lazy", hold="caller").result(600)
    target = tensors(filled=False)
    checkpoint.load(tmp_path, {"s": target})
    for name, expected in tensors(filled=True).items():
        assert torch.equal(target[name].to_local().cpu(), expected.to_local().cpu()), name
    assert simulated.devices_set() <= {dist.get_rank()}


@on_ranks(2)
def test_replicas_on_devices_that_differ_are_found(tmp_path: Path) -> None:
    device = on_own_device()
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    wrong = torch.full((100,), float(dist.get_rank())).to(device)
    with pytest.raises(CheckpointError, match="PerRank(?s:.*)s.t"):
        checkpoint.save(tmp_path, {"s": {"t": DTensor.from_local(wrong, mesh, [Replicate()], run_check=False)}})


@on_ranks(2)
def test_lazy_save_and_step_of_replicas_wait_for_nothing_and_copy_their_fingerprints_together(tmp_path: Path) -> None:
    """Save replicas and their optimizer while their stream is held, and step."""
    device = on_own_device()
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    local = [(WHOLE[:300] + i).to(device) for i in range(4)]
    model = nn.ParameterList(DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in local)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = {f"optimizer.state.{i}.{k}": v for i, p in enumerate(model) for k, v in optimizer.state[p].items()}
    state |= {f"model.{i}": param for i, param in enumerate(model)}
    expected = {k: (v.to_local() if isinstance(v, DTensor) else v).detach().cpu() for k, v in state.items()}
    torch.accelerator.synchronize()
    simulated.reset()
    let_go = simulated.hold_stream()
    handle = checkpoint.async_save(tmp_path, {"model": model, "optimizer": optimizer}, staging="lazy")
    optimizer.step()
    assert (simulated.host_waits(), bool(let_go())) == (0, True)
    handle.result(600)
    # Six of twelve tensors, the numbers of steps in one or two packs, the fingerprints, and two samples of the copied tensors.
    assert simulated.counters().d2h <= 11
    assert simulated.counters().pageable == 0
    read = checkpoint.read(tmp_path)
    assert [name for name, value in expected.items() if not torch.equal(read[name], value)] == []


@on_ranks(2)
def test_read_once_comes_after_what_the_callers_stream_has_queued(tmp_path: Path) -> None:
    """Load on a stream that is held, with a change of the target queued on it."""
    device = on_own_device()
    checkpoint.save(tmp_path, {"s": {"t": WHOLE}})
    target = torch.zeros(1000, 3000, device=device)
    torch.accelerator.set_stream(torch.Stream(device=device))
    let_go = simulated.hold_stream()
    target.fill_(-1)
    finish = Reader.finish

    def opened(self: Reader) -> None:
        simulated.let_run(streams_of(target.device).link)
        assert let_go(), "the load has waited before all was queued"
        torch.accelerator.current_stream().synchronize()
        finish(self)

    with mock.patch.object(Reader, "finish", opened):
        checkpoint.load(tmp_path, {"s": {"t": target.t()}}, read_once=True)
    assert torch.equal(target.t().cpu(), WHOLE)


@pytest.mark.parametrize("own_is_current", [True, False])
@on_ranks(2)
def test_live_reshard_stays_on_the_devices_and_in_the_order_of_the_callers_stream(own_is_current: bool) -> None:
    """Move rows to columns from device to device, twice, on a side stream that is far behind the host."""
    device, rank = on_own_device(), dist.get_rank()
    if not own_is_current:
        torch.accelerator.set_stream(torch.accelerator.current_stream("sim:0"))
    link_group.register()
    group = dist.new_group(backend="link")
    whole = WHOLE[:600]
    rows = torch.empty(300, 1000, device=device)
    columns = torch.empty(500, 600, device=device).t()  # in another order than the rows
    small, host = torch.empty(50, device=device), torch.empty(1000)
    src = {
        "t": LocalShard(rows, (600, 1000), (300 * rank, 0)),
        "half": LocalShard(small, (100,), (50 * rank,)),
        "host": LocalShard(host[:500], (1000,), (500 * rank,)),
    }
    dst = {
        "t": LocalShard(columns, (600, 1000), (0, 500 * rank)),
        "half": torch.empty(100, device=device, dtype=torch.bfloat16),
        "host": torch.empty(1000, device=device),
    }
    simulated.reset()
    if own_is_current:
        torch.accelerator.set_stream(torch.Stream(device=device))
    job = checkpoint.LiveReshard(src, dst, process_group=group, cast=["half"], memory_bytes=1 << 20)
    simulated.set_speed(kernel_us=200)
    for i in range(2):
        host.fill_(rank + i)
        rows.fill_(-1)
        columns.fill_(-2)
        rows.copy_(whole[300 * rank : 300 * (rank + 1)])
        rows.add_(i)
        small.fill_(rank + i)
        job.run()
        there = columns.clone()
        columns.fill_(-3)
        expected = torch.tensor([0.0, 1.0]) + i
        assert torch.equal(there.cpu(), whole[:, 500 * rank : 500 * (rank + 1)] + i)
        assert torch.equal(dst["half"].cpu().float(), expected.repeat_interleave(50))
        assert torch.equal(dst["host"].cpu(), expected.repeat_interleave(500))
    assert simulated.devices_set() <= {rank}
    assert link_group.LinkGroup.devices == {rank}
