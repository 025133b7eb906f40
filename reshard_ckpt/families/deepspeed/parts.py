"""Finding the part of each parameter that a model-parallel rank's files hold.

1. Tensor-parallel ranks hold shards, which follow from the shapes on all of them (`shards`). If a parameter's division is not
   described, the parameter becomes unreadable.
2. If several stages of a pipeline have a parameter, the first stage has all of it, and the later ones do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plugins import CatalogBuilder
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.torchfile import TorchFile
from .names import parameter_name
from .places import Params
from .shapes import local_shapes
from .shards import Shard, TensorParallel


class ModelParallelParts:
    """The parts of parameters that model-parallel ranks hold.

    Parameters
    ----------
    builder
        The catalog to which errors of unreadable parameters are added.
    models
        The file of model states of each model-parallel rank.
    parallel
        The description of tensor-parallel shards; None if the ranks are stages, or there is just one rank.
    """

    def __init__(self, builder: CatalogBuilder, models: Sequence[TorchFile], parallel: TensorParallel | None) -> None:
        self._builder, self._parallel = builder, parallel
        self._local_shapes = [local_shapes(model) for model in models] if parallel else []
        self._home: dict[str, int] = {}  # the first stage that has each parameter of a pipeline

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks hold shards, rather than stages."""
        return self._parallel is not None

    def has_home(self, fqn: str) -> bool:
        """Tell whether an earlier stage has a parameter."""
        return fqn in self._home

    def counts(self, mp: int, fqn: str) -> bool:
        """Tell whether a stage is the first that has a parameter: call it for the stages in order."""
        return self._home.setdefault(fqn, mp) == mp

    def shards(self, mp: int, params: Params) -> list[Shard]:
        """Return the part of each parameter of a group that a rank holds; without segments if another rank's part counts."""
        if self._parallel is not None:
            return [self.tensor_parallel_shard(mp, fqn) for fqn in params.names]
        return [
            Shard.whole(shape) if self.counts(mp, fqn) else Shard(shape, ())
            for fqn, shape in zip(params.names, params.shapes, strict=True)
        ]

    def tensor_parallel_shard(self, mp: int, fqn: str) -> Shard:
        """Return the part of a parameter that a tensor-parallel rank holds; not `readable` if the division is unknown."""
        assert self._parallel is not None
        shapes = [of_rank.get(fqn) for of_rank in self._local_shapes]
        try:
            if any(shape is None for shape in shapes):
                raise CorruptError(
                    f"{self._builder.where}: {fqn} is not on all {len(shapes)} tensor-parallel ranks; use another checkpoint"
                )
            return self._parallel.shard(fqn, mp, [shape for shape in shapes if shape is not None])
        except UnsupportedError as error:
            self._builder.unreadable(parameter_name(fqn), UnsupportedError(f"{self._builder.where}: {error}"))
            return Shard((), (), readable=False)
