"""Finding the newest whole generation (checkpoint in memory) among all nodes, and reading it from the nodes that hold its files.

1. Each node lists the generations that it knows, and their files in its slots.
2. Rank 0 proposes the newest generation whose files are all on some node. The load verifies every block that it reads. If it
   finds damage, each node verifies all its blocks of the generation, divided over its ranks.
3. If every file has an undamaged copy, the generation is loaded. Otherwise it is passed over with a warning, and the next older
   one is proposed. Nothing is written.
4. `open_images` makes the generation a source like any other: files of this node are read from its slots, other files are
   requested from a rank that has them. The reading rank verifies the blocks, so damage on the way is found too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..comm.links import Links, Serving
from ..comm.protocol import Comm, merge_of_all, value_of_first
from ..core.catalog.model import Catalog
from ..errors import CheckpointError
from ..format.files import digests_file_bytes
from ..formats.source import Source
from ..storage import Storage
from ..storage.protocol import DISK, flat_bytes
from .generations import NOTE, Generation, NodeImages, files_here, find_generations
from .persist import is_older, verified_parts
from .topology import Topology

PEER_BYTES = 32 << 20
"""Number of bytes that are requested from another node at once."""


class PassedOver(NamedTuple):
    """The reason why a checkpoint in memory is not loaded, and whether it is damage (else the nodes that had it are lost)."""

    line: str
    is_damaged: bool


@dataclass(frozen=True, slots=True)
class Restorable:
    """A checkpoint in memory, and the owners of its files. Each file is whole on at least one node.

    Attributes
    ----------
    generation
        The description of the checkpoint.
    owners
        For the key of each file, the ranks of the nodes that have the file whole.
    """

    generation: Generation
    owners: Mapping[str, Sequence[int]]

    def files_of(self, rank: int) -> list[str]:
        """List the files that a rank copies to the store: each file is assigned to one of its owners."""
        return [key for n, (key, ranks) in enumerate(sorted(self.owners.items())) if ranks[n % len(ranks)] == rank]

    def is_local(self, topology: Topology) -> bool:
        """Whether every node has every file of the checkpoint."""
        return all(len({topology.node_of[rank] for rank in ranks}) == len(topology.ids) for ranks in self.owners.values())


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search for a checkpoint in the memory of all nodes.

    Attributes
    ----------
    generation
        The newest whole generation, or None.
    passed
        The newer generations that are not whole: the save id of each, mapped to the reason.
    least
        The oldest step of the search: the answer of `at_least` on rank 0.
    """

    generation: Restorable | None
    passed: Mapping[str, PassedOver]
    least: int


def find_newest(
    comm: Comm,
    folder: Path,
    topology: Topology,
    wanted: Callable[[Generation], bool],
    at_least: Callable[[], int],
    stored: Callable[[int], str],
    excluded: Sequence[str],
    *,
    verify: bool,
) -> Found:
    """Find the newest generation (checkpoint in memory) that is whole on the nodes of the job. Collective.

    Parameters
    ----------
    wanted
        Called on each node for the generations that it knows; returns False for a superseded one.
    at_least
        Called on rank 0; generations of older steps than it returns are not considered.
    stored
        Called on rank 0 with a step; returns the id of its save in the store. An older generation is not considered.
    excluded
        Ids of saves to leave out.
    verify
        Verify every block in memory. Otherwise only the headers of slots are read; the load then verifies the blocks.
    """
    leads, ids = topology.leads(comm.rank), {*topology.ids}
    by_save_id = {g.save_id: g for g in find_generations(folder)}
    candidates = [g for g in by_save_id.values() if wanted(g) and g.save_id not in excluded]
    listed = [
        (*g.order, -1 if g.is_damaged else len(g.holders), g.older, files_here(folder, g) if leads else [], _lost(g, ids))
        for g in candidates
    ]
    least, proposals = _proposals(comm, topology, listed, at_least, stored)
    passed: dict[str, PassedOver] = {}
    for proposal in proposals:
        if proposal.line:
            passed[proposal.save_id] = PassedOver(proposal.line, proposal.is_damaged)
            continue
        generation, owners = _shared(comm, by_save_id.get(proposal.save_id), proposal.sender), proposal.owners
        damage, owners = _verified(comm, folder, topology, generation) if verify else ("", owners)
        if not damage:
            return Found(Restorable(generation, owners), passed, least)
        passed[proposal.save_id] = PassedOver(damage, is_damaged=True)
    return Found(None, passed, least)


