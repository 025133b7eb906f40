"""Messages between ranks over a key-value store (`StoreComm`), in steps; each step has one decision, which all ranks read.

The calls of a session are its steps ``0, 1, 2, …``, the same on every rank. The *decision* of a step is a key that is written
once, by compare-and-set: "go on", written by rank 0, or a refusal, written by the rank that failed. The first writer wins. So all
ranks go on, or all raise the same error. Ranks wait only for decisions, and rank 0 for the *bell* of a step.

1. *To rank 0* (gather): each rank appends its message to the step's inbox. The last rank to do so sets a key, the bell. Rank 0
   waits for the bell, not for each rank: one wait and one read for any number of ranks. Then it writes the decision.
2. *From rank 0* (broadcast, scatter): rank 0 writes the payload, and then the decision. If one rank has sent the messages of
   several, as the leader of a machine does, a scatter packs the payloads for these ranks into one.
3. *Failure*: a rank that raises writes its refusal into the first undecided step, and rings the bell of that step, because rank 0
   may wait there. A session begins and ends with a gather, so every failure inside it is seen.
4. *Deadline*: a rank that has waited too long reads from the inbox which ranks are absent, and refuses the step with their names.
   It does so at once if an absent rank is known to have ended.
5. *On one machine* (broadcast_near): its first rank writes a key that the others wait for. A rank that gives up writes it too.
6. *Leaving*: each rank adds itself to a count. Rank 0 leaves last, because its process hosts the store: the last of the others
   sets a key for which rank 0 waits, and counts that as well. Whoever completes the count deletes the session's keys: usually
   rank 0, or a rank that the others had given up.

A rank waits in the store's server, in another thread and on a connection of its own; before torch 2.8 it asks again and again
(`BoundedStore.begin_get`). So it can be interrupted, and meanwhile checks whether a rank has ended. A rank that gives up refuses
the step. That writes both keys that ranks wait for, so each wait ends with its key, also that of the rank which gives up
(`_wait_for`). If the store does not reply because its process hangs, ranks wait for it no longer than for a rank
(`comm.bounded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from torch.distributed import DistError

from ..errors import PeerError
from .bounded import BoundedStore, StoreLost, Waiting
from .calls import different_calls_refusal, ended_refusal, expired_refusal, late_refusal
from .payloads import KeyValueStore, Payloads
from .peers import Ended
from .wire import Frame, Refusal, decode_frames, encode_frames, refusal_of

# The decisions that let a step pass: the name of rank 0's call in that step.
_PASSED = (b"gather", b"broadcast", b"scatter")

INLINE = b"\0"
"""The separator between a step's decision and a payload in the same value; a refusal, which is JSON, does not contain it."""
_INLINE_BYTES = 64 << 10
_GIVEN_UP = b"refused"
"""Written in place of a message when its step was refused: as the value of the step's bell, or for the ranks of one machine.
(Real messages to them begin with `INLINE`.)"""

_SLICE_S = 0.05
"""Seconds that a rank waits for a key before it checks again whether to give up."""
_LOOK_S = 0.5
_FAREWELL_S = 5.0
_HOST_FAREWELL_S = 60.0
"""Seconds that rank 0 waits for the others to leave a session: they still need the store, which its process hosts."""

TOLD = 1 << 60
"""The amount that rank 0 adds to the count of ranks that have left, and so does the rank that has set the key "gone" for it."""

_given_up = 0
"""Number of times that this process has given up all its sessions."""


