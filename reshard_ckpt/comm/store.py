"""The `Comm` over a key-value store. Ranks exchange messages in steps; each step has one decision, which all ranks read.

The calls of a session are its steps ``0, 1, 2, …``, the same on every rank. The *decision* of a step is a key that is written
once, by compare-and-set: "go on", written by rank 0, or a refusal, written by the rank that failed. The first writer wins. So
all ranks go on, or all raise the same error. Ranks wait for decisions, and rank 0 for the bell; for nothing else.

1. *To rank 0* (gather): each rank appends its message to the step's inbox. The last rank to do so sets a key, the *bell*. Rank 0
   waits for the bell, not for each rank: one wait and one read for any number of ranks. Then it writes the decision.
2. *From rank 0* (broadcast, scatter): rank 0 writes the payload, and then the decision.
3. *Failure*: a rank that raises writes its refusal into the first undecided step, and rings the bell of that step, because rank 0
   may wait there. A session begins and ends with a gather, so every failure inside it is seen.
4. *Deadline*: a rank that has waited too long reads from the inbox which ranks are absent, and refuses the step with their names.
   It does so at once if an absent rank is known to have ended.
5. *On one machine* (broadcast_near): its first rank writes a key that the others wait for. A rank that gives up writes it too.
6. *Leaving*: each rank counts itself out. Rank 0 is the last, because its process may host the store. The rank whose count
   completes the number deletes the session's keys: usually rank 0, or a rank that the others had given up.

A rank waits in the store's server, in another thread and on a connection of its own. So it can be interrupted, and it looks
meanwhile whether a rank has ended. A rank that gives up refuses the step. That writes both keys that ranks wait for, so it wakes
the others and its own thread. Before torch 2.8, waiting is polling, at intervals of a tenth of the time waited so far, and longer
ones in larger jobs. If the store does not reply because its process hangs, it is waited for no longer than a rank
(`comm.bounded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from torch.distributed import DistError

from ..errors import PeerError
from .bounded import BoundedStore
from .calls import call_of, disagreement, expired, processes_ended, too_late
from .payloads import KeyValueStore, Payloads
from .peers import Ended
from .wire import Frame, Refusal, decode_frames, encode_frame, refusal_of

# The decisions that let a step pass: the name of rank 0's call in that step.
_PASSED = (b"gather", b"broadcast", b"scatter")

_INLINE = b"\0"
"""Between a decision and its payload; JSON, the form of a refusal, does not contain it."""
_INLINE_BYTES = 64 << 10
_GIVEN_UP = b"refused"
"""In place of a message to the ranks of one machine, which begins with `_INLINE`."""

_FIRST_PAUSE_S, LAST_PAUSE_S = 0.0002, 0.05
_LOOK_S = 0.5
_FAREWELL_S = 5.0
_HOST_FAREWELL_S = 60.0
"""If rank 0's process hosts the store: the others need it until they have left too, or their save would fail."""

_given_up = 0
"""Number of times that this process has given up all its sessions."""


