"""What must hold of every save and load: bytes are shared out evenly, memory stays bounded, nothing is unpickled."""

from __future__ import annotations

import gc
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.engine.common import files
from tests.distributed.net import reference
from tests.launch import on_ranks, run_ranks

MB = 1 << 20


class Gpt(nn.Module):
    """The tensors of a GPT of about 11 MB: a large tied embedding, matrices of 1 and 0.3 MB, and many small vectors."""

    def __init__(self, dim: int = 160, layers: int = 6, vocab: int = 5003) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(dim),
                    "qkv": nn.Linear(dim, 3 * dim),
                    "out": nn.Linear(dim, dim),
                    "norm2": nn.LayerNorm(dim),
                    "up": nn.Linear(dim, 4 * dim),
                    "down": nn.Linear(4 * dim, dim),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight


def balance_job(folder: str) -> dict[str, float]:
    """The largest share of bytes over the mean one, for each layout."""
    world = dist.get_world_size()
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (world,))
    plan = {"layers.*.qkv": ColwiseParallel(), "layers.*.up": ColwiseParallel()}
    plan |= {"layers.*.out": RowwiseParallel(), "layers.*.down": RowwiseParallel()}
    plan |= {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}

    def parallel() -> nn.Module:
        net = parallelize_module(Gpt(), grid["tp"], plan)
        net.head.weight = net.embedding.weight
        return net

    kinds: dict[str, Callable[[], nn.Module]] = {
        "ddp": lambda: DistributedDataParallel(Gpt()),
        "plain": Gpt,
        "fsdp": lambda: fully_shard(Gpt(), mesh=flat),
        "hsdp": lambda: fully_shard(Gpt(), mesh=grid),
        "dp×tp": parallel,
        "fsdp×tp": lambda: fully_shard(parallel(), mesh=grid["dp"]),
    }
    out: dict[str, float] = {}
    for kind, make in kinds.items():
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.AdamW(net.parameters())
        for i, p in enumerate(net.parameters()):
            optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": p.detach() + i, "exp_avg_sq": p.detach() * i}
        path = Path(folder, kind)
        checkpoint.save(path, {"model": net, "optimizer": optimizer}, mesh=grid if kind == "dp×tp" else None)
        written = Counter[int]()
        for tensor in checkpoint.catalog(path).tensors():
            for shard in tensor.shards if tensor.alias_of is None else ():
                written[shard.file.rank] += shard.num_bytes
        assert sum(written.values()) == 3 * sum(p.numel() * 4 for p in Gpt().parameters()) + 4 * len(list(net.parameters()))
        out[kind] = max(written.values()) * world / sum(written.values())
    return out


@pytest.mark.slow
def test_every_rank_writes_about_the_same_number_of_bytes(tmp_path: Path):
    ratios = run_ranks(balance_job, 4, str(tmp_path))[0]
    assert {kind: ratio for kind, ratio in ratios.items() if ratio > 1.05 and kind != "plain"} == {}
    assert ratios["plain"] <= 1.15, "what nothing declares to be a replica is written whole, but not all by one rank"


