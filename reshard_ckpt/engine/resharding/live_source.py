"""The live state of a job, opened like a checkpoint: a catalog whose one file stands for the memory of all ranks.

1. `open_live`: gather every rank's metadata on rank 0, broadcast the catalog. Rank 0 merges the metadata, as for a save, and
   proves that the shards tile every tensor. So names, links, renaming, matching and values work as for any checkpoint.
2. `compare_live`, if asked for: scatter the runs to fingerprint (once), gather the fingerprints, then gather empty messages as a
   barrier. Rank 0 compares the replicas between the two gathers, as for a save.
3. `LiveValues.share`: gather the values that are not tensors, broadcast them merged. They may change from one exchange to the
   next; a rank sends its own again only if they changed.

A source and a destination must not share memory, unless they are the same tensor (`find_overlaps`). Destinations may be written
into spare memory first (`Spares`): all with ``staged=True``, else the tied ones, so that the bytes of their sources can be
compared before any is put in place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.model import Catalog, FileEntry, RowTable, ValueEntry
from ...core.catalog.names import is_below
from ...core.catalog.specs import ValueKind, ValueSpec, item_bytes_of, piece_columns
from ...core.planning.exchange import RankRuns
from ...core.planning.merge import MergedTables, tensor_table
from ...core.planning.save_plan import Checks, HeldRows, find_holders
from ...errors import LayoutError, MismatchError, UsageError
from ...format.catalog import decode_catalog, encode_catalog
from ...format.files import new_save_id
from ...format.values import decode_value, encode_value
from ..common.rounds import pack_table, unpack_table
from ..common.tensor_bytes import LocalPiece
from ..loading.ties import INTS, shared_memory
from ..saving.local_shards import LocalShards, merge_values
from ..saving.messages import RunColumns, decode_metadata, decode_values, encode_metadata, encode_values
from ..saving.replicas import all_fingerprints, compare_replicas


class LiveSource(NamedTuple):
    """The live state of all ranks, described like a checkpoint. All fields but `catalog` are None except on rank 0.

    Attributes
    ----------
    catalog
        The tensors, without values.
    held
        The runs that each rank holds in memory.
    tables
        The merged tensors of all ranks.
    checks
        The runs that several ranks hold as replicas, for `compare_live`.
    """

    catalog: Catalog
    held: RankRuns | None = None
    tables: MergedTables | None = None
    checks: Checks | None = None


def open_live(comm: Comm, local: LocalShards, devices: Sequence[bool], *, may_lack: bool) -> LiveSource:
    """Open the live state of all ranks. Collective.

    Raise `LayoutError` if the shards of the ranks do not tile every tensor, or ranks disagree about a tensor.

    Parameters
    ----------
    local
        The tensors that this rank holds, without values.
    devices
        For each row of `local`, whether its elements may be sent from device memory, without a copy in host memory.
    may_lack
        Whether the shards may leave regions of tensors uncovered.
    """
    *own, _ = encode_metadata(local.local_metadata)
    message = msgpack.packb([*own, np.packbits(np.array(devices, bool)).tobytes()])
    gathered = comm.gather(zlib.compress(message, 1))
    if gathered is None:
        return LiveSource(decode_catalog(zlib.decompress(comm.broadcast(None))))
    tensors, rows, flags = zip(*(msgpack.unpackb(zlib.decompress(data)) for data in gathered), strict=True)
    metadata = decode_metadata(tensors, rows)
    holders = find_holders(metadata, may_lack=may_lack)
    tables, runs = holders.tables, holders.runs
    sizes = runs.count * item_bytes_of(tables.dtype)[runs.tensor]
    # The one file of the catalog, "memory", is never read: the exchange reads the ranks' memory.
    catalog = Catalog(
        save_id=new_save_id(),
        created_s=0.0,
        mesh=None,
        metadata=encode_value(None, ""),
        tensors_table=tensor_table(tables, np.full(len(tables.names), -1), runs.tensor),
        placements=(),
        boxes=holders.boxes,
        rows=RowTable(runs.box, runs.start, runs.count, np.zeros_like(runs.box), np.cumsum(sizes) - sizes),
        files=(FileEntry("memory", int(sizes.sum()), "memory.digests", bytes(16), "memory", 0),),
        values_table=(),
    )
    comm.broadcast(zlib.compress(encode_catalog(catalog), 1))
    # num_rows[r]: rows of rank r; bits[r]: the `devices` of rank r, one 0 or 1 for each row (sent packed, 8 to a byte)
    num_rows = np.bincount(metadata.rank, minlength=len(tensors))
    bits = [np.unpackbits(np.frombuffer(data, np.uint8), count=num) for data, num in zip(flags, num_rows.tolist(), strict=True)]
    return LiveSource(catalog, _held(holders, bits), tables, holders.checks)


def compare_live(comm: Comm, source: LiveSource, local: LocalShards, checked: RunColumns | None) -> RunColumns:
    """Compare the replicas of all tensors of a live state, by fingerprints of all of their bytes. Collective.

    Return the runs of this rank that were compared. If all ranks pass them as `checked` next time, no scatter is needed. Raise
    `LayoutError` if two replicas differ. Rank 0 finds it, and all ranks raise it.
    """
    messages, checks = None, source.checks
    if checked is None:
        if checks is not None:
            columns = np.column_stack([checks.local, checks.start, checks.count])
            messages = list(map(pack_table, np.split(columns, np.searchsorted(checks.rank, np.arange(1, comm.size)))))
        checked = RunColumns(*unpack_table(comm.scatter(messages)).T)
    gathered = comm.gather(all_fingerprints(local, checked).tobytes())
    if gathered is not None:
        assert checks is not None
        assert source.tables is not None
        compare_replicas(checks, source.tables.names, np.frombuffer(b"".join(gathered), np.uint64))
    comm.gather(b"")  # a barrier: no rank moves anything before rank 0 has compared, and its error reaches all ranks here
    return checked


def _held(holders: HeldRows, devices: Sequence[Any]) -> RankRuns:
    """Return the table of the runs that each rank holds in memory.

    ``devices[r][i]`` is 1 if row i of rank r can be sent from device memory without a copy in host memory, else 0.
    """
    # first[r]: rows of all ranks before r. device[j]: flag of j-th row.
    held = holders.held
    first = np.concatenate([[0], np.cumsum([len(bits) for bits in devices])])
    device = np.concatenate([*devices, np.zeros(0, np.uint8)]).astype(np.int64)
    return RankRuns(
        rank=held.rank,
        local=held.local,
        tensor=held.tensor,
        offsets=holders.boxes.offsets[held.box],
        lengths=holders.boxes.lengths[held.box],
        start=held.start,
        count=held.count,
        dtype=holders.tables.dtype[held.tensor].astype(np.int64),
        device=device[first[held.rank] + held.local],
    )


class LiveValues:
    """The values, other than tensors, of all ranks. Each rank sends its values again only if they have changed.

    With `may_lack`, a `PerRank` may be missing on some ranks; `lost` names these ranks.
    """

    def __init__(self, *, may_lack: bool = False) -> None:
        self._may_lack = may_lack
        self._sent = b""
        self._of_rank: list[Any] = []
        self._table: tuple[ValueEntry, ...] = ()
        self._per_rank: Mapping[str, Sequence[bytes | None]] = {}

    def have_changed(self, values: Sequence[ValueSpec]) -> bool:
        """Return whether this rank's values differ from the values that it last sent in `share`."""
        return encode_values(values) != self._sent

    def share(self, comm: Comm, values: Sequence[ValueSpec], tables: MergedTables | None) -> None:
        """Gather the changed values on rank 0, merge the values of all ranks, and broadcast them. Collective.

        `tables` are the merged tensors of `LiveSource`, on rank 0 alone. Raise `LayoutError` if ranks disagree about a value.
        """
        own = encode_values(values)
        gathered = comm.gather(b"" if own == self._sent else own)
        self._sent = b""  # if this call fails, everything is sent again next time
        merged = None
        if gathered is not None:
            self._of_rank = [decode_values(data) if data else self._of_rank[rank] for rank, data in enumerate(gathered)]
            assert tables is not None
            merged = self._merged(tables) if any(gathered) else b""
        answer = comm.broadcast(merged)
        if answer:
            table, self._per_rank = msgpack.unpackb(answer, strict_map_key=False)
            self._table = tuple(ValueEntry(v.name, v.path, v.kind, v.data, link=v.link) for v in decode_values(table))
        self._sent = own

    def _merged(self, tables: MergedTables) -> bytes:
        """On rank 0, merge the values of all ranks, and encode the result."""
        per_rank: dict[str, list[bytes | None]] = {}
        entries: dict[str, ValueEntry] = {}
        plain: list[tuple[int, list[ValueSpec]]] = []
        for rank, values in enumerate(self._of_rank):
            plain.append((rank, [value for value in values if value.kind is not ValueKind.PER_RANK]))
            for value in values:
                if value.kind is ValueKind.PER_RANK:
                    of_ranks = per_rank.setdefault(value.name, [None] * len(self._of_rank))
                    of_ranks[rank] = value.data
                    entries[value.name] = ValueEntry(value.name, value.path, value.kind, None)
        merged = {entry.name: entry for entry in merge_values(plain, tables)}
        if both := sorted(merged.keys() & entries.keys()):
            raise LayoutError(f"{both[0]}: PerRank on some ranks, a plain value on others; pass the same kind on all ranks")
        if not self._may_lack:
            per_rank = {name: [data for data in of_ranks if data is not None] for name, of_ranks in per_rank.items()}
        table = [entry for _, entry in sorted({**merged, **entries}.items())]
        packed: bytes = msgpack.packb([encode_values(table), per_rank])
        return packed

    @property
    def num_bytes(self) -> int:
        """Memory in bytes of all values that this rank remembers."""
        entries = [*self._table, *(value for values in self._of_rank for value in values)]
        encoded = [*(entry.data for entry in entries), *(data for of_ranks in self._per_rank.values() for data in of_ranks)]
        return len(self._sent) + sum(len(data) for data in encoded if data is not None)

    @property
    def lost(self) -> dict[str, list[int]]:
        """For each `PerRank` name, the ranks on which it is missing; only with `may_lack`."""
        lost = {name: [rank for rank, data in enumerate(of_ranks) if data is None] for name, of_ranks in self._per_rank.items()}
        return {name: ranks for name, ranks in lost.items() if ranks}

    def added_to(self, catalog: Catalog) -> Catalog:
        """Return a copy of the catalog that also has the values of all ranks, as the last `share` merged them."""
        return replace(catalog, values_table=self._table)

    def decoded(
        self, table: Sequence[ValueEntry], old_names: Mapping[str, str], prefixes: Sequence[str], per_rank: Any
    ) -> dict[str, Any]:
        """Decode the values of a table, and return them by name: all values at or below the names `prefixes`.

        Parameters
        ----------
        old_names
            The name of each renamed value before it was renamed.
        per_rank
            Called with the list of all ranks' values of a `PerRank`, and the set of the ranks whose value is lost. Returns the
            one object to load.
        """
        out: dict[str, Any] = {}
        for entry in (entry for entry in table if is_below(entry.name, prefixes)):
            if entry.kind is ValueKind.PER_RANK:
                data = self._per_rank[old_names.get(entry.name, entry.name)]
                lost = frozenset(rank for rank, blob in enumerate(data) if blob is None)
                out[entry.name] = per_rank([None if blob is None else decode_value(blob, name=entry.name) for blob in data], lost)
            else:
                assert entry.data is not None
                out[entry.name] = decode_value(entry.data, name=entry.name)
        return out


