"""Functions with which DeepSpeed's engine looks into checkpoints: their state, their values, and which one is the latest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...plugins import TORCH_DTYPES, Catalog, FlatShard, LocalShard, open_storage
from ...plugins.errors import MismatchError
from ...plugins.groups import SWITCHES, Groups
from ...plugins.names import paths_of_values
from .folder import LATEST
from .names import GROUPS, OPTIMIZER, ROOT
from .shards import Shard

GROUPS_NAME = f"{OPTIMIZER}.{GROUPS}"

Kinds = dict[str, dict[str, tuple[bool, torch.dtype]]]


def declared(tensor: torch.Tensor, shard: Shard, start: int) -> FlatShard:
    """Return a `FlatShard` over a run of a shard of a parameter; `start` counts elements of the flattened shard."""
    pieces = [(segment.offsets, segment.lengths) for segment in sorted(shard.segments, key=lambda segment: segment.at)]
    return FlatShard(tensor, shard.shape, start, pieces=pieces)


def declared_whole(tensor: torch.Tensor) -> LocalShard:
    """Return a `LocalShard` over a tensor that this rank holds whole, with any strides."""
    return LocalShard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def kinds_of_state(saved: Catalog) -> Kinds:
    """Return for each parameter and key of the saved state whether it has the parameter's shape, and its dtype."""
    found: Kinds = {}
    for name, link in saved.links().items():
        if link.optimizer != OPTIMIZER:
            continue
        if name in saved:
            index = saved.index(name)
            dtype = TORCH_DTYPES[saved.dtype(index)]
            found.setdefault(link.fqn, {})[link.key] = (bool(saved.shape(index)), dtype)
        else:
            found.setdefault(link.fqn, {})[link.key] = (False, torch.float32)
    return found


def value_keys(saved: Catalog) -> dict[str, tuple[Any, ...]]:
    """Return the path of every readable tensor and value below `ROOT`, by its name."""
    found = {name: tuple(name.split(".")) for name in saved.names if name.startswith(f"{ROOT}.")}
    return found | {name: path for name, path in paths_of_values(saved).items() if name.startswith(f"{ROOT}.")}


def hyperparameters_of(saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return for each group the hyperparameters that were saved for its parameters.

    Raises
    ------
    MismatchError
        The parameters of a group were saved with different hyperparameters, or a parameter was in no group.
    """
    known = Groups(saved)
    found = [known.select(names, name=f"group {i} of the optimizer") for i, names in enumerate(groups)]
    problems = [line for one in found for line in one.problems]
    if problems:
        raise MismatchError("\n".join(problems), problems)
    return [{key: value for key, value in one.hyperparameters.items() if key not in SWITCHES} for one in found]


def read_latest(root: str) -> str | None:
    """Read the tag that the file ``latest`` of a root names; None without such a file."""
    with open_storage(root) as storage:
        key = next((key for key in LATEST if storage.size(key) is not None), None)
        return None if key is None else storage.read(key, limit=4096).decode().strip()


def write_latest(root: str, tag: str, *, timeout_s: float = 600.0) -> None:
    """Replace the tag in the file ``latest`` of a root, atomically."""
    with open_storage(root, timeout_s=timeout_s) as storage:
        storage.publish(LATEST[0], tag.encode())
