"""One rank's side of a live reshard: the parts that are planned once, and the parts that are done each time.

1. `Job.begin` opens both states, lets all ranks vote, and plans the parts that each rank sends to each other rank. A call of
   `reshard_live` (`Job.reshard_once`) takes the plan of the last call instead, if it still fits on all ranks.
2. `Job.move_opened` moves the state that was opened so, in the same session.
3. `Job.move_again` opens both states again, and checks that their layouts are unchanged. Ranks meet once over the job's store:
   each says whether its values have changed or something has failed. A session is opened if a rank says so, or fails later. If
   replicas are compared, or no rank sends anything, ranks open the session at once instead.
4. `Move` is one move of the state. When all ranks have received everything, it copies staged tensors into place and sets values.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..comm import CHANGED, FAILED, Comm, Turn, interrupts_allowed, interrupts_held, merge_of_all
from ..comm.exchange import HOST, group_of, open_exchange
from ..comm.peers import machine_id
from ..core.planning.scales import find_scales
from ..core.report import LoadReport, summarize
from ..engine.common.progress import RankLog, size_text
from ..engine.common.rounds import Buffers, Rounds, named_error, settle
from ..engine.loading.load import Resolved, drop_refused, resolve
from ..engine.loading.vote import VoteResult, Wanted, vote
from ..engine.resharding.delta import DeltaMover
from ..engine.resharding.live import LiveMover, WantedRows, plan_moves
from ..engine.resharding.live_source import LiveValues, Spares, compare_live, open_live
from ..engine.saving.handle import SAVES
from ..errors import MismatchError, UsageError
from ..format.files import digest128
from ..state.capture import Captured
from .live_plan import KEPT_BYTES, KEPT_ROWS, Kept, Plan
from .live_states import Opened, Options, State, States
from .loading import not_loaded

_KEPT: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()


class Job:
    """One rank's side of a live reshard: `begin` plans once, after which the state can be moved any number of times."""

    plan: Plan
    _first: Opened | None

    def __init__(self, src: State, dst: State, options: Options, process_group: Any, timeout_s: float) -> None:
        self._options, self._group, self._timeout_s = options, process_group, timeout_s
        self._states = States(src, dst, options, process_group)
        self._values = LiveValues(may_lack=options.load.may_lack)
        self._addresses: Sequence[Any] = ()
        self._turn: Turn | None = None
        """The last turn in which all ranks met."""

    @interrupts_held()
    def begin(self, comm: Comm) -> Job:
        """Open both states, let all ranks vote, and plan.

        Collective. All ranks go through these steps in the same order:

        1. `open_live`: make a catalog of the pieces of all ranks.
        2. `LiveValues.share`: give every rank the values of all ranks.
        3. `_vote`: let rank 0 judge whether every rank can load.
        4. `plan_moves`: gather the wanted rows, and plan the rounds.
        5. `open_exchange`: make the groups for messages, one for each device that any rank needs.
        """
        states = self._states
        captured = states.capture()
        held = states.held(captured)
        source = open_live(comm, held, states.skips_host(held), may_lack=self._options.load.may_lack)
        self._values.share(comm, captured.values, source.tables)
        opened = states.open(captured, source.catalog, self._values)
        load = self._options.load
        if load.cast:  # as for `load`: a quantized tensor is not cast without its scale
            load = replace(load, quantized=find_scales(source.catalog, None))
        resolved = resolve(opened.saved, opened.target.tensors, load)
        verdict = self._vote(comm, opened, resolved)
        resolved = drop_refused(opened.saved, resolved, verdict.refused)
        # place: the index in dst of each wanted tensor. sources: for each that will be loaded, the catalog's tensor with its
        # bytes.
        place = {(id(spec), id(memory)): i for i, (spec, memory) in enumerate(opened.target.tensors)}
        loads = zip(resolved.specs, resolved.targets, resolved.source.tolist(), strict=True)
        sources = {place[id(spec), id(target.tensor)]: opened.saved.source(index) for spec, target, index in loads}
        overlaps = opened.overlaps(sources, source.catalog)
        # source_of[i]: the catalog's tensor for tensor i of dst, -1 if it is not loaded or is the very memory of its source.
        rows = opened.wanted.local_metadata.rows
        source_of = np.full(len(opened.wanted.specs), -1)
        source_of[list(sources)] = list(sources.values())
        source_of[list(overlaps.identical)] = -1
        # chosen: the rows of dst to fill.
        chosen = np.flatnonzero((source_of[rows.tensor] >= 0) & (rows.count > 0))
        wanted = WantedRows(opened.wanted, chosen, source_of[rows.tensor[chosen]])
        skips_host, node = states.skips_host(opened.wanted), machine_id().encode()
        moves = plan_moves(comm, source.held, wanted, skips_host, node, self._options.round_bytes)
        converted = [
            f"{d.name}: {d.dtype} in src, loaded as {d.tensor.dtype}" for d in resolved.targets if d.dtype != d.tensor.dtype
        ]
        report = replace(
            verdict.report,
            num_tensors=len(resolved.targets),
            num_bytes=resolved.plan.num_bytes,
            converted=tuple(converted),
            saved_as=tuple(f"{name}: {other} in src" for name, other in resolved.saved_as.items()),
        )
        digests = states.layout_of(opened), states.names_of(opened)
        self.plan = Plan(*digests, source, sources, overlaps, moves, report, not_loaded(opened.target, resolved), opened.unfit)
        self._bind(opened, int.from_bytes(digest128(source.catalog.save_id.encode())[:3], "little") << 7)
        return self

    def _bind(self, opened: Opened, first: int) -> None:
        """Prepare exchanges and buffers to move these states by the plan; `first` is the number of the first message.

        Collective if a process group for the messages has to be made.
        """
        self.spares = self._make_spares(opened)
        into, num_rounds = self.spares.with_spares(opened.wanted), self.plan.moves.num_rounds
        kinds = (DeltaMover if self._options.delta else LiveMover, LiveMover)
        rank, size = self._states.rank, self._states.size
        self.movers = [kind(self.plan.moves, i, rank, size, opened.held, into) for i, kind in enumerate(kinds)]
        # Making a group is collective; all ranks agree here because they know the same number of rounds.
        devices = (HOST, self._states.device(opened))
        self.exchanges = [
            open_exchange(self._group, timeout_s=self._timeout_s, device=device) if num else None
            for device, num in zip(devices, num_rounds, strict=True)
        ]
        self._buffers = [Buffers(device, first) for device in devices]
        self._addresses = opened.addresses()
        self._first = opened

    @interrupts_held()
    def reshard_once(self, comm: Comm) -> LoadReport:
        """Move the state once: by the plan of the last call in this process group if it fits on all ranks, else by a new plan.

        Collective: `_bind_kept`; where the plan does not fit, `begin`, and a gather and a broadcast if all have kept memory; then
        `move_opened`.
        """
        key = group_of(self._group)
        kept = Kept() if key is None else _KEPT.pop(key, Kept())
        fits, has_memory = self._bind_kept(comm, kept)
        if not fits:
            self._values, self._addresses = LiveValues(may_lack=self._options.load.may_lack), ()
            self.begin(comm)
            if has_memory:
                assert kept.buffers is not None
                number = kept.buffers.next_number(self.movers[0], self._options.memory_bytes)
                has_memory = merge_of_all(comm, number, lambda numbers: len({*numbers}) == 1 and numbers[0] >= 0)
        if has_memory:
            assert kept.buffers is not None
            self._buffers[0] = kept.buffers
        report = self.move_opened(comm)
        if key is not None:  # here all ranks are known to have read all messages
            is_small = self.plan.num_rows <= KEPT_ROWS and self._values.num_bytes <= KEPT_BYTES
            keeps = is_small and not callable(self._options.rename)  # a function may give other names the next time
            plan, values = (self.plan, self._values) if keeps else (None, None)
            _KEPT[key] = Kept(plan, values, None if self.exchanges[0] is None else self._buffers[0])
        return report

    def _bind_kept(self, comm: Comm, kept: Kept) -> tuple[bool, bool]:
        """Open both states by the kept plan. Return whether that plan fits on all ranks, and whether all have kept host memory.

        Collective: a gather and a broadcast; where values have changed, `LiveValues.share`, and a gather and a broadcast again.
        """

        def agreed(answers: list[tuple[str, bool, bool]]) -> tuple[bool, bool, bool, int]:
            plans, changed, memory = zip(*answers, strict=True)  # a plan that does not fit is ""
            return len({*plans}) == 1 and plans[0] != "", any(changed), all(memory), secrets.randbits(24) << 6

        fits, has_changed, has_memory, first = True, True, False, 0  # first: the number of the first message in new memory
        while fits and has_changed:
            # Ranks with the same plan have used it equally often, so the memory kept with it is at the same message on all.
            known, captured, opened, changed = "", None, None, False
            if kept.plan is not None and kept.values is not None:
                self.plan, self._values = kept.plan, kept.values
                try:
                    captured = self._states.capture()
                    changed = self._values.have_changed(captured.values)
                    opened = self._opened_by_plan(captured)
                    if (self._states.names_of(opened), opened.unfit) == (self.plan.names, self.plan.unfit):
                        known = f"{self.plan.source.catalog.save_id} {kept.number}"
                except Exception:
                    known = ""  # `begin` raises the errors of the states themselves
            answer = known, changed, kept.buffers is not None
            fits, has_changed, has_memory, first = merge_of_all(comm, answer, agreed)
            if fits and has_changed:
                assert captured is not None
                self._values.share(comm, captured.values, self.plan.source.tables)
        if fits:
            assert opened is not None
            self._bind(opened, first)
        return fits, has_memory

    @property
    def opened(self) -> Opened:
        """Source and destination as `begin` opened them, until they are moved. A `PerRank` value has the values of all ranks."""
        assert self._first is not None
        return self._first

    @property
    def lost_values(self) -> dict[str, list[int]]:
        """Names of `PerRank` values, mapped to the ranks whose own value is lost because no rank of the source has it."""
        return self._values.lost

    @interrupts_held()
    def move_opened(self, comm: Comm) -> LoadReport:
        """Move the state that was just opened, by `begin` or by a kept plan. Collective: `_compare`, then the exchange."""
        opened, self._first = self.opened, None
        for save in list(SAVES.begun):  # memory that a save of this process still copies must not change
            save.staged()
        self._compare(comm, opened)
        return self._move(comm, opened, None)

    def move_again(self, turn: Turn) -> LoadReport:
        """Move the present content of the state. Most calls need no session (a `Comm` among all ranks).

        Collective. If replicas are compared, or if no rank sends anything, all ranks open a session. Otherwise they call
        `Turn.meet`, and then run the exchanges. If any rank's flags are set, all skip the exchanges and open a session: there
        they share values and start over, or `settle` raises the failure on all ranks. If a rank fails in the exchanges, all open
        a session for `settle` too.
        """
        running = [exchange for exchange in self.exchanges if exchange is not None]
        try:
            self._first = None
            if not running or self._options.compares:
                with interrupts_allowed(), turn.opened() as comm:
                    return self._again_in(comm)
            move, has_changed = self._opened_as_known()
            flags = turn.meet(CHANGED if has_changed else 0 if move.failure is None else FAILED, self._turn)
            self._turn = turn
            if not flags:
                for exchange in running:
                    exchange.look = turn.look
                self._exchange_all(move)
            if move.is_complete:
                return self._report(move)
            with turn.opened() as comm:
                if flags & CHANGED:
                    return self._again_in(comm)
                settle(comm, move.failure, move.changed, named_error)
        except BaseException as error:
            turn.give_up(error)
            raise
        finally:
            for exchange in running:
                exchange.look = None
        raise AssertionError("settle raises where a rank has failed")

    def _opened_as_known(self) -> tuple[Move, bool]:
        """Open both states, with the values of all ranks as they were shared last.

        Also return whether this rank's own values have changed since then. If they have, nothing is opened.
        """
        opened, failure, has_changed = None, None, False
        try:
            with interrupts_allowed():
                captured = self._states.capture()
                has_changed = self._values.have_changed(captured.values)
                if not has_changed:
                    opened = self._rebound(captured)
        except BaseException as error:
            failure = error
        return Move(self, opened, failure), has_changed

    @interrupts_held()
    def _again_in(self, comm: Comm) -> LoadReport:
        """Share the values of all ranks in a session that is open; then move the present content of the state. Collective."""
        captured = self._states.capture()
        self._values.share(comm, captured.values, self.plan.source.tables)
        opened, failure = None, None
        try:
            opened = self._rebound(captured)
        except BaseException as error:
            failure = error
        if self._options.compares or all(exchange is None for exchange in self.exchanges):
            if failure is not None:
                raise failure
            assert opened is not None
            self._compare(comm, opened)
        return self._move(comm, opened, failure)  # the first messages of the move tell the other ranks of a failure

    def _rebound(self, captured: Captured) -> Opened:
        """Open both states again; if their tensors have moved to other addresses, point the movers to the new ones."""
        for save in list(SAVES.begun):
            save.staged()
        opened = self._opened_by_plan(captured)
        # The layouts are unchanged, but tensors may lie at other addresses.
        if self._addresses != (addresses := opened.addresses()):
            self.spares = self._make_spares(opened)
            into = self.spares.with_spares(opened.wanted)
            for mover in self.movers:
                mover.bind_states(opened.held, into)
            self._addresses = addresses
        else:
            # Not for its result: it copies the present elements into spare memory that is filled only in part.
            self.spares.with_spares(opened.wanted)
        return opened

    def _opened_by_plan(self, captured: Captured) -> Opened:
        """Open both states, and check that the kept plan still fits.

        It fits if both states have the layouts and the shared memory that it was made for. Unless ``strict=False``, every value
        must fit too that fitted when the plan was made. Raise `UsageError` or `MismatchError` if the plan does not fit.
        """
        plan = self.plan
        opened = self._states.open(captured, plan.source.catalog, self._values)
        if self._states.layout_of(opened) != plan.layout:
            raise UsageError("a layout of src or dst has changed since this LiveReshard was made; make a new one")
        if self._addresses != opened.addresses() and opened.overlaps(plan.sources, plan.source.catalog) != plan.overlaps:
            raise UsageError("src and dst share other memory than when this LiveReshard was made; make a new one")
        problems = [line for line in opened.unfit if line not in plan.unfit]
        if problems and self._options.load.strict:
            raise MismatchError(summarize(problems, "make the values of src and dst fit"), problems)
        return opened

    def _compare(self, comm: Comm, opened: Opened) -> None:
        """If the options ask for it, compare the parts of `src` that several ranks hold. Collective either way.

        If a rank has failed, all ranks raise here, before anything is moved. The runs to compare stay the same, so only the first
        call sends them to each rank.
        """
        if self._options.compares:
            checked = compare_live(comm, self.plan.source, opened.held, self.plan.checked)
            self.plan = replace(self.plan, checked=checked)
        else:
            comm.gather(b"")

    def _make_spares(self, opened: Opened) -> Spares:
        """Allocate the memory into which staged tensors are received.

        With ``staged=True`` all tensors are staged, else only tensors of `dst` that share memory with each other.

        A tensor whose memory is that of its source receives nothing, so it needs no other memory.
        """
        overlaps = self.plan.overlaps
        staged, tied = self.plan.sources.keys() - overlaps.identical, {i for group in overlaps.tied for i in group}
        return Spares(opened.wanted, staged if self._options.staged else tied, may_lack=self._options.load.may_lack)

    def _vote(self, comm: Comm, opened: Opened, resolved: Resolved) -> VoteResult:
        """Let all ranks vote on whether the load can go on; raise on all of them if it cannot. Collective, as `vote`."""
        target, saved = opened.target, opened.saved
        wanted = Wanted(target.prefixes, opened.names, opened.unfit, target.unplaced)
        return vote(comm, saved, resolved, wanted, self._options.load, hints=target.hints(opened.values))

    def _move(self, comm: Comm, opened: Opened | None, failure: BaseException | None) -> LoadReport:
        """Move the opened state: exchange all messages, let all ranks say whether they failed, and put everything in place."""
        move = Move(self, opened, failure)
        self._exchange_all(move)
        if not move.is_complete:
            settle(comm, move.failure, move.changed, named_error)
            move.put()
        return self._report(move)

    def _exchange_all(self, move: Move) -> None:
        """Send and receive all messages of a move. If no rank sends anything, do only the last local steps.

        The last exchange runs `Move.finish` and `Move.put` once all ranks have received everything.
        """
        for mover in self.movers:
            mover.begin()
        # The exchange without the host is the second one; all ranks run both in this order.
        both = zip(self.movers, self.exchanges, self._buffers, strict=True)
        running = [(mover, exchange, buffers) for mover, exchange, buffers in both if exchange is not None]
        try:
            for i, (mover, exchange, buffers) in enumerate(running):
                rounds = Rounds(exchange, mover, buffers)
                # A rank that has failed takes part, and tells the others in its first messages.
                rounds.failure = move.failure
                rounds.run(move.changed, *((move.finish, move.put) if i == len(running) - 1 else ()))
                move.failure, move.is_complete = rounds.failure, rounds.complete
                if rounds.stopped:
                    return
            if not running:
                try:
                    move.finish()
                except BaseException as error:
                    move.failure = error
        finally:
            move.count_up()

    def _report(self, move: Move) -> LoadReport:
        """Make the report of one move, and log a line about it."""
        received, report = sum(mover.received_bytes for mover in self.movers), self.plan.report
        RankLog(self._states.rank, move.destination.target.mesh).info(
            "resharded %d tensors live in %.3f s, %s from other ranks",
            report.num_tensors,
            time.monotonic() - move.began,
            size_text(received),
        )
        return replace(report, bytes_read=received)


