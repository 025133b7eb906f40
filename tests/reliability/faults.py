"""Calls of the operating system that fail, or do less than they were asked to, below the local storage and nowhere else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from reshard_ckpt.storage import local, posix

Instead = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

CHANGING = ("open", "mkdir", "write", "fsync", "close", "replace", "unlink", "rmdir")
LOOKING = ("statvfs", "scandir", "listdir", "fstat", "read")


class FaultyOs:
    """Stands for the module `os`: `instead` runs in place of the n-th call (from 0) of one name, of every one with n None.

    Parameters
    ----------
    thread
        The name of the thread that it happens in; of any by default.
    """

    def __init__(self, name: str, n: int | None, instead: Instead, thread: str = "") -> None:
        self._name, self._n, self._instead, self._thread = name, n, instead, thread
        self._lock = threading.Lock()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._name:
            return real

        def call(*args: Any, **options: Any) -> Any:
            if self._thread not in ("", threading.current_thread().name):
                return real(*args, **options)
            with self._lock:
                n, self.calls = self.calls, self.calls + 1
            return self._instead(real, args, options) if self._n in (None, n) else real(*args, **options)

        return call

    @property
    def happened(self) -> bool:
        return self._n is not None and self.calls > self._n


@contextmanager
def faulty(name: str, n: int | None, instead: Instead, thread: str = "") -> Iterator[FaultyOs]:
    """Within it, calls of the storage go wrong."""
    fault = FaultyOs(name, n, instead, thread)
    with mock.patch.object(local, "os", fault), mock.patch.object(posix, "os", fault):
        yield fault


def fails(number: int) -> Instead:
    """The call fails with that error; a `close` closes all the same, as the system does."""

    def instead(real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if real is os.close:
            real(*args)
        raise OSError(number, os.strerror(number))

    return instead
