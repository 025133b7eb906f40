"""Finding the newest whole generation among all nodes, and reading it from wherever its images are.

1. Each node lists the generations that it knows, and the files of them that its slots hold.
2. Rank 0 proposes the newest of which some node has each file. The load verifies what it reads; where it finds damage, nodes
   verify every block of what they have, each rank a part.
3. If each file has a copy without damage, that is the one; else the next older one is proposed. What was passed over is said.
   Nothing is written.
4. `open_images` makes it a source like any other: files of this node are read from its slots, others are asked of a rank that has
   them. Whoever asked verifies the blocks, so damage on the way is found as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgpack

from ..comm.links import Links, Serving, serving
from ..comm.protocol import Comm
from ..core.catalog.model import Catalog
from ..engine.loading.files import open_files
from ..errors import CheckpointError
from ..format.checksums import digests_file_bytes, wrong_blocks
from ..formats.source import Source
from ..storage import Storage
from ..storage.protocol import flat_bytes, read_parts
from .generations import NOTE, Generation, NodeImages, files_here, find_generations
from .topology import Topology

VERIFY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Why a generation is not loaded: a line for people, and whether it is damaged, or went with nodes that are lost."""

    line: str
    is_damaged: bool


@dataclass(frozen=True, slots=True)
class Restorable:
    """A whole generation, and who has its files.

    Attributes
    ----------
    generation
        Which.
    owners
        By key: the ranks of the nodes that have the file whole.
    """

    generation: Generation
    owners: Mapping[str, tuple[int, ...]]

    def files_of(self, rank: int) -> list[str]:
        """List the files that this rank is to copy, of those that its node has: each file is one rank's."""
        return [key for n, (key, ranks) in enumerate(sorted(self.owners.items())) if ranks[n % len(ranks)] == rank]

    def is_local(self, topology: Topology) -> bool:
        """Whether every node has every file."""
        return all(len({topology.node_of[rank] for rank in ranks}) == len(topology.ids) for ranks in self.owners.values())


def find_newest(
    comm: Comm,
    folder: Path,
    topology: Topology,
    wanted: Callable[[Generation], bool],
    excluded: Sequence[str] = (),
    *,
    verify: bool = True,
) -> tuple[Restorable | None, dict[str, PassedOver]]:
    """Find the newest generation that is whole on the nodes of the job, without a damaged block. Collective.

    Also returns, by save id, the newer ones that are not whole.

    Parameters
    ----------
    wanted
        Asked on the nodes that know a generation: False for those that are superseded.
    excluded
        Save ids that are not to be taken.
    verify
        Whether to verify every block. Without it, headers alone are believed, for a load that verifies what it reads.
    """
    leads, ids = topology.leads(comm.rank), {*topology.ids}
    known = {g.save_id: g for g in find_generations(folder)}
    candidates = [g for g in known.values() if wanted(g) and g.save_id not in excluded]
    listed = [
        (*g.order, -1 if g.is_damaged else len(g.holders), files_here(folder, g) if leads else [], _lost(g, ids))
        for g in candidates
    ]
    gathered = comm.gather(msgpack.packb(listed))
    passed: dict[str, PassedOver] = {}
    for save_id, line, is_damaged, sender in _proposals(comm, gathered):
        if line:
            passed[save_id] = PassedOver(line, is_damaged)
            continue
        found = _verified(comm, folder, topology, _shared(comm, known.get(save_id), sender), verify=verify)
        if not isinstance(found, str):
            return Restorable(*found), passed
        passed[save_id] = PassedOver(found, is_damaged=True)
    return None, passed


def _lost(generation: Generation, ids: set[str]) -> bool:
    """Whether files of a generation lay on nodes alone that are not in the job any more."""
    return any(ids.isdisjoint(nodes) for nodes in map(set, generation.holders.values()))


def _proposals(comm: Comm, gathered: Sequence[bytes] | None) -> Iterator[tuple[str, str, bool, int]]:
    """Yield save ids, the newest first, the same on all ranks.

    Each with a line where it is not whole, with whether it is damaged then, and with the rank that sends the generation to all:
    −1 where all know it.
    """
    message = None
    if gathered is not None:
        found: dict[tuple[int, int, int, str], _Told] = {}
        for rank, data in enumerate(gathered):
            for attempt, step, number, save_id, num_files, keys, is_lost in msgpack.unpackb(data):
                told = found.setdefault((attempt, step, number, save_id), _Told())
                told.keys.update(keys)
                told.is_lost |= is_lost
                if num_files >= 0:  # else its file is damaged there
                    told.num_files = num_files
                    told.knowing.append(rank)
        message = msgpack.packb([told.proposal(order, comm.size) for order, told in sorted(found.items(), reverse=True)])
    for save_id, line, is_damaged, sender in msgpack.unpackb(comm.broadcast(message)):
        yield str(save_id), str(line), bool(is_damaged), int(sender)


@dataclass(slots=True)
class _Told:
    """What all nodes together say of a generation: how many files it has, those that are whole, and the ranks that know it."""

    num_files: int = 0
    keys: set[str] = field(default_factory=set)
    knowing: list[int] = field(default_factory=list)
    is_lost: bool = False

    def proposal(self, order: tuple[int, int, int, str], size: int) -> tuple[str, str, bool, int]:
        """Return what `_proposals` yields."""
        _, step, _, save_id = order
        gone, line = self.num_files - len(self.keys), ""
        if not self.knowing:
            line = f"step {step} in memory: its catalog is damaged on every node that has it"
        elif gone:
            why = "on no node that is left" if self.is_lost else "damaged, or removed, on every node that had them"
            line = f"step {step} in memory: {gone} of {self.num_files} files are {why}"
        return save_id, line, not self.is_lost, -1 if len(self.knowing) == size else next(iter(self.knowing), -1)


