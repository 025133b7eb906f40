"""What one rank hands to the engine: its tensors and values, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.catalog.specs import Mesh, ValueSpec
from ..engine.common.tensor_bytes import LocalTensor, count_up


@dataclass(frozen=True, slots=True)
class Captured:
    """All that one rank has to save.

    Two tensors may have one name: two stages on this rank hold the same tensor. `warnings` say what the user should know of how
    it is saved.
    """

    tensors: tuple[LocalTensor, ...]
    values: tuple[ValueSpec, ...]
    mesh: Mesh | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """All that one rank wants to load.

    Attributes
    ----------
    tensors
        To be written in place.
    values
        The names of values that must be in the checkpoint.
    unplaced
        Names of saved tensors that are wanted too, but for which there is no place on this rank: `check` says why.
    prefixes
        The top-level keys: what the checkpoint holds below them and no rank wants is unexpected.
    check
        Takes ``{name: value}`` for every value of the checkpoint below the prefixes, wanted or not; a per-rank one as
        `PerRankValues`. Returns what disagrees, one line for each. To be called once, before any tensor changes.
    finish
        Takes the same values, and the names of tensors that were not loaded (with ``strict=False``). To be called once, after
        `check` and after all tensors are in place and verified. Until then the objects of the state are as they were.
    mesh
        The mesh of the job, where the state shows it.
    hints
        Takes the values as `check` does; says what else may help where something disagrees.
    dtensors
        Which of the tensors are DTensors, by name: these count changes apart from their local tensors, which are written.
    """

    tensors: tuple[LocalTensor, ...]
    values: tuple[str, ...]
    unplaced: tuple[str, ...]
    prefixes: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], list[str]]
    finish: Callable[[Mapping[str, Any], Iterable[str]], None]
    mesh: Mesh | None = None
    hints: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda values: ()
    dtensors: tuple[tuple[str, torch.Tensor], ...] = ()

    def count_up(self, written: Iterable[str]) -> None:
        """Count up the versions of the DTensors whose local tensors have been written, under these names or tied to them."""
        first = {tensor.spec.name: tensor.spec.first_name for tensor in self.tensors}
        done = {first[name] for name in written}
        for name, dtensor in self.dtensors:
            if first.get(name) in done:
                count_up(dtensor)