class Move:
    """One move of a `Job`, and how far it has come.

    Attributes
    ----------
    failure
        The error of this rank, or None.
    is_complete
        True once all ranks are known to have everything in place.
    """

    def __init__(self, job: Job, opened: Opened | None, failure: BaseException | None) -> None:
        self._job, self._opened, self.failure = job, opened, failure
        self.is_complete = self._is_put = False
        self.began = time.monotonic()

    @property
    def destination(self) -> Opened:
        """Source and destination as this rank opened them. Only for ranks without a failure."""
        assert self._opened is not None
        return self._opened

    def changed(self) -> list[str]:
        """Name the tensors of the destination that this move has overwritten so far; staged ones count once they are put."""
        if self._opened is None:
            return []
        spares = {} if self._is_put else self._job.spares.memory
        rows = {row for mover in self._job.movers for row in mover.changed()}
        wanted = self._opened.wanted
        # A row of the destination is a pair: the index of its tensor, and its piece.
        return sorted({wanted.specs[i].name for i in {wanted.rows[row][0] for row in rows} if i not in spares})

    def count_up(self) -> None:
        """Increment the version counters of the overwritten tensors, as torch does when it writes to a tensor."""
        for mover in self._job.movers:
            mover.finish()
        if self._opened is not None and self._opened.target.dtensors:
            self._opened.target.count_up(self.changed())

    def finish(self) -> None:
        """Finish all but the copying of staged tensors: copy this rank's own bytes if no exchange did, and check tied tensors."""
        for mover, exchange in zip(self._job.movers, self._job.exchanges, strict=True):
            if exchange is None:
                mover.copy_own()
        if (conflict := self._job.spares.conflict(self.destination.wanted, self._job.plan.overlaps.tied)) is not None:
            raise conflict

    def put(self) -> None:
        """Copy staged tensors into the destination, and set its values."""
        opened, self._is_put = self.destination, True
        self._job.spares.put(opened.wanted)
        opened.target.finish(opened.values, self._job.plan.not_loaded)
