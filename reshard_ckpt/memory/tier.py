"""Saves into the memory of nodes: slots, images, copies on other nodes, and the commit of a generation.

1. Before the state is staged, ranks tell each other the sizes of their images. Each takes slots for its own images and for the copies
   that it holds; where one of them has no room, all leave the tier out, and the save goes to the store.
2. Staging copies the state straight into the slot, which is the staging ring. A thread hashes the blocks and seals the slot.
3. The slot goes to the ranks that hold its copies. They verify each block before they seal theirs.
4. Receipts go to rank 0, which makes the catalog that the save would have in the store. Each node keeps it as a generation; when all
   have said so, the save is committed, and the oldest generation is free.

A slot is refilled only if no kept generation has its images in it; so at every instant a whole generation is in memory.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from ..core.report import SaveReport
from ..engine.saving.commit import catalog_of, compare_replicas, file_entries
from ..engine.saving.messages import Receipt, WrittenFile, decode_receipt, encode_receipt
from ..engine.saving.options import SaveJob
from ..engine.saving.staging import Staging, image_addresses, ring_bytes
from ..engine.saving.write import FileLayout, lay_out, member_offsets
from ..errors import CorruptError, PeerError, StorageError, UsageError
from ..format.catalog import encode_catalog
from ..format.checksums import BlockHasher, decode_digests, digest128, digests_file_bytes, wrong_blocks
from ..format.keys import digests_key
from .generations import Generation, drop_generations, find_generations, keep_generation
from .links import Links
from .node import SLOT_SUFFIX, free_bytes
from .slots import ALIGN_BYTES, HEADER_BYTES, Extent, NoRoom, Slot, SlotTable, decode_table
from .topology import Topology


@dataclass(frozen=True, slots=True)
class Memory:
    """Keep the newest checkpoints of a run in the memory of its nodes, for ``Manager(memory=…)``.

    Parameters
    ----------
    copies
        How many other nodes hold a copy of what a node has.
    generations
        How many saves to keep. The memory of one more is needed while the next is being filled.
    max_bytes
        The most that the tier may take on a node, of all its ranks and copies together; by default what there is.
    folder
        A tmpfs that outlives the job's processes.
    """

    copies: int = 1
    generations: int = 2
    max_bytes: int | None = None
    folder: str = "/dev/shm"

    def __post_init__(self) -> None:
        for option, least in (("copies", 0), ("generations", 1)):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Memory({option}={value!r}): pass a whole number, {least} or more")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise UsageError(f"Memory(max_bytes={self.max_bytes!r}): pass a number of bytes above 0, or None")


@dataclass(slots=True)
class HeldSlot:
    """A slot of this process, and the save that it holds or is being filled with."""

    slot: Slot
    save_id: str = ""


class Tier:
    """The memory tier of one rank.

    Parameters
    ----------
    options
        What the user chose.
    folder
        The run's folder on this node.
    topology
        The nodes of the job.
    rank
        This rank.
    named_store
        Returns keys of the job's store that nobody else uses, by a name; None where this process is alone.
    attempt
        The number of this attempt of the run.
    due
        Whether the generation of a step goes to the store; asked on rank 0 at its commit.
    """

    def __init__(
        self,
        options: Memory,
        folder: Path,
        topology: Topology,
        rank: int,
        named_store: Callable[[str], Any],
        attempt: int,
        due: Callable[[int], bool],
        *,
        timeout_s: float,
    ) -> None:
        self.options, self.folder, self.topology, self.rank = options, folder, topology, rank
        self.attempt, self.num_skipped = attempt, 0
        self._named_store, self._timeout_s, self._due = named_store, timeout_s, due
        self._slots: dict[int, list[HeldSlot]] = {}
        self._lock = threading.Lock()
        self._kept: list[str] = []
        self._pinned: set[str] = set()
        self._links: Links | None = None
        self._epoch = 0
        self._next_slot = 0
        self._warned = False

    # Slots

    def target(self, job: SaveJob, step: int) -> MemoryTarget | None:
        """Take slots for a save on all ranks, or on none: then None, and a warning the first time. Collective."""
        layouts = lay_out(job.local_shards, job.agreed.assignment, job.comm.rank)
        used = ring_bytes(layouts) + sum(_aligned(digests_file_bytes(layout.num_bytes)) for layout in layouts)
        gathered = job.comm.gather(used.to_bytes(8, "little"))
        sizes = np.frombuffer(job.comm.broadcast(None if gathered is None else b"".join(gathered)), np.int64).tolist()
        taken: dict[int, HeldSlot] = {}
        reason = ""
        try:
            self._check_budget(sizes)
            for source in (self.rank, *self.topology.sources(self.rank)):
                taken[source] = self._take(source, sizes[source], job.save_id)
        except StorageError as error:
            reason = str(error)
        votes = job.comm.gather(reason.encode())
        refused = job.comm.broadcast(None if votes is None else next((vote for vote in votes if vote), b"")).decode()
        if not refused:
            return MemoryTarget(self, step, taken, sizes)
        for held in taken.values():
            held.save_id = ""
        self._skip(refused)
        return None

    def _skip(self, reason: str) -> None:
        self.num_skipped += 1
        if self.rank == 0 and not self._warned:
            self._warned = True
            warnings.warn(f"this save goes to the store, not to memory, and so may later ones: {reason}", stacklevel=6)

    def _check_budget(self, sizes: Sequence[int]) -> None:
        local = self.topology.ranks_of[self.topology.node_of[self.rank]]
        per_slot = {
            rank: sum(HEADER_BYTES + _rounded(sizes[source]) for source in (rank, *self.topology.sources(rank))) for rank in local
        }
        wanted = (self.options.generations + 1) * sum(per_slot.values())
        if self.options.max_bytes is not None and wanted > self.options.max_bytes:
            raise NoRoom(
                f"the tier would take {wanted:,} bytes of this node's memory, {self.options.generations + 1} times the images of its "
                f"ranks and copies, above Memory(max_bytes={self.options.max_bytes:,})"
            )

    def _take(self, source: int, num_bytes: int, save_id: str) -> HeldSlot:
        """Take a slot for the images of a rank: one that holds nothing that is kept, or a new one."""
        with self._lock:
            slots = self._slots.setdefault(source, [])
            held = next((one for one in slots if one.save_id not in {*self._kept, *self._pinned}), None)
            if held is None and len(slots) > self.options.generations:
                # One generation is being written to the store: the oldest other one goes before its time, but never the newest.
                oldest = [save_id for save_id in self._kept[:-1] if save_id not in self._pinned]
                held = next((one for save_id in oldest for one in slots if one.save_id == save_id), None)
                if held is None:
                    raise NoRoom(
                        "the generations in memory are still being written to the store, which is slower than saves come"
                    )
            if held is not None and held.slot.num_bytes < num_bytes:
                slots.remove(held)
                held.slot.close(remove=True)
                held = None
            if held is None:
                held = HeldSlot(self._new_slot(num_bytes))
                slots.append(held)
            held.slot.void()
            held.save_id = save_id
            return held

    def _new_slot(self, num_bytes: int) -> Slot:
        local = len(self.topology.ranks_of[self.topology.node_of[self.rank]])
        # The other ranks of the node allocate at the same time.
        free, wanted = free_bytes(str(self.folder)), local * (HEADER_BYTES + _rounded(num_bytes))
        if wanted > free:
            raise NoRoom(f"{self.folder}: a slot for each of {local} ranks takes {wanted:,} bytes, and {free:,} are free")
        name = f"{self.attempt:08d}-{self.rank:05d}-{self._next_slot}{SLOT_SUFFIX}"
        self._next_slot += 1
        return Slot(str(self.folder / name), num_bytes)

    def free(self, save_id: str) -> None:
        """Make the slots of a save that failed free again."""
        with self._lock:
            for held in self._all_slots():
                if held.save_id == save_id:
                    held.slot.void()
                    held.save_id = ""

    def unpin(self, save_id: str) -> None:
        """Let the slots of a save that is in the store now be refilled once its generation is no longer kept."""
        with self._lock:
            self._pinned.discard(save_id)

    def _all_slots(self) -> list[HeldSlot]:
        return [held for slots in self._slots.values() for held in slots]

    def close(self) -> None:
        """Let go of the slots, which stay in memory with what they hold."""
        for held in self._all_slots():
            held.slot.close()

    # Copies

    def copy(self, taken: Mapping[int, HeldSlot], sizes: Sequence[int], table: SlotTable) -> list[int]:
        """Send this rank's sealed slot to the ranks that hold its copies, and fill the copies that it holds.

        Returns
        -------
        list of int
            The ranks whose copies are here, every block verified. Where copying failed, none, with a warning.
        """
        sources = self.topology.sources(self.rank)
        targets = self.topology.targets[self.rank]
        if not sources and not targets:
            return []
        try:
            links, members = self._open_links()
            head = torch.frombuffer(bytearray(table.encoded().ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
            heads = {source: torch.empty(HEADER_BYTES, dtype=torch.uint8) for source in sources}
            links.swap({members.index(t): head for t in targets}, {members.index(s): heads[s] for s in sources})
            body = taken[self.rank].slot.region()[: sizes[self.rank]]
            bodies = {source: taken[source].slot.region()[: sizes[source]] for source in sources}
            links.swap({members.index(t): body for t in targets}, {members.index(s): bodies[s] for s in sources})
        except PeerError as error:
            self._links = None
            warnings.warn(f"this save has fewer copies in memory: {error}", stacklevel=2)
            return []
        held = []
        for source in sources:
            try:
                seal_copy(taken[source].slot, bytes(heads[source].numpy()))
                held.append(source)
            except (CorruptError, NoRoom) as error:
                warnings.warn(f"the copy of rank {source}'s images is not used: {error}", stacklevel=2)
        return held

    def _open_links(self) -> tuple[Links, tuple[int, ...]]:
        number, members = self.topology.group_of(self.rank)
        if self._links is None:
            store = self._named_store(f"{number}/{self._epoch}")
            self._links = Links(store, members.index(self.rank), len(members), timeout_s=self._timeout_s)
        return self._links, members

    # Commit

    def commit(self, job: SaveJob, step: int, receipt: Receipt, held: Sequence[int]) -> tuple[Generation, int, bool]:
        """Make the catalog on rank 0, keep the generation on every node, and free what is older. Collective.

        Returns
        -------
        Generation
            What was committed.
        int
            How many copies each image has at least.
        bool
            Whether it goes to the store; its slots are pinned then.
        """
        comm, topology = job.comm, self.topology
        gathered = comm.gather(msgpack.packb((encode_receipt(receipt), list(held))))
        message = None
        if gathered is not None:
            pairs = [msgpack.unpackb(data) for data in gathered]
            message = msgpack.packb(self._published(job, step, [decode_receipt(r) for r, _ in pairs], [h for _, h in pairs]))
        fields = msgpack.unpackb(comm.broadcast(message))
        generation = Generation(
            fields["attempt"],
            fields["step"],
            fields["save_id"],
            fields["catalog"],
            {k: tuple(v) for k, v in fields["holders"].items()},
        )
        if topology.leads(self.rank):
            keep_generation(self.folder, generation)
        comm.gather(b"")  # every node has it: only now may an older one go
        comm.broadcast(b"" if comm.rank == 0 else None)
        if topology.group_of(self.rank)[0] in fields["failed"]:
            self._links, self._epoch = None, self._epoch + 1
        self._committed(generation, pin=fields["persist"])
        return generation, int(fields["copies"]), bool(fields["persist"])

    def _published(self, job: SaveJob, step: int, receipts: Sequence[Receipt], held: Sequence[Sequence[int]]) -> dict[str, Any]:
        plan = job.agreed.plan
        assert plan is not None
        compare_replicas(plan.checks, plan.tables.names, receipts)
        files = file_entries(receipts)
        catalog = catalog_of(plan, job.agreed.values, receipts, files, save_id=job.save_id, metadata=job.metadata)
        topology = self.topology
        holding: list[list[str]] = [[topology.ids[node]] for node in topology.node_of]
        for rank, sources in enumerate(held):
            for source in sources:
                holding[source].append(topology.ids[topology.node_of[rank]])
        late = {rank for rank in range(len(receipts)) if len(holding[rank]) <= topology.most_copies}
        return {
            "attempt": self.attempt,
            "step": step,
            "save_id": job.save_id,
            "catalog": encode_catalog(catalog),
            "holders": {file.key: holding[rank] for rank, receipt in enumerate(receipts) for file in receipt.files},
            "copies": min(len(nodes) - 1 for nodes in holding),
            "persist": self._due(step),
            "failed": sorted({topology.group_of(rank)[0] for rank in late}),
        }

    def _committed(self, generation: Generation, *, pin: bool) -> None:
        """Keep this generation, and forget the oldest: own slots are free, those of dead processes go."""
        with self._lock:
            if pin:
                self._pinned.add(generation.save_id)
            self._kept = [*self._kept, generation.save_id][-self.options.generations :]
            pinned, own = set(self._pinned), {held.slot.path for held in self._all_slots()}
        if not self.topology.leads(self.rank):
            return
        found = find_generations(self.folder)
        old = [g for g in found[: -self.options.generations] if g.save_id not in pinned]
        drop_generations(self.folder, [g.name for g in old])
        kept = {g.save_id for g in found} - {g.save_id for g in old}
        remove_dead_slots(self.folder, kept, own)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def remove_dead_slots(folder: Path, kept: set[str], own: set[str]) -> None:
    """Remove slots of processes that are gone, if they hold no save that is kept."""
    for path in folder.glob(f"*{SLOT_SUFFIX}"):
        if str(path) in own:
            continue
        with suppress(OSError, StorageError, CorruptError):
            slot = Slot(str(path), 0)  # refused where its process is alive
            table = slot.table
            slot.close(remove=table is None or table.save_id not in kept)


def seal_copy(slot: Slot, head: bytes) -> None:
    """Verify every block of images that came from another rank, and seal the slot.

    Raises
    ------
    CorruptError
        A block differs from its digest: the slot stays void.
    """
    table = decode_table(head, slot.size, where="the copy that came from another rank")
    if table is None:
        raise CorruptError("the copy that came from another rank has no header")
    for key, extent in table.files.items():
        digests_extent = table.files.get(digests_key(key))
        if digests_extent is None or key == digests_key(key):
            continue
        digests = decode_digests(slot.view(digests_extent), extent.size, name=digests_key(key))
        if wrong_blocks([slot.view(extent)], 0, digests.values, digests.block_bytes):
            raise CorruptError(f"{key} was damaged on its way to another node's memory")
    slot.seal(table)


class MemoryTarget:
    """Where the images of one save go: into slots of this rank and of those that hold its copies."""

    def __init__(self, tier: Tier, step: int, taken: Mapping[int, HeldSlot], sizes: Sequence[int]) -> None:
        self._tier, self._step, self._taken, self._sizes = tier, step, taken, sizes
        self.generation: Generation | None = None
        self.copies, self.persists = 0, False

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        """Return the slot's memory: staging fills the images in place."""
        return self._taken[self._tier.rank].slot.region()[: ring_bytes(layouts)]

    def finish(self, job: SaveJob, layouts: Sequence[FileLayout], staging: Staging, marks: NDArray[np.uint64]) -> SaveReport:
        """Hash and seal the images, copy them to other nodes, and commit."""
        try:
            receipt, table = self._sealed(job, layouts, staging, marks)
            with job.recorder.step("copy"):
                held = self._tier.copy(self._taken, self._sizes, table)
            self.generation, self.copies, self.persists = self._tier.commit(job, self._step, receipt, held)
        except BaseException:
            self._tier.free(job.save_id)
            raise
        total = None if job.comm.rank else sum(file.size for file in self.generation.decoded_catalog().files)
        return SaveReport(job.path, job.save_id, receipt.num_bytes, total, 0.0, 0.0)

    def _sealed(
        self, job: SaveJob, layouts: Sequence[FileLayout], staging: Staging, marks: NDArray[np.uint64]
    ) -> tuple[Receipt, SlotTable]:
        slot = self._taken[self._tier.rank].slot
        num_items = sum(len(layout.members) for layout in layouts)
        file, offset = np.zeros(num_items, np.int64), np.zeros(num_items, np.int64)
        files: dict[str, Extent] = {}
        written = []
        at = HEADER_BYTES + ring_bytes(layouts)
        for part, (layout, begin) in enumerate(zip(layouts, image_addresses(layouts), strict=True)):
            hasher = BlockHasher()
            with job.recorder.step("write", layout.num_bytes):
                for chunk in staging.drain(layout):
                    hasher.update(chunk)
            digests, key = hasher.finish(), digests_key(layout.key)
            files[layout.key] = Extent(HEADER_BYTES + begin, layout.num_bytes)
            files[key] = slot.put(at, digests)
            at += _aligned(len(digests))
            written.append(WrittenFile(layout.key, layout.num_bytes, key, digest128(digests)))
            file[layout.items], offset[layout.items] = part, member_offsets(layout)
        staging.wait_finished()
        table = SlotTable(job.save_id, self._tier.rank, files)
        slot.seal(table)
        return Receipt(tuple(written), file, offset, marks), table

    def give_back(self, ring: torch.Tensor) -> None:
        """Do nothing: the slot stays as it is, and the next save takes another."""