def _lost(generation: Generation, ids: set[str]) -> bool:
    """Whether some file of a generation was only on nodes that are no longer in the job; `ids` are the ids of the job's nodes."""
    return any(ids.isdisjoint(nodes) for nodes in map(set, generation.holders.values()))


class _Proposal(NamedTuple):
    """Rank 0's proposal to load one generation (checkpoint in memory), or the reason why it cannot be loaded.

    Attributes
    ----------
    line, is_damaged
        The reason why the generation is not whole, and whether that is damage; an empty line if it is whole.
    sender
        The rank that sends the generation to all; −1 if all ranks know it.
    owners
        As in `Restorable`, by the headers of slots.
    """

    save_id: str
    line: str
    is_damaged: bool
    sender: int
    owners: Mapping[str, Sequence[int]]


def _proposals(
    comm: Comm, topology: Topology, listed: Sequence[Any], at_least: Callable[[], int], stored: Callable[[int], str]
) -> tuple[int, list[_Proposal]]:
    """On all ranks, return rank 0's `at_least`, and its proposals, the newest first. Collective.

    `listed` has the generations that this rank knows.
    """

    def proposed(of_ranks: list[Any]) -> Any:
        least = at_least()
        found: dict[tuple[Any, ...], _Told] = {}
        for rank, of_rank in enumerate(of_ranks):
            for *order, num_files, older, keys, is_lost in of_rank:
                if order[1] < least:
                    continue
                told = found.setdefault(tuple(order), _Told())
                _own(told.owners, keys, topology, rank)
                told.is_lost |= is_lost
                if num_files >= 0:  # −1: the rank's note of the generation is damaged
                    told.num_files, told.older = num_files, older
                    told.knowing.append(rank)
        proposals = []
        for order, told in sorted(found.items(), reverse=True):
            _, step, _, save_id = order
            gone, line = told.num_files - len(told.owners), ""
            if not told.knowing:
                line = f"step {step} in memory: its catalog is damaged on every node that has it"
            elif is_older(save_id, told.older, stored(step)):
                continue
            elif gone:
                why = "on no node that is left" if told.is_lost else "damaged, or removed, on every node that had them"
                line = f"step {step} in memory: {gone} of {told.num_files} files are {why}"
            sender = -1 if len(told.knowing) == comm.size else next(iter(told.knowing), -1)
            proposals.append(_Proposal(save_id, line, not told.is_lost, sender, {} if line else told.owners))
        return least, proposals

    least, proposals = merge_of_all(comm, listed, proposed)
    return least, [_Proposal(*fields) for fields in proposals]


def _own(owners: dict[str, list[int]], keys: Sequence[str], topology: Topology, rank: int) -> None:
    """Add all ranks of the node of `rank` to the owners of some files, which that node has."""
    for key in keys:
        owners.setdefault(key, []).extend(topology.ranks_of[topology.node_of[rank]])


@dataclass(slots=True)
class _Told:
    """The facts of all nodes about a generation (checkpoint in memory), such as its number of files and their owners.

    `knowing` are the ranks whose node has the generation file undamaged. `is_lost` says that some shard file was only on nodes
    that have left the job.
    """

    num_files: int = 0
    older: Sequence[str] = ()
    owners: dict[str, list[int]] = field(default_factory=dict)
    knowing: list[int] = field(default_factory=list)
    is_lost: bool = False


def _shared(comm: Comm, known: Generation | None, sender: int) -> Generation:
    """Send a generation that rank `sender` knows to all ranks, and return it.

    With a negative `sender`, all know it: return `known`.
    """
    if sender < 0:
        assert known is not None
        return known
    gathered = comm.gather(known.encoded() if known is not None and comm.rank == sender else b"")
    data = comm.broadcast(None if gathered is None else gathered[sender])
    return NOTE.decoded(data, where="a generation from another node")


