"""The exchange between live tensors: from the memory in which ranks hold a state to that in which they want it.

1. `plan_moves`: rank 0 plans for all (`core.planning.exchange`), and sends each rank its parts.
2. `Mover`: this rank's side. A part is a strided box of memory on both sides; it is packed from where it lies, and unpacked to
   where it goes. What a rank takes from itself is copied at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod

import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.specs import Ints
from ...core.geometry.dtypes import CODES
from ...core.geometry.ordering import is_new, lex_order
from ...core.geometry.runs import I64, pad_left
from ...core.planning.exchange import OWN, Parts, RankRuns, plan_exchange
from ...core.planning.local_metadata import piece_columns, width_of
from ...format.torch_dtypes import TORCH_DTYPES
from ..common.rounds import pack_table, unpack_table
from ..common.tensor_bytes import RAW, count_up, region, storage_bytes
from ..saving.local_shards import LocalShards

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
View = torch.Tensor | Array

_ROUNDS = struct.Struct("<II")

LARGE_BYTES = 64 << 10
"""Boxes of this size are copied by torch, in as many threads as it has; smaller ones by numpy, which begins sooner."""

MAX_VIEWS = 1 << 18
"""Views of memory that are kept from run to run; more are made anew each time."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """What this rank wants: the rows of `local` at ``rows``, each of the tensor of the catalog in ``source``."""

    local: LocalShards
    rows: I64
    source: I64


def memory_rows(local: LocalShards) -> list[torch.Tensor]:
    """List the memory of each row."""
    return [piece.tensor for _, piece in local.rows]


@dataclass(frozen=True, slots=True)
class Moves:
    """This rank's parts, and how many rounds they travel in: through the host, and from device to device."""

    parts: Parts
    num_rounds: tuple[int, int]

    def of_device(self, device: int) -> Parts:
        """Return the parts that travel through host memory (0), or without it (1)."""
        return self.parts.take(np.flatnonzero(self.parts.device == device))


def plan_moves(
    comm: Comm, held: RankRuns | None, wanted: WantedRows, devices: Sequence[bool], node: bytes, round_bytes: int
) -> Moves:
    """Plan on rank 0 who sends what to whom. Collective.

    Parameters
    ----------
    held
        What all ranks hold, on rank 0.
    devices
        For each row of the destination whether its memory may travel without the host.
    node
        The name of this rank's machine.
    """
    columns = _wanted_columns(wanted, devices)
    gathered = comm.gather(len(node).to_bytes(4, "little") + node + pack_table(columns))
    messages = None
    if gathered is not None:
        assert held is not None
        cuts = [4 + int.from_bytes(data[:4], "little") for data in gathered]
        number = {name: i for i, name in enumerate(dict.fromkeys(data[4:cut] for data, cut in zip(gathered, cuts, strict=True)))}
        nodes = [number[data[4:cut]] for data, cut in zip(gathered, cuts, strict=True)]
        all_wanted = _joined([unpack_table(data[cut:]) for data, cut in zip(gathered, cuts, strict=True)])
        parts = plan_exchange(held, all_wanted, nodes, round_bytes)
        num_rounds = [int(parts.round[parts.device == device].max(initial=OWN)) + 1 for device in (0, 1)]
        head = _ROUNDS.pack(*num_rounds)
        messages = [head + pack_table(_columns_of(parts.of_rank(rank))) for rank in range(comm.size)]
    data = comm.scatter(messages)
    table = unpack_table(data[_ROUNDS.size :])
    width = (table.shape[1] - 7) // 2
    device, number, owner, owner_row, taker, taker_row, wire = table[:, :7].T
    offsets, lengths = table[:, 7 : 7 + width], table[:, 7 + width :]
    own = Parts(device, number, owner, owner_row, taker, taker_row, wire, offsets, lengths)
    return Moves(own, _ROUNDS.unpack_from(data))


def _wanted_columns(wanted: WantedRows, devices: Sequence[bool]) -> I64:
    columns, rows = wanted.local.local_metadata.rows, wanted.rows
    box = columns.box[rows]
    flat = [
        rows,
        wanted.source,
        columns.start[rows],
        columns.count[rows],
        wanted.local.local_metadata.tensors.dtype[columns.tensor[rows]].astype(np.int64),
        np.array(devices, np.int64)[rows],
    ]
    return np.column_stack([*flat, columns.box_offsets[box], columns.box_lengths[box]])


