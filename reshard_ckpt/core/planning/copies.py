"""Where copies of each node's images (checkpoint files in memory) lie, and how likely it is that failures lose all copies of one.

1. Deal out the nodes by machine, so that neighbours are on different machines if there are several.
2. Form groups of ``copies + 1`` nodes; the last group takes the rest. Inside a group each node sends its images to the next
   ``copies`` nodes of a ring.

Groups are the proposal of GEMINI (Wang et al., SOSP 2023): with one copy, a second lost node holds the only copy of the first
one's images with probability 1 / (n − 1), while in one large ring the probability is twice that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import zip_longest
from math import comb


def copy_holders(machines: Sequence[Hashable], copies: int) -> tuple[tuple[int, ...], ...]:
    """Choose the other nodes that hold a copy of each node's images (checkpoint files in memory).

    Parameters
    ----------
    machines
        For each node the machine that it is on, as any hashable key.
    copies
        Number of other nodes that hold a copy of each node's images. If there are fewer other nodes, each of them holds one.

    Returns
    -------
    tuple of tuples
        For each node the nodes that it sends its images to, without itself.

    >>> copy_holders(["a", "b", "c", "d", "e"], 1)
    ((1,), (0,), (3,), (4,), (2,))
    >>> copy_holders(["a", "a", "b", "b"], 1)
    ((2,), (3,), (0,), (1,))
    """
    holders: list[tuple[int, ...]] = [()] * len(machines)
    for group in copy_groups(machines, copies):
        sent = min(copies, len(group) - 1)
        for place, node in enumerate(group):
            holders[node] = tuple(group[(place + n) % len(group)] for n in range(1, sent + 1))
    return tuple(holders)


def copy_groups(machines: Sequence[Hashable], copies: int) -> tuple[tuple[int, ...], ...]:
    """Divide the nodes into groups whose members hold copies for each other.

    >>> copy_groups(["a", "b", "c", "d", "e"], 1)
    ((0, 1), (2, 3, 4))
    """
    order = _dealt_out(machines)
    size = copies + 1
    count = max(1, len(order) // size)
    ends = [size * n for n in range(1, count)] + [len(order)]
    return tuple(tuple(order[start:end]) for start, end in zip([0, *ends], ends, strict=False) if end > start)


def _dealt_out(machines: Sequence[Hashable]) -> list[int]:
    """List the indices of all nodes, taking one from each machine in turn."""
    by_machine: dict[Hashable, list[int]] = defaultdict(list)
    for node, machine in enumerate(machines):
        by_machine[machine].append(node)
    # Machines with most nodes first: if one has more nodes than all others, only its last nodes stand side by side.
    hands = sorted(by_machine.values(), key=len, reverse=True)
    return [node for round_ in zip_longest(*hands) for node in round_ if node is not None]


def pair_lost_share(nodes: int, copies: int) -> float:
    """Compute the probability that data are lost if two nodes, drawn at random, fail at once.

    Data are lost if the two nodes hold the only two copies of some node's images. `nodes` and `copies` are counts; each node is a
    machine of its own.

    >>> pair_lost_share(8, 1) == 1 / 7, pair_lost_share(8, 0), pair_lost_share(8, 2)
    (True, 1.0, 0.0)
    """
    holders = copy_holders(range(nodes), copies)
    if nodes < 3 or not holders[0]:
        return 1.0
    return len({frozenset((node, sent[0])) for node, sent in enumerate(holders) if len(sent) == 1}) / comb(nodes, 2)
