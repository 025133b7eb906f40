"""The folder of one training run: its lock, and the facts about each step that pruning needs."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..checkpoint.listing import METRIC, metric_of
from ..comm import Comm, value_of_first
from ..engine.common.files import identified_catalog
from ..engine.common.step_folders import STEP_NAMES, StepNames, needed_keys
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UsageError
from ..format.catalog import HEAD_BYTES
from ..format.files import RUN_LOCK_KEY
from ..formats.source import Path, locate, open_source
from ..memory.options import Memory
from ..storage import Lock, LocksUnsupported, Storage, holder_text, is_object_path, open_below, unlinked_path


class StepInfo(NamedTuple):
    """Facts from one step's catalog, which are needed to remove old steps and to save incrementally.

    Attributes
    ----------
    folder
        The name of the step's folder in the root.
    needed, referred
        Keys (paths below the root) of all files that the step needs, and of those among them that lie in other folders.
    num_saves
        The number of saves that wrote the needed files; 0 if the step has no catalog that can be read.
    head
        The first bytes of the catalog (`HEAD_BYTES`).
    saved_as
        The name of the folder that the checkpoint was saved to; empty if it is not known.
    """

    folder: str
    metric: float | None = None
    needed: frozenset[str] = frozenset()
    save_id: str = ""
    num_saves: int = 0
    head: bytes = bytes(HEAD_BYTES)
    saved_as: str = ""

    @property
    def referred(self) -> frozenset[str]:
        return frozenset(key for key in self.needed if not key.startswith(f"{self.folder}/"))


def read_step_info(root: Storage, folder: str) -> StepInfo:
    """Read the `StepInfo` of a step from the catalog in its folder; without a readable catalog, it has only the folder."""
    try:
        with open_below(root, folder) as storage:
            opened = identified_catalog(storage)
    except (CheckpointNotFound, CorruptError):
        return StepInfo(folder)
    catalog = opened.value
    return StepInfo(
        folder,
        metric_of(catalog.metadata),
        frozenset(needed_keys(folder, catalog)),
        catalog.lineage_id,
        len({catalog.save_id, *(file.save_id for file in catalog.files)}),
        bytes(opened.found.data[:HEAD_BYTES]) if opened.found else b"",
        catalog.folder,
    )


def is_foreign(path: str, timeout_s: float) -> bool:
    """Return whether a folder, which has no catalog of this library, holds a checkpoint of another one, whole or damaged.

    Requests to an object store are repeated for `timeout_s` seconds.
    """
    try:
        with open_source(path, timeout_s=timeout_s):
            return True
    except CheckpointNotFound:
        return False
    except CheckpointError:  # a load must see the error, and must not take an older step for the newest
        return True


def with_metric(metadata: Any, metric: float | None) -> Any:
    """Return a checkpoint's metadata with ``metric=`` of the manager's save in it.

    Raise `UsageError` if the metadata are not a dict, or have a metric of their own; or the metric is not a number.
    """
    if metric is None:
        return metadata
    if metadata is not None and (not isinstance(metadata, Mapping) or METRIC in metadata):
        raise UsageError(f"metadata={metadata!r:.200}: with metric=, pass a dict without a {METRIC!r} of its own")
    try:
        return {**(metadata or {}), METRIC: float(metric)}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"metric={metric!r:.80}: pass a number ({error})") from error


def checked_root(root: Path) -> str:
    """Return the absolute path of a run's root, which need not exist yet. A root that is a symbolic link is resolved only here.

    If a link such as ``current`` is set to another run later, saves and the removal of steps stay with the run that is locked.
    Raise `UsageError` if the path is a file.
    """
    path = unlinked_path(root)
    if is_object_path(path):  # there, keys may lie below another key
        return path
    storage, key = locate(path)
    with storage:
        if key is not None:
            raise UsageError(f"{path}: this is a file; pass the folder that holds the run's checkpoints, or is to hold them")
    return os.path.realpath(path) if os.path.islink(path) else path  # other links in the path may differ from node to node


def known_names(
    comm: Comm, storage: Storage, names: StepNames, noted_names: Callable[[], StepNames], *, read_only: bool
) -> StepNames:
    """Return the names of a run's step folders: the patterns in `names`, and others that are noted in the root. Collective.

    New patterns are noted in the root, unless `read_only`. `noted_names` is `names_at` of the root; only rank 0 calls it.
    """

    def noted() -> list[str]:
        known = noted_names()
        if read_only and names == StepNames():
            return list(known.patterns)
        wanted = names.with_patterns(known.patterns)
        if wanted != known and not read_only:
            STEP_NAMES.keep(storage, wanted.patterns)
        return list(wanted.patterns)

    return StepNames(tuple(value_of_first(comm, noted)))


def check_memory_options(memory: Any, root: str, *, persist_every: int | str | None, read_only: bool, incremental: bool) -> None:
    """Raise a `UsageError` if ``memory=`` has a wrong type, or other options of a manager do not go with it."""
    if memory is None and persist_every is not None:
        raise UsageError(
            f"persist_every={persist_every!r}: how often saves go from memory to the store; pass memory=checkpoint.Memory(...) "
            "too, or leave it out"
        )
    if memory is not None and not isinstance(memory, Memory):
        raise UsageError(f"memory={memory!r:.100}: pass a checkpoint.Memory, as in memory=checkpoint.Memory(copies=1), or None")
    if memory is not None and read_only:
        raise UsageError(f"{root}: this manager is read_only; memory= is for the job that saves")
    if memory is not None and incremental:
        raise UsageError("incremental=True: saves to memory are always whole; pass incremental=True or memory=, not both")


@contextmanager
def take_lock(storage: Storage) -> Iterator[tuple[bool, Lock | None]]:
    """Lock a run's root during the ``with`` block; yield whether the root ever had a manager, and the lock.

    If the file system has no locks, warn, and yield None as the lock. Raise `UsageError` if another manager holds the lock.
    """
    had_manager = storage.hints.has_locks and storage.size(RUN_LOCK_KEY) is not None
    own = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        lock = storage.lease(RUN_LOCK_KEY, own.encode())
    except LocksUnsupported as error:
        warnings.warn(f"{error}; nothing keeps a second job from saving and pruning there too", stacklevel=4)
        yield had_manager, None
        return
    except StorageError as error:  # evaluation jobs often mount the root so that they cannot write
        raise StorageError(f"{error}; or pass read_only=True, to load alone") from error
    if lock is None:
        holder = holder_text(storage.read(RUN_LOCK_KEY, 1 << 16)) or "another job"
        if holder == own:
            raise UsageError(
                f"{storage.url}: {holder}, which is this one, has a manager of the checkpoints there already; close that one "
                "first, or pass read_only=True to load"
            )
        raise UsageError(
            f"{storage.url}: {holder} manages the checkpoints there, or reshard-ckpt memory persist writes some of them; give "
            "each job its own root, or pass read_only=True to load"
        )
    with lock:
        yield had_manager if lock.had_file is None else lock.had_file, lock
