"""The exchange between live tensors: elements are moved from the memory of ranks that hold them to ranks that want them.

1. `plan_moves`: rank 0 plans for all ranks (`core.planning.exchange`), and sends each rank its parts. Collectives, in order:
   gather the wanted rows of each rank, scatter the parts.
2. `Mover` is this rank's side of the rounds (`engine.common.rounds`). A part is a strided box of memory on both sides. Its owner
   packs it into a message, its taker unpacks it. A part whose owner and taker are the same rank is copied without a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod

import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.specs import CODES, Ints, piece_columns
from ...core.geometry.columns import ColumnTable, Table, columns_of, concatenated, is_new, lex_order
from ...core.geometry.runs import I64, Mask, pad_left
from ...core.planning.exchange import OWN, Parts, RankRuns, plan_exchange
from ...format.dtypes import TORCH_DTYPES
from ..common.rounds import pack_table, unpack_table
from ..common.tensor_bytes import RAW, count_up, region, storage_bytes
from ..saving.local_shards import LocalShards

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
View = torch.Tensor | Array

_ROUNDS = struct.Struct("<II")

LARGE_BYTES = 64 << 10
"""Boxes of at least this size are copied by torch, which uses many threads. Smaller ones are copied by numpy, whose calls have
less overhead."""

MAX_VIEWS = 1 << 18
"""With at most this many parts, the views of memory are kept from one exchange to the next. With more parts they are made each
time."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The memory that this rank wants filled: row `rows[i]` of `local`, with elements of tensor `source[i]` of the catalog."""

    local: LocalShards
    rows: I64
    source: I64


def memory_rows(local: LocalShards) -> list[torch.Tensor]:
    """Return the local tensor of each row."""
    return [piece.tensor for _, piece in local.rows]


@dataclass(frozen=True, slots=True)
class Moves:
    """The parts that this rank sends, receives or keeps, and the number of rounds of the whole exchange: through host memory
    (`num_rounds[0]`), and from device to device (`num_rounds[1]`)."""

    parts: Parts
    num_rounds: tuple[int, int]

    def of_device(self, device: int) -> Parts:
        """Return the parts that travel through host memory (`device=0`), or from device to device (`device=1`)."""
        return self.parts.take(np.flatnonzero(self.parts.device == device))


def plan_moves(
    comm: Comm, held: RankRuns | None, wanted: WantedRows, devices: Sequence[bool], node: bytes, round_bytes: int
) -> Moves:
    """Plan on rank 0 which rank sends which elements to whom, and return this rank's parts. Collective.

    Parameters
    ----------
    held
        On rank 0, the runs that all ranks hold; None on the others.
    wanted
        The memory that this rank wants filled.
    devices
        For each row of `wanted.local`, whether its elements may be received into device memory, without a copy in host memory.
    node
        The name of this rank's machine.
    round_bytes
        About how many bytes a rank sends, or receives, in one round.
    """
    # Message of a rank: length of the node's name (4 bytes), the name, its wanted runs as a table.
    runs = _runs_of(wanted, devices, comm.rank)
    gathered = comm.gather(len(node).to_bytes(4, "little") + node + _packed(runs))
    messages = None
    if gathered is not None:
        assert held is not None
        # cuts[r]: where the table begins in the message of rank r; number: an index for each machine; nodes[r]: rank r's machine
        cuts = [4 + int.from_bytes(data[:4], "little") for data in gathered]
        number = {name: i for i, name in enumerate(dict.fromkeys(data[4:cut] for data, cut in zip(gathered, cuts, strict=True)))}
        nodes = [number[data[4:cut]] for data, cut in zip(gathered, cuts, strict=True)]
        of_ranks = [_unpacked(RankRuns, data[cut:]) for data, cut in zip(gathered, cuts, strict=True)]
        # Tables are as wide as the most dims on their rank; shorter boxes get leading dims of offset 0 and length 1.
        width = max(table.offsets.shape[1] for table in of_ranks)
        all_wanted = concatenated(
            [replace(t, offsets=pad_left(t.offsets, width, 0), lengths=pad_left(t.lengths, width, 1)) for t in of_ranks]
        )
        parts = plan_exchange(held, all_wanted, nodes, round_bytes)
        # Rounds are numbered from 0, and `OWN` is -1, so an exchange of own parts alone has 0 rounds.
        num_rounds = [int(parts.round[parts.device == device].max(initial=OWN)) + 1 for device in (0, 1)]
        messages = [_ROUNDS.pack(*num_rounds) + _packed(parts.of_rank(rank)) for rank in range(comm.size)]
    data = comm.scatter(messages)
    return Moves(_unpacked(Parts, data[_ROUNDS.size :]), _ROUNDS.unpack_from(data))


