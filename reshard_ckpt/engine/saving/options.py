"""The options of a save, and the values that go from step to step: the checkpoint before it, the job, and its contents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.optim import Optimizer

from ...comm.protocol import Comm
from ...core.catalog.model import FileEntry, ValueEntry
from ...core.planning.save_plan import SavePlan
from ...core.report import SaveReport, check_choice, check_count, check_patterns
from ...errors import UsageError
from ...storage.protocol import Storage, Version
from ..common.progress import OnProgress, Recorder
from ..common.reader_notes import GRACE_S
from .local_shards import LocalShards
from .messages import Assignment
from .touched import Picked, Tracker
from .unchanged import Base, Unchanged

Hold = str | Optimizer | Sequence[Optimizer]
"""The type of ``hold=`` of a lazy save: ``"optimizers"`` (those in the state), ``"caller"``, or optimizers to hold back in
addition."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The arguments of `save` or `async_save`; see there."""

    mesh: Any = None
    process_group: Any = None
    metadata: Any = None
    timeline: bool = True
    sha256: bool = False
    progress: bool | OnProgress = False
    timeout_s: float = 600.0
    staging: str = "eager"
    host_buffer_bytes: int | None = None
    when_busy: str = "wait"
    hold: Hold = "optimizers"
    replicas: str = "verify"
    exclude: Sequence[str] = ()
    base: str | os.PathLike[str] | Callable[[], str | None] | None = None
    """The base of an incremental save. A `Manager` passes a function that only rank 0 calls, as only that rank looks into the
    store."""
    verify_base: bool = False
    rows: Tracker | None = None
    grace_s: float = GRACE_S
    compare_first: bool = False
    """Whether to compare replicas before anything is written, and to capture again the tensors whose replicas differ."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by key, which rank 0 publishes just before the catalog."""
    first_metadata: Callable[[], Any] | None = None
    """A function that only rank 0 calls; it returns the metadata to save, in place of `metadata`."""
    check_names: Callable[[list[str], list[str]], None] = lambda names, claims: None
    """A check that rank 0 calls with the names of all values and all claims (`StateBuilder.claim`). Its error is raised on all
    ranks."""

    def __post_init__(self) -> None:
        check_choice("staging", self.staging, ("eager", "lazy"))
        check_choice("when_busy", self.when_busy, ("wait", "error"))
        check_choice("replicas", self.replicas, ("verify", "sample"))
        check_patterns("exclude", self.exclude)
        for option, value in (("timeline", self.timeline), ("sha256", self.sha256), ("verify_base", self.verify_base)):
            if type(value) is not bool:
                raise UsageError(f"{option}={value!r:.200}: pass True or False")
        if self.rows is not None and not isinstance(self.rows, Tracker):
            raise UsageError(f"rows={self.rows!r:.200}: pass checkpoint.TouchedRows(module), made once before training, or None")
        if self.base is not None and not callable(self.base) and self.sha256:
            raise UsageError(
                "sha256=True hashes the files that a save writes, and with base= the checkpoint needs others too: leave it out, "
                "and call checkpoint.write_manifest(path) after the save"
            )
        check_count("host_buffer_bytes", self.host_buffer_bytes, 1, or_none=True)
        if isinstance(self.hold, str):
            check_choice("hold", self.hold, ("optimizers", "caller"))
        elif not isinstance(self.hold, Optimizer | list | tuple):
            raise UsageError(f"hold={self.hold!r}: pass 'optimizers', 'caller', an optimizer, or a list of optimizers")
        for optimizer in self.more_held:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(
                    f"hold: {optimizer!r} is not a torch optimizer, so its steps cannot be held back; pass hold='caller', and "
                    "wait for staged() before the state changes"
                )
        if self.staging == "eager" and self.hold != "optimizers":
            raise UsageError(f"hold={self.hold!r} is for staging='lazy': an eager save has copied all when async_save returns")

    @property
    def samples_replicas(self) -> bool:
        """Whether large replicas are compared by samples. If so, each replica is written by one rank, not in parts by several."""
        return self.replicas == "sample"

    @property
    def caller_holds(self) -> bool:
        """Whether the caller promises to change nothing until all is staged. Then `async_save` may return before any copy."""
        return self.hold == "caller"

    @property
    def more_held(self) -> list[Optimizer]:
        """The optimizers in ``hold=``: their steps wait for the copy although they are not in the state."""
        if isinstance(self.hold, str):
            return []
        return [self.hold] if isinstance(self.hold, Optimizer) else list(self.hold)