def _joined(tables: Sequence[I64]) -> RankRuns:
    """Put what all ranks want into one table."""
    width = max((table.shape[1] - 6) // 2 for table in tables)
    offsets = [pad_left(table[:, 6 : 6 + (table.shape[1] - 6) // 2], width, 0) for table in tables]
    lengths = [pad_left(table[:, 6 + (table.shape[1] - 6) // 2 :], width, 1) for table in tables]
    local, tensor, start, count, dtype, device = np.vstack([table[:, :6] for table in tables]).T
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return RankRuns(rank, local, tensor, np.vstack(offsets), np.vstack(lengths), start, count, dtype, device)


def _columns_of(parts: Parts) -> I64:
    return np.column_stack([getattr(parts, field.name) for field in fields(parts)])


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of the memory of this rank's rows; those of row -1 are on another rank."""

    row: list[int]
    first: list[int]
    lengths: list[Ints]
    strides: list[Ints]


def _boxes_in(local: LocalShards, row: I64, offsets: I64, lengths: I64) -> _Boxes:
    """Find where in memory boxes of global tensors lie, each of which is inside a row."""
    width = offsets.shape[1]
    pieces = piece_columns(local.specs, width_of(local.specs))
    here = row >= 0
    first, strides = np.zeros(len(row), np.int64), np.zeros((len(row), width), np.int64)
    strides[here] = pad_left(pieces.strides, width, 0)[row[here]]
    inner = offsets[here] - pad_left(pieces.offsets, width, 0)[row[here]]
    first[here] = pieces.base[row[here]] + (inner * strides[here]).sum(axis=1)
    return _Boxes(row.tolist(), first.tolist(), list(map(tuple, lengths.tolist())), list(map(tuple, strides.tolist())))


class _Memories:
    """The memory of this rank's rows, as views of boxes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._bytes: dict[int, memoryview] = {}
        self._seen_raw: dict[int, torch.Tensor] = {}

    def region(self, boxes: _Boxes, i: int) -> torch.Tensor:
        """View a box as a tensor."""
        return region(self.tensors[boxes.row[i]], boxes.first[i], boxes.lengths[i], boxes.strides[i])

    def view(self, boxes: _Boxes, i: int, wire: torch.dtype) -> View:
        """View a box: its raw elements where it lies in host memory and travels as it is."""
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
        """Count up the versions of the tensors of which raw elements were viewed, and may have been written."""
        for tensor in self._seen_raw.values():
            count_up(tensor)


def _in_buffer(buffer: torch.Tensor, at: int, lengths: Ints, wire: torch.dtype, like: View) -> View:
    """View a part in a message, as what it is copied from or to."""
    if isinstance(like, np.ndarray):
        raw: Array = np.ndarray(lengths, RAW[wire.itemsize], buffer.numpy().data, at)
        return raw
    num = int(np.prod(lengths, dtype=np.int64)) * wire.itemsize
    return buffer[at : at + num].view(wire).view(lengths)


def _copy(into: View, source: View) -> None:
    if isinstance(into, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(into, source)
    else:
        _tensor(into).copy_(_tensor(source))


def _tensor(view: View) -> torch.Tensor:
    assert isinstance(view, torch.Tensor)
    return view


class Mover:
    """This rank's side of an exchange: the traffic of one kind of memory.

    Parameters
    ----------
    parts
        This rank's parts of that kind, in order.
    held, wanted
        What this rank holds, and the destination.
    """

    def __init__(self, moves: Moves, device: int, rank: int, size: int, held: LocalShards, wanted: LocalShards) -> None:
        self._size, self.num_rounds = size, moves.num_rounds[device]
        parts = moves.of_device(device)
        self._wire = [TORCH_DTYPES[CODES[code]] for code in parts.wire.tolist()]
        self._bytes = parts.num_bytes
        out, into = parts.owner == rank, parts.taker == rank
        self._own = np.flatnonzero(out & into)
        self._sends, self._receives = _Schedule(parts, out & ~into, parts.taker), _Schedule(parts, into & ~out, parts.owner)
        self._places = np.where(out, parts.owner_row, -1), np.where(into, parts.taker_row, -1), parts.offsets, parts.lengths
        self._views: dict[tuple[Hashable, ...], list[tuple[View, View]]] = {}
        self._keeps = len(parts.owner) <= MAX_VIEWS
        self.received_bytes = int(self._bytes[into & ~out].sum())
        self.bind(held, wanted)
        self._done: set[int] = set()
        """The rounds of which something has been put in place; `OWN` for what this rank takes from itself."""

    def bind(self, held: LocalShards, wanted: LocalShards) -> None:
        """Move the memory of these, which have the same layouts; how they lie in their memory may differ."""
        owner_row, taker_row, offsets, lengths = self._places
        self._views.clear()
        self._held, self._wanted = _Memories(memory_rows(held)), _Memories(memory_rows(wanted))
        self._from = _boxes_in(held, owner_row, offsets, lengths)
        self._into = _boxes_in(wanted, taker_row, offsets, lengths)

    def begin(self) -> None:
        """Forget what was moved before."""
        self._done.clear()

    def changed(self) -> set[int]:
        """List the rows that have new values, wholly or in part."""
        received = (i for number in self._done for i in self._receives.rows(number).tolist())
        own = self._own.tolist() if OWN in self._done else []
        return {self._into.row[i] for i in (*own, *received)}

    def finish(self) -> None:
        """Count up the versions of what was written past torch; when nothing more is moved, also after a failure."""
        if self._done:
            self._wanted.count_up()

    def copy_own(self) -> None:
        """Copy what this rank takes from itself."""
        self._done.add(OWN)
        for into, source in self._pairs(("own",), self._own_pairs):
            _copy(into, source)

    def _own_pairs(self) -> list[tuple[View, View]]:
        pairs = []
        for i in self._own.tolist():
            source, into = self._held.view(self._from, i, self._wire[i]), self._wanted.view(self._into, i, self._wire[i])
            if type(source) is not type(into):  # one is on a device, or of another dtype
                source, into = self._held.region(self._from, i), self._wanted.region(self._into, i)
            pairs.append((into, source))
        return pairs

    def _pairs(self, key: tuple[Hashable, ...], make: Callable[[], list[tuple[View, View]]]) -> list[tuple[View, View]]:
        pairs = self._views.get(key)
        if pairs is None:
            pairs = make()
            if self._keeps:
                self._views[key] = pairs
        return pairs

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        return (
            self._sends.sizes(number, self._bytes, self._size),
            self._receives.sizes(number, self._bytes, self._size),
        )

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        def make() -> list[tuple[View, View]]:
            pairs = []
            for i, at, dest in self._sends.places(number, self._bytes, starts):
                source = self._held.view(self._from, i, self._wire[i])
                pairs.append((_in_buffer(out[dest], at, self._from.lengths[i], self._wire[i], source), source))
            return pairs

        for into, source in self._pairs(("out", number, *_begins(out, starts)), make):
            _copy(into, source)

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        def make() -> list[tuple[View, View]]:
            pairs = []
            for i, at, source in self._receives.places(number, self._bytes, starts):
                into = self._wanted.view(self._into, i, self._wire[i])
                pairs.append((into, _in_buffer(data[source], at, self._into.lengths[i], self._wire[i], into)))
            return pairs

        if number == 0:
            self.copy_own()  # not before the first message says that no rank has failed
        self._done.add(number)
        for into, source in self._pairs(("in", number, *_begins(data, starts)), make):
            _copy(into, source)


def _begins(memory: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """List where the parts of all ranks begin."""
    return [part.data_ptr() + start for part, start in zip(memory, starts, strict=True)]


class _Schedule:
    """Some parts by round, and in each by the rank at the other end; those of a pair in the order of their message."""

    def __init__(self, parts: Parts, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], peer: I64) -> None:
        rows = np.flatnonzero(chosen)
        rows = rows[lex_order(parts.round[rows], peer[rows])] if len(rows) else rows
        self._rows, self._peer, self._round = rows, peer[rows], parts.round[rows]

    def _of(self, number: int) -> slice:
        return slice(*np.searchsorted(self._round, [number, number + 1]).tolist())

    def rows(self, number: int) -> I64:
        """List the parts of a round."""
        return self._rows[self._of(number)]

    def sizes(self, number: int, num_bytes: I64, size: int) -> list[int]:
        part = self._of(number)
        total = np.bincount(self._peer[part], weights=num_bytes[self._rows[part]], minlength=size)
        out: list[int] = total.astype(np.int64).tolist()
        return out

    def places(self, number: int, num_bytes: I64, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """List the parts of a round, where in the memory of a rank each begins, and which rank's that is."""
        part = self._of(number)
        rows, peer = self._rows[part], self._peer[part]
        if not len(rows):
            return []
        sizes = num_bytes[rows]
        before = np.cumsum(sizes) - sizes
        first = np.flatnonzero(is_new(peer))
        counts = [b - a for a, b in pairwise([*first.tolist(), len(rows)])]
        at = before - np.repeat(before[first], counts) + np.array(starts, np.int64)[peer]
        return list(zip(rows.tolist(), at.tolist(), peer.tolist(), strict=True))
