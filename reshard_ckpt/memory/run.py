"""The memory tier of one run, for its manager: opening, saving, writing to the store in the background, and restoring."""

from __future__ import annotations

import inspect
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from ..checkpoint.loading import load, load_state
from ..checkpoint.saving import begin_save
from ..comm import Comm, open_session, shared_store
from ..core.durations import duration_s
from ..core.report import LoadReport
from ..engine.common.logs import LOGGER
from ..engine.loading.load import LoadOptions
from ..engine.saving.handle import RunningSave, SaveHandle
from ..engine.saving.options import SaveJob, SaveOptions
from ..errors import CheckpointError, UsageError
from ..format.keys import step_name
from ..storage import Storage, open_storage
from .generations import Generation, NodeImages, drop_generations, find_generations
from .lineage import decode_lineage, keep_lineage, read_lineage
from .links import Links
from .node import machine_id, node_id, run_folder
from .persist import is_persisted, persist
from .restore import Restorable, find_newest, open_images
from .tier import Memory, MemoryTarget, Tier
from .topology import find_topology

_LOAD_OPTIONS = frozenset(field.name for field in fields(LoadOptions))


class PersistRule:
    """When rank 0 sends a generation to the store: every so many steps, or so many seconds after the one before.

    Parameters
    ----------
    every
        A whole number of steps, or a duration such as ``"10min"``.

    Raises
    ------
    UsageError
        It is neither.
    """

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = self._seconds = None
        if isinstance(every, int) and not isinstance(every, bool):
            if every < 1:
                raise UsageError(f'persist_every={every!r}: pass a number of steps, 1 or more, or a duration such as "10min"')
            self._steps = every
        else:
            self._seconds = duration_s(every, option="persist_every")
        self._last_step: int | None = None
        self._last_s = clock()

    def begin(self, step: int) -> None:
        """Count from this step on: the one that was loaded."""
        self._last_step = step

    def due(self, step: int) -> bool:
        """Whether to send the generation of this step; if so, the interval begins anew."""
        if self._steps is not None:
            if self._last_step is None:
                self._last_step = 0
            is_due = step - self._last_step >= self._steps
        else:
            is_due = self._clock() - self._last_s >= (self._seconds or 0.0)
        if is_due:
            self._last_step, self._last_s = step, self._clock()
        return is_due