def _verified(comm: Comm, folder: Path, topology: Topology, generation: Generation) -> tuple[str, Mapping[str, Sequence[int]]]:
    """Let each node verify the files that it has of a generation (a checkpoint in memory). Collective.

    Return a line about files that are whole on no node (empty if there are none), and for each other file the ranks of the nodes
    that have it whole.
    """
    local = topology.ranks_of[topology.node_of[comm.rank]]
    with closing(NodeImages(folder, generation.save_id)) as images:
        own_keys = sorted(images.keys() & frozenset(generation.holders))[local.index(comm.rank) :: len(local)]
        whole = whole_files(cast(Storage, images), generation.decoded_catalog(), own_keys)

    def merged(of_ranks: list[Any]) -> Any:
        owners: dict[str, list[int]] = {}
        for rank, keys in enumerate(of_ranks):
            _own(owners, keys, topology, rank)
        return owners

    owners = merge_of_all(comm, whole, merged)
    lost = sorted(set(generation.holders) - set(owners))
    damage = f"step {generation.step} in memory: damaged in every copy that is left: {', '.join(lost[:3])}" if lost else ""
    return damage, owners


def whole_files(storage: Storage, catalog: Catalog, keys: Sequence[str]) -> list[str]:
    """Verify files block by block, and return the keys of the files that are undamaged."""
    whole = []
    for key in keys:
        with suppress(CheckpointError):
            for _ in verified_parts(storage, catalog, key):
                pass
            whole.append(key)
    return whole


class JobImages:
    """The files of one checkpoint in the memory of all nodes of the job, with the methods of `Storage` that a load needs."""

    url = "memory of the job's nodes"

    def __init__(
        self, images: NodeImages, catalog: Catalog, owners: Mapping[str, Sequence[int]], rank: int, server: Serving | None
    ) -> None:
        self._images, self._server = images, server
        self._sizes: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        for number, file in enumerate(catalog.files):
            self._sizes[file.key] = file.size
            self._sizes[file.digests_key] = digests_file_bytes(file.size)
            ranks = owners[file.key]
            if rank not in ranks:  # spread readers and files over the owners
                self._asked[file.key] = self._asked[file.digests_key] = ranks[(rank + number) % len(ranks)]
        # Large reads from other nodes, as each request crosses the network three times.
        self.hints = replace(DISK, read_bytes=PEER_BYTES) if self._asked else DISK

    @property
    def asked(self) -> frozenset[str]:
        """The keys of the files of the checkpoint that this rank reads from other nodes."""
        return frozenset(self._asked)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes; None if the checkpoint has no such file."""
        return self._sizes.get(key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes of a file from `offset` on, from the memory of this node or another one."""
        owner = self._asked.get(key)
        if owner is None:
            self._images.read_into(key, offset, buffers)
            return
        assert self._server is not None
        self._server.read(owner, key, offset, [flat_bytes(buffer) for buffer in buffers])

    def read(self, key: str, limit: int) -> bytes:
        """Return the bytes of a whole file of the checkpoint."""
        data = bytearray(self._sizes[key])  # sizes come from the catalog, which is below any limit
        self.read_into(key, 0, [memoryview(data)])
        return bytes(data)


@contextmanager
def open_images(comm: Comm, folder: Path, found: Restorable, make_links: Callable[[str], Links] | None) -> Iterator[Source]:
    """Open a checkpoint in the memory of nodes on every rank, as the source of loads in a ``with`` block. Collective.

    Parameters
    ----------
    make_links
        Makes the links between all ranks of the job, for a new name; None if every node has every file.
    """
    catalog = found.generation.decoded_catalog()
    keys = [key for file in catalog.files for key in file.keys]
    with closing(NodeImages(folder, found.generation.save_id)) as images, ExitStack() as stack:
        server = None
        if make_links is not None:
            name = value_of_first(comm, lambda: uuid.uuid4().hex)
            server = stack.enter_context(Serving(make_links(name), keys, images.lend))
        files = JobImages(images, catalog, found.owners, comm.rank, server)
        yield Source(cast(Storage, files), catalog, on_peers=files.asked)  # a load uses only these methods of a storage
