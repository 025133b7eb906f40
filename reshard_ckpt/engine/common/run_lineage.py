"""The lineage of a run, the same on all ranks of a job: rank 0 reads it, writes it, and broadcasts it.

A load is only remembered. The first save after it begins a new attempt in the lineage, and writes it to the store.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from typing import Any

from ...comm import open_session
from ...comm.protocol import Comm, value_of_first
from ...errors import StorageError
from ...storage import Storage
from .lineage import LINEAGE, Lineage


class RunLineage:
    """The lineage of a run (which saves still count after it went back to an older step), the same on all ranks.

    All ranks make it together.

    Parameters
    ----------
    storage
        The root of the run.
    comm
        Carries messages between all ranks of the job.
    where
        The root, for messages.
    session
        Options for opening such a `Comm` later.
    had_manager
        On rank 0, whether the root had a manager before. If it had none, its run is new.

    Attributes
    ----------
    current
        The lineage as it is now.
    is_unwritten
        Whether the store refused the lineage when the newest attempt began.
    """

    def __init__(self, storage: Storage, comm: Comm, where: str, session: Mapping[str, Any], *, had_manager: bool = True) -> None:
        self._storage, self._where, self._session = storage, where, session
        self._is_first = comm.rank == 0
        self._loaded: tuple[int, bool] | None = None
        self._is_begun = self.is_unwritten = False
        stored = LINEAGE.read(storage) if self._is_first else None
        self._may_be_anyone = stored is None and had_manager
        self.current = self._shared(comm, (stored or Lineage(secrets.token_hex(16))) if self._is_first else None)

    def _shared(self, comm: Comm, own: Lineage | None) -> Lineage:
        data = comm.broadcast(None if own is None else LINEAGE.encoded(astuple(own)))
        return LINEAGE.decoded(data, where=self._where)

    def adopt(self, comm: Comm, copy: Lineage | None) -> None:
        """Take the newest copy of the lineage that a node has, if it is newer than the lineage in the store. Collective.

        If a root has a manager's lock but no lineage, the job that began the run could not write its lineage: then the copies
        are of this run. A root without the lock is new, so a copy on a node is of another run.
        """
        gathered = comm.gather(b"" if copy is None else LINEAGE.encoded(astuple(copy)))
        newest = self.current
        for data in filter(None, gathered or ()):
            found = LINEAGE.decoded(data, where="a copy from another node")
            if found.is_newer(newest) or (self._may_be_anyone and found.attempt > newest.attempt):
                newest = found
        self.current = self._shared(comm, newest if self._is_first else None)

    def refresh(self) -> None:
        """Read the lineage from the store again, for a process that only reads the run: its job may have begun new attempts."""
        self.current = LINEAGE.read(self._storage) or self.current

    def loaded(self, step: int, *, in_store: bool) -> None:
        """Remember which step was loaded. The next save begins an attempt there; nothing is written before that."""
        self._loaded = step, in_store

    def begin(self, newer: Callable[[int], Iterable[str]], own: Callable[[int], str], *, always: bool) -> bool:
        """Record in the lineage, before the first save after a load, that a new attempt begins; return whether one begins.

        Collective if it does.

        Parameters
        ----------
        newer
            Returns the ids of the saves in the store beyond a step. Called on rank 0.
        own
            Returns the id of the save of a step that was loaded from the store. Called on rank 0.
        always
            Begin an attempt also if nothing was loaded, before the first save of this job.
        """
        if self._loaded is None and (self._is_begun or not always):
            if self.is_unwritten and self._is_first:
                self._write(self.current)
            return False
        step, in_store = self._loaded or (None, False)
        with open_session("begin at", f"{self._where} step {step}", **self._session) as comm:
            found = None
            if comm.rank == 0:
                beyond = () if step is None else newer(step)
                found = self.current.begun(step, beyond, own(step) if step is not None and in_store else "")
                self._write(found)
            self.current = self._shared(comm, found)
            self.is_unwritten = value_of_first(comm, lambda: self.is_unwritten)
        self._loaded, self._is_begun = None, True
        return True

    def _write(self, lineage: Lineage) -> None:
        try:
            LINEAGE.keep(self._storage, astuple(lineage))
            self.is_unwritten = False
        except StorageError as error:  # it may be full, while memory is not
            self.is_unwritten = True
            warnings.warn(
                f"from which step this job went on could not be written: {error}; the next save tries again, and until then only "
                "a restart that finds its copy in the memory of a node knows it",
                stacklevel=5,
            )
