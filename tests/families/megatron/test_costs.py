"""What `reshard_ckpt.megatron` costs: bytes written and read, collectives, and messages between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.comm.store import StoreComm
from reshard_ckpt.storage.local import LocalStorage
from tests.families.megatron.stand_ins import DistributedOptimizer, ShardedTensor
from tests.launch import on_ranks

COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "recv_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
}  # fmt: skip


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Collect the bytes of every read from storage."""
    read, own = [], LocalStorage.read_into

    def counting(self: LocalStorage, key: str, offset: int, buffers: Any) -> None:
        read.append(sum(len(buffer) for buffer in buffers))
        own(self, key, offset, buffers)

    LocalStorage.read_into = counting
    try:
        yield read
    finally:
        LocalStorage.read_into = own


SIDE = 1024
"""Of a square weight: 4 MiB, and three times that of its optimizer's state."""


def _job(tp: int) -> tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]:
    """A weight whose rows are cut by tensor parallelism, and a distributed optimizer over the other ranks; where they belong."""
    at_tp, at_dp = dist.get_rank() % tp, dist.get_rank() // tp
    rows = SIDE // tp
    param = torch.nn.Parameter(torch.zeros(rows, SIDE))
    weight = ShardedTensor("w", param, (rows, SIDE), (SIDE, SIDE), (at_tp * rows, 0), (0, 0, at_dp))
    optimizer = DistributedOptimizer([param], 4 // tp, at_dp, 100, stepped=True)
    whole = torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)[at_tp * rows : (at_tp + 1) * rows]
    ((run, states),) = optimizer.runs_of(param)
    places = [whole, *(whole.flatten()[run] + i for i in range(1, 4))]
    return {"model": {"w": weight}, "optimizer": optimizer}, [param.detach(), *states.values()], places


@on_ranks(4)
def test_ranks_share_the_writing_and_read_what_they_want(tmp_path: Path) -> None:
    """Save on a layout and load on another: of a model and of the runs of its optimizer, whatever is cut and replicated."""
    for saved, loaded in ((2, 4), (4, 1), (1, 2)):
        path, (tree, tensors, places) = tmp_path / str(saved), _job(saved)
        for tensor, place in zip(tensors, places, strict=True):
            tensor.copy_(place)
        megatron.save(tree, path)
        files = checkpoint.catalog(path).files
        written = [sum(file.size for file in files if file.rank == rank) for rank in range(4)]
        assert max(written) <= 1.1 * 16 * SIDE * SIDE / 4
        tree, tensors, places = _job(loaded)
        with counted_reads() as read:
            megatron.load(tree, path)
        assert all(map(torch.equal, tensors, places)), (saved, loaded)
        assert sum(read) <= 1.2 * sum(tensor.nbytes for tensor in tensors) + (1 << 20)


class CountedStore:
    """A store whose writes are counted; how often others look whether something is there depends on time."""

    def __init__(self, store: Any, calls: list[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        if name in ("append", "multi_set", "compare_set"):
            self._calls.append(name)
        if name == "clone":  # a store inside a store, which has no connections of its own
            raise AttributeError(name)
        return getattr(self._store, name)


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Collect the names of all collectives of torch that are called, and of what is written to the store of messages."""
    calls: list[str] = []
    init = StoreComm.__init__

    def counting(self: StoreComm, store: Any, *args: Any, **options: Any) -> None:
        init(self, CountedStore(store, calls), *args, **options)

    def noted(name: str, own: Any) -> Any:
        return lambda *args, **options: (calls.append(name), own(*args, **options))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreComm, "__init__", counting)
        for name in COLLECTIVES:
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):  # some are newer than others
                    patch.setattr(module, name, noted(name, getattr(module, name)))
        yield calls


def _number_of_calls(root: str, num: int) -> list[list[str]]:
    """Save and load this many parameters and their optimizer; the calls of each."""
    params = [torch.nn.Parameter(torch.arange(6.0) + i) for i in range(num)]
    model = {str(i): ShardedTensor(f"w{i}", p, (6,), (6,), (0,), (0, 0, dist.get_rank())) for i, p in enumerate(params)}
    optimizer = DistributedOptimizer(params, 2, dist.get_rank(), 10, stepped=True)
    found = []
    for call in (megatron.save, megatron.load):
        with counted_calls() as calls:
            call({"model": model, "optimizer": optimizer}, f"{root}/{num}")
        found.append(sorted(calls))
    return found


@on_ranks(2)
def test_neither_collectives_nor_messages_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    with counted_calls() as calls:
        dist.barrier()
    assert calls == ["barrier"]
    _, few, many = (_number_of_calls(str(tmp_path), num) for num in (1, 2, 50))  # the first call fills the caches
    assert few == many
    for calls in few:
        assert 0 < len(calls) < 40
        assert not set(calls) & COLLECTIVES
