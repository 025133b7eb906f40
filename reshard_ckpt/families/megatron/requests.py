"""A save that runs in this process, as an ``AsyncRequest`` that Megatron's ``AsyncCallsQueue`` can schedule.

Megatron runs the function of a request in a process of its own, forked or spawned, and finalizes the request once these processes
have ended on all ranks. Here threads of this process save, so what is run there only waits for them:

1. a thread accepts connections at a socket until the save is over, and then says so to all of them;
2. the function connects, and returns when it is told, or when nobody listens any more;
3. the first of the functions that finalize the request raises what went wrong, on all ranks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ...checkpoint import SaveHandle


def request_of(handle: SaveHandle) -> Any:
    """Wrap a save that is under way."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # needs the package only here

    return AsyncRequest(wait_for, (listen(handle),), [handle.result])


def listen(handle: SaveHandle) -> Any:
    """Start to tell whoever connects when a save is over; return the address to connect to."""
    listener = Listener()
    address = listener.address
    threading.Thread(target=_serve, args=(listener, handle), name="reshard-ckpt-request", daemon=True).start()
    # What comes last wakes the thread; a closed socket would not.
    handle.add_done_callback(lambda _: _knock(address))
    return address


def _serve(listener: Listener, handle: SaveHandle) -> None:
    waiting: list[Connection] = []
    while not handle.done():
        waiting.append(listener.accept())
    listener.close()  # removes the address first: who comes later finds nobody
    for connection in waiting:
        with suppress(OSError):  # it has left
            # Told, not just hung up on: a process forked meanwhile may hold the connection open too.
            connection.send_bytes(b"over")
            connection.close()


def _knock(address: Any) -> None:
    with suppress(OSError, EOFError):
        Client(address).close()


def wait_for(address: Any) -> None:
    """Wait until the save at an address is over; to be run in any process of this machine."""
    with suppress(OSError, EOFError), Client(address) as connection:
        connection.recv_bytes()
