"""Target tensors of a load that share memory: check that the checkpoint has the same bytes for all, before any is written.

Two targets that overlap would both be written, and the last one would win.

1. `find_ties` finds groups of targets that may share memory (*ties*), and the range of addresses of each. It cuts every wanted
   piece into boxes, and describes each box in bytes: one more, innermost, dim has the bytes of an element. It groups boxes whose
   address ranges meet; most targets are alone in their group. Views of one buffer, such as columns of a matrix, have address
   ranges that meet although they share no byte. If all boxes of a group lie on one grid of steps, the grid tells whether they
   share a byte; if they do not, the group is dropped.
2. `conflicts` goes through these addresses in steps of `TIE_BYTES`. For each target it reads the bytes that a load would put at
   these addresses into a buffer, and compares them with the bytes that earlier targets would put there.
3. A target that a scale multiplies after the read may share no byte: shared memory would be multiplied once for each name.

So every overlap is checked, for any shapes, strides and dtypes of the targets. This takes five host buffers of `TIE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Piece, PieceColumns, TensorSpec, piece_columns
from ...core.geometry.columns import group_bounds, is_new, running_max
from ...core.geometry.runs import I64, decompose
from ...core.planning.load_plan import LoadPlan, plan_load
from ...core.planning.scales import Quantized
from ...storage.protocol import Storage
from ..common.files import FileDigests
from ..common.tensor_bytes import region
from .read import ReadTarget, ReadTask, execute

TIE_BYTES = 16 << 20
"""Bytes of shared memory that are checked at a time; a multiple of every element size."""

_UNIT = 16
"""Checked address ranges begin and end at multiples of this many bytes, the largest element size."""

INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each element size in bytes, an integer dtype of torch."""


class TiedTarget(NamedTuple):
    """A target tensor that shares memory with others: its spec, the target, and the index of its source in the catalog."""

    spec: TensorSpec
    target: ReadTarget
    source: int


class Tie(NamedTuple):
    """A group of targets that may share memory at the addresses ``[low, high)``."""

    members: tuple[TiedTarget, ...]
    low: int
    high: int


def find_ties(specs: Sequence[TensorSpec], targets: Sequence[ReadTarget], source: I64, wanted: PieceColumns) -> tuple[Tie, ...]:
    """Return the groups of targets that may share memory. `wanted` has the pieces of all; ``source[i]`` is target i's source."""
    found = shared_memory([target.tensor for target in targets], wanted)
    return tuple(
        Tie(tuple(TiedTarget(specs[i], targets[i], int(source[i])) for i in shared.targets), shared.low, shared.high)
        for shared in found
    )


def shared_memory(tensors: Sequence[torch.Tensor], pieces: PieceColumns) -> list[Shared]:
    """Return the groups of tensors whose pieces may share memory, each with its range of addresses."""
    # device[i]: number of tensor i's device. address, each: its first address, and the size of its elements
    devices = [tensor.device for tensor in tensors]
    number = {device: i for i, device in enumerate(dict.fromkeys(devices))}
    device = np.array([number[device] for device in devices], np.int64)
    address = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    each = np.array([tensor.dtype.itemsize for tensor in tensors], np.int64)
    return find_shared(pieces, device, address, each)


def conflicts(
    storage: Storage, catalog: Catalog, ties: Sequence[Tie], *, verify: bool, quantized: Quantized | None = None
) -> list[str]:
    """Return one line of text for each tie that a load must refuse. No target changes.

    A load must refuse a tie if its targets would get different bytes from the checkpoint, if a scale would multiply bytes that
    they share, or if one of them is not aligned for its dtype. Raise `CorruptError` if a file or a block is damaged.
    """
    checker = _TieChecker(storage, catalog, verify, quantized)
    return list(dict.fromkeys(line for tie in ties if (line := checker.conflict(tie)) is not None))