def _shared(comm: Comm, known: Generation | None, sender: int) -> Generation:
    """Return a generation that the sender knows, on all ranks; nothing is sent where all know it."""
    if sender < 0:
        assert known is not None
        return known
    gathered = comm.gather(known.encoded() if known is not None and comm.rank == sender else b"")
    data = comm.broadcast(None if gathered is None else gathered[sender])
    return NOTE.decoded(data, where="a generation from another node")


def _verified(
    comm: Comm, folder: Path, topology: Topology, generation: Generation, *, verify: bool
) -> tuple[Generation, dict[str, tuple[int, ...]]] | str:
    """Have every node verify what it has of a generation; who has what, or why it is not whole."""
    local = topology.ranks_of[topology.node_of[comm.rank]]
    with closing(NodeImages(folder, generation.save_id)) as images:
        mine = sorted(images.keys() & frozenset(generation.holders))[local.index(comm.rank) :: len(local)]
        whole = whole_files(cast(Storage, images), generation.decoded_catalog(), mine) if verify else mine
    answers = comm.gather(msgpack.packb((whole, [key for key in mine if key not in whole])))
    verdict = None
    if answers is not None:
        owners: dict[str, list[int]] = {}
        damaged = []
        for rank, answer in enumerate(answers):
            good, bad = msgpack.unpackb(answer)
            damaged += bad
            for key in good:
                owners.setdefault(key, []).extend(topology.ranks_of[topology.node_of[rank]])
        lost = sorted(set(generation.holders) - set(owners))
        verdict = msgpack.packb((owners, lost, damaged))
    owners, lost, damaged = msgpack.unpackb(comm.broadcast(verdict))
    if lost:
        return f"step {generation.step} in memory: damaged in every copy that is left: {', '.join(lost[:3])}"
    return generation, {str(key): tuple(ranks) for key, ranks in owners.items()}


def whole_files(storage: Storage, catalog: Catalog, keys: Sequence[str]) -> list[str]:
    """Verify files block by block, and return the keys of the files that are whole."""
    index_of = {file.key: index for index, file in enumerate(catalog.files)}
    whole = []
    for key in keys:
        index = index_of[key]
        with suppress(CheckpointError):
            digests = open_files(storage, catalog, [index], [index])[index]
            parts = read_parts(storage, key, catalog.files[index].size, VERIFY_BYTES)
            if not any(wrong_blocks([part], low, digests.values, digests.block_bytes) for low, part in parts):
                whole.append(key)
    return whole


class JobImages:
    """The files of one generation, wherever they are in the job: what loading needs of a `Storage`."""

    url = "memory of the job's nodes"

    def __init__(
        self, images: NodeImages, catalog: Catalog, owners: Mapping[str, tuple[int, ...]], rank: int, server: Serving | None
    ) -> None:
        self._images, self._server = images, server
        self.joins_windows = server is not None
        """Whether to read many windows at once: a read of this node's memory has no latency, and what is hashed after each one
        is in the processor's cache still."""
        self._sizes: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        for number, file in enumerate(catalog.files):
            self._sizes[file.key] = file.size
            self._sizes[file.digests_key] = digests_file_bytes(file.size)
            ranks = owners[file.key]
            if rank not in ranks:  # readers and files are spread over those that have them
                self._asked[file.key] = self._asked[file.digests_key] = ranks[(rank + number) % len(ranks)]

    def size(self, key: str) -> int | None:
        """Look up the size of a file."""
        return self._sizes.get(key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers from a byte of a file on, from this node's memory or another's."""
        owner = self._asked.get(key)
        if owner is None:
            self._images.read_into(key, offset, buffers)
            return
        assert self._server is not None
        self._server.read(owner, key, offset, [flat_bytes(buffer) for buffer in buffers])

    def read(self, key: str, limit: int) -> bytes:
        """Read a whole file."""
        data = bytearray(self._sizes[key])  # as the catalog says, and so below any limit
        self.read_into(key, 0, [memoryview(data)])
        return bytes(data)


@contextmanager
def open_images(comm: Comm, folder: Path, found: Restorable, make_links: Callable[[str], Links] | None) -> Iterator[Source]:
    """Open a generation as a source for loading, on every rank.

    Parameters
    ----------
    make_links
        Makes a group of all ranks of the job, by a name of its own; None where every node has every file.
    """
    catalog = found.generation.decoded_catalog()
    keys = [key for file in catalog.files for key in (file.key, file.digests_key)]
    images = NodeImages(folder, found.generation.save_id)
    with ExitStack() as stack:
        stack.callback(images.close)
        server = None
        if make_links is not None:
            name = comm.broadcast(uuid.uuid4().hex.encode() if comm.rank == 0 else None).decode()
            server = stack.enter_context(serving(make_links(name), keys, images.read_into))
        # Loading uses no other half of a store than this one.
        storage = cast(Storage, JobImages(images, catalog, found.owners, comm.rank, server))
        yield Source(storage, catalog)
