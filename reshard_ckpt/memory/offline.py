"""Checkpoints in the memory of this node whose jobs are gone: list them, write them to the store, or drop them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.catalog.model import Catalog
from ..engine.common.files import open_files
from ..engine.common.lineage import LINEAGE, Lineage
from ..engine.common.step_folders import StepNames, names_at
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, UsageError
from ..format.files import RUN_LOCK_KEY
from ..storage import LocksUnsupported, Storage, open_storage, resolved_path
from ..storage.protocol import map_at_once
from .generations import Generation, NodeImages, files_here, find_generations
from .lineage_copy import read_copy
from .node import is_entered, node_id, remove_run, run_path, runs
from .persist import is_older, is_persisted, publish, stored_save_id, write_files
from .restore import whole_files


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A checkpoint that this node holds in memory, wholly or in part.

    Attributes
    ----------
    step, save_id
        The step, and the id of the save.
    run
        Id of the run. A run that began anew with the same root has another id.
    saved_s
        Time of the save in seconds since 1970; None if its catalog is damaged.
    files_here, files
        Number of its files that are whole on this node, and of all its files.
    superseded
        Whether the run went back to an older step, as far as its root and this node can tell.
    """

    step: int
    save_id: str
    run: str
    saved_s: float | None
    files_here: int
    files: int
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class HeldRun:
    """The checkpoints of one run in the memory of this node.

    Attributes
    ----------
    root
        The run's root.
    num_bytes
        Memory in bytes that the run takes on this node.
    is_alive
        Whether a process of the run's job is alive on this node.
    steps
        The checkpoints, the newest last.
    """

    root: str
    num_bytes: int
    is_alive: bool
    steps: tuple[HeldStep, ...]


@dataclass(frozen=True, slots=True)
class PersistReport:
    """The result of `persist_held`.

    Attributes
    ----------
    step, path
        The checkpoint, and its path in the store.
    num_bytes
        Bytes that this call wrote.
    is_published
        Whether the store has the whole checkpoint now.
    missing
        Nodes that hold files which the store still lacks; call `persist_held` there.
    passed_over
        A line for each newer checkpoint in the memory of this node that is passed over: its catalog is damaged there, or the
        store has a newer save of its step.
    """

    step: int
    path: str
    num_bytes: int
    is_published: bool
    missing: tuple[str, ...]
    passed_over: tuple[str, ...] = ()


def held_runs(root: str | None, folder: str) -> list[HeldRun]:
    """List the checkpoints in the memory of this node: of the run at `root`, or of all runs of this user."""
    wanted = None if root is None else run_path(folder, root)
    out = []
    for run in runs(folder):
        if wanted in (None, run.path):
            lineage = None
            with suppress(CheckpointError), open_storage(run.root) as storage:  # the store may be away, or the note damaged
                lineage = _lineage(run.path, storage)
            steps = []
            for held in find_generations(run.path):
                saved_s = None if held.is_damaged else held.decoded_catalog().created_s
                superseded = lineage is not None and held.run == lineage.run and not lineage.is_current(held.attempt, held.step)
                num_here = len(files_here(run.path, held))
                steps.append(HeldStep(held.step, held.save_id, held.run, saved_s, num_here, len(held.holders), superseded))
            out.append(HeldRun(run.root, run.num_bytes, is_entered(run.path), tuple(steps)))
    return out


def _lineage(path: Path, storage: Storage) -> Lineage | None:
    """Return the newest lineage of a run (which saves still count): from its root, or from the copy on this node; or None."""
    lineage, copy = LINEAGE.read(storage), read_copy(path)
    return copy if copy is not None and (lineage is None or copy.is_newer(lineage)) else lineage


def drop_held(root: str, folder: str) -> int:
    """Free all memory of this node that a run takes, and return the number of bytes.

    Raise `CheckpointNotFound` if the memory of this node holds nothing of the run, and `UsageError` if a job of the run is alive
    on this node.
    """
    path = _run(root, folder)
    num_bytes = sum(run.num_bytes for run in runs(folder) if run.path == path)
    remove_run(path)
    return num_bytes


def persist_held(root: str, folder: str, *, step: int | None = None) -> PersistReport:
    """Write the newest checkpoint of a run, or the one of `step`, from the memory of this node to the store.

    Call it on every node: each writes the files that it holds and the store lacks. The call that finds all files in the store
    publishes the checkpoint. Raise `CheckpointNotFound` if the memory of this node holds no such checkpoint, and `UsageError` if
    a job of the run is alive, on this node or another one.
    """
    path = _run(root, folder)
    with open_storage(resolved_path(root)) as storage, _unmanaged(storage):
        names = names_at(storage)

        def target(generation: Generation) -> str:
            return f"{resolved_path(root).rstrip('/')}/{names.of(generation.step)}"

        chosen, passed_over = _chosen(path, storage, names, step, target)
        return replace(_persist(path, target(chosen), folder, chosen), passed_over=passed_over)


