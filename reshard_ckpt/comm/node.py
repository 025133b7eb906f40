"""Node leaders: the first rank of each machine sends messages to rank 0, and receives from it, for all ranks of the machine.

So rank 0's key-value store serves one rank a machine. Each leader hosts another store for its machine. A session has the same
steps as in `StoreComm`, with three differences on a machine that has several ranks but not rank 0:

1. *To rank 0*: a rank leaves its message in the machine's store. Once the messages of all its ranks are there, the leader appends
   them together to the step's inbox.
2. *Decision* (rank 0's word that the step passes, or a refusal): the leader waits for it and copies it into the machine's store,
   where the others wait.
3. *From rank 0*: before that, the leader copies rank 0's payload for all ranks, or moves the payload for its machine, into the
   machine's store.

Failures go the direct way. Each rank writes refusals into rank 0's store itself. If the leader leaves a rank's message lying for
long, that rank appends it to the inbox itself, and waits for the decision there; a claim in the machine's store keeps a message
from being sent twice. So an error names the absent ranks alone, and not all ranks of their machine. If the leader's process ends,
its store does not answer any more; then the others refuse the step and name the leader.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistError

from .bounded import BoundedStore, Waiting, bounded
from .payloads import KeyValueStore, Payloads
from .peers import Machine
from .store import INLINE, TOLD, StoreComm, call_let_pass
from .wire import Frame, Refusal, decode_frames, encode_frames

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores

_REPLY_S = 120.0
_MEETING_S = 2.0
"""Seconds that a rank waits for its leader to send its message in the first step of a session; later steps allow half of the time
limit. The first step is short because ranks may have made different calls."""

_DIRECT, _LED = 1 << 20, 1 << 40
"""Amounts added to the count of ranks of a machine that have left the session: `_DIRECT` by a rank that has also counted itself
in rank 0's store, `_LED` by the leader."""


class Neighbours(NamedTuple):
    """The ranks on this machine, seen through one connection to rank 0's store."""

    machine: Machine
    store: BoundedStore

    def ended(self) -> frozenset[int]:
        """Return the ranks of this machine whose processes are known to have ended."""
        return self.machine.ended(self.store)

    def ranks(self) -> tuple[int, ...]:
        """Return all ranks of this machine, ascending. All ranks of the group must have met in a session before."""
        return self.machine.ranks(self.store)


def _serve() -> Any:
    return _STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_REPLY_S))


def _connect(port: int) -> Any:
    return _STORES.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_REPLY_S))


