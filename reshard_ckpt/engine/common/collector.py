"""Pausing Python's garbage collector in a ``with`` block.

A forked child turns it on again, because the threads that paused it do not exist there.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

PAUSING: list[None] = []
"""One entry for each ``with`` block under way that has paused the collector."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector in a ``with`` block, if it is on."""
    collects = gc.isenabled()
    if collects:
        PAUSING.append(None)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            del PAUSING[-1:]
            gc.enable()


def _forked() -> None:
    if PAUSING:
        PAUSING.clear()
        gc.enable()


os.register_at_fork(after_in_child=_forked)
