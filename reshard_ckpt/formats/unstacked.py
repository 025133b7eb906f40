"""Splitting tensors that stack layers or experts into one tensor for each, for tools that expect such names.

``decoder.layers.mlp.weight`` of shape (L, …) becomes ``decoder.layers.0.mlp.weight`` and so on. ``experts.experts.…`` of shape
(L, E, …) or (E, …) is split likewise. Each result is a contiguous run of the stacked tensor, so no bytes move.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..core.catalog.model import Catalog
from ..core.planning.pipeline_stages import expert_dim, layer_dim
from ..engine.loading.stream import Run, whole_run
from .catalog_builder import CatalogBuilder


@dataclass(frozen=True, slots=True)
class Unstacked:
    """A catalog in which each layer or expert is a tensor of its own.

    `runs` has for each tensor of `catalog`, in order, the run of elements in a tensor of the stacked catalog.
    """

    catalog: Catalog
    runs: tuple[Run, ...]


def unstack(catalog: Catalog, where: str) -> Unstacked:
    """Split the stacked tensors of a catalog; all other tensors stay as they are.

    Raise `NameCollisionError` if a tensor of one layer has the name of another tensor.
    """
    builder = CatalogBuilder(catalog.save_id, where)
    runs: dict[str, Run] = {}
    for name in catalog.names:
        runs |= _add_parts(builder, catalog, name)
    made = builder.finish(links_from_names=False)
    return Unstacked(made, tuple(runs[name] for name in made.names))


def _add_parts(builder: CatalogBuilder, catalog: Catalog, name: str) -> Iterator[tuple[str, Run]]:
    """Add each layer or expert of a stacked tensor to a catalog builder as a tensor; any other tensor is added as it is.

    Yields the name of each added tensor, and its run in the stacked one.
    """
    index = catalog.index(name)
    whole, shape, dtype = whole_run(catalog, index), catalog.shape(index), catalog.dtype(index)
    source = catalog.source(index)
    stacked = {dim for dim in (layer_dim(name), expert_dim(name)) if dim is not None and dim < len(shape)}
    dims = shape[: len(stacked)]  # the stacked dims come first
    count = prod(shape[len(dims) :])
    for number in range(prod(dims)):
        part = _numbered(name, dims, number)
        if source != index:
            builder.alias(part, _numbered(catalog.names[source], dims, number))
        else:
            builder.tensor(part, dtype, shape[len(dims) :])
        yield part, Run(index, whole.offsets, whole.lengths, number * count, count)


def _numbered(name: str, dims: tuple[int, ...], number: int) -> str:
    """Insert the numbers of a layer and an expert into the name of a stacked tensor.

    >>> _numbered("decoder.layers.mlp.experts.experts.fc1.weight", (2, 4), 6)
    'decoder.layers.1.mlp.experts.experts.2.fc1.weight'
    """
    if layer_dim(name) is not None and dims:
        layer, number = divmod(number, prod(dims[1:]))
        name = re.sub(r"(^|\.)layers\.(?!\d+(\.|$))", rf"\g<1>layers.{layer}.", name, count=1)
        dims = dims[1:]
    if expert_dim(name) is not None and dims:
        name = re.sub(r"(^|\.)experts\.experts\.", rf"\g<1>experts.experts.{number}.", name, count=1)
    return name
