"""Memory that is read and written by one live reshard, and spare memory for what must not change before every rank has all.

1. `find_overlaps`: what is read and what is written must not share memory, unless they are the same tensor.
2. `Spares`: everything goes to spare memory first if staged, else tied tensors, which must get the same bytes from all that they
   load from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.planning.local_metadata import piece_columns, width_of
from ...errors import MismatchError, UsageError
from ..common.tensor_bytes import LocalPiece
from ..loading.ties import INTS, shared_memory
from ..saving.local_shards import LocalShards


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Which destinations share memory, and may: by index, those that are the very memory that they would be copied from, and
    groups of those that are one memory, which load from several tensors."""

    identical: frozenset[int]
    tied: tuple[tuple[int, ...], ...]


def find_overlaps(held: LocalShards, wanted: LocalShards, chosen: Collection[int], same: Callable[[str, str], bool]) -> Overlaps:
    """Find destinations whose memory is also that of a source, or of another destination.

    Parameters
    ----------
    chosen
        The tensors of `wanted`, by index, that will be written.
    same
        Tells whether the first name, of a destination, loads from the second, of a source.

    Raises
    ------
    UsageError
        One shares its memory with anything but itself, or shares a part of it; nothing was changed.
    """
    sources = {i: piece.tensor for i, piece in held.rows}
    targets = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
    memory = [*sources.values(), *targets.values()]
    specs = [held.specs[i] for i in sources] + [wanted.specs[i] for i in targets]

    def where(i: int) -> tuple[Any, ...]:
        return memory[i].data_ptr(), memory[i].dtype, specs[i].pieces

    index, identical, tied = list(targets), set[int](), []
    for shared in shared_memory(memory, piece_columns(specs, width_of(specs))):
        of_src = [i for i in shared.targets if i < len(sources)]
        of_dst = [i for i in shared.targets if i >= len(sources)]
        for j in of_dst:
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
    """Spare memory for destinations that are put in place only once every rank has all.

    Parameters
    ----------
    wanted
        The destination.
    chosen
        Its tensors, by index, that get spare memory.
    """

    def __init__(self, wanted: LocalShards, chosen: Collection[int]) -> None:
        tensors = {i: piece.tensor for i, piece in wanted.rows if i in chosen}
        counts = {i: sum(piece.count for piece in wanted.specs[i].pieces) for i in tensors}
        self._partial = {i for i, tensor in tensors.items() if counts[i] < tensor.numel()}
        self.memory = {
            i: torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device) for i, t in tensors.items()
        }

    def instead_of(self, wanted: LocalShards) -> LocalShards:
        """Return the destination with the spare memory in place of its own."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i in self._partial:  # what nothing is loaded into keeps its value
            self.memory[i].copy_(own[i])
        rows = [(i, LocalPiece(self.memory.get(i, piece.tensor), piece.piece)) for i, piece in wanted.rows]
        return replace(wanted, rows=rows)

    def conflict(self, wanted: LocalShards, tied: Iterable[Sequence[int]]) -> MismatchError | None:
        """Make the error of tied destinations that have got different bytes; None where there are none."""
        for first, *others in tied:
            for other in others:
                if not torch.equal(_raw(self.memory[first]), _raw(self.memory[other])):
                    names = wanted.specs[other].name, wanted.specs[first].name
                    return MismatchError(
                        f"{names[0]}: tied to {names[1]} in dst, but src holds different values for them; untie them"
                    )
        return None

    def put(self, wanted: LocalShards) -> None:
        """Copy the spare memory to its place."""
        own = {i: piece.tensor for i, piece in wanted.rows}
        for i, memory in self.memory.items():
            own[i].copy_(memory)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers, so that NaNs are equal where their bits are."""
    return tensor.view(INTS[tensor.element_size()])
