"""The state of one rank, built tensor by tensor and value by value, for save and load functions of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.catalog.specs import Ints
from ..core.trees import Path, name_of
from ..engine.common.tensor_bytes import region
from ..format.values import encode_path
from .capture import Captured, Target
from .describe import Describer
from .entries import Entry, Kind
from .shards import FlatShard, LocalShard
from .tensors import local_memory

CLAIM_PATH = encode_path([])
"""The path of a `claim`, which no real value of a state has."""


class StateBuilder:
    """Builds the tensors and values that one rank saves or loads: add them, then call `captured` or `target`.

    Examples
    --------
    >>> builder = StateBuilder()
    >>> builder.tensor("model.w", LocalShard(torch.zeros(2, 3), (4, 3), (2, 0)))
    >>> builder.value(("extra", "step"), 7)
    >>> captured = builder.captured()
    >>> [tensor.spec.name for tensor in captured.tensors], [value.name for value in captured.values]
    (['model.w'], ['extra.step'])
    """

    def __init__(self) -> None:
        self._out = Describer(None)

    def tensor(self, name: str, shard: LocalShard | FlatShard, *, offered: bool = True, written: bool = False) -> None:
        """Add this rank's part of a tensor, under the tensor's name.

        Parameters
        ----------
        offered
            Whether this rank's elements are offered to the save. With False other ranks must save them.
        written
            Whether a load writes into the part.

        Raises
        ------
        UnsupportedError
            The memory of the part cannot be read, or with `written` cannot be written.
        """
        with torch.no_grad():
            memory, layout = local_memory(shard, name, writes=written)
            layout = layout if offered else replace(layout, boxes=())
            self._out.add([Entry(name, (), Kind.TENSOR, shard, memory=memory, layout=layout)])

    def value(self, path: Path, value: Any) -> None:
        """Add a value at its path, the keys that lead to it in the state."""
        self._out.add([Entry(name_of(path), path, Kind.VALUE, value)])

    def claim(self, name: str) -> None:
        """Announce a name that another rank saves. On rank 0, `SaveOptions.check_names` gets the announced names of all ranks."""
        self._out.add([Entry(name, (), Kind.VALUE, None)])

    def captured(self, warnings: tuple[str, ...] = ()) -> Captured:
        """Return all added tensors and values, to be saved. Rank 0 shows each of `warnings` to the user when it saves them."""
        return Captured(tuple(self._out.tensors), tuple(self._out.values), None, warnings)

    def target(
        self,
        values: Iterable[str],
        check: Callable[[Mapping[str, Any]], list[str]],
        finish: Callable[[Mapping[str, Any], Iterable[str]], None],
    ) -> Target:
        """Return all added tensors as the target of a load. `values` are the names of saved values that `check` and `finish` get.

        See `Target` for these two functions.
        """
        names = tuple(values)
        return Target(tuple(self._out.tensors), names, (), names, check, finish)


def zero_outside(shard: LocalShard | FlatShard, shape: Ints, name: str) -> None:
    """Set the elements of this rank's part of a tensor to zero if they lie outside of `shape`, a smaller global shape."""
    with torch.no_grad():
        memory, layout = local_memory(shard, name)
        for piece in layout.pieces(memory):
            for box in piece.boxes():
                part = region(memory, box.base, box.lengths, box.strides)
                for dim, (offset, size, end) in enumerate(zip(box.offsets, box.lengths, shape, strict=True)):
                    begin = max(end - offset, 0)
                    if begin < size:  # this box ends beyond the shape along `dim`
                        part.narrow(dim, begin, size - begin).zero_()
