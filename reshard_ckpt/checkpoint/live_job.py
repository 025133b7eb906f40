"""One rank's side of a live reshard: the parts that are planned once, and the parts that are done each time.

1. `Job.begin` opens both states, lets all ranks vote, and plans the parts that each rank sends to each other rank.
2. `Job.first` moves the state that `begin` opened, in the session of `begin`.
3. `Job.again` opens both states again, and checks that their layouts are unchanged. Ranks meet once over the job's store, where
   each says whether its values have changed or something has failed. Only if a rank says so, a session is opened.
4. `Move` is one such move. When all ranks have received everything, it copies staged tensors into place, and sets the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import msgpack
import numpy as np
import torch

from ..comm import CHANGED, FAILED, Comm, Turn, merge_of_all, union
from ..comm.exchange import HOST, Exchange, carries, node_name, open_exchange
from ..comm.group import current_accelerator
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints
from ..core.report import LoadReport, summarize
from ..engine.common.progress import RankLog, size_text
from ..engine.common.rename import renamed
from ..engine.common.rounds import NUM_BUFFERS, Buffers, Rounds, Traffic, named_error, settle
from ..engine.loading.load import LoadOptions, Resolved, drop_refused, resolve
from ..engine.loading.vote import VoteResult, Wanted, missing_values, vote
from ..engine.resharding.delta import DeltaMover
from ..engine.resharding.live import LiveMover, Moves, WantedRows, memory_rows, plan_moves
from ..engine.resharding.live_source import LiveSource, LiveValues, Overlaps, Spares, compare_live, find_overlaps, open_live
from ..engine.saving.handle import SAVES
from ..engine.saving.local_shards import LocalShards, describe_local
from ..engine.saving.messages import encode_metadata
from ..errors import MismatchError, UsageError
from ..format.files import digest128
from ..state.capture import Target, capture, prepare_load
from ..state.shards import PerRankValues
from .loading import not_loaded, wanted_names, without_ignored

MIN_MEMORY_BYTES = 1 << 20

_KEPT: WeakKeyDictionary[Any, Buffers] = WeakKeyDictionary()
"""The host memory of the last one-shot reshard of each process group, for the next one: at most its ``memory_bytes``."""


def _common(numbers: list[int]) -> int:
    """Return the number that all ranks have, or -1 if they differ."""
    return numbers[0] if len(set(numbers)) == 1 else -1


State = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Options:
    load: LoadOptions
    rename: Mapping[str, str] | Callable[[str], str] | None
    staged: bool
    memory_bytes: int
    replicas: str
    delta: bool = False

    def __post_init__(self) -> None:
        if self.replicas not in ("verify", "trust"):
            raise UsageError(f"replicas={self.replicas!r}: pass one of 'verify', 'trust'")
        if type(self.delta) is not bool:
            raise UsageError(f"delta={self.delta!r}: pass True or False")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise UsageError(f"memory_bytes={self.memory_bytes}: messages need at least {MIN_MEMORY_BYTES} bytes")

    @property
    def compares(self) -> bool:
        return self.replicas == "verify"

    @property
    def round_bytes(self) -> int:
        """The bytes of one round: the size of a buffer, minus the room for headers and for rounding up."""
        return self.memory_bytes // NUM_BUFFERS * 7 // 8


@dataclass(frozen=True, slots=True)
class _Opened:
    """Both states as they are now.

    ``held`` are the pieces of `src` on this rank, ``wanted`` the pieces of `dst`. ``saved`` is a catalog of the pieces of all
    ranks of `src`, under the names of `dst`, and ``values`` the decoded values for `target`, which is `dst`.
    """

    held: LocalShards
    wanted: LocalShards
    saved: Catalog
    target: Target
    values: dict[str, Any]
    ignored: tuple[str, ...]


class Job:
    """One rank's side of a live reshard: planned once by `begin`, then run any number of times."""

    _source: LiveSource
    _first: _Opened | None
    resolved: Resolved
    verdict: VoteResult
    _moves: Moves

    def __init__(self, src: State, dst: State, options: Options, process_group: Any, timeout_s: float) -> None:
        self._src, self._dst = ({} if state is None else state for state in (src, dst))
        self._options, self._group, self._timeout_s = options, process_group, timeout_s
        self._values = LiveValues(may_lack=options.load.may_lack)
        self._turn: Turn | None = None
        """The last turn in which all ranks met."""

    def begin(self, comm: Comm) -> Job:
        """Open both states, let all ranks vote, and plan.

        Collective. All ranks go through these steps in the same order:

        1. `open_live`: make a catalog of the pieces that all ranks hold.
        2. `LiveValues.share`: give every rank the values of all ranks.
        3. `_vote`: gather the wanted prefixes, then let rank 0 judge whether every rank can load.
        4. `plan_moves`: gather the wanted rows, and plan the rounds.
        5. `open_exchange`: make the groups for messages, one for each device that any rank needs.
        """
        self._rank, self._size = comm.rank, comm.size
        captured = capture(self._src, process_group=self._group)
        held = describe_local(captured.tensors, (), None, comm.rank)
        self._source = open_live(comm, held, self._travels(held), may_lack=self._options.load.may_lack)
        self._values.share(comm, captured.values, self._source.tables)
        opened = self._open(held)
        resolved = resolve(opened.saved, opened.target.tensors, self._options.load)
        self.verdict = self._vote(comm, opened, resolved)
        self.resolved = drop_refused(opened.saved, resolved, self.verdict.refused)
        # place: the index in dst of each wanted tensor. _sources: for each that will be loaded, the catalog's tensor with its
        # bytes.
        place = {(id(spec), id(memory)): i for i, (spec, memory) in enumerate(opened.target.tensors)}
        loads = zip(self.resolved.specs, self.resolved.targets, self.resolved.source.tolist(), strict=True)
        self._sources = {place[id(spec), id(target.tensor)]: opened.saved.source(index) for spec, target, index in loads}
        self.overlaps = self._find_overlaps(opened)
        self._layout = self._layout_of(opened)
        # source[i]: the catalog's tensor for tensor i of dst, -1 if it is not loaded or is the very memory of its source.
        rows = opened.wanted.local_metadata.rows
        source = np.full(len(opened.wanted.specs), -1)
        source[list(self._sources)] = list(self._sources.values())
        source[list(self.overlaps.identical)] = -1
        # chosen: the rows of dst to fill.
        chosen = np.flatnonzero((source[rows.tensor] >= 0) & (rows.count > 0))
        wanted = WantedRows(opened.wanted, chosen, source[rows.tensor[chosen]])
        self._moves = plan_moves(
            comm, self._source.held, wanted, self._travels(opened.wanted), node_name(), self._options.round_bytes
        )
        self.spares = self._make_spares(opened)
        into = self.spares.instead_of(opened.wanted)
        kinds = (DeltaMover if self._options.delta else LiveMover, LiveMover)
        self.movers = [kind(self._moves, device, comm.rank, comm.size, opened.held, into) for device, kind in enumerate(kinds)]
        # Making a group is collective; all ranks agree here because they know the same number of rounds.
        devices = (HOST, self._device(opened))
        self.exchanges = [
            open_exchange(self._group, timeout_s=self._timeout_s, device=device) if num_rounds else None
            for device, num_rounds in zip(devices, self._moves.num_rounds, strict=True)
        ]
        first = int.from_bytes(digest128(self._source.catalog.save_id.encode())[:3], "little") << 7
        self._buffers = [Buffers(device, first) for device in devices]
        self._small_buffers = Buffers(HOST, first ^ 1 << 30)
        self._addresses = _addresses(opened)
        self._first = opened
        return self

    @property
    def saved(self) -> Catalog:
        """The catalog of the source, with its values, as `begin` opened it."""
        assert self._first is not None
        return self._first.saved

    @property
    def values(self) -> dict[str, Any]:
        """The decoded values of the source, as `begin` opened it; of a `PerRank`, those of all ranks."""
        assert self._first is not None
        return self._first.values

    @property
    def lost_values(self) -> dict[str, list[int]]:
        """The ranks whose value of a `PerRank` no rank has, by name."""
        return self._values.lost

    def first(self, comm: Comm) -> LoadReport:
        """Move the state that `begin` opened, in its session. Collective: gather, compare replicas, exchange."""
        opened, self._first = self._first, None
        assert opened is not None
        for save in list(SAVES.begun):  # memory that a save of this process still copies must not change
            save.staged()
        host = self.exchanges[0]
        kept = None if host is None else _KEPT.pop(host.group, None)
        # A rank that has failed raises here: the exchanges that follow need all ranks.
        most = self._options.memory_bytes
        number = merge_of_all(comm, -1 if kept is None else kept.next_number(self.movers[0], most), _common)
        if kept is not None and number >= 0:
            self._buffers[0] = kept
        if self._options.compares:
            compare_live(comm, self._source, opened.held)
        report = self._move(comm, opened, None)
        if host is not None:  # here all ranks are known to have read all messages
            _KEPT[host.group] = self._buffers[0]
        return report

    def again(self, turn: Turn) -> LoadReport:
        """Move the state as it is now, in most cases without opening a session.

        Collective. If replicas are compared, or if no rank sends anything, all ranks open a session. Otherwise they call
        `Turn.meet`, and then run the exchanges. If any rank's flags are set, all skip the exchanges and open a session: there
        they share values and start over, or `settle` raises the failure on all ranks.
        """
        self._first = None
        running = [exchange for exchange in self.exchanges if exchange is not None]
        if not running or self._options.compares:
            with turn.opened() as comm:
                return self._again_in(comm)
        try:
            move, has_changed = self._opened_as_known()
            flags = turn.meet(CHANGED if has_changed else 0 if move.failure is None else FAILED, self._turn)
            self._turn = turn
            if not flags:
                for exchange in running:
                    exchange.look = turn.look
                self._exchange_all(move)
        except BaseException as error:
            turn.give_up(error)
            raise
        finally:
            for exchange in running:
                exchange.look = None
        if move.is_complete:
            return self._report(move)
        with turn.opened() as comm:
            if flags & CHANGED:
                return self._again_in(comm)
            settle(comm, move.failure, move.changed, named_error)
        raise AssertionError("settle raises where a rank has failed")

    def _opened_as_known(self) -> tuple[Move, bool]:
        """Open both states with the values that all ranks know; the second result is True if this rank's values have changed."""
        opened, failure, has_changed = None, None, False
        try:
            captured = capture(self._src, process_group=self._group)
            has_changed = self._values.have_changed(captured.values)
            if not has_changed:
                opened = self._opened_again(describe_local(captured.tensors, (), None, self._rank))
        except BaseException as error:
            failure = error
        return Move(self, opened, failure), has_changed

    def _again_in(self, comm: Comm) -> LoadReport:
        """Move the state as it is now, in a session in which the ranks first share their values."""
        captured = capture(self._src, process_group=self._group)
        self._values.share(comm, captured.values, self._source.tables)
        opened, failure = None, None
        try:
            opened = self._opened_again(describe_local(captured.tensors, (), None, comm.rank))
        except BaseException as error:
            failure = error
        if self._options.compares or all(exchange is None for exchange in self.exchanges):
            if failure is not None:
                raise failure
            assert opened is not None
            comm.gather(b"")  # nothing is moved unless every rank can
            if self._options.compares:
                compare_live(comm, self._source, opened.held)
        return self._move(comm, opened, failure)  # the first messages of the move tell the other ranks of a failure

    def _opened_again(self, held: LocalShards) -> _Opened:
        """Open both states again, and check that their layouts are the ones that `begin` planned for."""
        for save in list(SAVES.begun):
            save.staged()
        opened = self._open(held)
        if self._layout_of(opened) != self._layout:
            raise UsageError("a layout of src or dst has changed since this LiveReshard was made; make a new one")
        # The layouts are unchanged, but tensors may lie at other addresses.
        if self._addresses != _addresses(opened):
            if self._find_overlaps(opened) != self.overlaps:
                raise UsageError("src and dst share other memory than when this LiveReshard was made; make a new one")
            self.spares = self._make_spares(opened)
            into = self.spares.instead_of(opened.wanted)
            for mover in self.movers:
                mover.bind_states(opened.held, into)
            self._addresses = _addresses(opened)
        else:
            # Not for its result: it copies the present elements into spare memory that is filled only in part.
            self.spares.instead_of(opened.wanted)
        problems = [*missing_values(opened.saved, opened.target.values), *opened.target.check(opened.values)]
        if problems and self._options.load.strict:
            raise MismatchError(summarize(problems, "make the values of src and dst fit"), problems)
        return opened

    def _make_spares(self, opened: _Opened) -> Spares:
        """Allocate memory for tensors that are staged: all of them, or only those tied to another one.

        A tensor that is the very memory of its source receives nothing, so it needs none.
        """
        staged, tied = self._sources.keys() - self.overlaps.identical, {i for group in self.overlaps.tied for i in group}
        return Spares(opened.wanted, staged if self._options.staged else tied, may_lack=self._options.load.may_lack)

    def _open(self, held: LocalShards) -> _Opened:
        """Open the destination, with the values that the sources of all ranks have now."""
        saved = catalog = self._values.added_to(self._source.catalog)
        if self._options.rename is not None:
            saved = renamed(catalog, self._options.rename)
        old = {new.name: value.name for new, value in zip(saved.values_table, catalog.values_table, strict=True)}
        target = prepare_load(self._dst, saved, rank=self._rank, size=self._size)
        target, saved, ignored = without_ignored(target, saved, self._options.load.ignore)
        decoded = self._values.decoded(saved.values_table, old, target.prefixes, PerRankValues)
        wanted = describe_local(target.tensors, (), None, self._rank)
        return _Opened(held, wanted, saved, target, decoded, ignored)

    def _vote(self, comm: Comm, opened: _Opened, resolved: Resolved) -> VoteResult:
        """Let all ranks vote on whether the load can go on. Collective: gather, broadcast, then the messages of `vote`."""
        target, saved = opened.target, opened.saved
        prefixes = merge_of_all(comm, target.prefixes, union)  # rank 0 judges unexpected names for all, and may want none itself
        unfit = missing_values(saved, target.values) + target.check(opened.values)
        wanted = Wanted(prefixes, (*wanted_names(target), *opened.ignored), unfit, target.unplaced)
        return vote(comm, saved, resolved, wanted, self._options.load, hints=target.hints(opened.values))

    def _travels(self, local: LocalShards) -> list[bool]:
        """Tell for each row whether its memory may be sent without a copy through the host."""
        if self._options.delta:  # snapshots are compared in host memory
            return [False] * len(memory_rows(local))
        known: dict[str, bool] = {"cpu": False}
        for tensor in memory_rows(local):
            kind = tensor.device.type
            if kind not in known:
                known[kind] = carries(self._group, kind)
        return [known[tensor.device.type] for tensor in memory_rows(local)]

    def _device(self, opened: _Opened) -> torch.device:
        """Choose the device of the buffers for messages that do not pass through the host: that of the memory they carry."""
        both = (opened.held, opened.wanted)
        travel = (tensor.device for local in both for tensor in compress(memory_rows(local), self._travels(local)))
        return next(travel, current_accelerator() or HOST)

    def _find_overlaps(self, opened: _Opened) -> Overlaps:
        """Find wanted tensors that share memory with each other, or with tensors of the source."""
        catalog = self._source.catalog
        source = {opened.wanted.specs[i].name: index for i, index in self._sources.items()}

        def share_a_saved_tensor(name: str, other: str) -> bool:
            return source[name] == catalog.source(catalog.index(other))

        return find_overlaps(opened.held, opened.wanted, self._sources.keys(), share_a_saved_tensor)

    def _layout_of(self, opened: _Opened) -> bytes:
        """Return a digest that changes if the layout of either state changes."""
        parts = []
        for local in (opened.held, opened.wanted):
            encoded = encode_metadata(local.local_metadata)
            parts += [encoded.tensors, encoded.rows, bytes(self._travels(local))]
        return digest128(msgpack.packb(parts))

    def _move(self, comm: Comm, opened: _Opened | None, failure: BaseException | None) -> LoadReport:
        """Move the opened state, in a session: run the exchanges, then settle with all ranks, and put everything in place."""
        move = Move(self, opened, failure)
        self._exchange_all(move)
        if not move.is_complete:
            settle(comm, move.failure, move.changed, named_error)
            move.put()
        return self._report(move)

    def _exchange_all(self, move: Move) -> None:
        """Run the exchanges, or only the last local steps if no rank sends anything.

        The last exchange runs `Move.finish` and `Move.put` once all ranks have received everything.
        """
        for mover in self.movers:
            mover.begin()
        # The exchange without the host is the second one; all ranks run both in this order.
        running: list[tuple[Traffic, Exchange, Buffers]] = []
        for mover, exchange, buffers in zip(self.movers, self.exchanges, self._buffers, strict=True):
            if exchange is not None and isinstance(mover, DeltaMover):
                *small, messages = mover.traffics()
                running += [*((traffic, exchange, self._small_buffers) for traffic in small), (messages, exchange, buffers)]
            elif exchange is not None:
                running.append((mover, exchange, buffers))
        try:
            for i, (traffic, exchange, buffers) in enumerate(running):
                rounds = Rounds(exchange, traffic, buffers)
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
        """Make the report of a move, and log a line."""
        opened, resolved = move.destination, self.resolved
        received = sum(mover.received_bytes for mover in self.movers)
        RankLog(self._rank, opened.target.mesh).info(
            "resharded %d tensors live in %.3f s, %s from other ranks",
            len(resolved.targets),
            time.monotonic() - move.began,
            size_text(received),
        )
        converted = [
            f"{d.name}: {d.dtype} in src, loaded as {d.tensor.dtype}" for d in resolved.targets if d.dtype != d.tensor.dtype
        ]
        saved_as = [f"{name}: {other} in src" for name, other in resolved.saved_as.items()]
        report = self.verdict.report
        return report.loaded(len(resolved.targets), resolved.plan.num_bytes, received, converted, saved_as)


