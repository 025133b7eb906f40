"""The mesh of the job.

It is the first of these that exists: the mesh that the caller passes; the mesh of a DTensor that spans all ranks, or the mesh
that it was sliced from; one axis ``dp``, if DDP is used. Otherwise the mesh is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.protocol import ALONE
from ..core.catalog.specs import Mesh
from ..core.words import check_text, plural
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class RankSet:
    """The ranks that take part: their global ranks in order, and the index of this process among them."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(process_group: Any) -> RankSet:
    """Return the ranks of a process group, or of the default group for None; this process alone for `ALONE` or no group."""
    if process_group is ALONE or not (dist.is_available() and dist.is_initialized()):
        return RankSet((0,), 0)
    group = dist.group.WORLD if process_group is None else process_group  # torch 2.6 has no ranks for None
    return RankSet(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))


def declared_mesh(mesh: DeviceMesh | Mapping[str, int], group: RankSet) -> Mesh:
    """Return the mesh that the caller passes.

    Raises
    ------
    UsageError
        Its ranks are not the ranks that take part, in row-major order.
    """
    if isinstance(mesh, Mapping):
        out = Mesh(tuple(mesh), tuple(int(size) for size in mesh.values()))
        for axis in out.axes:
            check_text(str(axis), "an axis of mesh=")
        if out.size != group.size or any(size < 1 for size in out.sizes):
            raise UsageError(
                f"mesh: axes {dict(mesh)} have {plural(out.size, 'rank')}, but {group.size} take part; give the size of each axis"
            )
        return out
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh: wanted a DeviceMesh or a dict of axis sizes, got {type(mesh).__name__}")
    ranks = _ranks(mesh)
    if ranks != group.ranks:
        raise UsageError(
            f"mesh: the DeviceMesh has ranks {_some(ranks)}, but those that take part are {_some(group.ranks)}; pass the mesh "
            "of the whole job, with its ranks in row-major order"
        )
    return Mesh(axis_names(mesh), tuple(mesh.shape))


def found_mesh(meshes: Iterable[DeviceMesh], group: RankSet, *, ddp_groups: Sequence[tuple[int, ...]]) -> Mesh | None:
    """Return the mesh that the state shows, or None; `ddp_groups` are the ranks of each process group that DDP uses."""
    best: DeviceMesh | None = None
    sees_part = False
    for mesh in dict.fromkeys(m for one in meshes for m in (one, root_mesh(one))):
        if _ranks(mesh) == group.ranks:
            best = mesh if best is None or mesh.ndim > best.ndim else best
        else:
            sees_part = True
    if best is not None:
        return Mesh(axis_names(best), tuple(best.shape))
    if group.size == 1:
        return Mesh((), ())
    is_all_dp = bool(ddp_groups) and not sees_part and all(ranks == group.ranks for ranks in ddp_groups)
    return Mesh(("dp",), (group.size,)) if is_all_dp else None


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes; ``axis0``, ``axis1`` and so on if it has no names."""
    return tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was sliced from, or the mesh itself."""
    # torch has no public name for it. Without it, placements are not recorded if the state shows slices alone.
    root = getattr(mesh, "_get_root_mesh", None)
    found = root() if callable(root) else mesh
    return found if isinstance(found, DeviceMesh) else mesh


@lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    # The ranks of a mesh never change, and torch takes a tenth of a millisecond to list them.
    ranks: list[int] = mesh.mesh.flatten().tolist()
    assert len(ranks) == prod(mesh.shape)
    return tuple(ranks)


def _some(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{', '.join(map(str, ranks[:8]))}, … {len(ranks)} in all]"
