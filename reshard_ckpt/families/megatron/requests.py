"""A save that runs in this process, as an ``AsyncRequest`` that Megatron's ``AsyncCallsQueue`` can schedule.

Megatron runs the function of a request in another process, forked or spawned. It finalizes the request once these processes have
ended on all ranks. But here, threads of this process save. So the function in the other process only waits for them:

1. A thread of this process accepts connections at a socket until the save is over, and then sends a message to each of them.
2. The function connects. It returns when it receives the message, or if nobody listens any more.
3. The first function that finalizes the request raises the error of the save, if any, on all ranks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ...plugins import checkpoint


def request_of(handle: checkpoint.SaveHandle) -> Any:
    """Wrap a save that is under way in an ``AsyncRequest``."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # needs the package only here

    return AsyncRequest(wait_for, (listen(handle),), [handle.result])


def listen(handle: checkpoint.SaveHandle) -> Any:
    """Start a thread that tells every process that connects when a save is over; return the address to connect to."""
    listener = Listener()
    address = listener.address
    threading.Thread(target=_serve, args=(listener, handle), name="reshard-ckpt-request", daemon=True).start()
    # The callback connects, because that wakes the thread from `accept`; closing the socket would not.
    handle.add_done_callback(lambda _: _knock(address))
    return address


def _serve(listener: Listener, handle: checkpoint.SaveHandle) -> None:
    waiting: list[Connection] = []
    while not handle.done():
        waiting.append(listener.accept())
    listener.close()  # this removes the address, so that later processes fail to connect and return at once
    for connection in waiting:
        with suppress(OSError):  # the process at the other end has ended
            # A message, not only a close: a process that was forked meanwhile may hold this connection open too.
            connection.send_bytes(b"over")
            connection.close()


def _knock(address: Any) -> None:
    with suppress(OSError, EOFError):
        Client(address).close()


def wait_for(address: Any) -> None:
    """Wait until the save behind an address is over; any process of this machine can call it."""
    with suppress(OSError, EOFError), Client(address) as connection:
        connection.recv_bytes()