@contextmanager
def _unmanaged(storage: Storage) -> Iterator[None]:
    """Keep managers away from a run's root in a ``with`` block: a new manager would remove files that no catalog refers to yet.

    Where the store has neither locks nor leases, nothing keeps them away. Raise `UsageError` if a job manages the checkpoints
    there.
    """
    try:
        if storage.hints.has_locks:
            lock = storage.lock(RUN_LOCK_KEY, shared=True, make=True)
        else:
            lock = storage.lease(RUN_LOCK_KEY, b"reshard-ckpt memory persist")
    except LocksUnsupported:
        yield
        return
    if lock is None:
        raise UsageError(f"{storage.url}: a job manages the checkpoints there; end it first")
    with lock:
        yield


def _persist(path: Path, target: str, folder: str, generation: Generation) -> PersistReport:
    with open_storage(target) as storage:
        if is_persisted(storage, generation):
            return PersistReport(generation.step, target, 0, True, ())
        catalog, local = generation.decoded_catalog(), files_here(path, generation)
        own = [key for key in local if generation.holders[key][0] == node_id(folder)]
        num_bytes = _write_absent(path, generation, own, storage, catalog)
        # The copies of other nodes' files come last: these nodes may have written their files meanwhile.
        num_bytes += _write_absent(path, generation, local, storage, catalog)

        def is_there(number: int) -> bool:
            """Tell whether the store has a whole file, and its digests, which are written once the file is durable."""
            try:
                open_files(storage, catalog, [number], [number])
            except CorruptError:
                return False
            return True

        is_stored = map_at_once(storage, is_there, range(len(catalog.files)))
        absent = [file.key for file, found in zip(catalog.files, is_stored, strict=True) if not found]
        if not absent:
            publish(storage, generation)
    missing = sorted({generation.holders[key][0] for key in absent})
    return PersistReport(generation.step, target, num_bytes, not absent, tuple(missing))


def _write_absent(path: Path, generation: Generation, keys: Sequence[str], storage: Storage, catalog: Catalog) -> int:
    """Write the files that the store lacks, or has damaged, from this node's memory. Return the number of bytes written."""
    num_bytes = 0
    with closing(NodeImages(path, generation.save_id)) as images:
        for key in keys:
            # Checked just before each file: another node may have written it meanwhile, or published the checkpoint.
            if not whole_files(storage, catalog, [key]):
                # If this copy is damaged, another node may hold a whole one; else the file is reported as missing.
                with suppress(CorruptError):
                    num_bytes += write_files(images, catalog, [key], storage)
    return num_bytes


def _chosen(
    path: Path, storage: Storage, names: StepNames, step: int | None, target: Callable[[Generation], str]
) -> tuple[Generation, tuple[str, ...]]:
    """Choose the newest checkpoint in memory that counts in the run's lineage, only of `step` if that is given.

    Also return a line for each newer one that is passed over: its catalog is damaged, or the store has a newer save of its step.
    If the root and with it the run's lineage is lost, all checkpoints count.
    """
    found = find_generations(path)
    lineage = _lineage(path, storage)
    if lineage is not None:
        found = [held for held in found if held.run == lineage.run and lineage.is_current(held.attempt, held.step)]
    passed: list[str] = []
    for generation in reversed(found):
        if step in (None, generation.step):
            if generation.is_damaged:
                passed.append(f"step {generation.step} in memory: its catalog is damaged on this node")
                continue
            with open_storage(target(generation)) as stored:
                if not is_older(generation.save_id, generation.older, stored_save_id(stored, names, generation.step)):
                    return generation, tuple(passed)
            passed.append(f"step {generation.step} in memory: the store has a newer save of that step")
    steps = ", ".join(str(generation.step) for generation in found if not generation.is_damaged) or "none"
    raise CheckpointNotFound(
        "; ".join([f"{storage.url}: the memory of this node has no such checkpoint; the steps there: {steps}", *passed])
    )


def _run(root: str, folder: str) -> Path:
    path = run_path(folder, root)
    if not path.is_dir():
        raise CheckpointNotFound(
            f"{root}: the memory of this node ({folder}) holds nothing of this run; reshard-ckpt memory list names the runs"
        )
    if is_entered(path):
        raise UsageError(f"{root}: a job of this run is alive on this node; end it first")
    return path
