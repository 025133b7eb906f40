"""What processes do that are interrupted, or that end while they save; `test_interrupts` starts them."""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import saving
from reshard_ckpt.engine.saving import async_save, commit, staged_copy, staging, write
from reshard_ckpt.engine.saving.handle import saves_to
from reshard_ckpt.errors import UsageError
from tests.reliability.faults import CHANGING, fails, faulty
from tests.reliability.states import NEW, OLD, assert_clean, assert_next_save_works, contents, held, plain

_ENTERED: list[Any] = []
_LEFT: dict[str, bytes | None] = {}
"""What the last call of `after` left, whose state it has read."""


def interrupt() -> None:
    """Ctrl-C now, in the main thread."""
    os.kill(os.getpid(), signal.SIGINT)


def around(n: int) -> Callable[..., Any]:
    """The call, and Ctrl-C just before it or just after."""

    def instead(real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if n % 2 or real is os.open:
            interrupt()
            return real(*args, **options)
        try:
            return real(*args, **options)
        finally:
            interrupt()

    return instead


def from_now_on(fault: Any) -> None:
    """Enter a context that the process never leaves."""
    fault.__enter__()
    _ENTERED.append(fault)


def threads() -> list[threading.Thread]:
    """Our threads; not those whose start was interrupted before there was a thread."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("reshard-ckpt") and thread.ident]


def after(path: Path) -> None:
    """The old checkpoint, or the new one where the interrupt came after the commit; no file beside it, and no thread."""
    global _LEFT
    assert threads() == [], threads()
    if contents(path) != _LEFT:
        assert held(path) in (OLD, NEW)
        assert_clean(path)
    before, _LEFT = _LEFT, assert_next_save_works(path, OLD)
    assert _LEFT.keys() != before.keys()


def caught(call: Callable[[], object]) -> bool:
    """Whether the call ends by Ctrl-C."""
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def sync(path: Path) -> int:
    """Ctrl-C at each system call that changes something."""
    points = 0
    for name in CHANGING:
        for n in range(0, 1000, 3 if name == "open" else 1):  # most of those only look at folders
            with faulty(name, n, around(n)) as fault:
                interrupted = caught(lambda: checkpoint.save(path, plain(NEW)))
            if not fault.happened:
                checkpoint.save(path, plain(OLD))
                break
            assert interrupted, (name, n)
            after(path)
            points += 1
    return points


def between(path: Path, functions: Iterable[Any], save: Callable[[], object]) -> int:
    """Ctrl-C at each line of these functions, and at each return; the number of these points."""
    codes = {function.__code__ for function in functions}
    for n in range(10_000):
        reached = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal reached
            if frame.f_code in codes and event in ("line", "return"):
                reached += 1
                if reached == n + 1:  # noqa: B023 (called at once)
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace if frame.f_code in codes else None

        sys.settrace(trace)
        try:
            interrupted = caught(save)
        finally:
            sys.settrace(None)
        for handle in saves_to(str(path)):  # it came just before the save's return
            handle.running.wait()
        for thread in threads():
            thread.join(600)
        after(path)
        if not interrupted:
            return n
    raise AssertionError


def to_the_commit(path: Path) -> int:
    """Ctrl-C at each line of a save from its first file to the commit."""
    steps = (commit.write_and_commit, write.write_files, commit.commit, commit._undo, commit.publish)
    return between(path, (saving._save, saving.run_save, *steps), lambda: checkpoint.save(path, plain(NEW)))


START = threading.Thread.start


def start_thread(thread: threading.Thread) -> None:
    """`Thread.start` in two lines: Ctrl-C comes before there is a thread, or after it, while the caller still waits for it."""
    START(thread)
    return


def beginning(path: Path, kind: str) -> int:
    """Ctrl-C at each line that begins a save in the background, also while its threads are started."""
    thread = async_save.SaveThread
    steps = (async_save.launch, async_save._stage_lazily, async_save._thread, thread.start, thread.stage, thread._stage)
    with mock.patch.object(threading.Thread, "start", start_thread):
        return between(
            path,
            (*steps, staged_copy.StagedCopy.fill_all, start_thread),
            lambda: checkpoint.async_save(path, plain(NEW), staging=kind).result(600),
        )


def copying(path: Path, kind: str) -> int:
    """Ctrl-C while async_save copies the state, before it returns."""
    real, points = staging.copy_run, 0
    for n in range(1000):
        calls = 0

        def copy(*args: Any, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == n + 1:  # noqa: B023 (called at once)
                interrupt()
            real(*args, **options)

        with mock.patch.object(staging, "copy_run", copy):
            interrupted = caught(lambda: checkpoint.async_save(path, plain(NEW), staging=kind).result(600))
        if calls <= n:
            checkpoint.save(path, plain(OLD))
            break
        assert interrupted
        assert held(path) == OLD
        after(path)
        points += 1
    return points


def waiting(path: Path) -> None:
    """Ctrl-C while the save goes on in the background: it ends the waiting alone."""
    waits = threading.Event()

    def then_interrupt(*call: Any) -> Any:
        assert waits.wait(600)
        return around(1)(*call)

    def wait() -> None:
        waits.set()
        handle.result(600)
        time.sleep(600)  # the signal may come a moment later

    with faulty("write", 1, then_interrupt, thread="reshard-ckpt-save"):
        handle = checkpoint.async_save(path, plain(NEW))
        assert caught(wait)
        handle.result(600)
    assert held(path) == NEW
    for thread in threads():
        thread.join(600)
    after(path)


def no_thread(path: Path) -> None:
    """The system gives no thread: the error says what to do, and nothing is left of the try."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "reshard-ckpt-save":
            raise RuntimeError("can't start new thread")
        start(self)

    with mock.patch.object(threading.Thread, "start", refuse):
        try:
            checkpoint.async_save(path, plain(NEW))
        except UsageError as error:
            assert "call checkpoint.save" in str(error)  # noqa: PT017
        else:
            raise AssertionError
    after(path)


def interrupts(path: Path) -> None:
    checkpoint.save(path, plain(OLD))
    points = {"sync": sync(path), "to the commit": to_the_commit(path)}
    for kind in ("eager", "lazy"):
        points |= {kind: copying(path, kind), f"beginning, {kind}": beginning(path, kind)}
    waiting(path)
    no_thread(path)
    print(json.dumps(points))


def from_outside(path: Path) -> None:
    """A save that hangs until Ctrl-C comes from another process."""
    checkpoint.save(path, plain(OLD))

    def hang(*_: Any) -> None:
        print(os.getpid(), "writes", flush=True)
        sys.stdin.readline()
        raise AssertionError("nobody interrupted it")

    with faulty("write", 1, hang):
        interrupted = caught(lambda: checkpoint.save(path, plain(NEW)))
    after(path)
    print(json.dumps(interrupted))


def loses_the_last_save(path: Path) -> None:
    """The disk is full, nobody asks for the result, and the process ends."""
    checkpoint.save(path, plain(OLD))
    from_now_on(faulty("write", 1, fails(errno.ENOSPC), thread="reshard-ckpt-save"))
    checkpoint.async_save(path, plain(NEW))


def ends_while_saving(path: Path) -> None:
    """The main thread raises while the save has hardly begun; an exit function tries one more."""
    checkpoint.save(path, plain(OLD))
    ending = threading.Event()

    def late() -> None:
        # From Python 3.12 on no thread starts now; before that it does, and nobody waits for it unless asked to.
        try:
            checkpoint.async_save(path.with_name("late"), plain(NEW)).result(600)
        except UsageError as error:
            print(f"late: {error}")
            checkpoint.save(path.with_name("late"), plain(NEW))

    def wait(real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        assert ending.wait(600)
        return real(*args, **options)

    atexit.register(late)
    from_now_on(faulty("write", 1, wait, thread="reshard-ckpt-save"))
    checkpoint.async_save(path, plain(NEW))
    threading.Timer(0.3, ending.set).start()
    raise ValueError("training failed")


if __name__ == "__main__":
    # A shell that starts a job in the background has it ignore SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](Path(sys.argv[2]))
