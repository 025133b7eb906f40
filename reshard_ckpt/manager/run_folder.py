"""The folder of one training run: its lock, and what pruning needs from the catalog of each step."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..checkpoint.listing import METRIC, metric_of
from ..engine.common.step_folders import referred_keys
from ..engine.loading.load import open_catalog
from ..errors import CheckpointNotFound, CorruptError, StorageError, UsageError
from ..format.keys import RUN_LOCK_KEY
from ..formats.protocol import locate
from ..formats.source import Path, open_source
from ..memory.options import Memory
from ..storage import LocksUnsupported, Storage, open_storage, resolved_path


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What pruning needs from the catalog of one step."""

    metric: float | None
    referred: frozenset[str]
    save_id: str = ""


def look(path: str, step: int) -> StepInfo:
    """Read what pruning needs of a step; empty, where its catalog is gone or damaged."""
    try:
        with open_storage(path) as storage:
            catalog = open_catalog(storage)
    except (CheckpointNotFound, CorruptError):
        return StepInfo(None, frozenset())
    return StepInfo(metric_of(catalog.metadata), frozenset(referred_keys(step, catalog)), catalog.save_id)


def is_foreign(path: str) -> bool:
    """Whether a folder without a catalog is a checkpoint of another library, be it damaged."""
    try:
        with open_source(path):
            return True
    except CheckpointNotFound:
        return False
    except (CorruptError, StorageError):  # whoever loads it shall see that, and not take an older one for the newest
        return True


def with_metric(metadata: Any, metric: float | None) -> Any:
    """Add the metric to the metadata.

    Raises
    ------
    UsageError
        They have no place for it.
    """
    if metric is None:
        return metadata
    if metadata is not None and (not isinstance(metadata, Mapping) or METRIC in metadata):
        raise UsageError(f"metadata={metadata!r:.200}: with metric=, pass a dict without a {METRIC!r} of its own")
    return {**(metadata or {}), METRIC: float(metric)}


def checked_root(root: Path) -> str:
    """Return the path of a run's root, whole, also where nothing is there yet.

    Raises
    ------
    UsageError
        It is a file.
    """
    path = resolved_path(root)
    storage, key = locate(path)
    with storage:
        if key is not None:
            raise UsageError(f"{path}: this is a file; pass the folder that holds the run's checkpoints, or is to hold them")
    return path


def refuse_memory_unless(memory: Any, root: str, *, read_only: bool) -> None:
    """Raise a `UsageError` for ``memory=`` of a wrong type, or of a manager that never saves."""
    if memory is not None and not isinstance(memory, Memory):
        raise UsageError(f"memory={memory!r:.100}: pass a checkpoint.Memory, as in memory=checkpoint.Memory(copies=1), or None")
    if memory is not None and read_only:
        raise UsageError(f"{root}: this manager is read_only; memory= is for the job that saves")


@contextmanager
def take_lock(storage: Storage) -> Iterator[bool]:
    """Lock the root, so that no other job saves and prunes here. Yield whether the root had a manager before."""
    had_manager = storage.size(RUN_LOCK_KEY) is not None
    try:
        lock = storage.lock(RUN_LOCK_KEY, make=True)
    except LocksUnsupported as error:
        warnings.warn(f"{error}; nothing keeps a second job from saving and pruning there too", stacklevel=4)
        yield had_manager
        return
    if lock is None:
        holder = storage.read(RUN_LOCK_KEY, 1 << 10).decode(errors="replace") or "another job"
        raise UsageError(
            f"{storage.url}: {holder} manages the checkpoints there, or reshard-ckpt memory persist writes some of them; give "
            "each job its own root, or pass read_only=True to load"
        )
    with lock:
        with suppress(OSError):  # the disk may be full, and a job must be able to load all the same
            lock.note(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield had_manager
