"""The timeline of a save: when each rank did each step (capture, write, …), on one axis of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .catalog.specs import Mesh

STEP_NAMES = (
    *("meet", "turn", "capture", "agree", "compare", "stage", "copy", "write", "sync"),
    *("receipts", "check", "publish", "clean up", "other"),
)
"""The names of a save's steps, in the order of their codes in files; a new name goes before the last."""

STEP_THREADS = ("caller", "stage", "save")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a save on one rank, with its times.

    Attributes
    ----------
    rank
        The rank.
    name
        The name of the step: ``"meet"`` (wait for the other ranks), ``"turn"`` (wait for the previous save), ``"capture"``,
        ``"agree"``, ``"compare"`` (hash samples of replicas), ``"stage"``, ``"copy"`` (to another node's memory), ``"write"``,
        ``"sync"``; on rank 0 also ``"receipts"`` (wait for the other ranks), ``"check"``, ``"publish"``, ``"clean up"``.
    thread
        The thread of the rank that took the step: ``"caller"``, which does not train meanwhile, or ``"stage"`` or ``"save"`` in
        the background.
    start_s, end_s
        Seconds since the first step of any rank began.
    num_bytes
        Bytes that the step staged or wrote; 0 for other steps.
    """

    rank: int
    name: str
    thread: str
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of all ranks of one save.

    Attributes
    ----------
    save_id
        The id of the save.
    began_s
        The time at which it began, in seconds since 1970 by rank 0's clock.
    mesh
        The job's mesh; None if it is not known.
    uncertainty_s
        For each rank the largest error of its times relative to those of rank 0.
    steps
        The steps, in order of rank and start.
    """

    save_id: str
    began_s: float
    mesh: Mesh | None
    uncertainty_s: tuple[float, ...]
    steps: tuple[Step, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks that saved."""
        return len(self.uncertainty_s)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last one, over all ranks."""
        return max((step.end_s for step in self.steps), default=0.0)

    def label(self, rank: int) -> str:
        """Return a rank's number and coordinates as text: ``"rank 5 dp=1 tp=1"``."""
        return rank_label(rank, self.mesh)

    def chrome_trace(self) -> dict[str, Any]:
        """Convert to a dict in the trace format of ``chrome://tracing`` and Perfetto, to be written as JSON.

        Each rank is a process there.
        """
        threads = list(dict.fromkeys(step.thread for step in self.steps))
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": self.label(rank)}})
            events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        for rank, thread in sorted({(step.rank, step.thread) for step in self.steps}):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": threads.index(thread), "args": {"name": thread}})
        events += [
            {
                "name": step.name,
                "ph": "X",
                "ts": round(step.start_s * 1e6, 3),
                "dur": round((step.end_s - step.start_s) * 1e6, 3),
                "pid": step.rank,
                "tid": threads.index(step.thread),
                "args": {"bytes": step.num_bytes} if step.num_bytes else {},
            }
            for step in self.steps
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"save_id": self.save_id}}


def rank_label(rank: int, mesh: Mesh | None) -> str:
    """Return the number of a rank and its coordinates on a mesh as text; a rank outside the mesh has no coordinates.

    >>> rank_label(5, Mesh(("dp", "tp"), (4, 2)))
    'rank 5 dp=2 tp=1'
    """
    axes = () if mesh is None or rank >= mesh.size else zip(mesh.axes, mesh.coordinates(rank), strict=True)
    return " ".join([f"rank {rank}", *(f"{axis}={coordinate}" for axis, coordinate in axes)])
