"""Which ranks share a node, and which ranks hold the copies of which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgpack

from ..comm.protocol import Comm
from ..core.planning.copies import copy_groups, copy_holders


@dataclass(frozen=True)
class Topology:
    """The nodes of a job.

    Attributes
    ----------
    node_of
        By rank: the number of its node; nodes are numbered in the order of their first ranks.
    ids, machines
        By node: its id, which is gone with its memory, and what tells its machine from others.
    copies
        How many other nodes are to hold a copy.
    """

    node_of: tuple[int, ...]
    ids: tuple[str, ...]
    machines: tuple[str, ...]
    copies: int

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """By node: its ranks."""
        return tuple(tuple(r for r, node in enumerate(self.node_of) if node == n) for n in range(len(self.ids)))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the ranks that hold its copies, one on each of the nodes that hold those of its node."""
        holders = copy_holders(self.machines, self.copies)
        out = []
        for rank, node in enumerate(self.node_of):
            place = self.ranks_of[node].index(rank)
            out.append(tuple(ranks[place % len(ranks)] for ranks in (self.ranks_of[holder] for holder in holders[node])))
        return tuple(out)

    def sources(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of whose images a rank holds copies."""
        return tuple(source for source, targets in enumerate(self.targets) if rank in targets)

    def group_of(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the number and the ranks of the group of nodes that hold each other's copies, for a rank."""
        for number, nodes in enumerate(copy_groups(self.machines, self.copies)):
            if self.node_of[rank] in nodes:
                return number, tuple(r for r, node in enumerate(self.node_of) if node in nodes)
        raise AssertionError(rank)

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of its node."""
        return self.ranks_of[self.node_of[rank]][0] == rank


def find_topology(comm: Comm, node: str, machine: str, copies: int) -> Topology:
    """Tell all ranks on which nodes they are. Collective."""
    gathered = comm.gather(msgpack.packb((node, machine)))
    data = comm.broadcast(None if gathered is None else msgpack.packb(gathered))
    of_ranks = [tuple(msgpack.unpackb(one)) for one in msgpack.unpackb(data)]
    nodes = list(dict.fromkeys(of_ranks))
    return Topology(tuple(nodes.index(one) for one in of_ranks), tuple(n for n, _ in nodes), tuple(m for _, m in nodes), copies)
