"""The agreement of all ranks on which rank writes which runs: rank 0 plans once for each layout, and reuses the plan.

The collectives, in order; steps 3 and 4 are left out on all ranks if the answer of step 2 says so:

1. Gather: every rank sends digests of the parts of its metadata (tensors, rows, values, and the user's ``metadata=``), and the id
   of the plan from which it has kept an assignment for this layout.
2. Broadcast: rank 0 looks for a kept plan for the layouts of *all* ranks, and sends the save's id, the plan's id, and which ranks
   shall send which parts. If several ranks have equal parts, the lowest of them sends it. With a kept plan, rank 0 asks only for
   values and ``metadata=`` that differ from its own; they may change from save to save, and are merged each time.
3. Gather: the ranks that were asked send their parts. Rank 0 makes a plan, unless it has kept one.
4. Scatter: each rank that lacks its assignment from this plan gets it. Left out if no rank lacks it.

Only rank 0 decides whether a kept plan is valid, from the digests that all ranks have just sent. So a rank whose layout changed
never saves with ranks that use an older plan: another digest means another plan, with another id. A plan depends only on the
layouts in order of rank, and on whether replicas may be split; so process groups with equal layouts may share a plan.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from ...comm.protocol import Comm
from ...core.catalog.model import FileEntry, ValueEntry
from ...core.planning.local_metadata import Memo
from ...core.planning.save_plan import SavePlan, plan_save
from ...errors import UsageError
from ...format.files import digest128, new_save_id
from ...format.values import decode_value, encode_value
from .local_shards import LocalShards, merge_values
from .messages import Assignment, decode_assignment, decode_metadata, decode_values, encode_assignments, encode_metadata
from .options import PreviousCheckpoint, SaveContents

MAX_PLANS = 2
"""Number of plans kept on rank 0: enough for a job that saves its model and its whole state by turns."""

MAX_ASSIGNMENTS = 8
"""Number of assignments (one rank's part of a plan) kept on each rank."""

_ID_BYTES = 16
"""Number of bytes of a digest, and of a plan's id."""

_PARTS = 4
"""Number of parts of a rank's metadata: tensors, rows, values, and the user's ``metadata=``."""

_LAYOUT_PARTS = 2
"""Number of parts that form the layout: the first ones, tensors and rows. A save plan depends on the layout alone."""

_VALUES, _METADATA = 2, 3
_NO_PLAN = bytes(_ID_BYTES)


class PlanCache:
    """Plans and assignments that a process keeps from earlier saves, by layout, each with the id of its plan.

    Every process keeps its own assignments; rank 0 also keeps plans.
    """

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Empty the plan cache: when it is made, and in a forked child."""
        self.plans: Memo[bytes, tuple[bytes, SavePlan]] = Memo(MAX_PLANS)
        self.assignments: Memo[bytes, tuple[bytes, Assignment]] = Memo(MAX_ASSIGNMENTS)


PLANS = PlanCache()
"""The plan cache of this process, used by all its saves."""


class _Answer(NamedTuple):
    """Rank 0's answer to all ranks: the ids of the save and of the plan, and the next messages.

    Attributes
    ----------
    asked
        ``asked[part, rank]``: this rank shall send this part of its metadata.
    assigns
        Whether a scatter of assignments follows.
    """

    save_id: str
    plan_id: bytes
    asked: NDArray[np.bool_]
    assigns: bool

    def encode(self) -> bytes:
        # One bit a rank for each part, most significant bit first; no bytes for a part that no rank is asked for.
        rows = [np.packbits(row).tobytes() if row.any() else b"" for row in self.asked]
        packed: bytes = msgpack.packb([self.save_id, self.plan_id, self.asked.shape[1], rows, self.assigns])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> _Answer:
        save_id, plan_id, num_ranks, rows, assigns = msgpack.unpackb(data)
        asked = [np.unpackbits(np.frombuffer(r.ljust(-(-num_ranks // 8), b"\0"), np.uint8), count=num_ranks) for r in rows]
        return cls(save_id, plan_id, np.stack(asked) > 0, assigns)


def agree(
    comm: Comm,
    local_shards: LocalShards,
    cache: PlanCache = PLANS,
    *,
    splits: bool = True,
    metadata: Any = None,
    before: PreviousCheckpoint | None = None,
    base_files: Sequence[FileEntry | None] | None = None,
    folder: str = "",
    accept: Callable[[SavePlan], None] = lambda plan: None,
    checked: Callable[[tuple[ValueEntry, ...]], tuple[ValueEntry, ...]] = lambda values: values,
) -> tuple[Assignment, SaveContents | None]:
    """Agree with all ranks on the runs that each rank writes. Collective; the module's docstring lists the messages.

    Raise `LayoutError` if the tensors or values of the ranks do not fit together, and `UsageError` if ranks passed different
    ``metadata=``.

    Parameters
    ----------
    splits
        As for `plan_save`; the same on all ranks.
    metadata
        The user's ``metadata=``; the same on all ranks.
    before, base_files, folder
        As in `SaveContents`; from rank 0.
    accept
        Called with the plan on rank 0, before any rank gets its assignment. An error that it raises is raised on all ranks.
    checked
        Called with the merged values on rank 0; returns the values to save. Its error is raised on all ranks.

    Returns
    -------
    tuple
        The runs that this rank writes; and on rank 0 the contents of the catalog, None on other ranks.
    """
    encoded = encode_value(metadata, "metadata")
    parts = (*encode_metadata(local_shards.local_metadata), encoded)
    digests = [digest128(part) for part in parts]
    layout = b"".join((*digests[:_LAYOUT_PARTS], bytes([splits])))
    plan_id, kept = cache.assignments.find(layout) or (_NO_PLAN, None)
    # 1. Gather: digests, and the id of the plan of the kept assignment.
    states = comm.gather(b"".join((*digests, plan_id)))
    leader = None if states is None else Leader(states, cache, accept, splits=splits)
    # 2. Broadcast: the answer. Every rank decodes the same one, so all take part in the same collectives from here.
    answer = _Answer.decode(comm.broadcast(None if leader is None else leader.answer.encode()))
    # 3. Gather: the parts that rank 0 asked for.
    sent = None
    if answer.asked.any():
        sent = comm.gather(msgpack.packb([p if a else None for p, a in zip(parts, answer.asked[:, comm.rank], strict=True)]))
    if leader is not None:
        leader.take_parts(parts, sent)
    # 4. Scatter: assignments; no bytes for a rank that has kept its own.
    data = b""
    if answer.assigns:
        data = comm.scatter(None if leader is None else leader.assignments())
    if data or kept is None:
        plan_id, kept = answer.plan_id, decode_assignment(data, answer.save_id)
        cache.assignments.keep(layout, (plan_id, kept))
    assert plan_id == answer.plan_id
    assignment = replace(kept, save_id=answer.save_id)
    if leader is None:
        return assignment, None
    # Decoded: the caller may change the object that it passed before the commit.
    saved = decode_value(encoded, name="metadata")
    return assignment, SaveContents(
        leader.plan, checked(leader.values), answer.save_id, saved, before=before, base_files=base_files, folder=folder
    )


class Leader:
    """Rank 0's part of one agreement on a save plan, without sending and receiving.

    The order of use is: the constructor (makes `answer`), `take_parts`, `assignments`.

    Parameters
    ----------
    states
        The first message of every rank, by rank: its digests and the id of its plan.
    """

    def __init__(
        self,
        states: Sequence[bytes],
        cache: PlanCache,
        accept: Callable[[SavePlan], None] = lambda plan: None,
        *,
        splits: bool = True,
    ) -> None:
        # table[rank, i]: digest of part i; table[rank, _PARTS]: id of the plan of the kept assignment
        table = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), _PARTS + 1, _ID_BYTES)
        self._cache = cache
        self._states = states
        self._splits = splits
        self._layouts = digest128(np.ascontiguousarray(table[:, :_LAYOUT_PARTS]).data) + bytes([splits])
        self._accept = accept
        self._plan: SavePlan | None
        plan_id, self._plan = cache.plans.find(self._layouts) or (secrets.token_bytes(_ID_BYTES), None)
        if self._plan is not None:
            accept(self._plan)
        # _lacks[rank]: whether the rank has no assignment from this plan
        self._lacks = (table[:, _PARTS] != np.frombuffer(plan_id, np.uint8)).any(axis=1)
        self.answer = _Answer(new_save_id(), plan_id, self._asked(self._plan is None), bool(self._lacks.any()))
        self.values: tuple[ValueEntry, ...] = ()

    @property
    def plan(self) -> SavePlan:
        """The plan of this save: the kept one, or the one that `take_parts` made."""
        assert self._plan is not None
        return self._plan

    def _asked(self, everything: bool) -> NDArray[np.bool_]:
        """Return a mask of the metadata parts that ranks shall send to rank 0, (parts, ranks).

        With `everything` these are all parts. Without it a kept plan fits, and these are only values and ``metadata=``. Of
        several ranks with equal parts, only the lowest is asked. Rank 0, which has its own parts, is never asked.
        """
        asked = np.zeros((_PARTS, len(self._states)), bool)
        for part in range(0 if everything else _LAYOUT_PARTS, _PARTS):
            asked[part, [rank for rank in self._first_with(part).values() if rank]] = True
        return asked

    def _first_with(self, part: int) -> dict[bytes, int]:
        """Map each distinct digest of a part of the metadata to the lowest rank that has it, in order of rank."""
        at = slice(part * _ID_BYTES, (part + 1) * _ID_BYTES)
        first: dict[bytes, int] = {}
        for rank, state in enumerate(self._states):
            first.setdefault(state[at], rank)
        return first

    def _by_rank(self, part: int, messages: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return a part of every rank's metadata, by rank. Where several ranks have equal parts, only the lowest has sent it."""
        at = slice(part * _ID_BYTES, (part + 1) * _ID_BYTES)
        message_of = {digest: messages[rank][part] for digest, rank in self._first_with(part).items()}
        return [message_of[state[at]] for state in self._states]

    def take_parts(self, own: Sequence[bytes], sent: Sequence[bytes] | None) -> None:
        """Take the metadata parts that ranks sent. Make a plan unless one was kept, check ``metadata=``, and merge the values.

        Parameters
        ----------
        own
            The parts of rank 0.
        sent
            The messages of all ranks, by rank, each a packed list of parts; None if no part was asked for.
        """
        messages = [own, *((msgpack.unpackb(m) for m in sent[1:]) if sent else ())]
        if self._plan is None:
            metadata = decode_metadata(*(self._by_rank(part, messages) for part in range(_LAYOUT_PARTS)))
            self._plan = plan_save(metadata, splits=self._splits)
            self._accept(self._plan)
            self._cache.plans.keep(self._layouts, (self.answer.plan_id, self._plan))
        for rank in self._first_with(_METADATA).values():
            _refuse_other(messages[0][_METADATA], messages[rank][_METADATA], rank)
        of_ranks = [(rank, decode_values(messages[rank][_VALUES])) for rank in self._first_with(_VALUES).values()]
        self.values = merge_values(of_ranks, self.plan.tables)

    def assignments(self) -> list[bytes]:
        """Return the encoded assignment of each rank, by rank; empty bytes for a rank that has kept its assignment."""
        encoded = encode_assignments(self.plan)
        return [data if lacks else b"" for data, lacks in zip(encoded, self._lacks.tolist(), strict=True)]


def _refuse_other(first: bytes, second: bytes, rank: int) -> None:
    """Raise a `UsageError` if a rank's ``metadata=`` differs from rank 0's. Dicts may have their keys in another order."""
    if first == second:
        return
    own, other = decode_value(first, name="metadata"), decode_value(second, name="metadata")
    option = "metadata="
    if isinstance(own, dict | None) and isinstance(other, dict | None) and (own or other):
        own, other = own or {}, other or {}
        differ = [key for key in {**own, **other} if _encoded(own, key) != _encoded(other, key)]
        if not differ:
            return
        option = "metric=" if differ[0] == "metric" else f"metadata= of {differ[0]!r}"
        own, other = own.get(differ[0]), other.get(differ[0])
    raise UsageError(
        f"{option} differs between ranks: rank 0 passed {own!r:.200}, rank {rank} passed {other!r:.200}; a checkpoint keeps one "
        "value, so pass the same on all ranks, such as the mean of a metric over them (torch.distributed.all_reduce)"
    )


def _encoded(metadata: dict[Any, Any], key: Any) -> bytes | None:
    """Return the encoded value of one key of the user's metadata, or None if the dict lacks it."""
    return encode_value(metadata[key], "metadata") if key in metadata else None