class NodeComm(StoreComm):
    """The messages of one session (`Comm`) of a rank that speaks through the leader of its machine, if there is one.

    Parameters
    ----------
    near
        The ranks of this machine; without it, this rank speaks with rank 0's store alone. If this rank has joined the machine's
        store before, the session uses that store from its first message on, else from its second.
    name
        The session's name, which no other session of the group may have.
    """

    def __init__(
        self, store: KeyValueStore, rank: int, size: int, *, near: Neighbours | None = None, name: str = "", **options: Any
    ) -> None:
        if near is not None:
            options |= {"ended": near.ended, "ranks_near": near.ranks}
        super().__init__(store, rank, size, **options)
        self._neighbours, self._name = near, name
        self._near: BoundedStore | None = None
        self._frame: Frame | None = None
        self._use_node()

    def _use_node(self) -> None:
        if self._neighbours is not None and (store := self._neighbours.machine.store) is not None:
            # A part of the time, so that a leader that hangs is named before others miss this rank too.
            self._near = BoundedStore.of(store, self._timeout_s / 4).below(self._name)
            self._leader, *self._others = self._ranks_near()

    def open(self, call: bytes, *, before: bytes = b"", refused: bytes = b"") -> bool:
        if not super().open(call, before=before, refused=refused):
            return False
        if self._neighbours is not None and not self._neighbours.machine.is_known:
            with self._reachable():
                self._join(self._neighbours.machine, self._neighbours.store)
        return True

    def _join(self, machine: Machine, root: BoundedStore) -> None:
        """Start the store of this machine on its first rank, and connect the others.

        Starts none on rank 0's machine, on a machine with one rank, or before torch 2.8.
        """
        first, *others = self._ranks_near()
        if first and others and hasattr(_STORES.TCPStore, "clone"):
            key = f"node/{first}"
            if self.rank == first:
                client = bounded(_serve, self._timeout_s, f"{self._title}: rank {first} did not start the store of its machine")
                root.set(key, b"%d" % client.port)
            else:
                port = int(self._get_from(first, key, root))
                client = bounded(partial(_connect, port), self._timeout_s, f"{self._title}: rank {first} did not answer")
            machine.store = BoundedStore.of(client, 0)  # each session sets a time limit of its own
        machine.is_known = True
        self._use_node()

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        if self._near is not None:
            self._near.allow(self._timeout_s / 2)
        with super()._reachable():
            yield

    @contextmanager
    def _leader_answers(self) -> Iterator[None]:
        """If the machine's store stops answering inside the ``with`` block, refuse the step, unless it is decided already."""
        try:
            yield
        except DistError as error:
            if self._near is None:
                raise
            self._near = None
            self._refuse(self._leader_lost(str(error)))
            self._stop_if_over()

    def _leader_lost(self, why: str) -> Refusal:
        what = f"rank {self._leader}, which speaks for the ranks of its machine, does not answer any more"
        return Refusal(
            "PeerError", f"{self._title}: {what} ({why}): its own log says why", (self._leader,), absent=(self._leader,)
        )

    # --- to rank 0 ---

    def _post(self, frame: Frame) -> None:
        self._frame = frame
        if self._near is None:
            self._send(frame)
            return
        self._sender = self._leader

        def arrive(store: KeyValueStore) -> None:
            store.append(self._key("in"), encode_frames([frame]))
            if store.add(self._key("arrived"), 1) == 1 + len(self._others):
                store.set(self._key("bell"), b"")

        with self._leader_answers():
            self._near.on_worker(arrive)

    def _send_for(self, frames: Sequence[Frame]) -> None:
        """Send to rank 0 each of these messages that no rank of this machine has sent yet."""
        if self._near is None:
            return

        def claim(store: KeyValueStore) -> list[Frame]:
            return [frame for frame in frames if store.add(self._key("sent", frame.rank), 1) == 1]

        with self._leader_answers():
            if unsent := self._near.on_worker(claim):
                self._send(*unsent)

    # --- from rank 0 ---

    def _decision(self, call: str) -> bytes:
        if self._near is None:
            return super()._decision(call)
        decision = b""
        with self._leader_answers():
            decision = self._decision_near(call)
        return decision or self._store.get(self._key("decision"))

    def _decision_near(self, call: str) -> bytes:
        """Wait for the step's decision in the machine's store. The leader first sends the messages of its machine to rank 0.

        If the leader does not take a rank's message in time, that rank sends it to rank 0, and waits for rank 0's decision
        directly.
        """
        assert self._near is not None
        near, key, began = self._near, self._key("decision"), time.monotonic()
        unsent = self._frame if call == "gather" else None
        patience_s = min(self._timeout_s / 2, self._timeout_s if self._step else _MEETING_S)
        leads, bell = self.rank == self._leader, None
        decided = (self._store if leads else near).begin_get(key, self._timeout_s, self.size)
        is_direct = leads
        if unsent is not None and leads:
            bell = near.begin_get(self._key("bell"), self._timeout_s)
            if not self._ends(bell, patience_s, lambda: decided.ends(0) or self._refuse_without_ended()) and not decided.ends(0):
                self._send_for([unsent])
        elif unsent is not None and not self._ends(decided, patience_s, self._refuse_without_ended) and not decided.ends(0):
            self._send_for([unsent])
            decided, is_direct = self._store.begin_get(key, self._timeout_s, self.size), True
        elif unsent is None and not leads and self._is_not_led(decided, key):
            # Rank 0 has let this step pass. In the next step it would wait in vain for this machine, so name its leader now.
            self._refuse_undecided(self._leader_lost("it has not passed on a message of rank 0"))
            self._stop_if_over()

        def look() -> bool:
            nonlocal bell
            if bell is not None and bell.ends(0):
                bell = None
                self._send_for(list(decode_frames(near.get(self._key("in")))))
            return self._refuse_without_ended()

        look()
        decision = self._ended_by(decided, self._timeout_s - (time.monotonic() - began), self._expire, look)
        if is_direct:
            self._pass_on(decision, call if leads else "")
        return decision

    def _is_not_led(self, decided: Waiting, key: str) -> bool:
        """Wait for a decision in the machine's store.

        Return True if rank 0 has decided, but the leader did not copy it in time.
        """
        in_time = self._ends(decided, self._timeout_s * 3 / 4, self._refuse_without_ended)
        return not in_time and self._store.check([key]) and not self._ends(decided, self._timeout_s / 16, lambda: False)

    def _pass_on(self, decision: bytes, call: str = "") -> None:
        """Copy rank 0's decision into the machine's store, for the other ranks of this machine.

        The leader passes `call`, "broadcast" or "scatter" if that is the call under way. Then it first copies the payload for its
        machine, because the other ranks look for the payload once they see the decision.
        """
        if self._near is None:
            return  # it is lost, but rank 0 had let the step pass
        if call == "broadcast" and INLINE not in decision and self._store.check([f"{self._key('all')}/0"]):
            Payloads(self._near).save({self._key("all"): self._payloads.load(self._key("all"))})
        to = self._key("to", self.rank)
        if call == "scatter" and self._store.check([f"{to}/0"]):
            Payloads(self._near).save({to: self._payloads.take(to)})
        self._near.set(self._key("decision"), decision)

    def _payload_of_all(self, key: str) -> bytes:
        if self._near is not None and self._near.check([f"{key}/0"]):
            return Payloads(self._near).load(key)
        return super()._payload_of_all(key)

    def _payload_of_sender(self, key: str) -> bytes:
        if self._sender == self.rank and (self._near is None or self.rank != self._leader):
            return super()._payload_of_sender(key)
        payloads = []
        with self._leader_answers():
            if self._near is not None:
                payloads.append(Payloads(self._near).load(key))
        if not payloads:  # the store is lost, and the leader takes the payload from rank 0's store
            self._refuse_undecided(self._leader_lost("its store is lost"))
            self._stop_if_over()
        return payloads[0]

    def _wake_near(self, decision: bytes) -> None:
        if self._near is None:
            super()._wake_near(decision)
            return
        with suppress(DistError):  # the loss of the machine's store wakes them too
            super()._wake_near(decision)
            if self.rank == self._leader or not call_let_pass(decision):
                self._pass_on(decision, call_let_pass(decision))
            self._near.set(self._key("bell"), b"")

    # --- on this machine, and leaving ---

    def _value_near(self, payload: bytes | None) -> bytes:
        values = []
        with self._leader_answers():
            values.append(super()._value_near(payload))
        if not values:  # the store is lost, and rank 0 has let this step pass
            self._refuse_undecided(self._leader_lost("its store is lost"))
            self._stop_if_over()
        return values[0]

    def _shared_store(self) -> BoundedStore:
        return self._store if self._near is None else self._near

    def _num_leaving(self) -> int:
        if self._near is None:
            return 1
        near, failed = self._near, self._refusal is not None
        near.allow(self._farewell())
        try:
            if self.rank != self._leader:
                return int(near.on_worker(self._leave_machine) or failed)
            if not failed:
                self._wait_for("gone", self._farewell(), partial(near.set, "gone", b""), store=near)
            told, total = divmod(near.add("left", _LED) - _LED, TOLD)
            if told:
                near.on_worker(self._delete_near)
            direct, left = divmod(total, _DIRECT)
            return 1 + left - direct
        except DistError:
            return 1

    def _leave_machine(self, store: KeyValueStore) -> bool:
        """Count this rank in the machine's store; the last one tells the leader. Return whether the leader had left before."""
        total = store.add("left", 1 + _DIRECT * (self._refusal is not None))
        if total % _DIRECT == len(self._others):
            store.set("gone", b"")
            if store.add("left", TOLD) % TOLD >= _LED:
                self._delete_near(store)
        return total >= _LED

    def _delete_near(self, store: KeyValueStore) -> None:
        """Delete the session's keys from the machine's store. No rank may use them any more."""
        payloads = Payloads(store)
        for step in range(self._step + 1):
            payloads.drop(f"{step}/all")
            payloads.drop(f"{step}/to/{self._leader}")
            for rank in (self._leader, *self._others):
                store.delete_key(f"{step}/sent/{rank}")
            for name in ("in", "arrived", "bell", "decision"):
                store.delete_key(f"{step}/{name}")
        for number in range(self._num_near + 1):
            store.delete_key(f"near/{self._leader}/{number}")
        for name in ("left", "gone"):
            store.delete_key(name)
