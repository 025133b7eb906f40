"""The memory tier of one run, for its manager: opening, saving, writing to the store in the background, and restoring."""

from __future__ import annotations

import inspect
import threading
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from functools import partial
from typing import Any

from ..checkpoint.listing import metric_of
from ..checkpoint.loading import Prepare, load_given
from ..checkpoint.reading import read_from
from ..checkpoint.saving import async_save, begin_save
from ..comm import ArgumentCheck, Comm, open_session, open_session_by_name, shared_store, value_of_first
from ..comm.links import Links
from ..comm.peers import machine_id
from ..core.catalog.model import Catalog
from ..core.report import LoadReport, duration_s
from ..engine.common.run_lineage import RunLineage
from ..engine.common.step_folders import StepNames
from ..engine.saving.handle import RunningSave, SaveHandle
from ..engine.saving.options import SaveJob, SaveOptions
from ..errors import StorageError, UsageError
from ..storage import open_storage
from .background import Persisting, PersistRule
from .generations import Generation, NodeImages, drop_generations, find_generations
from .lineage_copy import drop_copy, keep_copy, read_copy
from .node import node_id, remove_run, runs
from .options import Memory
from .persist import is_older, persist, stored_save_id
from .restore import Found, Restorable, find_newest, open_images
from .tier import MemoryTarget, Tier
from .topology import find_topology


class MemoryHandle(SaveHandle):
    """A save that goes to the memory of nodes first. It is committed once it is whole in memory."""

    def __init__(self, running: RunningSave, target: MemoryTarget | None, in_store: Callable[[float | None], bool]) -> None:
        super().__init__(running)
        self._target, self._in_store = target, in_store

    @property
    def copies(self) -> int:
        """The least number of other nodes that hold a copy of a file, once the save is done; 0 if the save went to the store."""
        return 0 if self._target is None else self._target.copies

    def persisted(self, timeout: float | None = None) -> bool:
        """Wait until this save is in the store, and return True. Return False if ``persist_every`` lets it stay in memory.

        Raises
        ------
        TimeoutError
            It is still being written.
        CheckpointError
            The save failed, or writing it to the store did.
        """
        self.result(timeout)
        return True if self._target is None else self._in_store(timeout)


