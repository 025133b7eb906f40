"""Ctrl-C and SIGTERM, held back while other ranks wait for this rank in a process group.

A rank that left an exchange by an exception would leave messages in the process group: the other ranks would wait for it, and the
next exchange would meet the old messages. So the signal waits until this rank can tell the others that it has failed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

_SIGNALS = signal.SIGINT, signal.SIGTERM


class _Held:
    """The signals that wait, and the handlers to call for them."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.waiting: dict[int, FrameType | None] = {}
        self.are_allowed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Keep a signal for later; call its handler if signals are allowed, or if one of this kind waits already."""
        if self.are_allowed or number in self.waiting:
            self.waiting.pop(number, None)
            self.handlers[number](number, frame)
        else:
            self.waiting[number] = frame

    @contextmanager
    def set_allowed(self, value: bool) -> Iterator[None]:
        """Allow signals in the ``with`` block, or hold them back. They are handled as soon as they are allowed."""
        before, self.are_allowed = self.are_allowed, value
        try:
            self.handle_allowed()
            yield
        finally:
            self.are_allowed = before
        self.handle_allowed()

    def handle_allowed(self) -> None:
        """Call the handlers of all signals that wait, if signals are allowed; also if the handler of one raises."""
        if self.are_allowed and self.waiting:
            number, frame = self.waiting.popitem()
            try:
                self.handlers[number](number, frame)
            finally:
                self.handle_allowed()


_LOCAL = threading.local()
"""Has the attribute `held` in the main thread while it holds signals back. Python calls handlers in the main thread only."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM in the ``with`` block, if Python functions handle them.

    A second signal of a kind is not held back. Signals that wait are handled at the end of the block.
    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if (outer := _held()) is not None:
        with outer.set_allowed(False):
            yield
        return
    held = _LOCAL.held = _Held()
    try:
        for each in _SIGNALS:
            if callable(handler := signal.getsignal(each)):
                held.handlers[each] = handler
                signal.signal(each, held.note)
        yield
    finally:
        _LOCAL.held = None
        for number, handler in held.handlers.items():
            signal.signal(number, handler)
        held.are_allowed = True
        held.handle_allowed()


@contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Handle signals in the ``with`` block, also those held back so far: for local work whose errors other ranks are told of."""
    held = _held()
    with nullcontext() if held is None else held.set_allowed(True):
        yield


def interrupt_waits() -> bool:
    """Tell whether this thread holds back a signal."""
    held = _held()
    return held is not None and bool(held.waiting)


def _held() -> _Held | None:
    return getattr(_LOCAL, "held", None)
