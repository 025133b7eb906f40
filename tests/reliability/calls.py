"""The system calls that a save makes, and a process that dies after the n-th of them.

`Calls` stands between the package and `os`: it records each call that changes something below a folder, in order, with its bytes;
and it can let the process die after any of them: then no later call happens, whatever handlers still run.
`tests/reliability/test_kills.py` proves against the real system calls that none escapes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.storage.faulty import Stopped

UNKNOWN = ("link", "symlink", "truncate", "ftruncate", "writev", "pwrite", "pwritev", "posix_fallocate", "fdatasync", "rename")
"""Calls that `tests.reliability.disk` has no model of; a save that began to make them would need one."""


@dataclass(frozen=True)
class Call:
    """One call that succeeded: its name, the path that it was about, where that went, how much was written, and what."""

    name: str
    path: str
    target: str = ""
    size: int = 0
    data: bytes = b""


def path_of(name: str | int, dir_fd: int | None = None) -> str:
    """The absolute path that a call means."""
    if isinstance(name, int):
        return os.readlink(f"/proc/self/fd/{name}")
    return os.path.join(os.getcwd() if dir_fd is None else path_of(dir_fd), name)


@dataclass
class Calls:
    """The changes below `base`; the process dies after `stop_after` of them."""

    base: str
    stop_after: int | None = None
    done: list[Call] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    @property
    def is_dead(self) -> bool:
        return self.stop_after is not None and len(self.done) >= self.stop_after

    def change(self, name: str, path: str, act: Callable[[], Any], *, target: str = "", data: bytes = b"") -> Any:
        """Let a call happen, unless the process is dead."""
        if not path.startswith(self.base):
            return act()
        with self.lock:
            if self.is_dead:
                raise Stopped
            out = act()
            at, to = (os.path.relpath(p, self.base) if p else "" for p in (path, target))
            written = data[:out] if name == "write" else b""
            self.done.append(Call(name, at, to, len(written), written))
            if self.is_dead:
                raise Stopped
            return out

    @contextmanager
    def watching(self) -> Iterator[Calls]:
        """Watch all calls of this process."""
        real = {name: getattr(os, name) for name in ("open", "mkdir", "write", "fsync", "replace", "unlink", "rmdir")}

        def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            def act() -> int:
                return real["open"](path, flags, mode, dir_fd=dir_fd)

            # A file that exclusive creation makes is new; the package makes none otherwise but locks.
            return self.change("create", path_of(path, dir_fd), act) if flags & os.O_CREAT else act()

        def write(fd: int, data: Any) -> int:
            return self.change("write", path_of(fd), lambda: real["write"](fd, data), data=bytes(data))

        def fsync(fd: int) -> None:
            self.change("fsync", path_of(fd), lambda: real["fsync"](fd))

        def replace(source: str, to: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            def act() -> None:
                real["replace"](source, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

            self.change("rename", path_of(source, src_dir_fd), act, target=path_of(to, dst_dir_fd))

        def named(name: str) -> Callable[..., Any]:
            def call(path: str, *args: Any, dir_fd: int | None = None) -> None:
                self.change(name, path_of(path, dir_fd), lambda: real[name](path, *args, dir_fd=dir_fd))

            return call

        def unknown(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                raise AssertionError(f"os.{name}{args}: tests.reliability has no model of this call")

            return call

        fakes = {"open": open_, "write": write, "fsync": fsync, "replace": replace}
        fakes |= {name: named(name) for name in ("mkdir", "unlink", "rmdir")} | {name: unknown(name) for name in UNKNOWN}
        with mock.patch.multiple(os, **fakes):
            yield self
