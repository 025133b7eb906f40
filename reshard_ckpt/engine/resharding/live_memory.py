"""Shared memory of a live reshard: tensors that are read and written in one call, and spare memory to write into first.

1. `find_overlaps`: a source and a destination must not share memory, unless they are the same tensor.
2. `Spares`: with ``staged=True`` all destinations are written into spare memory first. Without it only tied destinations are, so
   that the bytes of their sources can be compared before any is put in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.catalog.specs import piece_columns
from ...errors import MismatchError, UsageError
from ..common.tensor_bytes import LocalPiece
from ..loading.ties import INTS, shared_memory
from ..saving.local_shards import LocalShards


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The destinations that share memory in an allowed way, by index.

    Attributes
    ----------
    identical
        Destinations whose memory is that of the source that they would be copied from; nothing is copied for them.
    tied
        Groups of destinations that are one memory, and load from different names.
    """

    identical: frozenset[int]
    tied: tuple[tuple[int, ...], ...]


def find_overlaps(held: LocalShards, wanted: LocalShards, chosen: Collection[int], same: Callable[[str, str], bool]) -> Overlaps:
    """Find the destinations that share memory with a source, or with another destination.

    Parameters
    ----------
    held, wanted
        The sources and the destinations on this rank.
    chosen
        The tensors of `wanted`, by index, that will be written.
    same
        ``same(destination, source)`` tells whether the destination of this name loads from the source of this name.

    Raises
    ------
    UsageError
        A destination shares memory with another source than its own, or only a part of its memory. Nothing was changed.
    """
    sources = {i: piece.tensor for i, piece in held.rows}
    targets = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
    # Sources come first in `memory` and `specs`: an index below len(sources) is a source, any other a destination.
    memory = [*sources.values(), *targets.values()]
    specs = [held.specs[i] for i in sources] + [wanted.specs[i] for i in targets]

    def where(i: int) -> tuple[Any, ...]:
        """Return a key that is equal for tensors with the same elements at the same address."""
        return memory[i].data_ptr(), memory[i].dtype, specs[i].pieces

    index, identical, tied = list(targets), set[int](), []
    for shared in shared_memory(memory, piece_columns(specs)):
        of_src = [i for i in shared.targets if i < len(sources)]
        of_dst = [i for i in shared.targets if i >= len(sources)]
        for j in of_dst:
            # alike: sources (or, without any, destinations) that are exactly the same memory; other: one that is not
            alike = [i for i in (of_src or of_dst) if where(i) == where(j)]
            other = next((i for i in (of_src or of_dst) if i not in alike), j)
            if of_src and not any(same(specs[j].name, specs[i].name) for i in alike):
                raise UsageError(
                    f"{specs[j].name}: its memory in dst is also that of {specs[of_src[0]].name} in src, which would be "
                    "overwritten while it is read; pass a copy on one side, or the same tensor under the same name on both"
                )
            if not of_src and other != j:
                raise UsageError(f"{specs[j].name}: shares a part of its memory with {specs[other].name} in dst; pass copies")
        if of_src:
            identical.update(index[j - len(sources)] for j in of_dst)
        else:
            tied.append(tuple(index[j - len(sources)] for j in of_dst))
    return Overlaps(frozenset(identical), tuple(tied))


class Spares:
    """Spare memory for destinations. It is copied into place only after every rank has received all of its parts.

    Parameters
    ----------
    wanted
        The destinations.
    chosen
        The indices of the tensors that get spare memory.
    may_lack
        Whether the source may lack some of the elements that the pieces of the destinations cover.
    """

    def __init__(self, wanted: LocalShards, chosen: Collection[int], *, may_lack: bool = False) -> None:
        tensors = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
        counts = {i: sum(piece.count for piece in wanted.specs[i].pieces) for i in tensors}
        # Tensors that may receive only some of their elements.
        self._partial = {i for i, tensor in tensors.items() if may_lack or counts[i] < tensor.numel()}
        self.memory = {
            i: torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device) for i, t in tensors.items()
        }

    def instead_of(self, wanted: LocalShards) -> LocalShards:
        """Return the destinations with spare memory in place of their own, where they have any."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i in self._partial:  # elements that nothing is loaded into must keep their values when `put` copies the whole tensor
            self.memory[i].copy_(own[i])
        rows = [(i, LocalPiece(self.memory.get(i, piece.tensor), piece.piece)) for i, piece in wanted.rows]
        return replace(wanted, rows=rows)

    def conflict(self, wanted: LocalShards, tied: Iterable[Sequence[int]]) -> MismatchError | None:
        """Return the error for tied destinations that received different bytes, or None if all are equal."""
        for first, *others in tied:
            for other in others:
                if not torch.equal(_raw(self.memory[first]), _raw(self.memory[other])):
                    names = wanted.specs[other].name, wanted.specs[first].name
                    return MismatchError(
                        f"{names[0]}: tied to {names[1]} in dst, but src holds different values for them; untie them"
                    )
        return None

    def put(self, wanted: LocalShards) -> None:
        """Copy the spare memory into the destinations."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i, memory in self.memory.items():
            own[i].copy_(memory)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers, so that NaNs are equal where their bits are."""
    return tensor.view(INTS[tensor.element_size()])