def _runs_of(wanted: WantedRows, devices: Sequence[bool], rank: int) -> RankRuns:
    """Return the runs that this rank wants, of tensors of the catalog."""
    columns, rows = wanted.local.local_metadata.rows, wanted.rows
    box = columns.box[rows]
    return RankRuns(
        rank=np.full(len(rows), rank),
        local=rows,
        tensor=wanted.source,
        start=columns.start[rows],
        count=columns.count[rows],
        dtype=wanted.local.local_metadata.tensors.dtype[columns.tensor[rows]].astype(np.int64),
        device=np.array(devices, np.int64)[rows],
        offsets=columns.box_offsets[box],
        lengths=columns.box_lengths[box],
    )


def _packed(table: ColumnTable) -> bytes:
    """Pack the columns of a table, side by side."""
    return pack_table(np.column_stack(columns_of(table)))


def _unpacked(kind: type[Table], data: bytes) -> Table:
    """Unpack a table whose last two columns are the offsets and lengths of boxes, of as many dims as there are."""
    table, num = unpack_table(data), len(fields(kind)) - 2
    return kind(*table[:, :num].T, *np.split(table[:, num:], 2, axis=1))


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of elements in this rank's memory, one for each part.

    `row` is the row whose memory holds the box, or -1 if the box is on another rank. `first` is its first element, counted from
    the beginning of the row's local tensor. `strides` are in elements.
    """

    row: list[int]
    first: list[int]
    lengths: list[Ints]
    strides: list[Ints]


def _boxes_in(local: LocalShards, row: I64, offsets: I64, lengths: I64) -> _Boxes:
    """Convert boxes of global tensors to boxes of local memory.

    Parameters
    ----------
    row
        For each box, the row of `local` that contains it, or -1 if it is on another rank.
    offsets, lengths
        The boxes, in coordinates of the global tensors.
    """
    width = offsets.shape[1]
    pieces = piece_columns(local.specs)
    here = row >= 0  # boxes in this rank's memory; the others keep zeros
    first, strides = np.zeros(len(row), np.int64), np.zeros((len(row), width), np.int64)
    strides[here] = pad_left(pieces.strides, width, 0)[row[here]]
    # inner: offsets of each box relative to the piece that contains it; first: the same as a position in local memory
    inner = offsets[here] - pad_left(pieces.offsets, width, 0)[row[here]]
    first[here] = pieces.base[row[here]] + (inner * strides[here]).sum(axis=1)
    return _Boxes(row.tolist(), first.tolist(), list(map(tuple, lengths.tolist())), list(map(tuple, strides.tolist())))


class _Memories:
    """Makes views of boxes in the local tensors of this rank's rows."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._bytes: dict[int, memoryview] = {}
        self._seen_raw: dict[int, torch.Tensor] = {}

    def region(self, boxes: _Boxes, i: int) -> torch.Tensor:
        """View the i-th box as a tensor."""
        return region(self.tensors[boxes.row[i]], boxes.first[i], boxes.lengths[i], boxes.strides[i])

    def view(self, boxes: _Boxes, i: int, wire: torch.dtype) -> View:
        """View the i-th box: as a numpy array of raw elements if it is small, in host memory and of dtype `wire`; else as a
        tensor."""
        tensor, each = self.tensors[boxes.row[i]], wire.itemsize
        if tensor.device.type != "cpu" or tensor.dtype != wire or prod(boxes.lengths[i]) * each >= LARGE_BYTES:
            return self.region(boxes, i)
        key = id(tensor)
        if key not in self._bytes:
            self._bytes[key], self._seen_raw[key] = storage_bytes(tensor), tensor
        first = (tensor.storage_offset() + boxes.first[i]) * each
        strides = tuple(stride * each for stride in boxes.strides[i])
        raw: Array = np.ndarray(boxes.lengths[i], RAW[each], self._bytes[key], first, strides)
        return raw

    def count_up(self) -> None:
        """Increase the version counters of tensors that were viewed as numpy arrays, because torch has not seen the writes."""
        count_up(self._seen_raw.values())


