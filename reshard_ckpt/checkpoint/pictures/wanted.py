"""What would the ranks of another mesh hold of one tensor? What `reshard` would give them, of this tensor alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, Mesh
from ...core.planning.target_pieces import target_rows
from ...core.planning.target_placement import TargetPlacement, TargetTopology, place
from .cuts import Wanted


def wanted_on(catalog: Catalog, name: str, mesh: Mesh, groups: Mapping[str, Sequence[str]]) -> list[Wanted]:
    """The parts of a tensor on another mesh, each with the ranks that hold it, in order of rank.

    Parameters
    ----------
    groups
        For each optimizer the FQNs of its parameters, in its order.

    Raises
    ------
    UsageError
        The topology cannot be told from the catalog.
    """
    placed = place(catalog, catalog.names, TargetTopology(mesh, groups=groups))
    # Tensors that are cut together, as one vector, say where each of them is cut.
    names = [name, *(other for other in catalog.names if other != name and _is_cut_with(placed[name], placed, other))]
    shapes = [catalog.shape(catalog.index(n)) for n in names]
    held, boxes = target_rows(shapes, [placed[n] for n in names], names, mesh, {})
    runs: dict[int, list[tuple[Ints, Ints, int, int]]] = {}
    mine = held.tensor == 0
    columns = (held.rank[mine], held.box[mine], held.start[mine], held.count[mine])
    for rank, box, start, count in zip(*(column.tolist() for column in columns), strict=True):
        runs.setdefault(rank, []).append((*boxes[box], start, count))
    alike: dict[tuple[tuple[Ints, Ints, int, int], ...], list[int]] = {}
    for rank, held_by_it in runs.items():
        alike.setdefault(tuple(held_by_it), []).append(rank)
    return [Wanted(tuple(ranks), parts) for parts, ranks in alike.items()]


def _is_cut_with(of: TargetPlacement, placed: Mapping[str, TargetPlacement], other: str) -> bool:
    leader = placed[of.follows] if of.follows is not None else of
    vector, its = leader.vector, placed[other].vector
    return other == of.follows or (vector is not None and its is not None and its[0] == vector[0])