class Overlaps(NamedTuple):
    """The destination tensors that share memory in an allowed way, by index.

    Attributes
    ----------
    identical
        Destinations that have the memory of their own source; nothing is copied for them.
    tied
        Groups of destinations that are one memory, and load from different names.
    """

    identical: frozenset[int]
    tied: tuple[tuple[int, ...], ...]


def find_overlaps(
    held: LocalShards, wanted: LocalShards, chosen: Collection[int], loads_from: Callable[[str, str], bool]
) -> Overlaps:
    """Find the destinations that share memory with a source, or with another destination.

    Raise `UsageError` if a destination shares memory with another source than its own, or only a part of its memory. Nothing was
    changed.

    Parameters
    ----------
    held, wanted
        The sources and the destinations on this rank.
    chosen
        The tensors of `wanted`, by index, that will be written.
    loads_from
        ``loads_from(destination, source)`` tells whether the destination of this name loads from the source of this name.
    """
    sources = {i: piece.tensor for i, piece in held.rows}
    targets = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
    # Sources come first in `memory` and `specs`: an index below len(sources) is a source, any other a destination.
    memory = [*sources.values(), *targets.values()]
    specs = [held.specs[i] for i in sources] + [wanted.specs[i] for i in targets]

    def memory_key(i: int) -> tuple[Any, ...]:
        """Return a key that two tensors share if they are the same elements at the same address."""
        return memory[i].data_ptr(), memory[i].dtype, specs[i].pieces

    index, identical, tied = list(targets), set[int](), []
    for shared in shared_memory(memory, piece_columns(specs)):
        of_src = [i for i in shared.targets if i < len(sources)]
        of_dst = [i for i in shared.targets if i >= len(sources)]
        for j in of_dst:
            # alike: sources (or, without any, destinations) that are exactly the same memory; other: one that is not
            alike = [i for i in (of_src or of_dst) if memory_key(i) == memory_key(j)]
            other = next((i for i in (of_src or of_dst) if i not in alike), j)
            if of_src and not any(loads_from(specs[j].name, specs[i].name) for i in alike):
                raise UsageError(
                    f"{specs[j].name}: its memory in dst is also that of {specs[of_src[0]].name} in src, which would be "
                    "overwritten while it is read; pass a copy on one side, or the same tensor under the same name on both"
                )
            if not of_src and other != j:
                raise UsageError(f"{specs[j].name}: shares a part of its memory with {specs[other].name} in dst; pass copies")
        if of_src:
            identical.update(index[j - len(sources)] for j in of_dst)
        else:
            tied.append(tuple(index[j - len(sources)] for j in of_dst))
    return Overlaps(frozenset(identical), tuple(tied))