def _in_buffer(buffer: torch.Tensor, at: int, lengths: Ints, wire: torch.dtype, like: View) -> View:
    """View a part in a message buffer, from byte `at` on: as a numpy array or a tensor, whichever `like` is."""
    if isinstance(like, np.ndarray):
        raw: Array = np.ndarray(lengths, RAW[wire.itemsize], buffer.numpy().data, at)
        return raw
    num = int(np.prod(lengths, dtype=np.int64)) * wire.itemsize
    return buffer[at : at + num].view(wire).view(lengths)


def _copy(into: View, source: View) -> None:
    """Copy between two views of the same kind; tensors may differ in dtype and device."""
    if isinstance(into, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(into, source)
    else:
        _tensor(into).copy_(_tensor(source))


def _tensor(view: View) -> torch.Tensor:
    assert isinstance(view, torch.Tensor)
    return view


class Mover:
    """This rank's side of an exchange, for one kind of memory: it packs, unpacks and copies this rank's parts.

    It is a `Traffic` of `engine.common.rounds`, which calls `sizes`, `pack` and `unpack` for each round.

    Parameters
    ----------
    moves
        The plan of this rank.
    device
        The kind of memory: 0 for parts that travel through host memory, 1 for parts that travel from device to device.
    rank, size
        This rank, and the number of ranks.
    held, wanted
        The memory that parts are read from, and the memory that they are written to.
    """

    def __init__(self, moves: Moves, device: int, rank: int, size: int, held: LocalShards, wanted: LocalShards) -> None:
        self._size, self.num_rounds = size, moves.num_rounds[device]
        parts = moves.of_device(device)
        self._wire = [TORCH_DTYPES[CODES[code]] for code in parts.wire.tolist()]
        self._bytes = parts.num_bytes
        # out[i], into[i]: whether this rank sends, or gets, part i; both, if it takes the part from itself
        out, into = parts.owner == rank, parts.taker == rank
        self._own = np.flatnonzero(out & into)
        self._sends, self._receives = _Schedule(parts, out & ~into, parts.taker), _Schedule(parts, into & ~out, parts.owner)
        # For each part: its row of `held` (or -1), its row of `wanted` (or -1), and its box of the global tensor.
        self._places = np.where(out, parts.owner_row, -1), np.where(into, parts.taker_row, -1), parts.offsets, parts.lengths
        self._views: dict[tuple[Hashable, ...], list[tuple[View, View]]] = {}
        self._keeps = len(parts.owner) <= MAX_VIEWS
        self.received_bytes = int(self._bytes[into & ~out].sum())
        self.bind(held, wanted)
        self._done: set[int] = set()
        """The rounds that have written, at least in part, into `wanted`; `OWN` stands for the parts that a rank takes from
        itself."""

    def bind(self, held: LocalShards, wanted: LocalShards) -> None:
        """Use the memory of these from now on. They must have the same pieces as the planned ones; their strides may differ."""
        owner_row, taker_row, offsets, lengths = self._places
        self._views.clear()
        self._held, self._wanted = _Memories(memory_rows(held)), _Memories(memory_rows(wanted))
        self._from = _boxes_in(held, owner_row, offsets, lengths)
        self._into = _boxes_in(wanted, taker_row, offsets, lengths)

    def begin(self) -> None:
        """Begin a new exchange: no row has changed yet."""
        self._done.clear()

    def changed(self) -> set[int]:
        """Return the rows of `wanted` that this exchange has overwritten, wholly or in part. Also true after a failure."""
        received = (i for number in self._done for i in self._receives.rows(number).tolist())
        own = self._own.tolist() if OWN in self._done else []
        return {self._into.row[i] for i in (*own, *received)}

    def finish(self) -> None:
        """Tell torch's autograd which tensors changed through numpy views. Call it after the last round, also after a failure."""
        if self._done:
            self._wanted.count_up()

    def copy_own(self) -> None:
        """Copy the parts that this rank takes from itself."""
        self._done.add(OWN)
        for into, source in self._pairs(("own",), self._own_pairs):
            _copy(into, source)

    def _own_pairs(self) -> list[tuple[View, View]]:
        pairs = []
        for i in self._own.tolist():
            source, into = self._held.view(self._from, i, self._wire[i]), self._wanted.view(self._into, i, self._wire[i])
            if type(source) is not type(into):  # only one is a numpy view: the other is on a device, or of another dtype
                source, into = self._held.region(self._from, i), self._wanted.region(self._into, i)
            pairs.append((into, source))
        return pairs

    def _pairs(self, key: tuple[Hashable, ...], make: Callable[[], list[tuple[View, View]]]) -> list[tuple[View, View]]:
        """Return the kept (into, source) views under this key, or make them and keep them unless there are too many."""
        pairs = self._views.get(key)
        if pairs is None:
            pairs = make()
            if self._keeps:
                self._views[key] = pairs
        return pairs

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the bytes sent to each rank in a round, and the bytes received from each."""
        return (
            self._sends.sizes(number, self._bytes, self._size),
            self._receives.sizes(number, self._bytes, self._size),
        )

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Copy the parts of a round into the messages: for rank r into `out[r]` from byte `starts[r]` on."""

        def make() -> list[tuple[View, View]]:
            pairs = []
            for i, at, dest in self._sends.places(number, self._bytes, starts):
                source = self._held.view(self._from, i, self._wire[i])
                pairs.append((_in_buffer(out[dest], at, self._from.lengths[i], self._wire[i], source), source))
            return pairs

        for into, source in self._pairs(("out", number, *_begins(out, starts)), make):
            _copy(into, source)

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Copy the parts of a round out of the messages: of rank r from `data[r]`, from byte `starts[r]` on."""

        def make() -> list[tuple[View, View]]:
            pairs = []
            for i, at, source in self._receives.places(number, self._bytes, starts):
                into = self._wanted.view(self._into, i, self._wire[i])
                pairs.append((into, _in_buffer(data[source], at, self._into.lengths[i], self._wire[i], into)))
            return pairs

        if number == 0:
            self.copy_own()  # only now: the first message has shown that no rank failed before the exchange
        self._done.add(number)  # before the copies: if one fails, its rows may be half overwritten
        for into, source in self._pairs(("in", number, *_begins(data, starts)), make):
            _copy(into, source)


def _begins(memory: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """Return the memory address at which the message of each rank begins; kept views are valid only at the same addresses."""
    return [part.data_ptr() + start for part, start in zip(memory, starts, strict=True)]


class _Schedule:
    """The chosen parts, sorted by round, then by the rank at the other end (`peer`), then by their order in the message."""

    def __init__(self, parts: Parts, chosen: Mask, peer: I64) -> None:
        rows = np.flatnonzero(chosen)
        rows = rows[lex_order(parts.round[rows], peer[rows])] if len(rows) else rows
        self._rows, self._peer, self._round = rows, peer[rows], parts.round[rows]

    def _of(self, number: int) -> slice:
        return slice(*np.searchsorted(self._round, [number, number + 1]).tolist())

    def by_peer(self, number: int, size: int) -> list[list[int]]:
        """Return the parts of a round for each rank at the other end, in their order."""
        part = self._of(number)
        return [self._rows[part][self._peer[part] == rank].tolist() for rank in range(size)]

    def rows(self, number: int) -> I64:
        """Return the indices of the parts of a round."""
        return self._rows[self._of(number)]

    def sizes(self, number: int, num_bytes: I64, size: int) -> list[int]:
        """Return the bytes of a round, by the rank at the other end. `num_bytes` has the bytes of each part, `size` is the number
        of ranks."""
        part = self._of(number)
        total = np.bincount(self._peer[part], weights=num_bytes[self._rows[part]], minlength=size)
        out: list[int] = total.astype(np.int64).tolist()
        return out

    def places(self, number: int, num_bytes: I64, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return, for each part of a round, its index, its first byte in the message, and the rank at the other end."""
        part = self._of(number)
        rows, peer = self._rows[part], self._peer[part]
        if not len(rows):
            return []
        sizes = num_bytes[rows]
        # before[i]: bytes of all parts of the round before part i; first: the first part of each peer.
        # Subtracting `before` at the first part of the same peer leaves the offset within that peer's message.
        before = np.cumsum(sizes) - sizes
        first = np.flatnonzero(is_new(peer))
        counts = [b - a for a, b in pairwise([*first.tolist(), len(rows)])]
        at = before - np.repeat(before[first], counts) + np.array(starts, np.int64)[peer]
        return list(zip(rows.tolist(), at.tolist(), peer.tolist(), strict=True))
