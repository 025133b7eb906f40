"""The calls of Azure's Nebula on a `Manager` with a memory tier: use ``import reshard_ckpt.nebula as nm`` in scripts for Nebula.

A checkpoint has *files*: named states, as for ``torch.save``. All ranks make all calls. A tag may end in the number of its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from .checkpoint import Manager, Memory, SaveHandle
from .core.trees import Path, map_tree
from .errors import CheckpointNotFound, CorruptError, UsageError
from .format.values import decode_value, encode_value
from .manager.open_runs import (
    RUNS,
    TAG,
    close_runs,
    load_without_going_back,
    memory_from_environment,
    open_run,
    step_for,
    tags_of,
)

__all__ = [
    "Checkpoint", "finish", "get_checkpoint", "get_latest_checkpoint", "get_latest_checkpoint_path", "init", "list_checkpoints",
    "manager", "memory_from_environment",
]  # fmt: skip

_TREE, _TENSOR = "tree", "__tensor__"
_BEGUN: dict[int, str] = {}
"""By step, the tags of the saves that this process has begun."""
_LOOKED_AT: list[int] = []
"""Steps that were loaded since the last save. The step of the next save shows whether the run went back to one of them."""


def init(
    persistent_storage_path: str,
    persistent_time_interval: float = 100,
    num_of_version_in_retention: int = 2,
    *,
    memory: Memory | None = None,
) -> Manager:
    """Open a run: saves go to memory, and are copied to the path every `persistent_time_interval` seconds.

    The path keeps the newest `num_of_version_in_retention` checkpoints. A run that is still open is closed first, by `finish`.
    """
    finish()
    return open_run(persistent_storage_path, persistent_time_interval, num_of_version_in_retention, memory)


def finish() -> None:
    """Copy the newest checkpoint to the storage path, and close the run; this also happens at the end of the process."""
    _BEGUN.clear()
    _LOOKED_AT.clear()
    close_runs()


def manager(persist_path: str | None = None) -> Manager:
    """Return the manager of the run that `init` or an engine of DeepSpeed has opened; else open a run at the path."""
    if not RUNS and persist_path is None:
        raise UsageError("nebula: call init(persistent_storage_path) first")
    return RUNS[0] if RUNS else init(str(persist_path))


class Checkpoint:
    """A checkpoint with this tag, to save files to or to load them from.

    It is saved when this rank has added `num_of_files` files; with -2, when `commit` is called.
    """

    def __init__(self, tag: str = "", num_of_files: int = 1) -> None:
        self.tag, self._num_files = str(tag), num_of_files
        self._files: dict[str, Any] = {}
        self.handle: SaveHandle | None = None

    def save(self, name: str, state: Any) -> None:
        """Add a file to the checkpoint: a module, a state dict, or any tree of tensors and plain values.

        Once `num_of_files` files are there, the checkpoint is saved.
        """
        tensors: dict[str, torch.Tensor] = {}

        def taken(path: Path, node: Any) -> Any:
            if not isinstance(node, torch.Tensor):
                return node
            key = "".join(f"/{key!r}" for key in path)
            tensors[key] = node.detach()
            return {_TENSOR: key, "shape": list(node.shape), "dtype": str(node.dtype).removeprefix("torch.")}

        tree = encode_value(map_tree(taken, state.state_dict() if hasattr(state, "state_dict") else state), name)
        self._files[name] = {"tensors": tensors, _TREE: tree}
        if len(self._files) == self._num_files:
            self.commit()

    def commit(self) -> bool:
        """Save all files that were added, in the background; return True. Collective."""
        step, is_beyond = step_for(manager(), self.tag, _BEGUN)
        # If the new step lies between the loaded one and the newest, the run goes back to the loaded one. Else the load did not
        # change the run.
        if not is_beyond and _LOOKED_AT and _LOOKED_AT[-1] < step:
            with suppress(CheckpointNotFound, CorruptError):  # it may be gone by now
                manager().load(_LOOKED_AT[-1], {}, strict=False)
        _LOOKED_AT.clear()
        self.tag = _BEGUN[step] = self.tag or str(step)
        self.handle = manager().async_save(step, {"files": self._files}, metadata={TAG: self.tag})
        self._files = {}
        return True

    def load(self, name: str, map_location: Any = None) -> Any:
        """Return the content of a file as it was saved; tensors that were sharded are returned whole. Collective.

        Newer checkpoints of the run stay. If the step of the next save lies between this one and the newest, the run goes back
        to this checkpoint.
        """
        step = max((step for step, tag in _tags().items() if tag == self.tag), default=None)
        if step is None:
            raise CheckpointNotFound(f"nebula: no checkpoint {self.tag!r}; there are: {', '.join(_tags().values())}")
        found: dict[str, Any] = {"files": {name: {_TREE: b""}}}
        load_without_going_back(manager(), step, found)
        if not found["files"][name][_TREE]:
            raise CheckpointNotFound(f"nebula: the checkpoint {self.tag!r} has no file {name!r}")
        tensors: dict[str, torch.Tensor] = {}

        def made(path: Path, node: Any) -> Any:
            if not isinstance(node, Mapping) or _TENSOR not in node:
                return node
            tensors[node[_TENSOR]] = torch.empty(node["shape"], dtype=getattr(torch, node["dtype"]), device=map_location)
            return tensors[node[_TENSOR]]

        tree = map_tree(made, decode_value(found["files"][name][_TREE]))
        load_without_going_back(manager(), step, {"files": {name: {"tensors": tensors}}})
        _LOOKED_AT.append(step)
        return tree


def list_checkpoints(persist_path: str | None = None) -> list[Checkpoint]:
    """List the checkpoints of the run, in memory and at the storage path, the newest last."""
    return [Checkpoint(tag) for tag in _tags(persist_path).values()]


def get_checkpoint(tag: str, persist_path: str | None = None) -> Checkpoint:
    """Return the `Checkpoint` with this tag; with a path, the run there is opened first if no run is open."""
    manager(persist_path)
    return Checkpoint(tag)


def get_latest_checkpoint(persist_path: str | None = None) -> Checkpoint | None:
    """Return the newest checkpoint; None if there is none."""
    return next(reversed(list_checkpoints(persist_path)), None)


def get_latest_checkpoint_path(name: str = "", persist_path: str | None = None) -> str:
    """Return the folder at the storage path that holds, or will hold, all files of the newest checkpoint; ``""`` without one."""
    latest = manager(persist_path).latest()
    return "" if latest is None else manager().path(latest)


def _tags(persist_path: str | None = None) -> dict[int, str]:
    return tags_of(manager(persist_path))