class StoreComm:
    """The `Comm` (messages of one session) over a key-value store; no other session may use the keys of `store`.

    Parameters
    ----------
    ended
        Returns the ranks that are known to have ended; by default an empty set.
    ranks_near
        Returns the ranks on this machine; by default this rank alone. Called once all ranks have met.
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
    ) -> None:
        self._store, self.rank, self.size = BoundedStore.of(store, timeout_s), rank, size
        self._payloads = Payloads(self._store)
        self._ended = ended
        self._ranks_near = ranks_near or (lambda: (rank,))
        self._num_near = 0
        self._title, self._timeout_s = title, timeout_s
        self._step, self._look_at = 0, 0.0
        self._inbox, self._sender = b"", rank
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
                to = self._key("to", self._sender)
                self._await_decision("scatter")
                shared = self._payload_of_sender(to)
                return next(frame.payload for frame in decode_frames(shared) if frame.rank == self.rank)
            assert payloads is not None
            assert len(payloads) == self.size
            senders = {frame.rank: frame.sender for frame in decode_frames(self._inbox)}
            shared_by: dict[int, list[Frame]] = {}
            for rank in range(1, self.size):
                sender = senders.get(rank, rank)
                shared_by.setdefault(sender, []).append(Frame(rank, sender, False, bytes(payloads[rank])))
            self._payloads.save({self._key("to", sender): encode_frames(frames) for sender, frames in shared_by.items()})
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
                # A rank has written the refusal into the first undecided step, perhaps a later one than this rank's.
                while call_let_pass(decision := self._store.get(self._key("decision"))):
                    self._skip_step()
                self._apply(decision, "")
            self._num_near += 1
            return value.removeprefix(INLINE)

    def _value_near(self, payload: bytes | None) -> bytes:
        """Write the next `broadcast_near` message if this rank is the first of its machine, else wait for it; return it."""
        first, *others = self._ranks_near()
        key, store = _near_key(first, self._num_near), self._shared_store()
        if first != self.rank:
            return self._get_from(first, key, store)
        assert payload is not None
        value = INLINE + payload
        return store.compare_set(key, b"", value) if others else value

    def _shared_store(self) -> BoundedStore:
        """Return the store that carries messages between the ranks of this machine."""
        return self._store

    def _get_from(self, rank: int, key: str, store: BoundedStore) -> bytes:
        """Wait for a key that `rank` writes, and return its value. If that rank is late or has ended, refuse the step."""
        # Other machines wait for this rank in the next step: it must name the late rank before they name this one.
        patience_s = self._timeout_s * 3 / 4

        def refuse(refusal: Refusal) -> None:
            self._stop_if_given_up()
            self._refuse_undecided(refusal)
            self._stop_if_over()

        def refuse_if_ended() -> bool:
            if self._may_look() and rank in self._ended():
                refuse(ended_refusal(self._title, (rank,)))
            return False

        over = partial(refuse, expired_refusal(self._title, (rank,), patience_s))
        return self._wait_for(key, patience_s, over, refuse_if_ended, store=store)

    # --- opening and leaving a session ---

    def open(self, call: bytes, *, before: bytes = b"", refused: bytes = b"") -> bool:
        """Take the first step of a session: wait for all ranks, and check that all have made the same call.

        Parameters
        ----------
        call
            This rank's call, encoded by `call_of`.
        before
            The call of this rank's previous session, if that session did not open.
        refused
            The same, if a rank refused that session without coming to it (`is_refused`).

        Returns
        -------
        bool
            False if this session belongs to another call, so that this rank must try the next session. Either this rank left out
            a call, and the others gave it up there; or the others have come only now for the call that this rank made before. The
            others may be the rank alone that refused a call which no other rank made, and so is one call behind.
        """
        with self._reachable():
            try:
                self._meet(call)
            except PeerError:
                if self._is_for_another(call, before, refused):
                    return False
                if self.came_late:
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
            self._refuse(different_calls_refusal(calls))
            self._stop_if_over()
        self._decide("gather")

    @property
    def came_late(self) -> bool:
        """Whether the other ranks had refused the session, because this rank was absent, before it came."""
        return self._step == 0 and self._refusal is not None and self.rank in self._refusal.absent

    @property
    def is_refused(self) -> bool:
        """Whether another rank has refused the session by an error of its arguments, without coming to it."""
        return self._step == 0 and self._refusal is not None and self._refusal.kind != PeerError.__name__

    def _is_for_another(self, call: bytes, before: bytes, refused: bytes) -> bool:
        if self._step or self._refusal is None:
            return False
        # calls: the encoded call of each other rank that came to this session in time, its message in the first step
        calls = {frame.payload for frame in self._inbox_of(0) if frame.rank not in (self.rank, *self._refusal.absent)}
        if not calls or call in calls:
            return calls - {call} == {refused}
        return self.came_late or calls == {before}

    def is_for_others(self, call: bytes) -> bool:
        """Tell whether another rank has opened this session for another call than `call`, or ended it by an error for all ranks.

        Use it before this rank opens the session.
        """
        with self._reachable():
            arrived = self._inbox_of(0)
            return self._store.check(["0/decision"]) or any(frame.payload != call for frame in arrived)

    def decline(self, call: bytes) -> bool:
        """Refuse a session that this rank will not join, because it is late.

        Return False if another rank had refused it before.
        """
        own = late_refusal(call, self.rank)
        with self._reachable():
            counts = self._refuse(own)
        self.leave(waits=False)
        return counts == own

    def abort(self, error: BaseException) -> None:
        """Refuse the session because of an error of this rank, so that all ranks raise it.

        Does nothing if the error came from another rank.
        """
        if self._refusal is not None:
            return
        self._store.allow(self._farewell())
        with suppress(DistError):  # without a store no rank can be reached, and `error` says more
            if self._step:
                self._payloads.drop(f"{self._step - 1}/to/{self.rank}")  # perhaps not taken: this rank was interrupted
            self._refuse_undecided(refusal_of(error, self.rank))

    def leave(self, *, waits: bool = True) -> None:
        """Leave the session: add this rank to the count of ranks that have left. The last one deletes all keys.

        Never raises `DistError`.
        """
        self._store.allow(self._farewell())
        with suppress(DistError):
            self._leave_near()
            # Rank 0 waits for all other ranks, or after a refusal for the ranks that had come. The last of these ranks tells it.
            num_others = self.size - 1 - (0 if self._refusal is None else len(self._refusal.absent))
            if self.rank == 0 and waits and num_others > 0:
                gone = partial(self._store.set, "gone", b"")
                self._wait_for("gone", self._farewell(), gone, lambda: self._refusal is not None and self._have_ended(num_others))
            if number := self._num_leaving():
                self._store.on_worker(partial(self._leave, number, num_others))

    def _leave(self, number: int, num_others: int, store: KeyValueStore) -> None:
        """Count `number` more ranks as having left the session. The rank that completes the count deletes the session's keys.

        The last of the `num_others` ranks that rank 0 waits for tells rank 0.
        """
        told, num_left = divmod(store.add("left", number if self.rank else TOLD), TOLD)
        if self.rank and num_left - number < num_others <= num_left:
            store.set("gone", b"")
            told, num_left = divmod(store.add("left", TOLD), TOLD)  # not before: with the count complete, all keys are deleted
        if num_left == self.size - 1 and told >= 1 + (num_others > 0):
            self._delete_all(store)

    def _num_leaving(self) -> int:
        """Return how many ranks this one adds to the count of leavers: itself, and ranks of its machine for which it speaks."""
        return 1

    def _leave_near(self) -> None:
        """Delete the keys of `broadcast_near` messages.

        After a refusal some may be unread, so list the keys for the rank that leaves last.
        """
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
        return min(_HOST_FAREWELL_S, self._timeout_s)

    def _have_ended(self, num_others: int) -> bool:
        """Tell whether at least `num_others` ranks have left the session or ended.

        Checks only twice a second; False in between.
        """
        if not self._may_look():
            return False
        absent = self._refused().absent
        return self._store.add("left", 0) + len(self._ended() - {*absent}) >= num_others

    def give_up_unmet(self, call: bytes, reason: PeerError) -> None:
        """Refuse a session that this rank did not reach, often because the store did not exist in time; tell the others why."""
        refusal = Refusal("PeerError", f"rank {self.rank}: {reason}", (self.rank,))
        if reason.ranks:
            refusal = Refusal("PeerError", str(reason), reason.ranks, absent=reason.ranks)
        with self._reachable():
            self._store.append(self._key("in"), encode_frames([Frame(self.rank, self.rank, False, call)]))
            self._refuse(refusal)
        self.leave(waits=False)

    def undo(self) -> None:
        """Call the function registered by `undo_unless_gathered` if its gather, or an earlier step, was refused on all ranks."""
        undo, self._undo = self._undo, None  # it may refer to this, and to all tensors of a save
        if self._refusal is not None and undo is not None and self._step <= undo[0]:
            undo[1]()

    # --- one step ---

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, (self._step, *parts)))

    def _arrive(self, payload: bytes, *, shown: bool = False) -> None:
        """Append this rank's message to the step's inbox. The last rank sets the key that rank 0 waits for, the bell."""
        self._stop_if_over()
        separate = len(payload) > _INLINE_BYTES and self.rank != 0
        if separate:
            self._payloads.save({self._key("from", self.rank): payload})
        # Rank 0 keeps its own payload. Its frame shows the others that it has arrived; with `shown`, also its call.
        is_empty = separate or (self.rank == 0 and not shown)
        self._post(Frame(self.rank, self.rank, separate, b"" if is_empty else bytes(payload)))

    def _post(self, frame: Frame) -> None:
        """Hand this rank's message of a step over to be sent to rank 0."""
        self._send(frame)

    def _send(self, *frames: Frame) -> None:
        """Append messages to rank 0's inbox: the message of this rank, or of several ranks of its machine."""
        self._sender = self.rank

        def arrive(store: KeyValueStore) -> None:
            store.append(self._key("in"), encode_frames(frame._replace(sender=self.rank) for frame in frames))
            if store.add(self._key("arrived"), len(frames)) == self.size:
                store.set(self._key("bell"), b"")

        self._store.on_worker(arrive)

    def _collect(self, own: bytes) -> list[bytes]:
        """Wait on rank 0 until the messages of all ranks have arrived in this step; return their payloads by rank."""
        if self._wait_for(self._key("bell"), self._timeout_s, self._expire, self._refuse_without_ended) == _GIVEN_UP:
            self._apply(self._store.get(self._key("decision")), "gather")
        self._inbox = self._store.get(self._key("in"))
        frames = {frame.rank: frame for frame in decode_frames(self._inbox)}
        messages = [bytes(own)]
        for rank in range(1, self.size):
            frame = frames[rank]
            messages.append(self._payloads.take(self._key("from", rank)) if frame.separate else frame.payload)
        return messages

    def _decide(self, call: str, inline: bytes | None = None) -> None:
        """Decide on rank 0 that the step passes, unless a rank has refused it. A small payload may be part of the decision."""
        decision = call.encode() if inline is None else b"".join((call.encode(), INLINE, inline))
        self._apply(self._store.compare_set(self._key("decision"), b"", decision), call)

    def _await_decision(self, call: str) -> bytes | None:
        """Wait for rank 0's decision on this step. Return the payload in the decision, or None; raise if the step is refused."""
        decision = self._decision(call)
        self._apply(decision, call)
        _, has_payload, payload = decision.partition(INLINE)
        return payload if has_payload else None

    def _decision(self, call: str) -> bytes:
        """Wait until this step is decided, and return the encoded decision."""
        return self._wait_for(self._key("decision"), self._timeout_s, self._expire, self._refuse_without_ended)

    def _payload_of_all(self, key: str) -> bytes:
        return self._payloads.load(key)

    def _payload_of_sender(self, key: str) -> bytes:
        """Return the encoded payloads of a scatter for the rank `_sender`, which sends the messages of this rank.

        They are its own payload, and the payloads for all ranks whose messages it sends.
        """
        return self._payloads.take(key)

    def _apply(self, decision: bytes, call: str) -> None:
        """Go on to the next step if rank 0's decision lets this step pass; if the decision is a refusal, raise its error.

        Raise a `PeerError` if rank 0 decided on another call than this rank's `call`, such as a gather.
        """
        name = call_let_pass(decision)
        if not name:
            self._refusal = Refusal.decode(decision)
            self._stop_if_over()
        self._step += 1
        if name != call:
            raise PeerError(
                f"{self._title}: this rank is at a {call} while rank 0 is at a {name}; call with the same options on every rank",
                ranks=(self.rank,),
            )

    def _stop_if_over(self) -> None:
        if self._refusal is not None:
            raise self._refusal.error()

    def _refused(self) -> Refusal:
        assert self._refusal is not None
        return self._refusal

    def _refuse(self, refusal: Refusal) -> Refusal | None:
        """Try to refuse this step.

        Return the refusal that counts, perhaps another rank's; None if rank 0 has let the step pass.
        """
        decision = self._store.compare_set(self._key("decision"), b"", refusal.encode())
        if not call_let_pass(decision):
            self._refusal = Refusal.decode(decision)  # first: whatever fails from here on, this rank raises the refusal
            self._store.set(self._key("bell"), _GIVEN_UP)
        self._wake_near(decision)
        return self._refusal

    def _wake_near(self, decision: bytes) -> None:
        """If the step is refused, wake the ranks of this machine that wait for a `broadcast_near` message."""
        if self._step and not call_let_pass(decision):  # at step 0 the ranks of this machine may not be known
            first, *others = self._ranks_near()
            if others:
                self._shared_store().compare_set(_near_key(first, self._num_near), b"", _GIVEN_UP)

    def _refuse_undecided(self, refusal: Refusal) -> None:
        """Refuse the first step that is not decided yet, which may be a later one: rank 0 may have let this step pass."""
        while self._refuse(refusal) is None:
            self._skip_step()

    def _skip_step(self) -> None:
        """Go on to the next step after one that rank 0 has let pass; delete rank 0's payload for this rank unread."""
        self._payloads.drop(self._key("to", self.rank))
        self._step += 1

    def _wait_for(
        self,
        key: str,
        timeout_s: float,
        over: Callable[[], object],
        look: Callable[[], bool] = lambda: False,
        *,
        store: BoundedStore | None = None,
    ) -> bytes:
        """Wait for a key, and return its value; see `_ended_by` for `over` and `look`."""
        began = time.monotonic()
        waiting = (store or self._store).begin_get(key, timeout_s, self.size)
        # If the store hangs, no connection to it could be made meanwhile: that time counts.
        return self._ended_by(waiting, timeout_s - (time.monotonic() - began), over, look)

    def _ended_by(self, waiting: Waiting, timeout_s: float, over: Callable[[], object], look: Callable[[], bool]) -> bytes:
        """Finish a wait for a key, and return the key's value.

        Parameters
        ----------
        over
            Called when the time is over, when this process gives up, or when `look` returns True. It writes the key, or raises.
        look
            Called again and again during the wait. It may write the key, or raise.
        """
        if not self._ends(waiting, timeout_s, look):
            over()
        if not waiting.ends(_FAREWELL_S):
            raise StoreLost("no reply came")
        return waiting.outcome()

    def _ends(self, waiting: Waiting, timeout_s: float, look: Callable[[], bool]) -> bool:
        """Wait for a key.

        Return False if the time is over, this process gives up, or `look` returns True before the key is there.
        """
        until = time.monotonic() + timeout_s
        while not waiting.ends(min(_SLICE_S, timeout_s)):
            if self._given_up_before != _given_up or look() or time.monotonic() >= until:
                return False
        return True

    def _stop_if_given_up(self) -> None:
        if self._given_up_before != _given_up:
            raise PeerError(
                f"{self._title}: given up, as this process was told to end and the time for that is over", ranks=(self.rank,)
            )

    def _refuse_without_ended(self) -> bool:
        """Refuse the step if it still needs a rank that has ended. Return True once the step is decided."""
        if not self._may_look() or not (gone := self._ended()):
            return False
        arrived = self._arrived()
        # The others still need rank 0's decision. They need nothing more of another rank once its message has arrived.
        needed = {0, *range(self.size if arrived else 0)} - (arrived - {0}) - {self.rank}
        missing = tuple(sorted(needed & gone))
        if not missing:
            return False
        self._refuse(ended_refusal(self._title, missing))
        return True

    def _may_look(self) -> bool:
        """Tell whether to check for ended ranks now: at most every half second."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return True

    def _arrived(self) -> set[int]:
        return {frame.rank for frame in self._inbox_of(self._step)}

    def _inbox_of(self, step: int) -> list[Frame]:
        """Return the messages that have arrived in a step so far."""
        inbox = f"{step}/in"
        return list(decode_frames(self._store.get(inbox))) if self._store.check([inbox]) else []

    def _expire(self) -> None:
        """Refuse the step because its time is over, and name the absent ranks.

        If all have just arrived, rank 0 rings the bell instead.
        """
        self._stop_if_given_up()
        arrived = self._arrived()
        absent = tuple(rank for rank in range(self.size) if rank not in arrived) if arrived else ()
        if arrived and not absent and self.rank == 0:
            self._store.set(self._key("bell"), b"")  # in place of the last rank, which was about to ring it
            return
        self._refuse(expired_refusal(self._title, absent, self._timeout_s))

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
            self._stop_if_over()
            raise PeerError(
                f"{self._title}: the job's key-value store does not answer any more ({error}); "
                "the process that hosts it, often rank 0, has probably ended, or hangs: its log says why",
                ranks=(0,),
            ) from error


def _near_key(first: int, number: int) -> str:
    """Return the key of message `number` from `first`, the first rank of a machine, to the other ranks there."""
    return f"near/{first}/{number}"


def give_up_sessions() -> None:
    """Make all current sessions of this process stop waiting for other ranks, because the process must end now.

    The other ranks are told. Sessions that are opened later are not affected.
    """
    global _given_up
    _given_up += 1


def call_let_pass(decision: bytes) -> str:
    """Return the name of the call ("gather", "broadcast", "scatter") that a decision lets pass, or "" if it is a refusal."""
    name = decision.partition(INLINE)[0]
    return name.decode() if name in _PASSED else ""
