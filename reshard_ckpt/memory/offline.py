"""What the memory tier of this node holds of runs whose jobs are gone: listing it, writing it to the store, dropping it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.catalog.model import Catalog
from ..engine.common.lineage import LINEAGE
from ..engine.loading.files import open_files
from ..errors import CheckpointNotFound, CorruptError, UsageError
from ..format.keys import RUN_LOCK_KEY, step_name
from ..storage import LocksUnsupported, Storage, open_storage, resolved_path
from .generations import Generation, NodeImages, files_here, find_generations
from .lineage_copy import read_copy
from .node import FOLDER, is_entered, node_id, remove_run, run_path, runs
from .persist import is_persisted, publish, write_files
from .restore import whole_files


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A checkpoint in the memory of this node.

    Attributes
    ----------
    step, save_id
        Which.
    run
        Id of the run: one that began anew with the same root is another run.
    saved_s
        When it was saved, in seconds since the epoch; None where its catalog is damaged.
    files_here, files
        How many of its files are whole here, and how many it has.
    """

    step: int
    save_id: str
    run: str
    saved_s: float | None
    files_here: int
    files: int


@dataclass(frozen=True, slots=True)
class HeldRun:
    """What the memory of this node holds of a run.

    Attributes
    ----------
    root
        The run's root.
    num_bytes
        The memory that it takes.
    is_alive
        Whether a process of the job is there.
    steps
        Its checkpoints, the newest last.
    """

    root: str
    num_bytes: int
    is_alive: bool
    steps: tuple[HeldStep, ...]


@dataclass(frozen=True, slots=True)
class PersistReport:
    """What `persist_held` did.

    Attributes
    ----------
    step, path
        Which checkpoint.
    num_bytes
        How much was written by this call.
    is_published
        Whether the store has the checkpoint now.
    missing
        The nodes whose files the store lacks; run it there.
    passed_over
        A line for each newer checkpoint whose catalog is damaged in the memory of this node.
    """

    step: int
    path: str
    num_bytes: int
    is_published: bool
    missing: tuple[str, ...]
    passed_over: tuple[str, ...] = ()


def held_runs(root: str | None = None, folder: str = FOLDER) -> list[HeldRun]:
    """List what the memory of this node holds of a run, or of all runs of this user."""
    wanted = None if root is None else run_path(folder, root)
    out = []
    for run in runs(folder):
        path = Path(run.path)
        if wanted in (None, path):
            steps = tuple(_held_step(path, generation) for generation in find_generations(path))
            out.append(HeldRun(run.root, run.num_bytes, is_entered(path), steps))
    return out


def _held_step(path: Path, generation: Generation) -> HeldStep:
    num_here, saved_s = (
        len(files_here(path, generation)),
        None if generation.is_damaged else generation.decoded_catalog().created_s,
    )
    return HeldStep(generation.step, generation.save_id, generation.run, saved_s, num_here, len(generation.holders))


def drop_held(root: str, folder: str = FOLDER) -> int:
    """Drop all that the memory of this node holds of a run; returns the bytes.

    Raises
    ------
    CheckpointNotFound
        It holds nothing of it.
    UsageError
        The job is alive.
    """
    path = _run(root, folder)
    num_bytes = sum(run.num_bytes for run in runs(folder) if run.path == str(path))
    remove_run(path)
    return num_bytes


def persist_held(root: str, folder: str = FOLDER, *, step: int | None = None) -> PersistReport:
    """Write the newest checkpoint of a run, or that of a step, from the memory of this node to the store.

    Run it on every node: each writes the files that it holds and the store lacks. Whoever finds all of them there publishes.

    Raises
    ------
    CheckpointNotFound
        The memory of this node holds nothing of it.
    UsageError
        The job is alive, on this node or another one.
    """
    path = _run(root, folder)
    with open_storage(resolved_path(root)) as storage, _unmanaged(storage):
        chosen, passed_over = _chosen(path, storage, step)
        return replace(_persist(path, root, folder, chosen), passed_over=passed_over)


@contextmanager
def _unmanaged(storage: Storage) -> Iterator[None]:
    """Keep jobs away from a root, also on other nodes: what no catalog refers to yet is removed when a manager is made."""
    try:
        lock = storage.lock(RUN_LOCK_KEY, shared=True, make=True)
    except LocksUnsupported:
        yield
        return
    if lock is None:
        raise UsageError(f"{storage.url}: a job manages the checkpoints there; end it first")
    with lock:
        yield


def _persist(path: Path, root: str, folder: str, generation: Generation) -> PersistReport:
    target = f"{resolved_path(root).rstrip('/')}/{step_name(generation.step)}"
    with open_storage(target) as storage:
        if is_persisted(storage, generation):
            return PersistReport(generation.step, target, 0, True, ())
        catalog, here = generation.decoded_catalog(), files_here(path, generation)
        own = [key for key in here if generation.holders[key][0] == node_id(folder)]
        num_bytes = _write_absent(path, generation, own, storage, catalog)
        # After its own: meanwhile the others may have written theirs.
        num_bytes += _write_absent(path, generation, here, storage, catalog)
        absent = [file.key for number, file in enumerate(catalog.files) if not _has_digests(storage, catalog, number)]
        if not absent:
            publish(storage, generation)
    missing = sorted({generation.holders[key][0] for key in absent})
    return PersistReport(generation.step, target, num_bytes, not absent, tuple(missing))


def _has_digests(storage: Storage, catalog: Catalog, number: int) -> bool:
    """Whether the store has a file, and its digests, which are written only after the bytes of the file are durable."""
    try:
        open_files(storage, catalog, [number], [number])
    except CorruptError:
        return False
    return True


def _write_absent(path: Path, generation: Generation, keys: Sequence[str], storage: Storage, catalog: Catalog) -> int:
    """Write the files that the store lacks, or has with other bytes than the catalog says. Return the bytes written."""
    num_bytes = 0
    with closing(NodeImages(path, generation.save_id)) as images:
        for key in keys:
            # Looked at anew for each: another node may have written it meanwhile, or published, and then it stays.
            if not whole_files(storage, catalog, [key]):
                with suppress(CorruptError):  # another node may hold a better copy, or it is named as missing
                    num_bytes += write_files(images, catalog, [key], storage)
    return num_bytes


def _chosen(path: Path, storage: Storage, step: int | None) -> tuple[Generation, tuple[str, ...]]:
    """Choose the newest generation that counts, with a line for each newer one that is damaged.

    All count where the root, and with it the run's lineage, is lost.
    """
    found = find_generations(path)
    lineage, copy = LINEAGE.read(storage), read_copy(path)
    if copy is not None and (lineage is None or copy.is_newer(lineage)):
        lineage = copy
    if lineage is not None:
        found = [one for one in found if one.run == lineage.run and lineage.counts(one.attempt, one.step)]
    passed: list[str] = []
    for one in reversed(found):
        if step in (None, one.step):
            if not one.is_damaged:
                return one, tuple(passed)
            passed.append(f"step {one.step} in memory: its catalog is damaged on this node")
    steps = ", ".join(str(one.step) for one in found if not one.is_damaged) or "none"
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