def sample_shift(save_id: str) -> int:
    """Return a number below 2^32, the same on all ranks and another in each save, with which `looked_at` chooses samples."""
    return xxhash.xxh32_intdigest(save_id.encode())


class PreviousCheckpoint(NamedTuple):
    """The contents of a path before a save made any file there: the catalog's bytes and version, and the names of folders.

    The catalog is empty if there was none. It is None if the file there is too large for one; then any version is replaced.
    """

    catalog: bytes | None
    folders: frozenset[str]
    version: Version


@dataclass(frozen=True, slots=True)
class SaveContents:
    """Rank 0's knowledge about a save before any file is written: the catalog without files, and the checkpoint to replace.

    Attributes
    ----------
    metadata
        The user's ``metadata=``.
    created_s
        Time of the save in seconds since 1970; None for the time of the commit.
    before
        Contents of the path before any rank could make a file of this save; None to publish over any catalog.
    base_files
        The files of the base of an incremental save, as `Base.files`; None for a full save.
    lossy
        For each tensor that is saved with older rows or in fewer bits, a text that says so.
    folder
        The name of the folder that the save is made in; empty for an offline reshard, whose bytes are the same in any folder.
    """

    plan: SavePlan
    values: Sequence[ValueEntry]
    save_id: str
    metadata: Any = None
    created_s: float | None = None
    before: PreviousCheckpoint | None = None
    base_files: Sequence[FileEntry | None] | None = None
    lossy: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


class Written(NamedTuple):
    """Numbers of bytes that a save has written.

    Attributes
    ----------
    num_bytes
        Bytes that this rank wrote.
    total_bytes
        Size of all files that the save wrote, on rank 0; None on other ranks.
    bytes_referred
        Bytes of this rank's items that lie in files of the base.
    """

    num_bytes: int
    total_bytes: int | None
    bytes_referred: int = 0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that one rank knows about a save, from the agreement of all ranks to the commit.

    Attributes
    ----------
    path
        The path of the checkpoint, as the caller passed it.
    contents
        None on all ranks but rank 0.
    fingerprints
        Fingerprints of the checks in `assignment`, if they have been taken already.
    base
        The checkpoint that an incremental save refers to; None for a full save.
    unchanged
        The parts of the agreed items that lie in files of the base, once they are found; `assignment` then has the other parts.
    picked
        Maps the items of `assignment` back to the agreed items, if some rows of tables are saved alone; else None.
    """

    path: str
    comm: Comm
    storage: Storage
    recorder: Recorder
    options: SaveOptions
    local_shards: LocalShards
    assignment: Assignment
    contents: SaveContents | None
    fingerprints: NDArray[np.uint64] | None = None
    base: Base | None = None
    unchanged: Unchanged | None = None
    picked: Picked | None = None

    @property
    def save_id(self) -> str:
        return self.assignment.save_id

    @property
    def shift(self) -> int | None:
        """The number by which `looked_at` chooses samples of a replica in this save; None if replicas are compared whole."""
        return sample_shift(self.save_id) if self.options.samples_replicas else None

    def report(self, written: Written) -> SaveReport:
        """Return the report of a save that ends now, and tell the tracker of ``rows=`` that it is committed.

        It counts all of the time as a stall. For a save in the background, `RunningSave.report` has the true stalls.
        """
        if self.options.rows is not None:
            self.options.rows.committed(self.save_id)
        seconds = self.recorder.now() - self.recorder.began
        num_bytes, total_bytes, referred = written
        return SaveReport(self.path, self.save_id, num_bytes, total_bytes, seconds, seconds, bytes_referred=referred)