class Spares:
    """Spare memory for destination tensors. It is copied into place only after every rank has received all of its parts.

    Parameters
    ----------
    wanted
        The destinations.
    chosen
        The indices of the tensors that get spare memory.
    may_lack
        Whether the source may lack some of the elements that the pieces of the destinations cover.
    """

    def __init__(self, wanted: LocalShards, chosen: Collection[int], *, may_lack: bool = False) -> None:
        tensors = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
        counts = {i: sum(piece.count for piece in wanted.specs[i].pieces) for i in tensors}
        # Tensors that may receive only some of their elements.
        self._partial = {i for i, tensor in tensors.items() if may_lack or counts[i] < tensor.numel()}
        self.memory = {
            i: torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device) for i, t in tensors.items()
        }

    def with_spares(self, wanted: LocalShards) -> LocalShards:
        """Return the destinations, with spare memory in place of their own for the chosen tensors."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i in self._partial:  # elements that nothing is loaded into must keep their values when `put` copies the whole tensor
            self.memory[i].copy_(own[i])
        rows = [(i, LocalPiece(self.memory.get(i, piece.tensor), piece.piece)) for i, piece in wanted.rows]
        return replace(wanted, rows=rows)

    def conflict(self, wanted: LocalShards, tied: Iterable[Sequence[int]]) -> MismatchError | None:
        """Compare the spare memory of tied destinations. Return an error if two received different bytes, else None."""
        for first, *others in tied:
            for other in others:
                raw = [self.memory[i].view(INTS[self.memory[i].element_size()]) for i in (first, other)]  # NaNs as their bits
                if not torch.equal(*raw):
                    names = wanted.specs[other].name, wanted.specs[first].name
                    return MismatchError(
                        f"{names[0]}: tied to {names[1]} in dst, but src holds different values for them; untie them"
                    )
        return None

    def put(self, wanted: LocalShards) -> None:
        """Copy the spare memory into the destinations that it stands for."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i, memory in self.memory.items():
            own[i].copy_(memory)