class MemoryHandle(SaveHandle):
    """A save that goes to memory first: it is committed once its generation is whole in memory."""

    def __init__(self, running: RunningSave, target: MemoryTarget | None, in_store: Callable[[float | None], bool]) -> None:
        super().__init__(running)
        self._target, self._in_store = target, in_store

    @property
    def copies(self) -> int:
        """How many other nodes hold a copy of each image, at least; known once the save is done. 0 where it went to the store."""
        return 0 if self._target is None else self._target.copies

    def persisted(self, timeout: float | None = None) -> bool:
        """Wait until this save is in the store; False where it stays in memory, because its interval had not come.

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
    """The memory tier of one run on one rank. Made on all ranks together, inside of a session.

    Parameters
    ----------
    on_stored
        Called on every rank with a step once its generation is in the store.
    """

    def __init__(
        self,
        options: Memory,
        root: str,
        storage: Storage,
        comm: Comm,
        persist_every: int | str,
        on_stored: Callable[[int], None],
        *,
        process_group: Any,
        timeout_s: float,
    ) -> None:
        self.options, self._root, self._storage = options, root, storage
        self._session: dict[str, Any] = {"process_group": process_group, "timeout_s": timeout_s}
        self._timeout_s, self._rank = timeout_s, comm.rank
        self._rule, self._on_stored = PersistRule(persist_every), on_stored
        self._folder = run_folder(options.folder, root)
        topology = find_topology(comm, node_id(options.folder), machine_id(), options.copies)
        if comm.rank == 0 and len(topology.ids) <= options.copies:
            warnings.warn(
                f"Memory(copies={options.copies}) wants {options.copies + 1} nodes, and there "
                f"{'is' if len(topology.ids) == 1 else 'are'} {len(topology.ids)}: with fewer copies, less survives",
                stacklevel=4,
            )
        message = None
        if comm.rank == 0:
            self._lineage = read_lineage(storage).begun()
            keep_lineage(storage, self._lineage)
            message = msgpack.packb((uuid.uuid4().hex, self._lineage.encoded()))
        nonce, lineage = msgpack.unpackb(comm.broadcast(message))
        self._adopt(lineage)
        self._links_made = 0
        self._named = partial(self._store, str(nonce))
        self._tier = Tier(
            options, self._folder, topology, comm.rank, self._named, self._lineage.attempt, self._due, timeout_s=timeout_s
        )
        self._drop_superseded()
        self._writing: _Persist | None = None

    def _store(self, nonce: str, name: str) -> Any:
        return shared_store(f"memory/{nonce}/{name}", self._session["process_group"])

    def _adopt(self, encoded: bytes) -> None:
        self._lineage = decode_lineage(encoded, where=self._root)

    def _due(self, step: int) -> bool:
        """Decide on rank 0 whether a generation is sent to the store; not while one is on its way."""
        return (self._writing is None or self._writing.done()) and self._rule.due(step)

    def _counts(self, generation: Generation) -> bool:
        return self._lineage.counts(generation.attempt, generation.step)

    def _drop_superseded(self) -> None:
        if self._tier.topology.leads(self._rank):
            drop_generations(self._folder, [g.name for g in find_generations(self._folder) if not self._counts(g)])

    @property
    def num_skipped(self) -> int:
        """How many saves went to the store because memory had no room."""
        return self._tier.num_skipped

    def steps(self) -> list[int]:
        """List the steps that this node knows in memory, in order."""
        return sorted({g.step for g in find_generations(self._folder) if self._counts(g)})

    def is_superseded(self, save_id: str) -> bool:
        """Whether a save in the store no longer counts, because the run went back to an older step."""
        return save_id in self._lineage.superseded

    def async_save(self, step: int, path: str, state: Mapping[str, Any], options: SaveOptions) -> SaveHandle:
        """Begin a save to memory; where memory has no room on some rank, to the store."""
        if options.host_buffer_bytes is not None:
            raise UsageError(
                f"host_buffer_bytes={options.host_buffer_bytes}: with memory=, the images in memory are the staging buffer; "
                "bound them by Memory(max_bytes=…)"
            )
        targets: list[MemoryTarget | None] = []

        def choose(job: SaveJob) -> MemoryTarget | None:
            targets.append(self._tier.target(job, step))
            return targets[0]

        # Opened here, in the order of calls, and used only where this generation goes to the store.
        session = open_session("persist", path, **self._session)
        handle = begin_save(path, state, options, choose)
        target = targets[0]
        if target is None:
            return MemoryHandle(handle.running, None, lambda timeout: True)
        begun = threading.Event()

        def committed(done: SaveHandle) -> None:
            try:
                if not done.failed() and target.persists and target.generation is not None:
                    self._writing = _Persist(self._tier, self._folder, target.generation, path, session, self._on_stored)
            finally:
                begun.set()

        handle.add_done_callback(committed)

        def in_store(timeout: float | None) -> bool:
            begun.wait()
            if not target.persists or self._writing is None:
                return False
            return self._writing.wait(timeout)

        return MemoryHandle(handle.running, target, in_store)

    def find(self, at_least: int, excluded: Sequence[str], step: int | None = None) -> Restorable | None:
        """Find the newest whole generation of a step, or of none older than `at_least`. Collective."""

        def wanted(generation: Generation) -> bool:
            return self._counts(generation) and (generation.step >= at_least if step is None else generation.step == step)

        with open_session("find in memory", f"{self._root} from step {at_least}", **self._session) as comm:
            return find_newest(comm, self._folder, self._tier.topology, wanted, excluded)

    def load(self, found: Restorable, state: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[LoadReport, str]:
        """Load a generation in place; returns the report, and the tier: ``"memory"`` or ``"peer"``."""
        where = f"{self._root}/{step_name(found.generation.step)} in memory"
        inspect.signature(load).bind(where, state, **options)  # a wrong option is a TypeError, as in `load`
        make_links = None if found.is_local(self._tier.topology) else self._job_links

        def opened(comm: Comm) -> AbstractContextManager[Any]:
            return open_images(comm, self._folder, found, make_links)

        chosen = LoadOptions(**{k: v for k, v in options.items() if k in _LOAD_OPTIONS})
        others = {k: v for k, v in options.items() if k not in _LOAD_OPTIONS}
        report, _ = load_state(where, state, chosen, opened=opened, **others)
        return report, "memory" if make_links is None else "peer"

    def _job_links(self) -> Links:
        self._links_made += 1
        size = len(self._tier.topology.node_of)
        return Links(self._named(f"load/{self._links_made}"), self._rank, size, timeout_s=self._timeout_s)

    def loaded(self, step: int, newer: Callable[[], list[str]]) -> None:
        """Begin an attempt at the step that was loaded: what lies beyond it no longer counts. Collective.

        Parameters
        ----------
        newer
            Returns the ids of saves in the store beyond that step; called on rank 0.
        """
        with open_session("begin at", f"{self._root} step {step}", **self._session) as comm:
            if comm.rank == 0:
                self._lineage = self._lineage.loaded(step, newer())
                keep_lineage(self._storage, self._lineage)
            self._adopt(comm.broadcast(self._lineage.encoded() if comm.rank == 0 else None))
        self._tier.attempt = self._lineage.attempt
        self._rule.begin(step)
        self._drop_superseded()

    def delete(self, step: int) -> bool:
        """Forget what this node has of a step; whether there was anything."""
        found = [g for g in find_generations(self._folder) if g.step == step]
        for generation in found:
            self._tier.free(generation.save_id)
        if self._tier.topology.leads(self._rank):
            drop_generations(self._folder, [g.name for g in found])
        return bool(found)

    def wait(self) -> None:
        """Wait until nothing is on its way to the store."""
        if self._writing is not None:
            self._writing.join()

    def close(self, *, clean: bool) -> None:
        """Send the newest generation to the store, if it is not there, and let go of the memory, which stays. Collective if `clean`.

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

    def _persist_newest(self) -> None:
        found = self.find(0, ())
        if found is None:
            return
        path = f"{self._root.rstrip('/')}/{step_name(found.generation.step)}"
        with open_session("persist", path, **self._session) as comm, open_storage(path) as storage:
            there = comm.broadcast(b"%d" % is_persisted(storage, found.generation) if comm.rank == 0 else None)
            if there == b"1":
                return
            images = NodeImages(self._folder, found.generation.save_id)
            try:
                mine = [key for key, ranks in found.owners.items() if min(ranks) == comm.rank]
                persist(comm, images, found.generation, mine, storage)
            finally:
                images.close()
        self._on_stored(found.generation.step)


