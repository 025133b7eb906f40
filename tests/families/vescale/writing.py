"""Folders as ``vescale.checkpoint`` 0.1 writes them, by the facts of its source (``legacy/vescale/checkpoint``); no code of it.

What is written, and where the source says so:

1. `api/vescale_checkpointer.py`: ``model/`` for all ranks, ``optimizer/pp_<n>/`` for those of a pipeline stage.
2. `storage/filesystem.py`: a chunk is what ``torch.save`` makes of a tensor, in ``__<rank>_<n>.distcp``; ``.metadata`` is a
   pickle of DCP's ``Metadata``, whose ``storage_data`` has objects of a ``_StorageInfo`` of that module.
3. `optim/distributed_optimizer.py`, ``state_dict``: ``{"param_group_meta": groups, dtype: {(chunk, name): state}}``, of which
   `planner/vescale/vescale_planner.py` has DCP's planner flatten dicts and lists of dicts. State of at least one dim is an
   ``OptimizerStateSpec``: one box, the part of the tensor that its tp rank has, also where several dp ranks hold ranges of it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MODULE = "vescale.checkpoint.storage.filesystem"
MASTER = "shard_casted_float16_groups"


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


_StorageInfo.__module__ = MODULE

Box = tuple[tuple[int, ...], torch.Tensor]
"""Where a part of a tensor begins, and the part."""


@dataclass
class Sharded:
    """A tensor of which ranks wrote boxes."""

    shape: tuple[int, ...]
    boxes: list[Box]


def split(whole: torch.Tensor, num: int, dim: int) -> Sharded:
    """A tensor that tensor parallelism divides."""
    parts = whole.chunk(num, dim)
    starts = [sum(part.shape[dim] for part in parts[:i]) for i in range(len(parts))]
    offsets = [tuple(start if d == dim else 0 for d in range(whole.ndim)) for start in starts]
    return Sharded(tuple(whole.shape), [(at, part.contiguous()) for at, part in zip(offsets, parts, strict=True)])


def flatten(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """As torch's planner does: dicts always, with text for keys; lists if there is a dict in them."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from flatten(value, (*path, str(key)))
    elif isinstance(state, list) and any(isinstance(value, Mapping) for value in state):
        for i, value in enumerate(state):
            yield from flatten(value, (*path, i))
    else:
        yield path, state


@contextmanager
def known_as_vescale() -> Iterator[None]:
    """Have pickle find the class where veScale has it."""
    names = [".".join(MODULE.split(".")[: i + 1]) for i in range(MODULE.count(".") + 1)]
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[MODULE]._StorageInfo = _StorageInfo  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def write_folder(folder: Path, state: Mapping[Any, Any], *, ranks: int = 2) -> None:
    """Write one folder; box number i of a tensor is in the file of rank i, all else in that of rank 0."""
    folder.mkdir(parents=True)
    files = [io.BytesIO() for _ in range(ranks)]
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for path, value in flatten(state):
        fqn = ".".join(map(str, path))
        paths[fqn] = path
        if not isinstance(value, Sharded | torch.Tensor):
            stored[MetadataIndex(fqn)] = _append(files, 0, value)
            described[fqn] = BytesStorageMetadata()
            continue
        whole = Sharded(tuple(value.shape), [((0,) * value.ndim, value)]) if isinstance(value, torch.Tensor) else value
        chunks = [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in whole.boxes]
        properties = TensorProperties.create_from_tensor(whole.boxes[0][1])
        described[fqn] = TensorStorageMetadata(properties, torch.Size(whole.shape), chunks)
        for i, (at, part) in enumerate(whole.boxes):
            stored[MetadataIndex(fqn, torch.Size(at), i)] = _append(files, i % ranks, part)
    for rank, file in enumerate(files):
        Path(folder, f"__{rank}_0.distcp").write_bytes(file.getvalue())
    with known_as_vescale():
        metadata = pickle.dumps(Metadata(described, planner_data=paths, storage_data=stored))
    Path(folder, ".metadata").write_bytes(metadata)


def _append(files: Sequence[io.BytesIO], rank: int, value: Any) -> _StorageInfo:
    at = files[rank].tell()
    torch.save(value, files[rank])
    return _StorageInfo(f"__{rank}_0.distcp", at, files[rank].tell() - at)