class Peak:
    """How much resident memory grew at most, in bytes; Linux alone tells that."""

    def __enter__(self) -> Peak:
        gc.collect()  # or garbage that is freed meanwhile makes room for what is measured
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.grown = self._read("VmHWM") - self.before

    @staticmethod
    def _read(field: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


ROWS, COLUMNS = 8192, 6144
TOTAL = ROWS * COLUMNS * 4
"""192 MB."""


def memory_job(folder: str) -> dict[str, int]:
    """A large tensor, a quarter on each rank: flat to other flat ranges, to columns, and from columns."""
    files.MAX_THREADS = 2  # each has a window; where there are more cores, there would be more of them
    rank, path = dist.get_rank(), Path(folder, "flat")
    numel, shape = ROWS * COLUMNS, (ROWS, COLUMNS)
    out: dict[str, int] = {}

    def cut(shift: int) -> tuple[int, int]:
        low, high = (numel * i // 4 + (shift if 0 < i < 4 else 0) for i in (rank, rank + 1))
        return low, high

    def place(low: int, high: int) -> torch.Tensor:  # each element tells where it is
        return torch.arange(low, high, dtype=torch.int32)

    def blank(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, -1, dtype=torch.int32)

    def right(name: str, got: torch.Tensor, wanted: Callable[[], torch.Tensor]) -> None:
        assert torch.equal(got, wanted()), name

    low, high = cut(12345)
    held = place(low, high)
    warm = {"model": {"w": torch.zeros(8)}}
    checkpoint.save(Path(folder, "warm"), warm)  # imports and pools are there from now on
    checkpoint.load(Path(folder, "warm"), warm)
    with Peak() as peak:
        checkpoint.save(path, {"optimizer": {"w": FlatShard(held, shape, low)}})
    out["save_flat"] = peak.grown

    low, high = cut(-54321)
    target = blank(high - low)
    with Peak() as peak:
        checkpoint.load(path, {"optimizer": {"w": FlatShard(target, shape, low)}})
    out["load_flat"] = peak.grown
    right("flat", target, lambda: place(low, high))

    width = COLUMNS // 4
    columns = blank(ROWS, width)
    mesh = init_device_mesh("cpu", (4,))
    dtensor = DTensor.from_local(columns, mesh, [Shard(1)], run_check=False)
    with Peak() as peak:
        checkpoint.load(path, {"optimizer": {"w": dtensor}})
    out["load_columns"] = peak.grown
    rows, inside = place(0, ROWS), place(width * rank, width * (rank + 1))
    right("columns", columns, lambda: rows[:, None] * COLUMNS + inside)

    columns.fill_(-1)
    with Peak() as peak:
        checkpoint.load(path, {"optimizer": {"w": dtensor}}, read_once=True)
    out["load_columns_once"] = peak.grown
    right("columns, read once", columns, lambda: rows[:, None] * COLUMNS + inside)

    with Peak() as peak:
        checkpoint.save(path, {"optimizer": {"w": dtensor}})
    out["save_columns"] = peak.grown
    target.fill_(-1)
    with Peak() as peak:
        checkpoint.load(path, {"optimizer": {"w": FlatShard(target, shape, low)}})
    out["load_flat_from_columns"] = peak.grown
    right("flat again", target, lambda: place(low, high))
    whole = blank(*shape)
    with Peak() as peak:
        checkpoint.load(path, {"optimizer": {"w": whole}}, read_once=True)
    out["load_whole_once"] = peak.grown
    right("whole, read once", whole, lambda: place(0, numel).view(shape))
    return out


only_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")


@pytest.mark.slow
@only_linux
def test_no_rank_ever_builds_the_whole_of_a_large_tensor(tmp_path: Path):
    for grown in run_ranks(memory_job, 4, str(tmp_path), timeout_s=800):
        told = {name: f"{value / MB:.0f} MB" for name, value in grown.items()}
        # A round that is sent, one received, one read ahead, and a window of 4 MiB in each thread.
        assert max(grown.pop("load_columns_once"), grown.pop("load_whole_once")) < 200 * MB, told
        assert max(grown.values()) < TOTAL // 8, told


@on_ranks(2)
def test_loading_never_unpickles(tmp_path: Path):
    """Load everything that can be loaded, with every way to unpickle watched."""
    path, rank = tmp_path / "a", dist.get_rank()
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.copy_(reference("w", (3, 3)))
        net.bias.zero_()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    shard = LocalShard(torch.arange(6.0).reshape(2, 3) + 6 * rank, (4, 3), (2 * rank, 0))

    def state() -> dict[str, Any]:
        extra = {
            "rng": checkpoint.PerRank(torch.get_rng_state()),
            "big": "x" * 9999,
            "t": (1, [b"2", {3: None}]),
            "dtype": torch.int8,
        }
        return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "shard": shard, "extra": extra}

    checkpoint.save(path, state(), metadata={"note": "hello"})
    seen: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and ("pickle" in event or event in ("marshal.loads", "exec", "compile")):
            seen.append(f"{event} {args!r:.200}")

    def read() -> None:
        checkpoint.load(path, state(), verify_first=True)
        checkpoint.read(path)
        checkpoint.catalog(path)

    read()  # what is imported on first use is no unpickling, but is compiled
    sys.addaudithook(hook)
    unpickled = AssertionError("unpickled")
    with (
        mock.patch.object(pickle, "loads", side_effect=unpickled),
        mock.patch.object(pickle, "load", side_effect=unpickled),
        mock.patch.object(pickle, "Unpickler", side_effect=unpickled),
        mock.patch.object(torch, "load", side_effect=unpickled),
    ):
        watching = True
        read()
        watching = False
    assert seen == []
    watching = True
    canary = pickle.loads(pickle.dumps(Path("x")))
    watching = False
    assert canary == Path("x")
    assert any("pickle.find_class" in line for line in seen), "the hook would have seen it"


@only_linux
def test_peak_sees_a_tensor_that_comes_and_goes():
    with Peak() as peak:
        torch.ones(64 * MB)
    assert peak.grown > 192 * MB, "of 256; the rest may be memory that others give back meanwhile"
