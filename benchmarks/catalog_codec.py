"""The size of the catalog of a million shards, and the time to write and read it.

``python -m benchmarks.catalog_codec``; the limit printed beside each time is one copy of the same bytes in memory.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import numpy as np

from reshard_ckpt.core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorTable
from reshard_ckpt.core.catalog.specs import CODES, AxisPlacement, Mesh
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog

ROUNDS = 5
CASES = ((4096, 256, False), (4096, 256, True), (256, 4096, False), (64, 16384, True))


def state(num_tensors: int, num_ranks: int, *, flat: bool) -> Catalog:
    """Make tensors of random sizes, each cut over all ranks: along dim 0 as FSDP does, or into flat ranges as ZeRO does."""
    rng = np.random.default_rng(0)
    num_rows, num_cols = rng.integers(num_ranks * 4, num_ranks * 80, num_tensors), rng.integers(1, 64, num_tensors) * 128
    tensor, rank = np.repeat(np.arange(num_tensors), num_ranks), np.tile(np.arange(num_ranks), num_tensors)
    unit = np.where(flat, 1, num_cols)[tensor]
    total = (num_rows * num_cols)[tensor] // unit
    chunk = -(-total // num_ranks)
    begin, end = np.minimum(rank * chunk, total), np.minimum((rank + 1) * chunk, total)
    held = end > begin
    tensor, rank, unit, begin, end = (column[held] for column in (tensor, rank, unit, begin, end))
    zeros, shape = np.zeros_like(begin), np.stack([num_rows, num_cols], axis=1)
    if flat:
        box, start, offsets, lengths = tensor, begin, np.zeros_like(shape), shape
    else:
        boxes = np.stack([begin, zeros, end - begin, num_cols[tensor]], axis=1)
        distinct, box = np.unique(boxes, axis=0, return_inverse=True)
        box, start, offsets, lengths = box.reshape(-1), zeros, distinct[:, :2], distinct[:, 2:]
    count = (end - begin) * unit
    offset, sizes = _place(rank, 4 * count, num_ranks)
    return Catalog(
        save_id="20260101-000000-abcdef",
        created_s=0.0,
        mesh=Mesh(("dp",), (num_ranks,)),
        metadata=b"\xc0",
        tensors_table=_tensors(shape, np.searchsorted(tensor, np.arange(num_tensors + 1))),
        placements=((AxisPlacement("dp", "flat"),) if flat else (AxisPlacement("dp", "shard", dim=0),),),
        boxes=BoxTable(offsets, lengths),
        rows=RowTable(box, start, count, rank, offset),
        files=tuple(map(_file, range(num_ranks), sizes.tolist())),
        values_table=(),
    )


def _place(rank: np.ndarray, num_bytes: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each shard begins in its rank's file, and the sizes of the files: one after the other, behind a header."""
    order = np.argsort(rank, kind="stable")
    ends = np.cumsum(num_bytes[order])
    first = np.searchsorted(rank[order], np.arange(num_ranks + 1))
    base = np.append(0, ends)[first]
    offset = np.empty_like(num_bytes)
    offset[order] = 4096 + ends - num_bytes[order] - base[rank[order]]
    return offset, 4096 + np.diff(base)


def _tensors(shape: np.ndarray, row_start: np.ndarray) -> TensorTable:
    num = len(shape)
    return TensorTable(
        names=tuple(f"optimizer.state.layers.{i:05d}.mlp.gate_up_proj.weight.exp_avg" for i in range(num)),
        dtype=np.full(num, CODES.index("F32"), np.uint8),
        kind=np.zeros(num, np.uint8),
        ndim=np.full(num, 2),
        shape=shape,
        alias=np.full(num, -1),
        placement=np.zeros(num, np.int64),
        row_start=row_start,
        optimizer=np.ones(num, np.int64),
        key=np.ones(num, np.int64),
        parameter=np.full(num, -1),
    )


def _file(rank: int, size: int) -> FileEntry:
    stem = f"20260101-000000-abcdef/rank{rank:05d}-0"
    return FileEntry(f"{stem}.safetensors", size, f"{stem}.digests", rank.to_bytes(16, "big"), "20260101-000000-abcdef", rank)


def fastest_s(call: Callable[[], object]) -> float:
    """Return the fastest of a few rounds: the others met the machine's other work."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(
        f"{'tensors':>8} {'ranks':>6} {'cut':>5} {'shards':>8} {'bytes/shard':>12} {'encode s':>9} {'decode s':>9} {'copy s':>8}"
    )
    for num_tensors, num_ranks, flat in CASES:
        catalog = state(num_tensors, num_ranks, flat=flat)
        data = encode_catalog(catalog)
        encode_s = fastest_s(lambda catalog=catalog: encode_catalog(catalog))
        decode_s, copy_s = fastest_s(lambda data=data: decode_catalog(data)), fastest_s(lambda data=data: bytearray(data))
        shards, cut = len(catalog.rows.box), "flat" if flat else "dim 0"
        size = len(data) / shards
        print(f"{num_tensors:8} {num_ranks:6} {cut:>5} {shards:8} {size:12.1f} {encode_s:9.3f} {decode_s:9.3f} {copy_s:8.4f}")


if __name__ == "__main__":
    main()
