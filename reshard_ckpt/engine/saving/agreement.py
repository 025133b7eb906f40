"""The agreement on who writes what: rank 0 plans for all, once for each layout; of an unchanged one it gets digests alone.

1. Every rank sends digests of the parts of its metadata (tensors, rows, values, and the user's ``metadata=``), and the id of the
   plan from which it has kept an assignment for this layout.
2. Rank 0 looks the layouts of *all* ranks up among the plans that it has kept, and says to everyone: the save's id, the plan's
   id, and who shall send which parts. Of equal parts, the lowest rank that has one sends it. With a kept plan only values
   that differ from rank 0's own are asked for; they may have changed, and are merged anew for each save.
3. Those ranks send them; rank 0 plans, unless it has a plan.
4. Ranks that lack their assignment from this plan are sent it. If none does, this step is left out.

Nobody but rank 0 decides that a plan holds, and it decides from what all ranks have just said. So a rank whose layout changed
never meets ranks that use a plan from before: with any other digest, it is another plan, under another id. A plan follows
from the layouts, in order of rank, and whether replicas may be split, and from nothing else; so process groups that are alike
may share one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from ...comm.protocol import Comm
from ...core.catalog.model import ValueEntry
from ...core.planning.save_plan import SavePlan, plan_save
from ...errors import UsageError
from ...format.checksums import digest128
from ...format.keys import new_save_id
from ...format.values import decode_value, encode_value
from ..common.memo import Memo
from .local_shards import LocalShards
from .messages import Assignment, decode_assignment, decode_metadata, decode_values, encode_assignments, encode_metadata
from .values import merge_values

MAX_PLANS = 2
"""Plans kept on rank 0: enough for jobs that save a model and all of their state by turns."""

MAX_ASSIGNMENTS = 8

_ID_BYTES = 16
_PARTS = 4
_LAYOUT_PARTS = 2
_VALUES, _METADATA = 2, 3
_NO_PLAN = bytes(_ID_BYTES)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """The outcome of the agreement: rank 0 alone has the plan and the merged values."""

    assignment: Assignment
    plan: SavePlan | None = None
    values: tuple[ValueEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Item]):
    plan_id: bytes
    item: Item


class PlanCache:
    """What a process keeps of earlier agreements: plans, where it was rank 0, and its own assignments, by layout."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Begin with nothing, in a forked child too."""
        self.plans: Memo[bytes, _Kept[SavePlan]] = Memo(MAX_PLANS)
        self.assignments: Memo[bytes, _Kept[Assignment]] = Memo(MAX_ASSIGNMENTS)


PLANS = PlanCache()
"""The cache of this process: it must outlive a call of `save` to be of use."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 says to all: `asked` (parts, ranks) tells who shall send what, and `assigns` whether assignments follow."""

    save_id: str
    plan_id: bytes
    asked: NDArray[np.bool_]
    assigns: bool

    def encode(self) -> bytes:
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
    metadata: bytes = b"",
    accept: Callable[[SavePlan], None] = lambda plan: None,
) -> AgreedPlan:
    """Settle with all ranks what each of them writes.

    Parameters
    ----------
    splits
        As for `plan_save`; the same on all ranks.
    metadata
        The user's ``metadata=``, encoded as a value.
    accept
        Is shown the plan on rank 0, before any rank has its part of it; what it raises, all ranks raise.

    Raises
    ------
    LayoutError
        What the ranks hold does not fit together.
    UsageError
        They passed different ``metadata=``.
    """
    parts = (*encode_metadata(local_shards.local_metadata), metadata)
    digests = [digest128(part) for part in parts]
    layout = b"".join((*digests[:_LAYOUT_PARTS], bytes([splits])))
    kept = cache.assignments.find(layout)
    states = comm.gather(b"".join((*digests, kept.plan_id if kept else _NO_PLAN)))
    leader = None if states is None else Leader(states, cache, accept, splits=splits)
    said = comm.broadcast(None if leader is None else leader.answer.encode())
    answer = _Answer.decode(said)
    sent = None
    if answer.asked.any():
        sent = comm.gather(msgpack.packb([p if a else None for p, a in zip(parts, answer.asked[:, comm.rank], strict=True)]))
    if leader is not None:
        leader.take_parts(parts, sent)
    data = b""
    if answer.assigns:
        data = comm.scatter(None if leader is None else leader.assignments())
    if data or kept is None:
        kept = _Kept(answer.plan_id, decode_assignment(data, answer.save_id))
        cache.assignments.keep(layout, kept)
    assert kept.plan_id == answer.plan_id
    assignment = replace(kept.item, save_id=answer.save_id)
    return AgreedPlan(assignment) if leader is None else AgreedPlan(assignment, leader.plan, leader.values)