class StoreComm:
    """The `Comm` of one session, which alone uses the keys of `store`.

    Parameters
    ----------
    ended
        Returns the ranks that are known to have ended; by default an empty set.
    ranks_near
        Returns the ranks on this machine; by default this rank alone. Called once all ranks have met.
    hosts
        Whether rank 0's process hosts the store, so that it must leave last.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        *,
        title: str,
        timeout_s: float,
        ended: Ended = frozenset,
        ranks_near: Callable[[], Sequence[int]] | None = None,
        hosts: bool = False,
    ) -> None:
        self._store, self.rank, self.size = BoundedStore.of(store, timeout_s), rank, size
        self._payloads = Payloads(self._store)
        self._ended, self._farewell_s = ended, _HOST_FAREWELL_S if hosts else _FAREWELL_S
        self._ranks_near = ranks_near or (lambda: (rank,))
        self._num_near = 0
        self._title, self._timeout_s = title, timeout_s
        # A server answers some 50,000 requests a second: polls of all ranks together must leave it most of its time.
        self._pauses_s = max(_FIRST_PAUSE_S, size * 20e-6), max(LAST_PAUSE_S, size * 100e-6)
        self._step, self._look_at = 0, 0.0
        self._given_up_before = _given_up
        self._refusal: Refusal | None = None
        self._undo: tuple[int, Callable[[], None]] | None = None

    # --- the calls of the protocol ---

    def undo_unless_gathered(self, undo: Callable[[], None]) -> None:
        self._undo = self._step, undo

    def gather(self, payload: bytes) -> list[bytes] | None:
        with self._reachable():
            self._arrive(payload)
            if self.rank:
                self._await_decision("gather")
                return None
            messages = self._collect(payload)
            self._decide("gather")
            return messages

    def broadcast(self, payload: bytes | None) -> bytes:
        with self._reachable():
            self._stop_if_over()
            key = self._key("all")
            if self.rank:
                inline = self._await_decision("broadcast")
                return self._payload_of_all(key) if inline is None else inline
            assert payload is not None
            if len(payload) > _INLINE_BYTES:
                self._payloads.save({key: payload})
                self._decide("broadcast")
            else:
                self._decide("broadcast", payload)
            return bytes(payload)

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        with self._reachable():
            self._stop_if_over()
            if self.rank:
                key = self._key("to", self.rank)
                self._await_decision("scatter")
                return self._payloads.take(key)
            assert payloads is not None
            assert len(payloads) == self.size
            self._payloads.save({self._key("to", rank): payloads[rank] for rank in range(1, self.size)})
            self._decide("scatter")
            return bytes(payloads[0])

    def count(self, amount: int) -> int:
        with self._reachable():
            return self._store.add("count", amount)

    def neighbours(self) -> Sequence[int]:
        with self._reachable():
            return self._ranks_near()

    def broadcast_near(self, payload: bytes | None) -> bytes:
        with self._reachable():
            self._stop_if_over()
            value = self._value_near(payload)
            if value == _GIVEN_UP:
                self._find_refusal()
            self._num_near += 1
            return value.removeprefix(_INLINE)

    def _value_near(self, payload: bytes | None) -> bytes:
        """Write the next message to the ranks of this machine, or wait for it."""
        first, *others = self._ranks_near()
        key, store = _near_key(first, self._num_near), self._shared_store()
        if first != self.rank:
            return self._get_from(first, key, store)
        assert payload is not None
        value = _INLINE + payload
        return store.compare_set(key, b"", value) if others else value

    def _shared_store(self) -> BoundedStore:
        """Return the store for messages among the ranks of this machine."""
        return self._store

    def _get_from(self, rank: int, key: str, store: BoundedStore) -> bytes:
        """Wait for a key that another rank writes."""

        gone = False

        def has_ended() -> bool:
            nonlocal gone
            gone = self._may_look() and rank in self._ended()
            return gone

        # Other machines wait for this rank in the next step: it must name the late rank before they name this one.
        patience_s = self._timeout_s * 3 / 4
        came, value = self._wait_for(key, patience_s, has_ended, store=store)
        if value is None and (gone or not came):
            self._stop_if_given_up()
            late = expired(self._title, (rank,), patience_s)
            self._refuse_undecided(processes_ended(self._title, (rank,)) if gone else late)
            self._stop_if_over()
        return store.get(key) if value is None else value

    def _find_refusal(self) -> None:
        """Raise the refusal that a rank has written into the first undecided step, perhaps a later one than this rank's."""
        while _passed(decision := self._store.get(self._key("decision"))):
            self._skip_step()
        self._apply(decision, "")

    # --- opening and leaving a session ---

    def open(self, kind: str, subject: str, *, before: bytes = b"") -> bool:
        """Take the first step: check that all ranks have come, and for the same call.

        Parameters
        ----------
        before
            The `call_of` of this rank's previous session, if that did not open.

        Returns
        -------
        bool
            False if this session belongs to another call, so that this rank must try the next one. Either the others gave up this
            rank in a call that it left out, or they have come only now for the call that this rank made before.
        """
        call = call_of(kind, subject)
        with self._reachable():
            try:
                self._meet(call)
            except PeerError:
                if self._is_for_another(call, before):
                    return False
                if self.late:
                    raise PeerError(f"{self._refused().message}; this rank came only after that", self._refused().ranks) from None
                raise
        return True

    def _meet(self, call: bytes) -> None:
        self._arrive(call, shown=True)
        if self.rank:
            self._await_decision("gather")
            return
        calls = self._collect(call)
        if len(set(calls)) > 1:
            self._refuse(disagreement(calls))
            self._stop_if_over()
        self._decide("gather")

    @property
    def late(self) -> bool:
        """Whether the others had given up this rank before it came to the session."""
        return self._step == 0 and self._refusal is not None and self.rank in self._refusal.absent

    def _is_for_another(self, call: bytes, before: bytes) -> bool:
        if self._step or self._refusal is None:
            return False
        calls = self._others_calls()
        if not calls or call in calls:
            return False
        return self.late or set(calls) == {before}

    def _others_calls(self) -> list[bytes]:
        """Return the encoded call of each other rank that came to this session in time: the messages of its first step."""
        inbox = "0/in"
        if not self._store.check([inbox]):
            return []
        late = {self.rank, *self._refused().absent}
        return [frame.payload for frame in decode_frames(self._store.get(inbox)) if frame.rank not in late]

    def is_for_others(self, call: bytes) -> bool:
        """Whether another rank has refused the session, or opened it for another call. Used before this rank opens it."""
        with self._reachable():
            inbox = self._store.get("0/in") if self._store.check(["0/in"]) else b""
            return self._store.check(["0/decision"]) or any(frame.payload != call for frame in decode_frames(inbox))

    def decline(self, call: bytes) -> bool:
        """Refuse a session that this rank, being late, will not join. Return False if another refusal was there before."""
        own = too_late(call, self.rank)
        with self._reachable():
            counts = self._refuse(own)
        self.leave(waits=False)
        return counts == own

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this rank, unless the error came from them."""
        if self._refusal is not None:
            return
        self._store.allow(self._farewell())
        with suppress(DistError):  # without a store no rank can be reached, and `error` says more
            if self._step:
                self._payloads.drop(f"{self._step - 1}/to/{self.rank}")  # perhaps not taken: this rank was interrupted
            self._refuse_undecided(refusal_of(error, self.rank))

    def leave(self, *, waits: bool = True) -> None:
        """Count this rank out; the last rank deletes all keys. Raises nothing if the store is gone."""
        self._store.allow(self._farewell())
        with suppress(DistError):
            self._leave_near()
            if self.rank == 0 and waits and self.size > 1:
                if self._refusal is None:
                    if not self._wait_for("gone", self._farewell())[0]:
                        self._store.set("gone", b"")
                else:
                    self._wait(partial(self._have_left, frozenset(self._refusal.absent)), self._farewell())
            number = self._num_leaving()
            num_left = self._store.add("left", number) if number else 0
            if num_left == self.size:
                self._store.on_worker(self._delete_all)
            elif num_left == self.size - 1 and self.rank and self._refusal is None:
                self._store.set("gone", b"")  # rank 0 waits for it

    def _num_leaving(self) -> int:
        """Return the number of ranks that this one counts out."""
        return 1

    def _leave_near(self) -> None:
        """Delete the messages to the ranks of this machine. After a refusal some may be unread: list them for the last rank."""
        failed = self._refusal is not None
        if not self._step or not (self._num_near or failed) or len(near := self._ranks_near()) == 1:
            return
        if self._shared_store() is not self._store:
            return  # the machine's first rank deletes all keys there
        keys = [_near_key(near[0], number) for number in range(self._num_near + failed)]
        if failed:
            self._store.append("near", "".join(f"{key} " for key in keys).encode())
        elif near[0] == self.rank:
            self._store.on_worker(lambda store: [store.delete_key(key) for key in keys])

    def _farewell(self) -> float:
        return min(self._farewell_s, self._timeout_s)

    def _have_left(self, absent: frozenset[int]) -> bool:
        staying = self.size - 1 - self._store.add("left", 0)
        if staying > len(absent) and self._refusal is not None and self._may_look():
            return staying <= len(absent | self._ended())
        return staying <= len(absent)

    def miss(self, call: bytes, reason: PeerError) -> None:
        """Give up a session to which this rank came before the store existed; tell the others so."""
        with self._reachable():
            self._store.append(self._key("in"), encode_frame(Frame(self.rank, False, call)))
            self._refuse(Refusal("PeerError", str(reason), tuple(reason.ranks), absent=tuple(reason.ranks)))
        self.leave(waits=False)

    def undo(self) -> None:
        """Call the `undo` of a gather that failed on all ranks: its step, or an earlier one, was refused."""
        if self._refusal is not None and self._undo is not None and self._step <= self._undo[0]:
            self._undo[1]()

    # --- one step ---

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, (self._step, *parts)))

    def _arrive(self, payload: bytes, *, shown: bool = False) -> None:
        """Append this rank's message to the step's inbox. The last rank rings the bell."""
        self._stop_if_over()
        separate = len(payload) > _INLINE_BYTES and self.rank != 0
        if separate:
            self._payloads.save({self._key("from", self.rank): payload})
        # Rank 0 keeps its own payload. Its frame shows the others that it has arrived; with `shown`, also its call.
        is_empty = separate or (self.rank == 0 and not shown)
        frame = Frame(self.rank, separate, b"" if is_empty else bytes(payload))
        self._post(frame)

    def _post(self, frame: Frame) -> None:
        """Send this rank's message of a step on its way to rank 0."""
        self._send(frame)

    def _send(self, *frames: Frame) -> None:
        inbox = b"".join(map(encode_frame, frames))

        def arrive(store: KeyValueStore) -> None:
            store.append(self._key("in"), inbox)
            if store.add(self._key("arrived"), len(frames)) == self.size:
                store.set(self._key("bell"), b"")

        self._store.on_worker(arrive)

    def _collect(self, own: bytes) -> list[bytes]:
        """Wait on rank 0 for all messages of this step, and return them by rank."""
        self._await(self._key("bell"), self._refuse_without_ended)
        if self._store.check([self._key("decision")]):
            self._apply(self._store.get(self._key("decision")), "gather")
        frames = {frame.rank: frame for frame in decode_frames(self._store.get(self._key("in")))}
        messages = [bytes(own)]
        for rank in range(1, self.size):
            frame = frames[rank]
            messages.append(self._payloads.take(self._key("from", rank)) if frame.separate else frame.payload)
        return messages

    def _decide(self, call: str, inline: bytes | None = None) -> None:
        """Let the step pass, unless a rank has refused it. Called on rank 0. A small payload travels with the decision."""
        decision = call.encode() if inline is None else b"".join((call.encode(), _INLINE, inline))
        self._apply(self._store.compare_set(self._key("decision"), b"", decision), call)

    def _await_decision(self, call: str) -> bytes | None:
        """Wait for the step's decision, apply it, and return its payload, or None. Called on the ranks above 0."""
        decision = self._decision(call)
        self._apply(decision, call)
        _, has_payload, payload = decision.partition(_INLINE)
        return payload if has_payload else None

    def _decision(self, call: str) -> bytes:
        """Wait for the step's decision, and return it."""
        key = self._key("decision")
        decision = self._await(key, self._refuse_without_ended)
        return self._store.get(key) if decision is None else decision

    def _payload_of_all(self, key: str) -> bytes:
        return self._payloads.load(key)

    def _apply(self, decision: bytes, call: str) -> None:
        """Go on to the next step, or raise the error if the decision is a refusal."""
        passed = _passed(decision)
        if not passed:
            self._refusal = Refusal.decode(decision)
            self._stop_if_over()
        self._step += 1
        if passed != call:
            raise PeerError(
                f"{self._title}: this rank is at a {call} while rank 0 is at a {passed}; "
                "call with the same options on every rank",
                ranks=(self.rank,),
            )

    def _stop_if_over(self) -> None:
        if self._refusal is not None:
            raise self._refusal.error()

    def _refused(self) -> Refusal:
        assert self._refusal is not None
        return self._refusal

    def _refuse(self, refusal: Refusal) -> Refusal | None:
        """Refuse this step. Return the refusal that was first, perhaps another rank's; None if rank 0 has let the step pass."""
        decision = self._store.compare_set(self._key("decision"), b"", refusal.encode())
        if not _passed(decision):
            self._store.set(self._key("bell"), b"")
        self._wake_near(decision)
        if _passed(decision):
            return None
        self._refusal = Refusal.decode(decision)
        return self._refusal

    def _wake_near(self, decision: bytes) -> None:
        """Wake the ranks of this machine that wait for another one of it, if the step is refused."""
        if self._step and not _passed(decision):  # at step 0 the ranks of this machine may not be known
            first, *others = self._ranks_near()
            if others:
                self._shared_store().compare_set(_near_key(first, self._num_near), b"", _GIVEN_UP)

    def _refuse_undecided(self, refusal: Refusal) -> None:
        """Refuse the first step that is not decided yet: rank 0 may have let this one pass."""
        while self._refuse(refusal) is None:
            self._skip_step()

    def _skip_step(self) -> None:
        """Go past a step that rank 0 has let pass, and in which this rank will not take its message any more."""
        self._payloads.drop(self._key("to", self.rank))
        self._step += 1

    def _await(self, key: str, refuse: Callable[[], bool]) -> bytes | None:
        """Wait for a key, the bell or the decision. Refuse the step when the time is over or `refuse` has done so.

        Return the key's value if it came with the wait, else None.
        """
        came, value = self._wait_for(key, self._timeout_s, refuse)
        if not came:
            self._stop_if_given_up()
            self._expire()
        return value

    def _wait_for(
        self, key: str, timeout_s: float, stop: Callable[[], bool] = lambda: False, *, store: BoundedStore | None = None
    ) -> tuple[bool, bytes | None]:
        """Wait for a key, or until `stop` returns True. Return as `_wait` does, and the key's value if the server sent it."""
        store = store or self._store
        waiting = store.begin_get(key, timeout_s)

        def came() -> bool:
            return (store.check([key]) if waiting is None else waiting.ends(0)) or stop()

        def pause(seconds: float) -> None:
            if waiting is None:
                time.sleep(seconds)
            else:
                waiting.ends(max(seconds, LAST_PAUSE_S))

        in_time = self._wait(came, timeout_s, pause)
        return in_time, waiting.outcome() if waiting is not None and waiting.ends(0) else None

    def _stop_if_given_up(self) -> None:
        if self._given_up_before != _given_up:
            raise PeerError(
                f"{self._title}: given up, as this process was told to end and the time for that is over", ranks=(self.rank,)
            )

    def _refuse_without_ended(self) -> bool:
        """Refuse the step if a rank that it still needs has ended. Return True once the step is decided."""
        if not self._may_look() or not (gone := self._ended()):
            return False
        arrived = self._arrived()
        # Of rank 0 the others need the decision; of another rank all is here once it has arrived.
        needed = {0, *range(self.size if arrived else 0)} - (arrived - {0}) - {self.rank}
        missing = tuple(sorted(needed & gone))
        if not missing:
            return False
        self._refuse(processes_ended(self._title, missing))
        return True

    def _may_look(self) -> bool:
        """Whether half a second has passed since the last check for ended ranks."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return True

    def _arrived(self) -> set[int]:
        inbox = self._key("in")
        return {frame.rank for frame in decode_frames(self._store.get(inbox))} if self._store.check([inbox]) else set()

    def _expire(self) -> None:
        """Refuse the step because its time is over, and name the absent ranks. Does nothing if the last rank has just arrived."""
        arrived = self._arrived()
        absent = tuple(rank for rank in range(self.size) if rank not in arrived) if arrived else ()
        if arrived and not absent and self.rank == 0:
            return  # all are here: the last one was just about to ring
        self._refuse(expired(self._title, absent, self._timeout_s))

    def _wait(
        self, done: Callable[[], bool], timeout_s: float, pause: Callable[[float], None] = lambda seconds: time.sleep(seconds)
    ) -> bool:
        """Poll until `done` returns True, and return True; False when the time is over or all sessions are given up."""
        begin = time.monotonic()
        first, last = self._pauses_s
        while not done():
            waited = time.monotonic() - begin
            if waited >= timeout_s or self._given_up_before != _given_up:
                return False
            pause(min(max(waited / 10, first), last, timeout_s - waited))
        return True

    def _delete_all(self, store: KeyValueStore) -> None:
        """Delete every key of the session, once no rank uses them any more."""
        payloads = Payloads(store)
        for step in range(self._step + 1):
            payloads.drop(f"{step}/all")
            for name in ("in", "arrived", "bell", "decision"):
                store.delete_key(f"{step}/{name}")
        if self._refusal is not None:
            # Payloads of the refused step, which no rank has taken.
            for rank in range(1, self.size):
                payloads.drop(f"{self._step}/from/{rank}")
                payloads.drop(f"{self._step}/to/{rank}")
            near = bytes(store.get("near")).decode().split() if store.check(["near"]) else []
            for name in {*near, "near"}:
                store.delete_key(name)
        for name in ("left", "gone", "count"):
            store.delete_key(name)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        self._store.allow(self._timeout_s)
        try:
            yield
        except DistError as error:
            raise PeerError(
                f"{self._title}: the job's key-value store does not answer any more ({error}); "
                "the process that hosts it, often rank 0, has probably ended, or hangs: its log says why",
                ranks=(0,),
            ) from error


def _near_key(first: int, number: int) -> str:
    """Return the key of a message of the first rank of a machine to the others there."""
    return f"near/{first}/{number}"


def give_up_sessions() -> None:
    """Make all current sessions of this process stop waiting for other ranks, because the process must end now.

    The other ranks are told. Sessions that are opened later are not affected.
    """
    global _given_up
    _given_up += 1


def _passed(decision: bytes) -> str:
    """Return the call that a decision lets pass, or "" if the decision is a refusal."""
    name = decision.partition(_INLINE)[0]
    return name.decode() if name in _PASSED else ""
