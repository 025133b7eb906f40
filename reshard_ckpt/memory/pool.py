"""The slots of one rank: which save is in which, and how much memory they take on the node.

1. A save takes a slot that holds nothing that is kept: one of this process, one that a dead process left, or a new one.
2. New memory is promised under a lock of the node, by the size of the file, and reserved outside of it; so ranks that allocate at
   the same time never promise more than there is.
3. Where there is too little, what dead processes left goes first, the oldest generation first; never the newest.
4. Where there is still too little, fewer generations are kept: the oldest of this process gives its slot up.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptError, StorageError
from ..storage.locks import FileLock, await_lock
from .generations import drop_generations, find_generations
from .node import SLOT_SUFFIX, NoRoom, enter_run, files_in, free_bytes, run_folder
from .options import Memory
from .slots import Slot, slot_bytes


@dataclass(slots=True)
class HeldSlot:
    """A slot of this process, and the save that it holds or is being filled with."""

    slot: Slot
    save_id: str = ""


class SlotPool:
    """The slots of this process, for its own images and for the copies that it holds.

    Parameters
    ----------
    options
        What the user chose.
    folder
        The run's folder on this node.

    Attributes
    ----------
    run
        The id of the run whose newest generation stays.
    generations
        How many saves are kept: as many as the user chose, or as there is memory for.
    short
        Why it is fewer, where that was found here; else empty.
    """

    def __init__(self, options: Memory, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._entered: FileLock | None = None
        self.run = ""
        self.generations, self.short = options.generations, ""
        self._given_up: set[str] = set()
        self._slots: dict[int, list[HeldSlot]] = {}
        self._kept: list[str] = []
        self._pinned: set[str] = set()
        self._lock = threading.Lock()

    def take(self, source: int, num_bytes: int, save_id: str) -> HeldSlot:
        """Take a slot for the images of a rank, and make it void.

        Raises
        ------
        NoRoom
            There is no memory for it.
        """
        with self._lock:
            slots = self._slots.setdefault(source, [])
            self._let_go_of_removed(slots)
            held = self._reusable(slots)
            if held is not None and held.slot.num_bytes < num_bytes:
                self._remove(slots, held)
                held = None
            if held is None:
                held = self._added(slots, num_bytes)
            self._give_up(held.save_id)
            held.slot.void()
            held.save_id = save_id
            return held

    def enter(self, root: str) -> None:
        """Make the run's folder on this node, and say that a process of the run is there, until `close`.

        Raises
        ------
        NoRoom
            There is no memory for that; or somebody has removed the folder meanwhile.
        """
        if self._entered is None:
            run_folder(self._options.folder, root)
            self._entered = enter_run(self._folder)
        if not self._folder.is_dir():
            raise NoRoom(f"{self._folder}: somebody has removed it, as systemd does at the end of a session (docs/memory.md)")

    def _let_go_of_removed(self, slots: list[HeldSlot]) -> None:
        """Let go of slots whose files somebody has removed: what is in them would be lost with this process."""
        for held in [held for held in slots if held.slot.is_removed]:
            slots.remove(held)
            held.slot.close()

    def _reusable(self, slots: list[HeldSlot]) -> HeldSlot | None:
        held = next((one for one in slots if one.save_id not in {*self._kept, *self._pinned}), None)
        if held is not None or len(slots) <= self.generations:
            return held
        # One generation is being written to the store: the oldest other one goes before its time.
        held = self._oldest(slots)
        if held is None:
            raise NoRoom("the generations in memory are still being written to the store, which is slower than saves come")
        return held

    def _oldest(self, slots: list[HeldSlot]) -> HeldSlot | None:
        """Find the slot of the oldest generation that may go: never the newest, nor one that is on its way to the store."""
        old = [save_id for save_id in self._kept[:-1] if save_id not in self._pinned]
        return next((one for save_id in old for one in slots if one.save_id == save_id), None)

    def given_up(self) -> list[str]:
        """Tell which kept saves have lost a slot here since this was last asked; they are whole no longer."""
        with self._lock:
            given_up, self._given_up = sorted(self._given_up), set()
            return given_up

    def agree(self, generations: int, given_up: Collection[str]) -> None:
        """Keep no more generations than every rank has memory for, without those that some rank gave up; free what is over."""
        with self._lock:
            self.generations = generations
            self._kept = [save_id for save_id in self._kept if save_id not in given_up]
            for held in self._all():
                if held.save_id in given_up and held.save_id not in self._pinned:
                    held.slot.void()
                    held.save_id = ""
            for slots in self._slots.values():
                for held in [held for held in slots if not held.save_id][: max(len(slots) - generations - 1, 0)]:
                    self._remove(slots, held)

    def _added(self, slots: list[HeldSlot], num_bytes: int) -> HeldSlot:
        """Add a slot; where there is no memory for one more, the oldest generation gives its own up, or its memory."""
        while True:
            try:
                slots.append(HeldSlot(self._adopted(num_bytes) or self._new_slot(num_bytes)))
                return slots[-1]
            except NoRoom as error:
                oldest = self._oldest(slots)
                if oldest is None:
                    raise
                self.generations, self.short = min(self.generations, len(slots) - 1), str(error)
            if oldest.slot.num_bytes >= num_bytes:
                return oldest
            self._remove(slots, oldest)

    def _remove(self, slots: list[HeldSlot], held: HeldSlot) -> None:
        self._give_up(held.save_id)
        slots.remove(held)
        held.slot.close(remove=True)

    def _give_up(self, save_id: str) -> None:
        if save_id in self._kept:
            self._kept.remove(save_id)
            self._given_up.add(save_id)

    def _adopted(self, num_bytes: int) -> Slot | None:
        """Take over a slot that a dead process left, if it is large enough and holds nothing that is known."""
        with node_lock(self._folder):
            known = {generation.save_id for generation in find_generations(self._folder)}
            for slot in dead_slots(self._folder, self.paths()):
                is_free = saved_in(slot) not in known
                if is_free and slot.num_bytes >= num_bytes:
                    return slot.reserve()
                slot.close(remove=is_free)  # too small: its process was killed while it made it, or saved less
        return None

    def _new_slot(self, num_bytes: int) -> Slot:
        path, wanted = str(self._folder / f"{secrets.token_hex(8)}{SLOT_SUFFIX}"), slot_bytes(num_bytes)
        with node_lock(self._folder):
            while short := self._shortage(wanted):
                if not self._give_up_oldest():
                    raise NoRoom(short)
            slot = Slot(path, num_bytes)
        return slot.reserve()

    def _shortage(self, wanted: int) -> str:
        """Say why there is no memory for so many bytes; empty where there is."""
        found = []
        for path in files_in(self._folder, SLOT_SUFFIX):
            with suppress(FileNotFoundError):  # its process has just given it back
                found.append(os.lstat(path))
        promised = sum(max(one.st_size - one.st_blocks * 512, 0) for one in found)
        free, taken, most = free_bytes(str(self._folder)) - promised, sum(one.st_size for one in found), self._options.max_bytes
        if wanted > free:
            return f"{self._folder}: a slot takes {wanted:,} bytes, and {max(free, 0):,} of this node's memory are free"
        if most is not None and taken + wanted > most:
            return f"{self._folder}: {taken + wanted:,} bytes with one more slot are above Memory(max_bytes={most:,})"
        return ""

    def _give_up_oldest(self) -> bool:
        """Remove what dead processes left: slots that hold nothing known, or the oldest generation, but not this run's newest."""
        known = sorted(find_generations(self._folder), key=lambda one: one.run == self.run)  # attempts of other runs are no order
        if remove_dead_slots(self._folder, {generation.save_id for generation in known}, self.paths()):
            return True
        dead = [one for one in known[:-1] if one.save_id not in {*self._kept, *self._pinned}]
        drop_generations(self._folder, [one.name for one in dead[:1]])
        return bool(dead)

    def keep(self, save_id: str, *, pin: bool) -> None:
        """Keep the slots of a save that is committed, and no longer those of the oldest one."""
        with self._lock:
            if pin:
                self._pinned.add(save_id)
            self._kept = [*self._kept, save_id][-self.generations :]

    def pin(self, save_id: str) -> None:
        """Keep the slots of a save while it is written to the store."""
        with self._lock:
            self._pinned.add(save_id)

    def unpin(self, save_id: str) -> None:
        """Let the slots of a save that is in the store now be refilled once it is no longer kept."""
        with self._lock:
            self._pinned.discard(save_id)

    @property
    def pinned(self) -> frozenset[str]:
        """The saves that are being written to the store."""
        return frozenset(self._pinned)

    def free(self, save_id: str) -> None:
        """Make the slots of a save that failed, or is forgotten, free again."""
        with self._lock:
            for held in self._all():
                if held.save_id == save_id:
                    held.slot.void()
                    held.save_id = ""

    def has_all(self) -> bool:
        """Whether this process has as many slots as it will ever take."""
        return bool(self._slots) and all(len(slots) > self.generations for slots in self._slots.values())

    def paths(self) -> set[str]:
        """The files of this process."""
        return {held.slot.path for held in self._all()}

    def _all(self) -> list[HeldSlot]:
        return [held for slots in self._slots.values() for held in slots]

    def close(self) -> None:
        """Let go of the slots, which stay in memory with what they hold; those that hold nothing go."""
        for held in self._all():
            held.slot.close(remove=not held.save_id)
        if self._entered is not None:
            self._entered.release()


@contextmanager
def node_lock(folder: Path) -> Iterator[None]:
    """Keep other processes of this node from allocating slots of a run, and from removing them."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with await_lock(fd, str(folder / "lock")):
        yield


def dead_slots(folder: Path, own: set[str]) -> Iterator[Slot]:
    """Yield the slots of processes that are gone, locked; whoever takes one closes it."""
    for path in files_in(folder, SLOT_SUFFIX):
        if str(path) not in own:
            with suppress(OSError, StorageError):  # its process is alive
                yield Slot(str(path))


def saved_in(slot: Slot) -> str:
    """Return the id of the save that a slot holds whole; empty where there is none."""
    try:
        table = slot.table
    except CorruptError:
        return ""
    return "" if table is None else table.save_id


def remove_dead_slots(folder: Path, kept: set[str], own: set[str]) -> bool:
    """Remove slots of processes that are gone, if they hold no save that is kept; whether there were any."""
    removed = False
    for slot in dead_slots(folder, own):
        goes = saved_in(slot) not in kept
        slot.close(remove=goes)
        removed |= goes
    return removed
