"""Loading a checkpoint into one of Megatron's trees: the tensors and values that one rank wants, and the resulting tree.

1. Compare the keys of all ranks' trees with those of the checkpoint, if the mode asks for it (`strictness`).
2. Fill tensors in place. If a saved tensor is smaller, and ``allow_shape_mismatch`` is set, the rest becomes zero.
3. Merge the loaded leaves into the saved common state. Optimizer objects receive their part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, Piece
from ...core.geometry.runs import decompose
from ...engine.common.tensor_bytes import LocalTensor, region
from ...format.torch_dtypes import TORCH_DTYPES
from ...state.describe import Describer
from ...state.entries import Entry, Kind, Target
from ...state.tensors import check_writable, local_memory
from .optimizers import lower_tree, unplaced_state
from .sharded_names import COMMON_OBJECT, check_common_file, common_state, key_of_object, keys_of_catalog
from .strictness import Keys, compare_keys
from .tree import NOTHING, Loaded, entries_of, loaded_of, merged, objects_of, problems_of


class WantedTree:
    """A tree to load into; after the load, `result` is the tree to return.

    Parameters
    ----------
    mode
        The value of a `StrictHandling`.
    folder
        The folder of the checkpoint.
    with_common
        Whether `result` includes the saved common state.
    """

    def __init__(self, tree: dict[str, Any], mode: str, folder: str, *, with_common: bool = True) -> None:
        self._tree, self._mode, self._folder, self._with_common = tree, mode, folder, with_common
        self._tensors: list[tuple[LocalTensor, bool]] = []
        self._shapes: dict[str, Ints] = {}
        self._common: dict[Any, Any] = {}
        self.keys = Keys(frozenset(), frozenset(), frozenset())
        self.result: Any = None

    def prepare(self, catalog: Catalog, comm: Comm) -> Target:
        """Describe the tensors and values that this rank wants from a checkpoint. Collective.

        Raises
        ------
        UsageError
            Something in the tree cannot be loaded into.
        MismatchError
            The tree and the checkpoint have different keys, and the mode makes this an error.
        CorruptError
            Megatron itself has read ``common.pt``, and that file belongs to another save.
        """
        # Collectives: `compare_keys` gathers and broadcasts, unless the mode is the default. All else is local.
        if not self._with_common and comm.rank == 0:
            check_common_file(catalog, self._folder)
        node = lower_tree(self._tree, loading=True)
        if self._mode != "assume_ok_unexpected":
            self.keys = compare_keys(comm, catalog, node, self._mode)
        out = Describer(None)
        with torch.no_grad():
            for entry in entries_of(node):
                if entry.name in self.keys.absent:
                    continue
                local = local_memory(entry.shard, entry.name)
                check_writable(entry.shard, local.memory, entry.name)
                tensor = out.add_tensor(Entry(entry.name, (), Kind.TENSOR, entry.shard, local=local))
                self._note(tensor, entry.resizable, catalog)
        objects = {part.name for part in objects_of(node)} - self.keys.absent
        paths = {name for name in catalog.value_names if is_common(name)} if self._with_common else set()

        def check(values: Mapping[str, Any]) -> list[str]:
            self._common = common_state(catalog, {name: values[name] for name in paths}) if self._with_common else {}
            return [*self._shape_problems(), *unplaced_state(node, catalog), *problems_of(node, self._common)]

        def finish(values: Mapping[str, Any], skipped: Iterable[str]) -> None:
            for tensor, resizable in self._tensors:
                if resizable:
                    _zero_rest(tensor, self._shapes[tensor.spec.name])
            loaded = loaded_of(node, self._common, Loaded(values, self.keys.absent))
            self.result = merged(self._common, {} if loaded is NOTHING else loaded)

        names = tuple(sorted(paths | objects))
        return Target(tuple(out.tensors), names, (), names, check, finish)

    def _note(self, tensor: LocalTensor, resizable: bool, catalog: Catalog) -> None:
        """Note a tensor whose saved global shape differs from the wanted one."""
        name = tensor.spec.name
        if name in catalog and (saved := catalog.shape(catalog.index(name))) != tensor.spec.shape:
            self._shapes[name] = saved
            self._tensors.append((tensor, resizable))

    def _shape_problems(self) -> list[str]:
        return list(
            dict.fromkeys(
                f"{tensor.spec.name}: saved with global shape {self._shapes[tensor.spec.name]}, wanted {tensor.spec.shape}"
                for tensor, resizable in self._tensors
                if not resizable
            )
        )


def _zero_rest(tensor: LocalTensor, saved: Ints) -> None:
    """Set the elements of a tensor that lie outside of the saved shape to zero."""
    for piece in tensor.spec.pieces:
        for offsets, lengths, box in _boxes(tensor.memory, piece):
            for dim, (low, size, end) in enumerate(zip(offsets, lengths, saved, strict=True)):
                if low + size > end:
                    # This box ends beyond the saved shape along `dim`: zero that end of it.
                    begin = max(end - low, 0)
                    box.narrow(dim, begin, size - begin).zero_()


def _boxes(memory: torch.Tensor, piece: Piece) -> list[tuple[Ints, Ints, torch.Tensor]]:
    """Cut a piece into boxes of the global tensor; return the offsets, the lengths and the memory of each."""
    cut = decompose(np.array([piece.lengths], np.int64), np.array([piece.start]), np.array([piece.count]))
    boxes = []
    for inner, lengths in zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True):
        base = piece.base + sum(o * s for o, s in zip(inner, piece.strides, strict=True))
        offsets = tuple(a + b for a, b in zip(piece.offsets, inner, strict=True))
        boxes.append((offsets, tuple(lengths), region(memory, base, tuple(lengths), piece.strides)))
    return boxes


def is_common(name: str) -> bool:
    """Tell whether the value of this name is common state, rather than an object."""
    return name == COMMON_OBJECT or key_of_object(name) is None


def tensors_of(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Describe the tensors of a checkpoint by key, as tensors on the meta device."""
    key_of = keys_of_catalog(catalog)
    indices = {key_of(name): catalog.index(name) for name in catalog.names}
    return {key: torch.empty(catalog.shape(i), dtype=TORCH_DTYPES[catalog.dtype(i)], device="meta") for key, i in indices.items()}
