"""Notes (small files) that keep the files of a checkpoint until their readers have ended, in a store without locks.

1. A process that removes or replaces a checkpoint leaves its files, and writes the note `REMOVED_KEY` beside them.
2. A reader (a process that loads or verifies, for example) that takes longer than `NOTE_EVERY_S` writes a note too, and renews it
   until it ends (`kept_for_reader`). A shorter reader makes no request.
3. A later save or manager deletes the files, once the grace period is over (`removed_within`, `old_enough`) and each reader's
   note is old (`is_read`).

A note holds the time in seconds since 1970. The clocks of machines may differ by less than `NOTE_S` − `NOTE_EVERY_S`.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from ...errors import StorageError
from ...storage import Storage
from ...storage.protocol import at_once

GRACE_S = 600.0
"""Grace period: seconds for which the files of a removed or replaced checkpoint stay."""
NOTE_EVERY_S = 60.0
"""Seconds after which a process that is still reading writes a reader's note, and then renews it."""
NOTE_S = 600.0
"""A reader's note that was not renewed for this many seconds no longer counts: its process was killed."""

REMOVED_KEY = "removed"
"""Key of the note that a folder's files belong to no checkpoint any more. Its first line is the time of the removal. Keys of
files in other folders that the removed checkpoint needed follow, compressed by zlib: a step of ten thousand ranks may need
hundreds of thousands."""

_READER = re.compile(r"(?:.*/)?reader-[0-9a-f]{32}")
_MAX_BYTES = 64 << 20
_MAX_TEXT_BYTES = 1 << 30
_JOIN_S = 10.0


def note_removed(root: Storage, folder: str, needs: Iterable[str] = ()) -> None:
    """Write the note that the files in a folder belong to no checkpoint from now on.

    `needs` are the keys of files in other folders that the removed checkpoint needs: they stay as long as its own.
    """
    keys = "\n".join(sorted(needs)).encode()
    root.publish(f"{folder}/{REMOVED_KEY}", repr(time.time()).encode() + (b"\n" + zlib.compress(keys, 1) if keys else b""))


def removed_within(root: Storage, folders: Iterable[str], seconds: float) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Divide the folders that have the note of a removal into young and old ones.

    A folder is young if its note was written within the last `seconds`, or if somebody reads its files.

    Returns
    -------
    tuple
        For each young folder, the keys of files elsewhere that its checkpoint needed. For each old folder, the time of its
        removal in seconds since 1970.
    """
    young: dict[str, list[str]] = {}
    old: dict[str, float] = {}
    listed = list(folders)
    for folder, note in zip(listed, root.read_many([f"{f}/{REMOVED_KEY}" for f in listed], _MAX_BYTES), strict=True):
        if note is not None:
            first, _, keys = note.data.partition(b"\n")
            age_s = _age_s(first.decode(errors="replace"))
            if age_s < seconds or is_read(root, (key for key, _ in root.list(folder))):
                with suppress(zlib.error):  # notes of earlier versions have the keys as they are
                    keys = zlib.decompressobj().decompress(keys, _MAX_TEXT_BYTES)
                young[folder] = keys.decode(errors="replace").split("\n") if keys else []
            else:
                old[folder] = time.time() - age_s
    return young, old


def old_enough(storage: Storage, stale: Mapping[str, list[str]], grace_s: float) -> dict[str, list[str]]:
    """Return the part of `stale` (keys of replaced files, by folder) that may be deleted now.

    The files of a folder may be deleted if its note of a removal is older than `grace_s`, and nobody reads them. A folder without
    a note gets one now. If `grace_s` is 0, no note is needed.
    """
    if not grace_s:
        return {folder: keys for folder, keys in stale.items() if keys and not is_read(storage, keys)}
    noted = [folder for folder, keys in stale.items() if f"{folder}/{REMOVED_KEY}" in keys]
    new = [folder for folder, keys in stale.items() if keys and folder not in noted]
    old, *_ = at_once(
        storage, lambda: removed_within(storage, noted, grace_s)[1], *(partial(note_removed, storage, folder) for folder in new)
    )
    return {folder: stale[folder] for folder in old or {}}


def is_read(storage: Storage, keys: Iterable[str]) -> bool:
    """Whether one of these keys is the note of a reader whose process still renews it."""
    notes = [key for key in keys if _READER.fullmatch(key)]
    found = storage.read_many(notes, _MAX_BYTES) if notes else []
    return any(note is not None and _age_s(note.data.decode(errors="replace")) < NOTE_S for note in found)


def _age_s(text: str) -> float:
    try:
        return time.time() - float(text)
    except ValueError:  # damaged, so it counts as written now
        return 0.0


@contextmanager
def kept_for_reader(storage: Storage, save_id: str) -> Iterator[None]:
    """Keep the files of a save while the ``with`` block reads them: a thread writes a reader's note and renews it.

    It is for stores without locks. A block that takes less than `NOTE_EVERY_S` makes no request. Errors of the store are dropped.
    """
    ended = threading.Event()
    key = f"{save_id}/reader-{uuid.uuid4().hex}"

    def renew() -> None:
        is_there = False
        while not ended.wait(NOTE_EVERY_S):
            with suppress(StorageError):  # this process may have the right to read alone: then it has the grace
                storage.publish(key, repr(time.time()).encode())
                is_there = True
        if is_there:
            with suppress(StorageError):  # it ends by itself
                storage.delete([key])

    thread = threading.Thread(target=renew, name="reshard-ckpt-reader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_JOIN_S)
