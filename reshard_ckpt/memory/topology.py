"""The nodes of a job: the ranks on each node, and the ranks that hold copies of other ranks' files in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..comm.protocol import Comm, merge_of_all
from ..core.planning.copies import copy_groups, copy_holders


@dataclass(frozen=True)
class Topology:
    """The nodes of a job.

    Attributes
    ----------
    node_of
        For each rank: the number of its node. Nodes are numbered in the order of their first ranks.
    ids
        For each node: its id (`node_id`). A node that has lost its memory has a new id.
    machines
        For each node: the id of its machine (`machine_id`). One machine may have several nodes.
    copies
        Number of other nodes that should hold a copy of each node's files.
    """

    node_of: tuple[int, ...]
    ids: tuple[str, ...]
    machines: tuple[str, ...]
    copies: int

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """For each node: its ranks, in order."""
        return tuple(tuple(r for r, node in enumerate(self.node_of) if node == n) for n in range(len(self.ids)))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each rank: the ranks that hold copies of its files, one rank on each node that holds copies for the rank's node."""
        holders = copy_holders(self.machines, self.copies)
        out = []
        for rank, node in enumerate(self.node_of):
            place = self.ranks_of[node].index(rank)
            # Rank number `place` of a node sends to rank number `place` of the other; a smaller node begins again at its first.
            out.append(tuple(ranks[place % len(ranks)] for ranks in (self.ranks_of[holder] for holder in holders[node])))
        return tuple(out)

    def sources(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose files the given rank holds copies of."""
        return tuple(source for source, targets in enumerate(self.targets) if rank in targets)

    def group_of(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of a rank's group, and the ranks in it. The nodes of a group hold each other's copies."""
        for number, nodes in enumerate(copy_groups(self.machines, self.copies)):
            if self.node_of[rank] in nodes:
                return number, tuple(r for r, node in enumerate(self.node_of) if node in nodes)
        raise AssertionError(rank)

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first one of its node, which does the work that is done once for each node."""
        return self.ranks_of[self.node_of[rank]][0] == rank


def find_topology(comm: Comm, node: str, machine: str, copies: int) -> Topology:
    """Find out which ranks share a node, and return the same topology on all ranks. Collective.

    Parameters
    ----------
    node, machine
        Ids of this rank's node and machine.
    copies
        Number of other nodes that should hold a copy of each node's files.
    """
    # of_ranks[r]: ids of the node and the machine of rank r; nodes: the same pairs, each once, by the first rank of the node
    of_ranks = [tuple(pair) for pair in merge_of_all(comm, (node, machine))]
    nodes = list(dict.fromkeys(of_ranks))
    return Topology(tuple(nodes.index(pair) for pair in of_ranks), tuple(n for n, _ in nodes), tuple(m for _, m in nodes), copies)