class _Persist:
    """A generation on its way to the store, in a thread of its own."""

    def __init__(
        self,
        tier: Tier,
        folder: Path,
        generation: Generation,
        path: str,
        session: AbstractContextManager[Comm],
        on_stored: Callable[[int], None],
    ) -> None:
        self._on_stored = on_stored
        self._tier, self._folder, self._generation, self._path, self._session = tier, folder, generation, path, session
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reshard-ckpt-persist", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._session as comm, open_storage(self._path) as storage:
                images = NodeImages(self._folder, self._generation.save_id)
                try:
                    catalog = self._generation.decoded_catalog()
                    mine = [file.key for file in catalog.files if file.rank == comm.rank]
                    persist(comm, images, self._generation, mine, storage)
                finally:
                    images.close()
            self._on_stored(self._generation.step)
        except BaseException as error:
            self._error = error
            LOGGER.error("the save to %s is in memory, but not in the store: %s", self._path, error)
            warnings.warn(f"the save to {self._path} is in memory, but not in the store: {error}", stacklevel=2)
        finally:
            self._tier.unpin(self._generation.save_id)
            self._over.set()

    def done(self) -> bool:
        """Whether it is over, by success or error."""
        return self._over.is_set()

    def join(self) -> None:
        """Wait until it is over."""
        self._thread.join()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is over; True where the generation is in the store."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save to {self._path} is still being written to the store after {timeout} s; it goes on")
        if self._error is not None:
            raise CheckpointError(f"the save is in memory, but was not written to {self._path}: {self._error}") from self._error
        return True
