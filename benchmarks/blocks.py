"""The least bytes that a load must read if it verifies every block that it touches, and reads each of those once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from reshard_ckpt.core.planning.load_plan import LoadPlan
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.engine.loading.load import LoadOptions, resolve
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.state.capture import prepare_load
from reshard_ckpt.storage import open_storage


def touched_bytes(path: Path, state: dict[str, Any]) -> int:
    """Return bytes of the blocks that this rank's load touches."""
    with open_storage(path) as storage:
        catalog = open_catalog(storage)
        target = prepare_load(state, catalog, rank=dist.get_rank(), size=dist.get_world_size())
        plan = resolve(catalog, target.tensors, LoadOptions()).plan
    marks = _Marks([file.size for file in catalog.files])
    for item in range(len(plan.src)):
        marks.mark(int(plan.file[item]), *_runs(plan, item))
    return marks.num_bytes


def _runs(plan: LoadPlan, item: int) -> tuple[np.ndarray, int]:
    """Return where an item's runs begin in its file, and how long each is."""
    size, starts = int(plan.item_bytes[item]), np.array([plan.src[item]])
    dims = list(zip(plan.lengths[item].tolist(), plan.src_strides[item].tolist(), strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == size):
        size *= dims.pop()[0]
    for length, stride in dims:
        starts = (starts[:, None] + np.arange(length) * stride).reshape(-1)
    return starts, size


class _Marks:
    """Blocks of each file that are touched."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._touched = [np.zeros(-(-size // BLOCK_BYTES), bool) for size in sizes]

    def mark(self, file: int, starts: np.ndarray, size: int) -> None:
        first, last = starts // BLOCK_BYTES, (starts + size - 1) // BLOCK_BYTES
        for begin, end in set(zip(first.tolist(), last.tolist(), strict=True)):
            self._touched[file][begin : end + 1] = True

    @property
    def num_bytes(self) -> int:
        total = 0
        for size, touched in zip(self._sizes, self._touched, strict=True):
            total += int(touched.sum()) * BLOCK_BYTES
            if len(touched) and touched[-1]:
                total -= -size % BLOCK_BYTES
        return total
