"""Which part of each parameter a model-parallel rank holds.

1. Tensor-parallel ranks hold shards, which follow from the shapes on all of them (`shards`). What nothing describes is kept with
   its error.
2. Of the stages of a pipeline, the first that has a parameter has all of it, and those after it none that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CorruptError, UnsupportedError
from ...torchfile.archive import TorchFile
from .columns import CatalogColumns
from .layout import Params, parameter_name
from .shapes import local_shapes
from .shards import Shard, TensorParallel


class ModelParallelParts:
    """The parts of parameters that model-parallel ranks hold.

    Parameters
    ----------
    columns
        The catalog, which learns of what is not readable.
    models
        The file of model states of each rank.
    parallel
        How tensor-parallel ranks divide parameters; None where ranks are stages, or there is one.
    """

    def __init__(self, columns: CatalogColumns, models: Sequence[TorchFile], parallel: TensorParallel | None) -> None:
        self._columns, self._parallel = columns, parallel
        self._local_shapes = [local_shapes(model) for model in models] if parallel else []
        self._home: dict[str, int] = {}  # of each parameter of a pipeline, the stage that counts

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks hold shards."""
        return self._parallel is not None

    def has_home(self, fqn: str) -> bool:
        """Tell whether some stage has had a parameter."""
        return fqn in self._home

    def counts(self, mp: int, fqn: str) -> bool:
        """Tell whether a stage is the first that has a parameter; the first one asked about is."""
        return self._home.setdefault(fqn, mp) == mp

    def shards(self, mp: int, params: Params) -> list[Shard]:
        """Say which part of each parameter of a group this model-parallel rank holds; none, if another one's counts."""
        if self._parallel is not None:
            return [self.tensor_parallel_shard(mp, fqn) for fqn in params.names]
        return [
            Shard.whole(shape) if self.counts(mp, fqn) else Shard(shape, ())
            for fqn, shape in zip(params.names, params.shapes, strict=True)
        ]

    def tensor_parallel_shard(self, mp: int, fqn: str) -> Shard:
        """Say which part of a parameter a tensor-parallel rank holds, given the shapes of all of them."""
        assert self._parallel is not None
        shapes = [of_rank.get(fqn) for of_rank in self._local_shapes]
        try:
            if any(shape is None for shape in shapes):
                raise CorruptError(
                    f"{self._columns.where}: {fqn} is not on all {len(shapes)} tensor-parallel ranks; use another checkpoint"
                )
            return self._parallel.shard(fqn, mp, [shape for shape in shapes if shape is not None])
        except UnsupportedError as error:
            self._columns.unreadable[parameter_name(fqn)] = UnsupportedError(f"{self._columns.where}: {error}")
            return Shard((), (), readable=False)