class MemoryRun:
    """The memory tier of one run on one rank: saves to the memory of nodes, and restores from it.

    All ranks make it together, with an open `Comm`.

    Parameters
    ----------
    lineage
        The lineage of the run (the note about the saves that count). Before each save, call its `begin`, then `attempt_begun`.
    keeps
        Asked on rank 0 with a step and its metric: whether the run's rule keeps it, so that it goes to the store at once.
    on_stored
        Called on every rank with a step once its generation is in the store.
    newest_stored
        Asked on rank 0 for the newest step in the store that counts; −1 if there is none.
    grace_s
        As ``grace=`` of a `Manager`, in seconds.
    """

    def __init__(
        self,
        options: Memory,
        root: str,
        names: StepNames,
        comm: Comm,
        lineage: RunLineage,
        persist_every: int | str,
        keeps: Callable[[int, float | None], bool],
        on_stored: Callable[[int], None],
        newest_stored: Callable[[], int],
        *,
        grace_s: float,
        process_group: Any,
        timeout_s: float,
    ) -> None:
        self.options, self._root, self._names = options, root, names
        self._session: dict[str, Any] = {"process_group": process_group, "timeout_s": timeout_s}
        self._timeout_s, self._grace_s, self._rank = timeout_s, grace_s, comm.rank
        self._rule, self._keeps = PersistRule(persist_every), keeps
        self._on_stored, self._newest_stored = on_stored, newest_stored
        topology = find_topology(comm, node_id(options.folder), machine_id(), options.copies)
        if comm.rank == 0 and len(topology.ids) <= options.copies:
            warnings.warn(
                f"Memory(copies={options.copies}) wants {options.copies + 1} nodes, and there "
                f"{'is' if len(topology.ids) == 1 else 'are'} {len(topology.ids)}: with fewer copies, less survives",
                stacklevel=4,
            )
        nonce = value_of_first(comm, lambda: uuid.uuid4().hex)
        self._named: Callable[[str], Any] = lambda name: shared_store(f"memory/{nonce}/{name}", **self._session)
        self._tier = Tier(options, root, topology, comm.rank, self._named, self._due, timeout_s=timeout_s)
        self._lineage, self._folder = lineage, self._tier.folder
        copy = read_copy(self._folder) if topology.leads(comm.rank) else None
        lineage.adopt(comm, copy)
        if copy is not None and copy.run != lineage.current.run:  # of a root that was removed: no later job may adopt it
            drop_copy(self._folder)
        self._tier.pool.run = lineage.current.run
        self._name_others()
        self._writing: Persisting | None = None
        self._newest: Generation | None = None
        self._stored: set[str] = set()
        self._noted = threading.Event()
        """Set once the last save that has begun is over, and noted here."""
        self._noted.set()
        self._metrics: dict[int, float | None] = {}

    def attempt_begun(self) -> None:
        """Before the first save of an attempt, forget saves in memory that no longer count, or are beyond the limit.

        An attempt is a part of the run from one load to the next. A killed job may have left more saves than the limit.
        """
        self._tier.attempt, self._newest = self._lineage.current.attempt, None
        self._tier.pool.keep_current(self._lineage.current.is_current)
        if not self._tier.topology.leads(self._rank):
            return
        if self._lineage.is_unwritten:
            keep_copy(self._folder, self._lineage.current)
        with suppress(StorageError, OSError):  # generations that stay do not count, and are freed first
            kept = {generation.name for generation in self._known()[-self.options.generations :]}
            of_run = [
                generation.name for generation in find_generations(self._folder) if generation.run == self._lineage.current.run
            ]
            drop_generations(self._folder, [name for name in of_run if name not in kept])

    def _name_others(self) -> None:
        """Warn of checkpoints in memory that are not loaded: of an earlier run with this root, or of this run at another root."""
        found = find_generations(self._folder)
        others = [g for g in found if g.run != self._lineage.current.run]
        if not self._tier.topology.leads(self._rank):
            return
        if others:
            warnings.warn(
                f"this node's memory holds {len(others)} checkpoints of another run with the root {self._root}, up to step "
                f"{max(g.step for g in others)}, which are not loaded; reshard-ckpt memory drop {self._root} frees them",
                stacklevel=5,
            )
        for root, step in self._elsewhere() if len(found) == len(others) else ():
            warnings.warn(
                f"this node's memory holds checkpoints of this run, or of one that it was copied from, up to step {step}, by the "
                f"root {root}; they are not loaded: where that is the same folder as {self._root}, pass it by that path",
                stacklevel=5,
            )

    def _elsewhere(self) -> Iterator[tuple[str, int]]:
        """Yield the other roots under which this node has checkpoints of this run in memory, each with its newest step."""
        for run in runs(self.options.folder):
            with suppress(StorageError):  # a run of another job, whose errors do not concern this one
                steps = [g.step for g in find_generations(run.path) if g.run == self._lineage.current.run]
                if steps and run.path != self._folder:
                    yield run.root, max(steps)

    def _due(self, step: int, stored: str, older: Collection[str]) -> bool:
        """Decide on rank 0 whether the checkpoint of a step goes from memory to the store.

        While another one is being written there, this happens only if the run's rule keeps the step, or the store has an older
        save of the step, or gets it: that one would be loaded once memory has forgotten the new one. `stored` is the id of the
        save that the store had when the new save began, and `older` has those of all older saves.
        """
        # Those on their way first: one that has come to the store is in `_stored` before its pin goes.
        on_the_way = self._tier.pool.pinned
        replaces = bool(stored) or not (on_the_way | self._stored).isdisjoint(older)
        if self._keeps(step, self._metrics.pop(step, None)) or replaces:
            return self._rule.due(step, kept=True)
        return (self._writing is None or self._writing.done()) and self._rule.due(step)

    def _is_current(self, generation: Generation) -> bool:
        return generation.run == self._lineage.current.run and self._lineage.current.is_current(
            generation.attempt, generation.step
        )

    @property
    def num_skipped(self) -> int:
        """The number of saves that went to the store because memory was full."""
        return self._tier.num_skipped

    def steps(self) -> list[int]:
        """List the steps of the checkpoints that this node knows to be in memory, in order."""
        return sorted({generation.step for generation in self._known()})

    def _known(self) -> list[Generation]:
        return [held for held in find_generations(self._folder) if self._is_current(held) and not held.is_damaged]

    def catalogs(self, step: int | None = None) -> dict[int, Catalog]:
        """Map the steps of checkpoints that this node knows to be in memory to their catalogs; with `step`, that step alone.

        A checkpoint is left out if the store has a newer save of its step: a job died before memory forgot the older one.
        """
        asked = [held for held in self._known() if step in (None, held.step)]
        known = [held for held in asked if not is_older(held.save_id, held.older, self._stored_id(held.step))]
        return {generation.step: generation.decoded_catalog() for generation in known}

    def async_save(self, step: int, path: str, state: Mapping[str, Any], options: Mapping[str, Any]) -> SaveHandle:
        """Begin a save to memory, with the options of `checkpoint.async_save`. If some rank has no room, it goes to the store."""
        inspect.signature(async_save).bind(path, state, **options)  # a wrong option is a TypeError, as in `async_save`
        given = dict(options)
        with ArgumentCheck("save to memory", path, **self._session):
            grace_s = duration_s(given.pop("grace", self._grace_s), option="grace", or_zero=True)
            chosen = SaveOptions(**given, grace_s=grace_s)
            _refuse_options(chosen)
        self.wait_for(step)
        self._metrics[step] = metric_of(chosen.metadata)
        targets: list[MemoryTarget | None] = []
        begun: list[Persisting] = []

        def choose(job: SaveJob) -> MemoryTarget | None:
            targets.append(self._tier.target(job, step))
            return targets[0]

        # Opened by name, because only some generations go to the store: it takes no number among the calls of all ranks.
        by_name = open_session_by_name("persist", path, **self._session)
        handle = begin_save(path, state, chosen, choose)
        target, is_known = targets[0], threading.Event()
        before = self._noted

        def committed(done: SaveHandle) -> None:
            before.wait()  # the thread of a later save may be the faster one, and ranks write to the store in the order of notes
            try:
                if target is None and not done.failed():
                    self.forget(step)  # a generation of this step in memory is older
                    self._on_stored(step)
                elif target is not None and target.generation is not None and not done.failed():
                    self._newest = target.generation
                    if target.persists:
                        begun.append(self._persist(target.generation, path, by_name(target.generation.save_id)))
            finally:
                if not begun:
                    self._tier.pool.unpin(done.running.save_id)
                is_known.set()

        handle.add_done_callback(committed)
        self._noted = is_known

        def in_store(timeout: float | None) -> bool:
            if not is_known.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                raise TimeoutError(f"the save to {path} still waits for the save before it after {timeout} s; it goes on")
            return begun[0].wait(timeout) if begun else handle.running.save_id in self._stored

        return MemoryHandle(handle.running, target, in_store)

    def _persist(
        self, generation: Generation, path: str, session: AbstractContextManager[Comm], keys: Sequence[str] | None = None
    ) -> Persisting:
        """Begin to write a checkpoint from memory to the store. Collective.

        Each rank writes the files `keys`, by default the files that it saved.
        """
        if keys is None:
            keys = [file.key for file in generation.decoded_catalog().files if file.rank == self._rank]

        def write() -> bool:
            with (
                session as comm,
                open_storage(path, timeout_s=self._timeout_s) as storage,
                closing(NodeImages(self._folder, generation.save_id)) as images,
            ):
                return persist(comm, images, generation, keys, storage, grace_s=self._grace_s)

        def over(is_stored: bool, is_new: bool) -> None:
            if is_stored:
                self._stored.add(generation.save_id)
            self._tier.pool.unpin(generation.save_id)
            if is_new:
                self._on_stored(generation.step)

        self._tier.pool.pin(generation.save_id)
        self._writing = Persisting(generation, path, write, self._writing, over)
        return self._writing

    def persist_found(self, found: Restorable) -> Persisting:
        """Begin to write a checkpoint in memory, which an ended job has left, to the store, if the store lacks it. Collective."""
        path = self._path(found.generation.step)
        session = open_session("persist", path, **self._session)
        return self._persist(found.generation, path, session, found.files_of(self._rank))

    def _path(self, step: int) -> str:
        return f"{self._root.rstrip('/')}/{self._names.of(step)}"

    def find(
        self, at_least: Callable[[], int], excluded: Sequence[str] = (), step: int | None = None, *, verify: bool = True
    ) -> Found:
        """Find the newest checkpoint in memory that is still whole, of `step` or of any step; see `find_newest`. Collective."""

        def wanted(generation: Generation) -> bool:
            return self._is_current(generation) and step in (None, generation.step)

        with open_session("find in memory", f"{self._root} at {step}", **self._session) as comm:
            return find_newest(
                comm, self._folder, self._tier.topology, wanted, at_least, self._stored_id, excluded, verify=verify
            )

    def _stored_id(self, step: int) -> str:
        with open_storage(self._path(step), timeout_s=self._timeout_s) as storage:
            return stored_save_id(storage, self._names, step)

    def load(self, found: Restorable, wanted: Mapping[str, Any] | Prepare, options: Mapping[str, Any]) -> tuple[LoadReport, str]:
        """Load a checkpoint from memory in place, as `load_given` does.

        Return the report, and the tier: ``"memory"`` or ``"peer"``.
        """
        self._tier.adopt(found.generation)
        report = load_given(self._in_memory(found), wanted, options, opened=partial(self._opened, found))
        return report, "memory" if found.is_local(self._tier.topology) else "peer"

    def read(self, found: Restorable, names: Sequence[str] | None) -> dict[str, Any]:
        """Read whole tensors and values of a checkpoint in memory, on every rank, and return them by name."""
        with ExitStack() as held, open_session("read", self._in_memory(found), **self._session) as comm:
            # The images stay open until all ranks have left the session: other ranks may read from this one.
            return read_from(held.enter_context(self._opened(found, comm)), names)

    def _in_memory(self, found: Restorable) -> str:
        return f"{self._root}/{self._names.of(found.generation.step)} in memory"

    def _opened(self, found: Restorable, comm: Comm) -> AbstractContextManager[Any]:
        def job_links(name: str) -> Links:
            store, ended = self._named(f"load/{name}")
            return Links(store, ended, self._rank, len(self._tier.topology.node_of), timeout_s=self._timeout_s)

        return open_images(comm, self._folder, found, None if found.is_local(self._tier.topology) else job_links)

    def loaded(self, step: int) -> None:
        """Let the interval of ``persist_every`` begin at the loaded step."""
        self._rule.begin(step)

    def save_ids_beyond(self, step: int) -> list[str]:
        """List the ids of the saves of steps beyond `step` that are being written to the store."""
        return [generation.save_id for generation in self._on_the_way() if generation.step > step]

    def forget(self, step: int) -> bool:
        """Forget the checkpoints of a step in this node's memory. Return whether there were any."""
        found = [generation for generation in find_generations(self._folder) if generation.step == step]
        self.wait_for(step)
        for generation in found:
            self._tier.pool.free(generation.save_id)
        if self._tier.topology.leads(self._rank):
            drop_generations(self._folder, [generation.name for generation in found])
        if self._newest is not None and self._newest.step <= step:  # the store has a newer save
            self._newest = None
        return bool(found)

    def _on_the_way(self) -> list[Generation]:
        """List the checkpoints in memory that are being written to the store, or are next to be."""
        out, writing = [], self._writing
        while writing is not None and not writing.done():
            out.append(writing.generation)
            writing = writing.before
        return out

    def wait_for(self, step: int) -> None:
        """If a checkpoint of this step is being written to the store, wait until all such writing is over.

        That checkpoint would replace a newer save of the step in the store.
        """
        if any(generation.step == step for generation in self._on_the_way()):
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written to the store."""
        if self._writing is not None:
            self._writing.join()

    def close(self, *, clean: bool) -> None:
        """Wait until no checkpoint is being written to the store, and close the tier. Collective if `clean`.

        If `clean`, first write the newest checkpoint in memory to the store, if it is not there.

        Raises
        ------
        CheckpointError
            Writing to the store failed.
        """
        try:
            self.wait()
            if clean:
                self._persist_newest()
        finally:
            self._tier.close()
        if clean and self.options.drop_on_clean_exit:
            # Rank 0 holds the lock of the root until all ranks have left this session, so the next job waits for it.
            with open_session("drop the memory of", self._root, **self._session):
                if self._tier.topology.leads(self._rank) and self._folder.is_dir():
                    remove_run(self._folder)

    def _persist_newest(self) -> None:
        if self._newest is not None:
            generation = self._newest
            if generation.save_id not in self._stored:
                path = self._path(generation.step)
                self._persist(generation, path, open_session("persist", path, **self._session)).wait(None)
            return
        found = self.find(self._newest_stored)
        for passed_over in found.passed.values() if self._rank == 0 else ():
            warnings.warn(f"passed over, as it cannot be written to the store: {passed_over.line}", stacklevel=4)
        if found.generation is not None:
            self.persist_found(found.generation).wait(None)


def _refuse_options(options: SaveOptions) -> None:
    if options.host_buffer_bytes is not None:
        raise UsageError(
            f"host_buffer_bytes={options.host_buffer_bytes}: with memory=, the images in memory are the staging buffer; "
            "bound them by Memory(max_bytes=…)"
        )
    if options.sha256:
        raise UsageError("sha256=True: with memory=, an asynchronous save keeps no manifest; Manager.save does, in the store")