class _TieChecker:
    """Checks ties (groups of targets that may share memory) against one checkpoint; reads the digests of each file once."""

    def __init__(self, storage: Storage, catalog: Catalog, verify: bool, quantized: Quantized | None) -> None:
        self._storage, self._catalog, self._quantized = storage, catalog, quantized
        self._digests = FileDigests(storage, catalog, verify=verify)

    def conflict(self, tie: Tie) -> str | None:
        """Check one tie. Return a message if two of its targets would get different bytes, or one is not aligned; else None."""
        for member in tie.members:
            if member.target.tensor.data_ptr() % member.target.tensor.element_size():
                return f"{member.spec.name}: shares memory with other tensors, unaligned for its dtype; load into a copy of it"
        starts = range(tie.low // _UNIT * _UNIT, tie.high, TIE_BYTES)
        lines = (self._conflict_in(tie, low, min(tie.high - low, TIE_BYTES)) for low in starts)
        return next((line for line in lines if line is not None), None)

    def _conflict_in(self, tie: Tie, low: int, size: int) -> str | None:
        """Return a message if two targets of a tie would get different bytes at addresses ``[low, low + size)``; else None."""
        size = -(-size // _UNIT) * _UNIT
        # image: bytes that the targets so far would get. covered: 0xFF for each byte that some target so far would get, else 0.
        # fresh: bytes that this target would get. scaled: 0xFF for each byte that a scale would multiply.
        image, covered, fresh, scaled = (torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(4))
        before: list[tuple[TiedTarget, LoadPlan]] = []
        for member in tie.members:
            plan = self._read(member, low, fresh)
            written = _written_mask(member, plan, size)
            is_cast = member.target.dtype != member.target.tensor.dtype
            if is_cast and self._quantized is not None and self._quantized.scale(self._catalog, member.source) is not None:
                scaled |= written
            # wrong[i]: an earlier target and this one would both get byte i, and differ, or a scale would multiply it
            wrong = (covered & written & (image ^ fresh | scaled)) != 0
            if wrong.any():
                first = next(other for other, done in before if (wrong & (_written_mask(other, done, size) != 0)).any())
                return _line(first, member, is_scaled=bool((wrong & (scaled != 0)).any()))
            torch.where(written != 0, fresh, image, out=image)
            covered |= written
            before.append((member, plan))
        return None

    def _read(self, member: TiedTarget, low: int, out: torch.Tensor) -> LoadPlan:
        """Read into `out` the bytes that a load would put at a target's addresses from `low` on; return the load plan for it.

        Places in the plan are counted from `low`, in elements. Bytes of `out` that the target does not have are left as they are.
        """
        dtype = member.target.tensor.dtype
        pieces = _pieces_within(member, low, out.numel() // dtype.itemsize)
        spec = replace(member.spec, pieces=tuple(pieces))
        wanted, window_bytes = piece_columns([spec]), self._storage.hints.read_bytes
        plan = plan_load(self._catalog, np.array([member.source]), wanted, window_bytes)
        target = ReadTarget(member.spec.name, out.view(dtype), member.target.dtype, is_buffer=True)
        execute(ReadTask(self._storage, self._catalog, plan, [target], self._digests.of(np.unique(plan.file).tolist())))
        return plan


def _line(first: TiedTarget, second: TiedTarget, *, is_scaled: bool) -> str:
    how = "tied to" if second.spec.alias_of == first.spec.name else "shares memory with"
    why = "has a scale under one of their names; ignore= the other" if is_scaled else "holds different values for them"
    return f"{second.spec.name}: {how} {first.spec.name} in the state passed, but the checkpoint {why}"


def _written_mask(member: TiedTarget, plan: LoadPlan, size: int) -> torch.Tensor:
    """Return a mask of `size` bytes: 0xFF where the load plan of a target writes a byte, 0 elsewhere.

    An element takes as many bytes as in the target's dtype, which may differ from the saved dtype.
    """
    out = torch.zeros(size, dtype=torch.uint8, device="cpu")
    elements = out.view(INTS[member.target.tensor.element_size()])
    for dst, lengths, strides in zip(*(column.tolist() for column in (plan.dst, plan.lengths, plan.dst_strides)), strict=True):
        region(elements, dst, tuple(lengths), tuple(strides)).fill_(-1)
    return out


def _pieces_within(member: TiedTarget, low: int, count: int) -> Iterator[Piece]:
    """Yield the boxes of a target in the `count` elements from address `low` on, as pieces whose `base` counts from `low`."""
    tensor = member.target.tensor
    first = (low - tensor.data_ptr()) // tensor.element_size()  # a whole number: addresses were checked
    for piece in member.spec.pieces:
        for box in _cut(piece, range(len(piece.lengths)), piece.start, piece.count):
            # In order of stride, the elements of a box are in order of address, so a window is one run of them.
            dims = sorted(range(len(box.lengths)), key=lambda d: (box.lengths[d] > 1, -box.strides[d]))
            lengths = [box.lengths[d] for d in dims]
            strides = [box.strides[d] for d in dims]
            begin = _num_before(first - box.base, lengths, strides)
            end = _num_before(first + count - box.base, lengths, strides)
            for part in _cut(box, dims, begin, end - begin):
                yield replace(part, base=part.base - first)


def _cut(piece: Piece, dims: Sequence[int], start: int, count: int) -> list[Piece]:
    """Cut `count` elements of a piece's box, from element `start` on, into boxes. Elements are counted in the order of `dims`.

    `dims` lists the dims of the box, slowest first.
    """
    if count <= 0:
        return []
    ordered = np.array([piece.lengths[d] for d in dims], np.int64)
    cut = decompose(ordered[None], np.array([start]), np.array([count]))
    back = np.argsort(np.array(dims, np.int64))  # the dims in their own order again
    boxes = zip(cut.offsets[:, back].tolist(), cut.lengths[:, back].tolist(), strict=True)
    return [piece.inner(offsets, tuple(lengths)) for offsets, lengths in boxes]


def _num_before(at: int, lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements of a strided box that lie in memory before the offset `at`, in elements from the box's first one.

    Strides fall from dim to dim, and each exceeds the reach of all later dims together.

    >>> [_num_before(at, [2, 3], [10, 2]) for at in (-1, 0, 1, 5, 10, 11, 99)]
    [0, 0, 1, 3, 3, 4, 6]
    """
    num = 0
    for dim, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        if at <= 0:
            return num
        if length == 1:
            continue
        inner = prod(lengths[dim + 1 :])
        whole = at // stride
        if whole >= length:
            return num + length * inner
        num += whole * inner
        at -= whole * stride
    return num + (at > 0)


MAX_BOXES = 1024
"""The most boxes of a group that are compared with each other; the targets of a larger group count as sharing memory."""


class Shared(NamedTuple):
    """A group of targets, as ascending indices, that may share bytes of the addresses ``[low, high)``."""

    targets: tuple[int, ...]
    low: int
    high: int


def find_shared(wanted: PieceColumns, device: I64, address: I64, item_bytes: I64) -> list[Shared]:
    """Find the groups of targets that may share memory; a target in no group certainly shares none.

    Parameters
    ----------
    wanted
        The pieces of all targets; no target has two elements at one address.
    device, address, item_bytes : (targets,)
        A number for the device, the address of the first element there, and the size of an element in bytes.
    """
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    target = wanted.tensor[cut.parent]
    strides = wanted.strides[cut.parent]
    each = item_bytes[target]
    # Row i is box i from here on. low, high: its addresses; lengths, steps: its dims in bytes, the last one within an element.
    low = address[target] + (wanted.base[cut.parent] + (cut.offsets * strides).sum(axis=1)) * each
    lengths = np.hstack([cut.lengths, each[:, None]])
    steps = np.hstack([strides * each[:, None], np.ones_like(each)[:, None]])
    high = low + ((lengths - 1) * steps).sum(axis=1) + 1
    # Boxes by device and address; each group is order[begin[g] : end[g]].
    order = np.lexsort((low, device[target]))
    # fresh: the boxes, in this order, that begin behind the ends of all boxes of their device before them.
    fresh = is_new(device[target][order])
    fresh[1:] |= low[order][1:] >= running_max(high[order], fresh)[:-1]
    begin, end = group_bounds(fresh)
    out = []
    for i in np.flatnonzero(end - begin > 1).tolist():
        boxes = order[begin[i] : end[i]]
        owners = np.unique(target[boxes])
        if len(owners) > 1 and not _are_apart(target[boxes], low[boxes], lengths[boxes], steps[boxes]):
            out.append(Shared(tuple(owners.tolist()), int(low[boxes].min()), int(high[boxes].max())))
    return out


def _are_apart(owner: I64, low: I64, lengths: I64, steps: I64) -> bool:
    """Tell whether it is certain that no two boxes of memory with different owners share a byte.

    Addresses are written as digits on the grid of all steps. If every step is larger than the reach of all smaller steps
    together, each byte has one sequence of digits, and boxes share a byte exactly if their ranges of digits meet on every dim.
    """
    if len(low) > MAX_BOXES:
        return False
    grid = sorted({1, *steps[lengths > 1].tolist()}, reverse=True)
    # first[i], size[i]: for each step of the grid, the digit at which box i begins, and the number of digits that it covers.
    rest = low - low.min()
    first, size = (np.empty((len(low), len(grid)), np.int64) for _ in range(2))
    for dim, step in enumerate(grid):
        first[:, dim], rest = np.divmod(rest, step)
        size[:, dim] = 1 + np.where(steps == step, lengths - 1, 0).sum(axis=1)
    # reach: the largest offset that each step contributes; within: the sum over a step and all smaller ones.
    reach = (first + size - 1).max(axis=0) * np.array(grid)
    within = np.cumsum(reach[::-1])[::-1]
    if (np.array(grid)[:-1] <= within[1:]).any():
        return False
    # meet[i, j]: boxes i and j share a byte.
    last = first + size
    meet = ((first[:, None] < last[None]) & (first[None] < last[:, None])).all(axis=2)
    return not bool((meet & (owner[:, None] != owner[None])).any())
