"""Leases: exclusive use of a file by one process, in an object store, which has no locks.

The object holds a note, the holder's process and a nonce. Its holder replaces it every third of the lease's time (If-Match),
with a new nonce, so that its version changes. A process that finds the object watches it: if the version does not change for the
whole time, the holder is gone, and the object is replaced by If-Match. Only durations on one's own clock
count, so clocks need not agree.

A holder that could not renew the lease for two thirds of its time counts it as lost (`check`), before anyone can take it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import StorageError
from .protocol import ABSENT, Document, Lock, PublishConflict, Storage, Version

_MAX_BYTES = 1 << 16
_sleep = time.sleep
_LOOKS = 12
"""How often another process's lease is looked at during its time."""


class LeaseLost(StorageError):
    """Raised if this process did not renew its lease in time, so that another process may have taken it."""


class ObjectLease(Lock):
    """A lease that this process holds. A thread renews it until `release`."""

    def __init__(
        self, storage: Storage, key: str, note: bytes, ttl_s: float, version: Version, renewed: float, *, once: bool
    ) -> None:
        self._storage, self._key, self._note, self._ttl_s, self._once = storage, key, note, ttl_s, once
        self._version, self._renewed = version, renewed
        self._lock, self._ended, self._is_lost = threading.Lock(), threading.Event(), False
        self._process = os.getpid()
        threading.Thread(target=self._renew_on_time, name="reshard-ckpt-lease", daemon=True).start()

    def _renew_on_time(self) -> None:
        while not self._ended.wait(self._ttl_s / 3):
            with suppress(StorageError):  # the next try is a third of the time away, and `check` raises for a lost lease
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._is_lost or self._ended.is_set():
                return
            began = time.monotonic()
            try:
                self._version = self._storage.publish(self._key, content(self._note, self._ttl_s), expected=self._version)
            except PublishConflict:
                self._is_lost = True
                raise
            self._renewed = began

    def check(self) -> None:
        if os.getpid() == self._process and time.monotonic() - self._renewed > self._ttl_s / 3:
            with suppress(StorageError):
                self._renew()
        if self._is_lost or time.monotonic() - self._renewed > self._ttl_s * 2 / 3:
            raise LeaseLost(
                f"{self._storage.url}/{self._key}: this process did not renew its lease within {self._ttl_s * 2 / 3:g} s, and "
                "another may have taken it: nothing was deleted; end the other job, or begin again"
            )

    def note(self, text: bytes) -> None:
        self._note = text
        self._renew()

    def release(self) -> None:
        self._ended.set()
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._is_lost:
                self._is_lost = True
                with suppress(StorageError):  # it ends by itself
                    # Nobody else takes a lease that was renewed lately, so the deletion needs no condition.
                    if self._once and time.monotonic() - self._renewed < self._ttl_s * 2 / 3:
                        self._storage.delete([self._key])
                        return
                    self._storage.publish(self._key, b"", expected=self._version)


def take_lease(storage: Storage, key: str, note: bytes, ttl_s: float, *, once: bool) -> ObjectLease | None:
    """Take a lease on the file `key`. Return None if this process holds it, or if another one renews or takes it meanwhile.

    If the holder is gone, this waits until the lease is over: for the time that the holder gave it, an hour at most. It does not
    wait for a process of this machine that has ended.
    """
    if once:  # most often there is no such file
        began = time.monotonic()
        with suppress(PublishConflict):
            version = storage.publish(key, content(note, ttl_s), expected=ABSENT)
            return ObjectLease(storage, key, note, ttl_s, version, began, once=once)

    def look() -> tuple[dict[str, Any] | None, Version]:
        [found] = storage.read_many([key], _MAX_BYTES)
        return _holder(found), found.version if found else ABSENT

    (holder, seen), waited_since = look(), time.monotonic()
    while holder is not None and not _is_dead(holder) and time.monotonic() - waited_since < holder["ttl_s"]:
        if holder["process"] == _this_process():
            return None
        _sleep(holder["ttl_s"] / _LOOKS)
        before = seen
        holder, seen = look()
        if holder is not None and seen != before:
            return None
    began = time.monotonic()
    try:
        version = storage.publish(key, content(note, ttl_s), expected=seen)
    except PublishConflict:
        return None
    lease = ObjectLease(storage, key, note, ttl_s, version, began, once=once)
    lease.had_file = seen != ABSENT
    return lease


def content(note: bytes, ttl_s: float) -> bytes:
    """Encode the contents of a lease's file, with a new nonce. Equal bytes could have equal ETags, which would hide a renewal."""
    fields = {"holder": note.decode(), "ttl_s": ttl_s, "process": _this_process(), "nonce": uuid.uuid4().hex}
    return json.dumps(fields).encode()


def holder_text(data: bytes) -> str:
    """Return the text, in a lease's file or a locked file, that says who holds it, for a message."""
    text = data.decode(errors="replace")
    with suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, dict):
            return str(fields.get("holder", ""))
    return text


def _holder(found: Document | None) -> dict[str, Any] | None:
    """Decode a lease's file; None if nobody holds the lease. A damaged one counts as held for a minute."""
    if found is None or not found.data:
        return None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        fields = json.loads(found.data, parse_constant=lambda name: None)
        return {**fields, "ttl_s": min(max(float(fields["ttl_s"]), 0.0), 3600.0), "process": list(fields["process"])}
    return {"ttl_s": 60.0, "process": []}


@cache
def _machine() -> list[str]:
    with suppress(OSError):
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return [uuid.uuid4().hex]


def _started(pid: int) -> str:
    """Return the start time of a process, which tells it from a later process with the same number; empty if unknown."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _this_process() -> list[str]:
    return [*_machine(), str(os.getpid()), _started(os.getpid())]


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder of a lease was a process of this machine that has ended, so that nobody needs to wait for the lease."""
    process = holder["process"]
    here = len(process) == 4 and process[:2] == _machine()
    return here and bool(process[3]) and str(process[2]).isdigit() and _started(int(process[2])) != process[3]
