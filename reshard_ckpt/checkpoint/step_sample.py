"""A check that a survivor's state and the checkpoint of the same step come from the same training: compare a sample of elements.

A run that went back and trained on, or another run, reaches the same number of steps with other bytes. Parts of both would be a
state that no training ever had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..comm import Comm
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Replication, row_major_strides
from ..engine.common.tensor_bytes import LocalPiece, LocalTensor, copy_run, empty_bytes
from ..state.capture import Target, capture

_MAX_TENSORS, _MAX_ELEMENTS = 4, 4096


class StepSample:
    """A sample of this rank's state: elements of parameters and of optimizer state; without optimizers, of any float tensors.

    Parameters
    ----------
    state
        The state of this rank; empty if the rank is not alive.
    """

    def __init__(self, state: Mapping[str, Any], process_group: Any) -> None:
        tensors = capture(state, process_group=process_group).tensors
        floats = [
            (spec, memory)
            for spec, memory in tensors
            # not buffers: those of two ranks may differ, and the checkpoint has the ones of the lowest rank
            if memory.is_floating_point() and memory.numel() > 1
            if spec.alias_of is None and spec.replication is not Replication.BUFFER
        ]
        names = {spec.link.parameter for spec, _ in floats if spec.link is not None}
        trained = [(spec, memory) for spec, memory in floats if spec.link is not None or spec.name in names]
        self._tensors = trained or floats
        self._read: list[tuple[LocalTensor, LocalTensor]] = []
        """Each part as it is on this rank, and as the checkpoint has it."""

    def prepare(self, saved: Catalog, comm: Comm) -> Target:
        """Choose the elements to compare, and return a load target that reads the checkpoint's elements into new memory."""
        self._read = []
        for spec, memory in self._tensors:
            piece = next((piece for piece in spec.pieces if piece.count), None)
            is_saved = spec.name in saved and spec.name not in saved.lossy
            if piece is None or not is_saved or saved.dtype(saved.index(spec.name)) != spec.dtype:
                continue
            count = min(piece.count, _MAX_ELEMENTS)
            part = replace(spec, pieces=(replace(piece, count=count),), link=None)
            # The same run of the same box, in memory of its own, in order.
            packed = replace(piece, count=count, base=-piece.start, strides=row_major_strides(piece.lengths))
            target = torch.empty(count, dtype=memory.dtype, device="cpu")
            self._read.append((LocalTensor(part, memory), LocalTensor(replace(part, pieces=(packed,)), target)))
        self._read = self._read[:: max(len(self._read) // _MAX_TENSORS, 1)][:_MAX_TENSORS]
        tensors = tuple(target for _, target in self._read)
        return Target(tensors, (), (), (), lambda values: [], lambda values, skipped: None)

    def differing(self) -> list[str]:
        """Name the tensors of the sample whose elements differ from those of the checkpoint."""
        found = []
        for (spec, memory), (_, saved) in self._read:
            own = empty_bytes(saved.nbytes)
            copy_run(LocalPiece(memory, spec.pieces[0]), spec.pieces[0].start, saved.numel(), own)
            if not torch.equal(own, saved.view(torch.uint8)):
                found.append(spec.name)
        return found