class Move:
    """One move of a `Job`, and how far it has come.

    Attributes
    ----------
    failure
        The error of this rank, or None.
    is_complete
        True once all ranks are known to have everything in place.
    """

    def __init__(self, job: Job, opened: _Opened | None, failure: BaseException | None) -> None:
        self._job, self._opened, self.failure = job, opened, failure
        self.is_complete = self._is_put = False
        self.began = time.monotonic()

    @property
    def destination(self) -> _Opened:
        """Both states; only on a rank where nothing has failed."""
        assert self._opened is not None
        return self._opened

    def changed(self) -> list[str]:
        """Name the tensors of the destination that this move has overwritten so far; staged ones count once they are put."""
        if self._opened is None:
            return []
        spares = {} if self._is_put else self._job.spares.memory
        rows = {row for mover in self._job.movers for row in mover.changed()}
        return sorted({self._opened.wanted.specs[i].name for i in _tensors(self._opened.wanted, rows) if i not in spares})

    def count_up(self) -> None:
        """Increment the version counters of the overwritten tensors, as torch does when it writes to a tensor."""
        for mover in self._job.movers:
            mover.finish()
        if self._opened is not None and self._opened.target.dtensors:
            self._opened.target.count_up(self.changed())

    def finish(self) -> None:
        """Do the last work before staged tensors are put: copy own bytes where no exchange does so, and check tied tensors."""
        for mover, exchange in zip(self._job.movers, self._job.exchanges, strict=True):
            if exchange is None:
                mover.copy_own()
        if (conflict := self._job.spares.conflict(self.destination.wanted, self._job.overlaps.tied)) is not None:
            raise conflict

    def put(self) -> None:
        """Copy staged tensors into place, and set the values."""
        opened, self._is_put = self.destination, True
        self._job.spares.put(opened.wanted)
        opened.target.finish(opened.values, not_loaded(opened.target, self._job.resolved))


def _addresses(opened: _Opened) -> list[tuple[int, int, Ints]]:
    """List where each piece lies in memory: two states of one layout may have other addresses, bases or strides."""
    pieces = (row for local in (opened.held, opened.wanted) for _, row in local.rows)
    return [(row.tensor.data_ptr(), row.piece.base, row.piece.strides) for row in pieces]


def _tensors(local: LocalShards, rows: Iterable[int]) -> set[int]:
    """Return the indices of the tensors of some rows."""
    return {local.rows[row][0] for row in rows}
