"""The slots (files in memory, one for each save) of one rank: choose a slot for each save, and keep within the node's memory.

1. A save takes a slot whose images are no longer kept: a slot of this process, one that a dead process left, or a new one.
2. A new slot gets its file size under a lock of the node, and its memory after the lock is released. Other ranks count the size
   of the file as taken, so ranks that allocate at the same time never promise more than the node has.
3. If the node has too little memory, slots of dead processes are removed, those of the oldest generation first. The newest
   generation always stays.
4. If that is still too little, this rank keeps fewer generations: the oldest one gives up its slot.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CorruptError, StorageError
from ..storage.posix import FileLock, await_lock
from .generations import Generation, drop_generations, find_generations
from .node import SLOT_SUFFIX, NoRoom, enter_run, files_in, free_bytes, run_folder
from .options import Memory
from .slots import Slot, slot_bytes


class SlotPool:
    """The slots (files in memory) of this process, for its own saves and for the copies that it holds for other ranks.

    Parameters
    ----------
    options
        The user's options of the memory tier.
    folder
        The run's folder on this node.
    timeout_s
        Seconds to wait for a lock of another process of this node.

    Attributes
    ----------
    run
        Id of the run whose newest generation is never removed.
    generations
        Number of saves to keep: the user's choice, or fewer if the memory does not suffice.
    short
        The reason for fewer generations, if this rank has found it; else empty.
    """

    def __init__(self, options: Memory, folder: Path, *, timeout_s: float) -> None:
        self._options, self._folder, self._timeout_s = options, folder, timeout_s
        self._entered: FileLock | None = None
        self.run = ""
        self.generations, self.short = options.generations, ""
        # Ids of kept saves that have lost a slot here since the last call of `given_up`.
        self._given_up: set[str] = set()
        self._slots: dict[int, list[Slot]] = {}
        """The slots, by the rank whose images they hold."""
        self._kept: dict[str, tuple[int, int]] = {}
        """The attempt and the step of each committed save that is kept, by its id, the newest last."""
        self._pinned: set[str] = set()
        self._lock = threading.Lock()

    def take(self, source: int, num_bytes: int, save_id: str) -> Slot:
        """Take a slot for the files of rank `source` in a new save, and mark the slot as not filled.

        Raise `NoRoom` if the node has too little memory, or all slots are being written to the store.
        """
        with self._lock:
            slots = self._slots.setdefault(source, [])
            # Slots whose files somebody has deleted: their images would be lost with this process.
            for removed in [held for held in slots if held.is_removed]:
                slots.remove(removed)
                removed.close()
            # From the cheapest to the dearest: a slot of this process, one of a dead process, new memory.
            held = self._reusable(slots)
            if held is not None and held.num_bytes < num_bytes:
                self._remove(slots, held)
                held = None
            if held is None:
                held = self._added(slots, num_bytes)
            # Void before anything is written: a reader of the old images finds out by the header.
            self._give_up(held.save_id)
            held.void()
            held.save_id = save_id
            return held

    def enter(self, root: str) -> None:
        """Make the run's folder on this node, and mark it as in use until `close`.

        Raise `NoRoom` if the tmpfs has too little memory, or somebody has removed the folder since this process entered it.
        """
        if self._entered is None:
            run_folder(self._options.folder, root)
            self._entered = enter_run(self._folder, self._timeout_s)
        if not self._folder.is_dir():
            raise NoRoom(f"{self._folder}: somebody has removed it, as systemd does at the end of a session (docs/memory.md)")

    def _reusable(self, slots: list[Slot]) -> Slot | None:
        """Choose one of these slots to fill again; return None if one more slot may be added instead."""
        held = next((slot for slot in slots if slot.save_id not in {*self._kept, *self._pinned}), None)
        if held is not None or len(slots) <= self.generations:
            return held
        # A generation that is on its way to the store occupies a slot, so the oldest of the others goes early.
        held = self._oldest(slots)
        if held is None:
            raise NoRoom("the generations in memory are still being written to the store, which is slower than saves come")
        return held

    def _oldest(self, slots: list[Slot]) -> Slot | None:
        """Return the slot of the oldest save that may go: not the newest save, and not one on its way to the store. Else None."""
        old = [save_id for save_id in [*self._kept][:-1] if save_id not in self._pinned]
        return next((slot for save_id in old for slot in slots if slot.save_id == save_id), None)

    def given_up(self) -> list[str]:
        """Return the ids of the kept saves that have lost a slot here since the last call, and so are not whole any more."""
        with self._lock:
            given_up, self._given_up = sorted(self._given_up), set()
            return given_up

    def agree(self, generations: int, given_up: Collection[str]) -> None:
        """Apply an agreement of all ranks: keep `generations` saves, and forget those in `given_up`.

        Free slots are removed if a source has more slots than it needs, which is one more than `generations`. The slots of a save
        that is on its way to the store stay until it is there.
        """
        with self._lock:
            self.generations = generations
            self._kept = {save_id: place for save_id, place in self._kept.items() if save_id not in given_up}
            self._empty(set(given_up) - self._pinned)
            # Each source needs a slot for each generation, and one to fill.
            for slots in self._slots.values():
                for held in [held for held in slots if not held.save_id][: max(len(slots) - generations - 1, 0)]:
                    self._remove(slots, held)

    def _added(self, slots: list[Slot], num_bytes: int) -> Slot:
        """Add a new slot to `slots` and return it. If memory is short, use the slot of the oldest save, or its memory, instead.

        Raise `NoRoom` if there is too little memory, and no save that may go.
        """
        while True:
            try:
                slots.append(self._adopted(num_bytes) or self._new_slot(num_bytes))
                return slots[-1]
            except NoRoom as error:
                oldest = self._oldest(slots)
                if oldest is None:
                    raise
                self.generations, self.short = min(self.generations, len(slots) - 1), str(error)
            # A slot that is too small is given back to the tmpfs, and the loop tries again with its memory.
            if oldest.num_bytes >= num_bytes:
                return oldest
            self._remove(slots, oldest)

    def _remove(self, slots: list[Slot], held: Slot) -> None:
        self._give_up(held.save_id)
        slots.remove(held)
        held.close(remove=True)

    def _give_up(self, save_id: str) -> None:
        if self._kept.pop(save_id, None) is not None:
            self._given_up.add(save_id)

    def _adopted(self, num_bytes: int) -> Slot | None:
        """Return a large enough slot that a dead process left and that holds no known save; None if there is none."""
        with node_lock(self._folder, self._timeout_s):
            save_ids = {generation.save_id for generation in find_generations(self._folder)}
            for slot in dead_slots(self._folder, self.paths()):
                is_free = saved_in(slot) not in save_ids
                if is_free and slot.num_bytes >= num_bytes:
                    return slot.reserve()
                slot.close(remove=is_free)  # free but too small: left half made, or of a smaller save
        return None

    def _new_slot(self, num_bytes: int) -> Slot:
        # Under the lock until the file has its size, which other processes count as promised memory.
        path, wanted = str(self._folder / f"{secrets.token_hex(8)}{SLOT_SUFFIX}"), slot_bytes(num_bytes)
        with node_lock(self._folder, self._timeout_s):
            while short := self._shortage(wanted):
                if not self._give_up_oldest():
                    raise NoRoom(short)
            slot = Slot(path, num_bytes)
        return slot.reserve()

    def _shortage(self, wanted: int) -> str:
        """Return why a slot of `wanted` bytes does not fit into this node's memory, or into ``max_bytes``; empty if it fits."""
        found = []
        for path in files_in(self._folder, SLOT_SUFFIX):
            with suppress(FileNotFoundError):  # its process has just removed it
                found.append(os.lstat(path))
        # promised: bytes of slots that have their size, and not yet their memory
        promised = sum(max(stat.st_size - stat.st_blocks * 512, 0) for stat in found)
        free, taken, most = free_bytes(str(self._folder)) - promised, sum(stat.st_size for stat in found), self._options.max_bytes
        if wanted > free:
            return f"{self._folder}: a slot takes {wanted:,} bytes, and {max(free, 0):,} of this node's memory are free"
        if most is not None and taken + wanted > most:
            return f"{self._folder}: {taken + wanted:,} bytes with one more slot are above Memory(max_bytes={most:,})"
        return ""

    def _give_up_oldest(self) -> bool:
        """Remove slots that dead processes left, and return whether there may be more memory now.

        First all slots that hold no known save are removed. If there is none, the oldest save that this process does not keep is
        given up, but never the newest of this run; its slots go with the next call.
        """
        # This run's last, since attempts of two runs cannot be compared.
        generations = sorted(find_generations(self._folder), key=lambda generation: generation.run == self.run)
        if remove_dead_slots(self._folder, {generation.save_id for generation in generations}, self.paths()):
            return True
        dead = [generation for generation in generations[:-1] if generation.save_id not in {*self._kept, *self._pinned}]
        drop_generations(self._folder, [generation.name for generation in dead[:1]])
        return bool(dead)

    def keep(self, generation: Generation, *, pin: bool) -> None:
        """Keep the slots of a committed save; with `pin`, at least until the save is in the store.

        The slots of the oldest save, and of an earlier save of the same step, may be refilled.
        """
        with self._lock:
            if pin:
                self._pinned.add(generation.save_id)
            others = [(save_id, place) for save_id, place in self._kept.items() if place[1] != generation.step]
            new = generation.save_id, (generation.attempt, generation.step)
            self._kept = dict([*others, new][-self.generations :])

    def keep_current(self, is_current: Callable[[int, int], bool]) -> None:
        """Let the slots of saves that no longer count in the run's lineage be refilled, so that saves that count keep theirs.

        `is_current` takes an attempt and a step.
        """
        with self._lock:
            self._kept = {save_id: place for save_id, place in self._kept.items() if is_current(*place)}

    def pin(self, save_id: str) -> None:
        """Keep the slots of a save from being refilled while it is written to the store."""
        with self._lock:
            self._pinned.add(save_id)

    def unpin(self, save_id: str) -> None:
        """Undo `pin`: the save is in the store. Its slots may be refilled as soon as newer saves have replaced it."""
        with self._lock:
            self._pinned.discard(save_id)

    @property
    def pinned(self) -> frozenset[str]:
        """Ids of the saves that are being written to the store."""
        return frozenset(self._pinned)

    def free(self, save_id: str) -> None:
        """Free the slots of a save that has failed, or that was deleted."""
        with self._lock:
            self._kept.pop(save_id, None)
            self._empty({save_id})

    def _empty(self, save_ids: Collection[str]) -> None:
        """Erase the headers of the slots of these saves, and mark the slots as free for the next saves."""
        for held in self._all():
            if held.save_id in save_ids:
                held.void()
                held.save_id = ""

    def has_all(self) -> bool:
        """Whether this process has all slots that it needs: for each rank whose files it holds, one more than `generations`."""
        return bool(self._slots) and all(len(slots) > self.generations for slots in self._slots.values())

    def paths(self) -> set[str]:
        """Return the paths of the slot files of this process."""
        return {held.path for held in self._all()}

    def _all(self) -> list[Slot]:
        return [held for slots in self._slots.values() for held in slots]

    def close(self) -> None:
        """Close the slots and leave the run's folder. Slots that hold a save stay in memory; free slots are deleted."""
        for held in self._all():
            held.close(remove=not held.save_id)
        if self._entered is not None:
            self._entered.release()


@contextmanager
def node_lock(folder: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a run's folder in a ``with`` block, in which slots are made or removed."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with await_lock(fd, str(folder / "lock"), timeout_s=timeout_s):
        yield


def dead_slots(folder: Path, own: set[str]) -> Iterator[Slot]:
    """Yield the slots of dead processes: all slots in the folder that are not locked and not in `own`, which are this process's.

    Each slot is locked when it is yielded; the caller closes it.
    """
    for path in files_in(folder, SLOT_SUFFIX):
        if str(path) not in own:
            with suppress(OSError, StorageError):  # locked, so its process is alive
                yield Slot(str(path))


def saved_in(slot: Slot) -> str:
    """Return the id of the save that a slot holds; empty if it is not filled, or its header is damaged."""
    try:
        table = slot.table
    except CorruptError:
        return ""
    return "" if table is None else table.save_id


def remove_dead_slots(folder: Path, kept: set[str], own: set[str]) -> bool:
    """Remove the slots of dead processes, except slots that hold a save in `kept`. Return whether one was removed."""
    removed = False
    for slot in dead_slots(folder, own):
        goes = saved_in(slot) not in kept
        slot.close(remove=goes)
        removed |= goes
    return removed
