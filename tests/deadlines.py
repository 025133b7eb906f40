"""Deadlines that are over when a test says so: a busy machine makes none of them early, and nobody waits for one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from reshard_ckpt.comm import StoreComm
from reshard_ckpt.comm import store as store_module


class Clock:
    """Time that stands still until a moment, from which on every deadline is over: nobody waits, and no slow machine matters."""

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self.is_over = is_over
        self.later = itertools.count(1)

    def monotonic(self) -> float:
        return next(self.later) * 1e9 if self.is_over() else 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))


@contextmanager
def over_when(is_over: Callable[[], bool], module: ModuleType = store_module) -> Iterator[Clock]:
    """Within it, the deadlines of sessions, or of another module, are over on this rank when that is true, and no earlier."""
    clock = Clock(is_over)
    with mock.patch.object(module, "time", clock):
        yield clock


@contextmanager
def over_when_here_are_all_but(*absent: int, once: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Within it, a session's deadline is over on this rank when all others but these have come to the step that it waits in.

    Parameters
    ----------
    once
        What must be true besides, where those that do not come have come to the steps before, and may be slow.
    """
    ends = StoreComm._ends
    with over_when(lambda: False) as clock:

        def waits(self: StoreComm, waiting: Any, timeout_s: float, look: Callable[[], bool]) -> bool:
            # Not the farewell, in which ranks wait for others to leave, nor the time that a rank leaves its leader.
            is_step = timeout_s > self._timeout_s / 2
            clock.is_over = lambda: is_step and once() and {*range(self.size)} - self._arrived() == {*absent}
            return ends(self, waiting, timeout_s, look)

        with mock.patch.object(StoreComm, "_ends", waits):
            yield
