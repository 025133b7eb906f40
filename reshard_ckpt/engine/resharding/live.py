"""The exchange of elements between live tensors: from the memory of ranks that hold them to the ranks that want them.

1. `plan_moves`: rank 0 plans for all ranks (`core.planning.exchange`), and sends each rank its parts. Collectives, in order:
   gather the wanted rows of each rank, scatter the parts.
2. `LiveMover` is this rank's side of the rounds (`engine.common.mover`): it finds the memory of each part. A part whose owner and
   taker are the same rank is copied without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgpack
import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.specs import CODES, piece_columns
from ...core.geometry.columns import concatenated
from ...core.geometry.runs import I64, pad_left
from ...core.planning.exchange import OWN, Parts, RankRuns, plan_exchange
from ...format.dtypes import TORCH_DTYPES
from ..common.mover import Boxes, Memories, Mover, Transfers
from ..common.rounds import pack_columns, unpack_columns
from ..saving.local_shards import LocalShards


class WantedRows(NamedTuple):
    """The memory that this rank wants filled: local row (piece) ``rows[i]`` gets elements of catalog tensor ``source[i]``."""

    local: LocalShards
    rows: I64
    source: I64


def memory_rows(local: LocalShards) -> list[torch.Tensor]:
    """Return the local tensor of each row (piece) of the local shards."""
    return [piece.tensor for _, piece in local.rows]


class Moves(NamedTuple):
    """The plan of an exchange for one rank: the parts that it sends, receives or keeps, and the number of rounds of all ranks.

    Parts that travel through host memory have ``num_rounds[0]`` rounds, parts that travel from device to device
    ``num_rounds[1]``.
    """

    parts: Parts
    num_rounds: tuple[int, int]

    def of_device(self, device: int) -> Parts:
        """Return those of `parts` that travel through host memory (`device` is 0), or from device to device (`device` is 1)."""
        return self.parts.take(np.flatnonzero(self.parts.device == device))


def plan_moves(
    comm: Comm, held: RankRuns | None, wanted: WantedRows, devices: Sequence[bool], node: bytes, round_bytes: int
) -> Moves:
    """Plan on rank 0 which rank sends which elements to which other rank, and return this rank's parts. Collective.

    Parameters
    ----------
    held
        On rank 0, the runs of tensors that each rank holds; None on the others.
    wanted
        The memory that this rank wants filled.
    devices
        For each row of `wanted.local`, whether its elements may be received into device memory, without a copy in host memory.
    node
        The name of this rank's machine.
    round_bytes
        About how many bytes a rank sends, or receives, in one round.
    """
    gathered = comm.gather(msgpack.packb([node, pack_columns(_runs_of(wanted, devices, comm.rank))]))
    messages = None
    if gathered is not None:
        assert held is not None
        names, tables = zip(*map(msgpack.unpackb, gathered), strict=True)
        # nodes[r]: the number of rank r's machine
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        nodes = [number[name] for name in names]
        of_ranks = [unpack_columns(RankRuns, table) for table in tables]
        # Tables are as wide as the most dims on their rank; shorter boxes get leading dims of offset 0 and length 1.
        width = max(table.offsets.shape[1] for table in of_ranks)
        all_wanted = concatenated(
            [replace(t, offsets=pad_left(t.offsets, width, 0), lengths=pad_left(t.lengths, width, 1)) for t in of_ranks]
        )
        parts = plan_exchange(held, all_wanted, nodes, round_bytes)
        # Rounds are numbered from 0, and `OWN` is -1, so an exchange of own parts alone has 0 rounds.
        num_rounds = [int(parts.round[parts.device == device].max(initial=OWN)) + 1 for device in (0, 1)]
        messages = [msgpack.packb([pack_columns(parts.of_rank(rank)), num_rounds]) for rank in range(comm.size)]
    own_parts, num_rounds = msgpack.unpackb(comm.scatter(messages), use_list=False)
    return Moves(unpack_columns(Parts, own_parts), num_rounds)


def _runs_of(wanted: WantedRows, devices: Sequence[bool], rank: int) -> RankRuns:
    """Return the wanted memory of this rank as runs of tensors of the catalog, for rank 0 to plan with."""
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


def _boxes_in(local: LocalShards, row: I64, offsets: I64, lengths: I64) -> Boxes:
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
    return Boxes.of(row, first, lengths, strides)


class LiveMover(Mover):
    """A `Mover` between the live states of all ranks, for one kind of memory.

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
        parts = moves.of_device(device)
        transfers = Transfers(parts.round, parts.owner, parts.taker, parts.num_bytes)
        wire = [TORCH_DTYPES[CODES[code]] for code in parts.wire.tolist()]
        super().__init__(rank, size, moves.num_rounds[device], transfers, wire)
        # For each part: its row of `held` (or -1), its row of `wanted` (or -1), and its box of the global tensor.
        owner_row = np.where(parts.owner == rank, parts.owner_row, -1)
        taker_row = np.where(parts.taker == rank, parts.taker_row, -1)
        self._places = owner_row, taker_row, parts.offsets, parts.lengths
        self.bind_states(held, wanted)

    def bind_states(self, held: LocalShards, wanted: LocalShards) -> None:
        """Set the states whose memory the next exchanges use. They must have the planned pieces; their strides may differ."""
        owner_row, taker_row, offsets, lengths = self._places
        self.bind(
            Memories(memory_rows(held)),
            _boxes_in(held, owner_row, offsets, lengths),
            Memories(memory_rows(wanted)),
            _boxes_in(wanted, taker_row, offsets, lengths),
        )
