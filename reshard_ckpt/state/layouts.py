"""Layouts: where the elements of a local tensor lie in the global tensor, whatever its strides; and the job's mesh.

A `Layout` is geometry only, so optimizer state can share the layout of its parameter even if its strides differ. Together with a
tensor it gives the pieces of `core.catalog.specs`:

1. A layout of boxes: each box of the local tensor is one whole-box piece with the tensor's own strides.
2. A flat layout: the local tensor is a run of the concatenated boxes. Each box that the run touches gives one piece with the
   strides of the whole box, so its base may lie before the first element.
3. A flat layout of a cut tensor: the local tensor is a run of a flattened tensor, in which the boxes lie. The elements that a run
   and a box share are one run of the box too, because both go through the elements in the same order.

The mesh of the job is the first of these that exists: the mesh that the caller passes; the mesh of a DTensor that spans all
ranks, or the mesh that it was sliced from; one axis ``dp``, if DDP is used. Otherwise the mesh is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index as as_int
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.protocol import ALONE
from ..core.catalog.specs import AxisPlacement, Ints, Mesh, Piece, Replication, row_major_strides
from ..core.report import check_text, plural
from ..errors import UsageError


class LocalBox(NamedTuple):
    """A box of the global tensor (`offsets`, `lengths`), and where it begins in the local tensor (`local_offsets`)."""

    local_offsets: Ints
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a global tensor of shape `shape` that a local tensor of shape `local_shape` holds.

    Without `flat_start`, the local tensor consists of `boxes`. With `flat_start` it is flat: its element ``k`` is element
    ``flat_start + k`` of all `boxes` laid end to end in row-major order, and their `local_offsets` have no meaning. With
    `flat_shape` too, elements are counted in a tensor of that shape instead, in row-major order, in which each box begins at its
    `local_offsets`.
    """

    shape: Ints
    local_shape: Ints
    boxes: tuple[LocalBox, ...]
    replication: Replication
    placement: tuple[AxisPlacement, ...] = ()
    flat_start: int | None = None
    flat_shape: Ints | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the whole global tensor."""
        if self.flat_start is not None or self.local_shape != self.shape:
            return False
        return prod(self.shape) == 0 or (len(self.boxes) == 1 and self.boxes[0].lengths == self.shape)

    def pieces(self, memory: torch.Tensor) -> tuple[Piece, ...]:
        """Return the pieces of the global tensor that `memory` holds, which has shape `local_shape`.

        Empty pieces are left out.
        """
        assert tuple(memory.shape) == self.local_shape, (memory.shape, self.local_shape)
        if self.flat_start is None:
            strides = tuple(memory.stride())
            return tuple(_box(box, strides) for box in self.boxes if prod(box.lengths))
        # A flat tensor of several dims is contiguous (checked where it is declared), so its flat stride is 1.
        step = memory.stride(0) if memory.ndim == 1 else 1
        if self.flat_shape is not None:
            runs = (_cut_run(box, self.flat_shape, self.flat_start, memory.numel(), step) for box in self.boxes)
            return tuple(piece for piece in runs if piece.count)
        return tuple(_runs(self.boxes, self.flat_start, memory.numel(), step))


@lru_cache(maxsize=1 << 16)
def whole(shape: Ints, replication: Replication = Replication.PLAIN) -> Layout:
    """Return the layout of a tensor that this rank holds completely."""
    zeros = (0,) * len(shape)
    return Layout(shape, shape, (LocalBox(zeros, zeros, shape),), replication)


def _box(box: LocalBox, strides: Ints) -> Piece:
    base = sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))
    return Piece(box.offsets, box.lengths, 0, prod(box.lengths), base, strides)


def _runs(boxes: tuple[LocalBox, ...], first: int, count: int, step: int) -> Iterator[Piece]:
    """Yield the pieces for elements ``first : first + count`` of boxes laid end to end; elements are `step` apart in memory."""
    box_first = 0
    for box in boxes:
        size = prod(box.lengths)
        start, stop = max(first, box_first) - box_first, min(first + count, box_first + size) - box_first
        if start < stop:
            strides = tuple(stride * step for stride in row_major_strides(box.lengths))
            yield Piece(box.offsets, box.lengths, start, stop - start, (box_first - first) * step, strides)
        box_first += size


def _cut_run(box: LocalBox, shape: Ints, first: int, count: int, step: int) -> Piece:
    """Return the part of a box in elements ``first : first + count`` of a flattened tensor of this shape, as a piece.

    The piece may be empty.
    """
    strides = row_major_strides(shape)
    start = _num_before(box, strides, shape, first)
    stop = _num_before(box, strides, shape, first + count)
    at = sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))
    return Piece(box.offsets, box.lengths, start, stop - start, (at - first) * step, tuple(stride * step for stride in strides))


def _num_before(box: LocalBox, strides: Ints, shape: Ints, index: int) -> int:
    """Count the elements of a box before element `index` of a flattened tensor with this shape, in which the box lies."""
    if index >= prod(shape):
        return prod(box.lengths)
    before = 0
    for dim, (low, length, stride) in enumerate(zip(box.local_offsets, box.lengths, strides, strict=True)):
        at, index = divmod(index, stride)
        before += min(max(at - low, 0), length) * prod(box.lengths[dim + 1 :])
        if not low <= at < low + length:
            break
    return before


class RankSet(NamedTuple):
    """The ranks that take part in a save or load: their global ranks in order, and the index of this process among them."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(process_group: Any) -> RankSet:
    """Return the ranks of a process group; of the default group for None, only this process for `ALONE` or without a group."""
    if process_group is ALONE or not (dist.is_available() and dist.is_initialized()):
        return RankSet((0,), 0)
    group = dist.group.WORLD if process_group is None else process_group  # torch 2.6 has no ranks for None
    return RankSet(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))


def declared_mesh(mesh: DeviceMesh | Mapping[str, int], group: RankSet) -> Mesh:
    """Check the ``mesh=`` that the caller passes, and return it as a `Mesh`.

    Raise `UsageError` if it is neither a DeviceMesh nor a dict of axis sizes, or its ranks are not the ranks that take part, in
    row-major order.
    """
    if isinstance(mesh, Mapping):
        try:
            out = Mesh(tuple(mesh), tuple(map(as_int, mesh.values())))
        except TypeError:
            raise UsageError(f"mesh={dict(mesh)!r:.200}: the size of each axis is a whole number, as in {{'dp': 2}}") from None
        for axis in out.axes:
            if not isinstance(axis, str):
                raise UsageError(f"mesh={dict(mesh)!r:.200}: the name of each axis is text, as in {{'dp': 2}}")
            check_text(axis, "an axis of mesh=")
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
    """Find the job's mesh, or return None if the state does not show it.

    It is the mesh of a DTensor, or the mesh that it was sliced from, that spans all ranks; of several, the one with most axes.
    Without one, it has no axes if the job has one rank, or one axis ``dp`` if every group of DDP spans all ranks and no DTensor
    has a mesh of other ranks.

    `meshes` are the meshes of DTensors in the state, `ddp_groups` the ranks of each process group that DDP uses.
    """
    best: DeviceMesh | None = None
    sees_part = False
    for mesh in dict.fromkeys(m for found in meshes for m in (found, root_mesh(found))):
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
    """Return the mesh from which a mesh was sliced, or the mesh itself if it is not a slice."""
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