class Leader:
    """Rank 0's side of one agreement, in the order of its steps; it knows nothing of how messages travel.

    Parameters
    ----------
    states
        What every rank says first.
    """

    def __init__(
        self,
        states: Sequence[bytes],
        cache: PlanCache,
        accept: Callable[[SavePlan], None] = lambda plan: None,
        *,
        splits: bool = True,
    ) -> None:
        table = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), _PARTS + 1, _ID_BYTES)
        self._cache = cache
        self._states = states
        self._splits = splits
        self._layouts = digest128(np.ascontiguousarray(table[:, :_LAYOUT_PARTS]).data) + bytes([splits])
        kept = cache.plans.find(self._layouts)
        self._accept = accept
        self._plan = None if kept is None else kept.item
        if self._plan is not None:
            accept(self._plan)
        plan_id = secrets.token_bytes(_ID_BYTES) if kept is None else kept.plan_id
        self._lacks = (table[:, _PARTS] != np.frombuffer(plan_id, np.uint8)).any(axis=1)
        self.answer = _Answer(new_save_id(), plan_id, self._asked(kept is None), bool(self._lacks.any()))
        self.values: tuple[ValueEntry, ...] = ()

    @property
    def plan(self) -> SavePlan:
        """The plan, once there is one."""
        assert self._plan is not None
        return self._plan

    def _asked(self, everything: bool) -> NDArray[np.bool_]:
        asked = np.zeros((_PARTS, len(self._states)), bool)
        for part in range(0 if everything else _LAYOUT_PARTS, _PARTS):
            # Rank 0 need not send to itself.
            asked[part, [rank for rank in self._first_with(part).values() if rank]] = True
        return asked

    def _first_with(self, part: int) -> dict[bytes, int]:
        """The lowest rank with each distinct digest of a part, by rank."""
        at = slice(part * _ID_BYTES, (part + 1) * _ID_BYTES)
        first: dict[bytes, int] = {}
        for rank, state in enumerate(self._states):
            first.setdefault(state[at], rank)
        return first

    def _by_rank(self, part: int, messages: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return a part of every rank's metadata, each from the rank that sent it for all that have the same."""
        at = slice(part * _ID_BYTES, (part + 1) * _ID_BYTES)
        known = {digest: messages[rank][part] for digest, rank in self._first_with(part).items()}
        return [known[state[at]] for state in self._states]

    def take_parts(self, own: Sequence[bytes], sent: Sequence[bytes] | None) -> None:
        """Take the parts that were asked for, and this rank's own; plan where need be, and merge the values."""
        messages = [own, *((msgpack.unpackb(m) for m in sent[1:]) if sent else ())]
        if self._plan is None:
            metadata = decode_metadata(*(self._by_rank(part, messages) for part in range(_LAYOUT_PARTS)))
            self._plan = plan_save(metadata, splits=self._splits)
            self._accept(self._plan)
            self._cache.plans.keep(self._layouts, _Kept(self.answer.plan_id, self._plan))
        for rank in self._first_with(_METADATA).values():
            _refuse_other(messages[0][_METADATA], messages[rank][_METADATA], rank)
        of_ranks = [(rank, decode_values(messages[rank][_VALUES])) for rank in self._first_with(_VALUES).values()]
        self.values = merge_values(of_ranks, self.plan.tables)

    def assignments(self) -> list[bytes]:
        """For each rank that lacks its assignment."""
        encoded = encode_assignments(self.plan)
        return [data if lacks else b"" for data, lacks in zip(encoded, self._lacks.tolist(), strict=True)]


def _refuse_other(first: bytes, second: bytes, rank: int) -> None:
    """Raise a `UsageError` if the user's metadata of a rank are not those of rank 0; dicts may differ in order."""
    if first == second:
        return
    mine, others = decode_value(first, name="metadata"), decode_value(second, name="metadata")
    what = "metadata="
    if isinstance(mine, dict) and isinstance(others, dict):
        differ = [key for key in {**mine, **others} if _encoded(mine, key) != _encoded(others, key)]
        if not differ:
            return
        what = "metric=" if differ[0] == "metric" else f"metadata= of {differ[0]!r}"
        mine, others = mine.get(differ[0]), others.get(differ[0])
    raise UsageError(
        f"{what} differs between ranks: rank 0 passed {mine!r:.200}, rank {rank} passed {others!r:.200}; a checkpoint has "
        "one, so pass the same on all ranks, such as the mean of a metric over them (torch.distributed.all_reduce)"
    )


def _encoded(metadata: dict[Any, Any], key: Any) -> bytes | None:
    return encode_value(metadata[key], "metadata") if key in metadata else None
