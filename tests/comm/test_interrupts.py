"""Signals held back: when their handlers run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from reshard_ckpt.comm import interrupts_allowed, interrupts_held
from reshard_ckpt.comm.interrupts import interrupt_waits


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    def handle(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(request.param, handle)
    yield request.param
    assert signal.getsignal(request.param) is handle
    signal.signal(request.param, before)


def came(number: int) -> bool:
    """Send a signal to this process; return whether its handler ran at once."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


def test_a_signal_waits_for_the_end_of_the_block(number: int):
    with suppress(KeyboardInterrupt), ExitStack() as block:
        block.enter_context(interrupts_held())
        assert not came(number)
        assert interrupt_waits()
        block.close()
        pytest.fail("the end of the block handles the signal")
    assert came(number)


def test_a_signal_waits_beside_an_error_of_the_block(number: int):
    def fails() -> None:
        with interrupts_held():
            assert not came(number)
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        fails()
    assert isinstance(raised.value.__context__, ValueError)


def test_the_second_signal_of_a_kind_is_not_held_back(number: int):
    with interrupts_held():
        assert not came(number)
        assert came(number)
        assert not interrupt_waits()


def test_local_work_meets_the_signal_that_waits_and_those_that_come(number: int):
    with interrupts_held():
        assert not came(number)
        with pytest.raises(KeyboardInterrupt), interrupts_allowed():
            pytest.fail("the signal that waits is handled first")
        with interrupts_allowed():
            assert came(number)
        assert not interrupt_waits()


@pytest.mark.parametrize("order", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_each_signal_that_waits_is_handled_though_the_handler_of_one_raises(order: tuple[int, int]):
    seen: list[int] = []
    # A job that a shell starts in the background ignores SIGINT.
    handlers = {signal.SIGTERM: lambda number, _: seen.append(number), signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            list(map(signal.raise_signal, order))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [signal.SIGTERM]


def test_a_block_within_local_work_holds_signals_back_again(number: int):
    with interrupts_held(), interrupts_allowed():
        with suppress(KeyboardInterrupt), ExitStack() as inner:
            inner.enter_context(interrupts_held())
            assert not came(number)
            inner.close()
            pytest.fail("the end of the inner block handles the signal")
        assert came(number)


def test_default_actions_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    handlers = []

    def elsewhere() -> None:
        with interrupts_held(), interrupts_allowed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
