"""Saves into the memory of nodes: take slots (files on tmpfs), fill them, copy them to other nodes, and commit.

1. Before staging, ranks exchange the sizes of their images (the files that they would write to the store). Each rank takes slots
   for its own images and for the copies that it holds. If some rank has room for fewer generations (saves in memory), all ranks
   keep fewer. If some rank has no room beside the newest generation, all ranks skip the tier, and the save goes to the store.
2. Staging copies the state straight into the slot, which is the staging ring. A thread hashes the blocks and seals the slot.
3. The slot is sent to the ranks that hold its copies. They verify each block, and then seal their copies.
4. Receipts go to rank 0, which makes the catalog that the save would have in the store. Each node keeps it as a generation. Once
   all nodes have acknowledged it, the save is committed, and the oldest generation is freed.

A slot is refilled only if no kept generation has its images in it; so at every instant a whole generation is in memory.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..comm.links import Links
from ..comm.protocol import Comm, merge_of_all, union
from ..engine.common.tensor_bytes import empty_bytes, on_device
from ..engine.saving.async_save import SaveTarget
from ..engine.saving.commit import catalog_of
from ..engine.saving.messages import Receipt, WrittenFile, decode_receipts, encode_receipt
from ..engine.saving.options import SaveJob, Written
from ..engine.saving.replicas import compare_replicas
from ..engine.saving.staged_copy import StagedCopy
from ..engine.saving.staging import image_addresses, ring_bytes
from ..engine.saving.write import FileLayout, lay_out, receipt_of
from ..errors import CorruptError, PeerError, StorageError
from ..format.catalog import encode_catalog
from ..format.files import BlockHasher, decode_digests, digest128, digests_file_bytes, digests_key, wrong_blocks
from .generations import (
    SPARE,
    Generation,
    drop_generations,
    find_generations,
    keep_generation,
    next_number,
    reserve_generation,
    saves_of,
)
from .node import NoRoom, remove_temporaries, run_path
from .options import Memory
from .persist import id_in
from .pool import SlotPool, node_lock, remove_dead_slots
from .slots import HEADER_BYTES, Slot, SlotRange, SlotTable, decode_table, slot_bytes
from .topology import Topology

MIN_SPARE_BYTES = 1 << 20
"""Bytes that are reserved for the catalog of a save; twice the size of the previous catalog, if that is more."""


class Tier:
    """Saves of one rank to the memory of nodes.

    Parameters
    ----------
    options
        The user's `Memory`.
    root
        The root of the run.
    topology
        The nodes of the job.
    rank
        This rank.
    named_store
        Returns the key-value store for a new name (`shared_store`); None if this process is on its own.
    due
        Called on rank 0 at the commit with the step, the id of its save in the store, and the ids of all its older saves.
        Returns whether the new save also goes to the store.

    Attributes
    ----------
    attempt
        The number of this attempt.
    num_skipped
        Number of saves that went to the store because memory was full.
    """

    def __init__(
        self,
        options: Memory,
        root: str,
        topology: Topology,
        rank: int,
        named_store: Callable[[str], Any],
        due: Callable[[int, str, Collection[str]], bool],
        *,
        timeout_s: float,
    ) -> None:
        self.folder, self.topology, self.rank = run_path(options.folder, root), topology, rank
        self.pool, self._root = SlotPool(options, self.folder, timeout_s=timeout_s), root
        with suppress(NoRoom):  # each save tries again, and warns
            self.pool.enter(root)
        if topology.leads(rank):  # this rank alone writes generation files on its node, and has written none yet
            remove_temporaries(self.folder)
        self.attempt, self.num_skipped = 0, 0
        self._options, self._named_store, self._timeout_s, self._due = options, named_store, timeout_s, due
        self._links: Links | None = None
        self._spare_bytes = MIN_SPARE_BYTES
        self._warned: set[str] = set()

    def target(self, job: SaveJob, step: int) -> MemoryTarget | None:
        """Take slots for a save on all ranks, and return the save's target. Collective.

        If some rank has no room, no rank takes any; warn once, and return None.
        """
        layouts = lay_out(job.local_shards, job.assignment, job.comm.rank)
        used = ring_bytes(layouts) + sum(_aligned(digests_file_bytes(layout.num_bytes)) for layout in layouts)
        pairs = merge_of_all(job.comm, (used, self._links is not None))
        sizes = [size for size, _ in pairs]
        # If one rank of a group has lost its links, all ranks of the group make new ones.
        if not all(pairs[member][1] for member in self.topology.group_of(self.rank)[1]):
            self._links = None
        taken: dict[int, Slot] = {}
        refused = ""
        try:
            self._fit_budget(sizes)
            self.pool.enter(self._root)
            if self.topology.leads(self.rank):  # reserved now: a tmpfs that is full at the commit would fail it
                reserve_generation(self.folder, self._spare_bytes)
            for source in (self.rank, *self.topology.sources(self.rank)):
                taken[source] = self.pool.take(source, sizes[source], job.save_id)
        except (StorageError, OSError) as error:
            refused = str(error)
        refused, short = self._agreed(job, refused)
        if short:
            self._warn_once(f"memory has room for fewer generations, so it keeps no more than {self.pool.generations}", short)
        if not refused:
            return MemoryTarget(self, step, taken, sizes)
        self.pool.free(job.save_id)
        self.num_skipped += 1
        self._warn_once("this save goes to the store, not to memory, and so may later ones", refused)
        return None

    def _agreed(self, job: SaveJob, refused: str) -> tuple[str, str]:
        """Agree with all ranks on the number of generations (saves in memory) to keep. Collective.

        Returns
        -------
        tuple of str
            The reason why this save cannot go to memory, and the reason why fewer generations are kept; empty if there is none.
        """

        def merge(votes: list[Any]) -> Any:
            all_refused, all_short, generations, given_up = map(list, zip(*votes, strict=True))
            reasons = [next(filter(None, texts), "") for texts in (all_refused, all_short)]
            return *reasons, min(generations), sorted(union(given_up))

        vote = (refused, self.pool.short, self.pool.generations, self.pool.given_up())
        refused, short, fewest, gone = merge_of_all(job.comm, vote, merge)
        self.pool.agree(fewest, gone)
        if gone and self.topology.leads(self.rank):
            drop_generations(self.folder, [held.name for held in find_generations(self.folder) if held.save_id in gone])
        return refused, short

    def _warn_once(self, what: str, why: str) -> None:
        if self.rank == 0 and what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{what}: {why}", stacklevel=6)

    def _fit_budget(self, sizes: Sequence[int]) -> None:
        """Keep fewer saves if the user's budget for this node is too small; it must also cover the save that is being filled.

        Raise `NoRoom` if not even one save and the one that is being filled fit.
        """
        most = self._options.max_bytes
        if most is None:
            return
        local = self.topology.ranks_of[self.topology.node_of[self.rank]]
        held = [source for rank in local for source in (rank, *self.topology.sources(rank))]
        each = sum(slot_bytes(sizes[source]) for source in held)
        fits = most // each - 1
        short = f"a save takes {each:,} bytes of this node's memory, with the copies that it holds, of Memory(max_bytes={most:,})"
        if fits < 1:
            raise NoRoom(f"{short}, and the newest is kept while the next one is filled")
        if fits < self.pool.generations:
            self.pool.generations, self.pool.short = fits, short

    def close(self) -> None:
        """Close the slots and the links to other ranks. The slots that hold a save stay in memory."""
        self.pool.close()
        self._links = None
        if self.topology.leads(self.rank):
            (self.folder / SPARE).unlink(missing_ok=True)

    # Copies

    def copy(self, taken: Mapping[int, Slot], sizes: Sequence[int], table: SlotTable) -> list[int]:
        """Send this rank's filled slot to the ranks that hold its copies, and receive the copies that it holds for other ranks.

        Returns
        -------
        list of int
            The ranks whose copies are here, with every block verified; empty, with a warning, if copying failed.
        """
        sources = self.topology.sources(self.rank)
        targets = self.topology.targets[self.rank]
        if not sources and not targets:
            return []
        # One deadline for the whole copy, half of the session's: the ranks that wait at the commit must not give up before it.
        timeout_s = self._timeout_s / 2
        ends = time.monotonic() + timeout_s
        try:
            number, members = self.topology.group_of(self.rank)
            if self._links is None:
                store, ended = self._named_store(f"{number}/{table.save_id}")
                self._links = Links(store, ended, members.index(self.rank), len(members), timeout_s=timeout_s, members=members)
            head = torch.frombuffer(bytearray(table.encoded().ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
            heads = {source: empty_bytes(HEADER_BYTES) for source in sources}
            body, *bodies = (taken[rank].region()[: sizes[rank]] for rank in (self.rank, *sources))
            for own, theirs in ((head, heads.values()), (body, bodies)):
                coming = dict(zip(map(members.index, sources), theirs, strict=True))
                self._links.swap({members.index(target): own for target in targets}, coming, ends)
        except PeerError as error:
            self._links = None
            warnings.warn(f"this save has fewer copies in memory: {error}", stacklevel=2)
            return []
        held = []
        for source in sources:
            try:
                seal_copy(taken[source], bytes(heads[source].numpy()))
                held.append(source)
            except (CorruptError, NoRoom) as error:
                warnings.warn(f"the copy of rank {source}'s images is not used: {error}", stacklevel=2)
        return held

    # Commit

    def commit(self, job: SaveJob, step: int, receipt: Receipt, held: Sequence[int]) -> tuple[Generation, int, bool]:
        """Make the catalog of a save on rank 0, and write the generation file on every node. Collective.

        Returns
        -------
        Generation
            The save, to be acknowledged by `acknowledge`.
        int
            The least number of copies that a file has on other nodes.
        bool
            Whether the save also goes to the store.
        """
        contents, ids = job.contents, self.topology.ids

        def published(told: list[Any]) -> Any:
            """On rank 0, make the catalog. Return it with the nodes that hold each file, and with `commit`'s other results."""
            assert contents is not None
            receipts = decode_receipts([receipt for receipt, _, _ in told])
            compare_replicas(contents.plan.checks, contents.plan.tables.names, receipts.fingerprints)
            catalog = encode_catalog(catalog_of(contents, receipts))
            # holding[r]: the ids of the nodes that hold the images of rank r, its own first.
            holding = [[ids[node]] for node in self.topology.node_of]
            for rank, (_, sources, _) in enumerate(told):
                for source in sources:
                    holding[source].append(ids[self.topology.node_of[rank]])
            holders = {file.key: holding[rank] for rank, file in zip(receipts.rank.tolist(), receipts.files, strict=True)}
            # Generations are ordered by a counter, because clocks and random ids give no order. It is above the numbers of all
            # nodes.
            number = max(number for _, _, number in told)
            stored = id_in(contents.before.catalog if contents.before else None)
            older = sorted({*saves_of(self.folder, step), stored})
            return catalog, holders, older, number, min(len(nodes) - 1 for nodes in holding), self._due(step, stored, older)

        answer = (encode_receipt(receipt), held, next_number(self.folder))
        catalog, holders, older, number, copies, persist = merge_of_all(job.comm, answer, published)
        generation = Generation(self.pool.run, self.attempt, step, number, job.save_id, catalog, holders, older)
        if self.topology.leads(self.rank):
            keep_generation(self.folder, generation)
            self._spare_bytes = max(2 * len(catalog), MIN_SPARE_BYTES)
        return generation, copies, persist

    def adopt(self, generation: Generation) -> None:
        """Write the generation file of a checkpoint that is being loaded, if this node lacks it. A failure only warns."""
        if not self.topology.leads(self.rank):
            return
        if not any(held.save_id == generation.save_id and not held.is_damaged for held in find_generations(self.folder)):
            try:
                keep_generation(self.folder, generation)
            except StorageError as error:
                warnings.warn(f"the checkpoint that is loaded is not noted in this node's memory: {error}", stacklevel=6)

    def acknowledge(self, comm: Comm, generation: Generation, *, pin: bool) -> None:
        """Tell all ranks that this node has noted a save. Collective.

        Once all ranks have told, the save is committed, and older ones may be freed.
        """
        # If the gather fails, the images are freed only if surely no rank has freed an older generation: they may be the only
        # whole one.
        comm.undo_unless_gathered(partial(self._undo, generation))
        comm.gather(b"")
        self.pool.keep(generation, pin=pin)
        try:
            self._forget_older(generation)
        except (StorageError, OSError) as error:  # the save itself is done
            self._warn_once("older generations stay in memory for now", str(error))

    def _undo(self, generation: Generation) -> None:
        self.pool.free(generation.save_id)
        if self.topology.leads(self.rank):
            drop_generations(self.folder, [generation.name])

    def _forget_older(self, generation: Generation) -> None:
        """Forget the saves that a new one replaces, and the oldest ones; remove unused slots of dead processes."""
        if not self.topology.leads(self.rank):
            return
        found = [held for held in find_generations(self.folder) if held.run == self.pool.run]
        of_step = [held for held in found if held.step == generation.step and held.save_id != generation.save_id]
        counted = [held for held in found if held not in of_step]
        old = [*of_step, *counted[: -self.pool.generations]]
        drop_generations(self.folder, [held.name for held in old if held.save_id not in self.pool.pinned])
        if self.pool.has_all():
            with node_lock(self.folder, self._timeout_s):
                remove_dead_slots(self.folder, {held.save_id for held in find_generations(self.folder)}, self.pool.paths())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def seal_copy(slot: Slot, head: bytes) -> None:
    """Verify every block of the files that came from another rank, and mark their slot as whole.

    Raise `CorruptError` if a block differs from its digest: the slot stays marked as not whole.
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


class MemoryTarget(SaveTarget):
    """Where a save to memory puts the images of its files: slots of this rank, and of the ranks that hold copies."""

    def __init__(self, tier: Tier, step: int, taken: Mapping[int, Slot], sizes: Sequence[int]) -> None:
        self._tier, self._step, self._taken, self._sizes = tier, step, taken, sizes
        self.generation: Generation | None = None
        self.copies, self.persists = 0, False

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        """Return the memory of this rank's slot as the ring, so that the state is copied straight into it.

        It is pinned if a tensor lies on an accelerator.
        """
        slot = self._taken[self._tier.rank]
        device = job.local_shards.device_to_pin
        if device is not None:
            with on_device(device):
                slot.pin()
        return slot.region()[: ring_bytes(layouts)]

    def finish(self, job: SaveJob, copy: StagedCopy) -> Written:
        """Hash the files in the slot, mark it as whole, copy it to other nodes, and commit the save."""
        try:
            receipt, table = self._sealed(job, copy)
            # A rank whose images failed sends no copy. Without this gather, others would wait for it until the links' deadline.
            job.comm.gather(b"")
            with job.recorder.step("copy"):
                held = self._tier.copy(self._taken, self._sizes, table)
            generation, self.copies, self.persists = self._tier.commit(job, self._step, receipt, held)
        except BaseException:
            self._tier.pool.free(job.save_id)
            raise
        self._tier.acknowledge(job.comm, generation, pin=self.persists)
        self.generation = generation
        total = None if job.comm.rank else sum(file.size for file in generation.decoded_catalog().files)
        return Written(receipt.num_bytes, total)

    def _sealed(self, job: SaveJob, copy: StagedCopy) -> tuple[Receipt, SlotTable]:
        slot, layouts = self._taken[self._tier.rank], copy.chunks.layouts
        files: dict[str, SlotRange] = {}
        written = []
        at = HEADER_BYTES + ring_bytes(layouts)
        for layout, begin in zip(layouts, image_addresses(layouts)[:-1], strict=True):
            hasher = BlockHasher()
            with job.recorder.step("write", layout.num_bytes):
                for chunk in copy.staging.drain(layout):
                    hasher.update(chunk)
            digests, key = hasher.finish(), digests_key(layout.key)
            files[layout.key] = SlotRange(HEADER_BYTES + begin, layout.num_bytes)
            files[key] = slot.put(at, digests)
            at += _aligned(len(digests))
            written.append(WrittenFile(layout.key, layout.num_bytes, digest128(digests)))
        copy.staging.wait_finished()
        table = SlotTable(job.save_id, self._tier.rank, files)
        slot.seal(table)
        return receipt_of(layouts, written, copy.chunks.fingerprints), table

    def give_back(self, ring: torch.Tensor) -> None:
        """Do nothing: the slot keeps the save, and the next save takes another slot."""
