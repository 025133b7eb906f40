"""The rendezvous of a job of one node: a store on a free port, and nobody to wait for.

The one that the agent has for any number of nodes waits a second for others to come, and takes half a CPU second for each job.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "one-node"


class OneNode(RendezvousHandler):
    """What the agent asks, answered for the only node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the agent's store, as those of ``torchrun`` do."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("localhost", self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> str:
    """Make the backend known to the agent of this process; returns its name."""
    rendezvous_handler_registry.register(BACKEND, OneNode)
    return BACKEND
