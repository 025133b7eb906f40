"""The layers of a pipeline: one file for each; the names of its tensors begin with the number of the layer.

A *tied* layer stands at several places of the pipeline. Its parameters are called ``tied_modules.<key>.…``, and are in the
optimizers of all stages with one of these places; the first stage counts. The name that begins with a layer's number is an alias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...plugins import CatalogBuilder, Ints, Storage, read_range
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.torchfile import FileReader, FileTensor, PickledTensor, attributes_of
from .names import MODEL, Rank
from .places import Params
from .without_zero import SAMPLE

TIED = "tied_modules."
"""The beginning of the names of parameters in tied modules of a pipeline."""


def open_layers(reader: FileReader, layers: Mapping[Rank, str], where: str) -> dict[str, FileTensor]:
    """Return the tensors of all layers, under their names in the pipeline's module.

    Raise `UnsupportedError` if layers are divided among tensor-parallel ranks.
    """
    found: dict[str, FileTensor] = {}
    for (layer, mp), key in sorted(layers.items()):
        if mp:
            raise UnsupportedError(
                f"{where}: has {key}: pipelines whose layers are divided among tensor-parallel ranks are not read; save with "
                "reshard_ckpt.integrations.deepspeed attached to the engine"
            )
        file = reader.open(key)
        if not isinstance(file.content, dict):
            raise CorruptError(f"{where}: {key} holds no layer of a pipeline; use another copy")
        tensors = {f"{layer}.{name}": view for name, view in file.content.items() if isinstance(view, PickledTensor)}
        found |= {fqn: FileTensor(fqn, view, file) for fqn, view in tensors.items()}
    return found


def tied_names(layers: Mapping[str, FileTensor], builder: CatalogBuilder, storage: Storage) -> dict[str, str]:
    """Find the tensors of layers that are aliases of tied modules' tensors, which the catalog has.

    They must have the same shape, the same end of the name and the same elements, cast to the layer's dtype, and only one tensor
    may fit. The elements are compared because a frozen layer, which no optimizer has, may have the same shape and end of its
    name.

    Returns
    -------
    A dict from names that begin with a layer's number to names of tied modules' tensors.
    """
    shapes = {name: tensor.shape for name, tensor in builder.tensors.items()}
    tied = [name for name in shapes if name.startswith(f"{MODEL}.{TIED}")]
    owned = {name.partition(".")[2].partition(".")[0] for name in shapes if name.startswith(f"{MODEL}.")}
    found = {}
    for fqn, layer in layers.items():
        number, _, rest = fqn.partition(".")
        # The optimizer has the layer under its own name, so it is not tied.
        if number in owned:
            continue
        alike = [name for name in tied if name.removeprefix(f"{MODEL}.{TIED}").partition(".")[2] == rest]
        equal = [name for name in alike if shapes[name] == layer.view.shape and _is_cast(builder, storage, layer, name)]
        if len(equal) == 1:
            found[fqn] = equal[0]
    return found


def _is_cast(builder: CatalogBuilder, storage: Storage, layer: FileTensor, name: str) -> bool:
    """Tell whether a layer's tensor is the catalog's tensor `name`, cast to the layer's dtype; a sample is compared."""
    size = prod(layer.view.shape)
    if not size or not layer.view.is_row_major:
        return False
    tensor, dtype = builder.tensors[name], builder.tensors[name].torch_dtype
    parts = [part for part in builder.parts(name) if part.lengths == tensor.shape]  # runs of the whole tensor
    for i in sorted({(size - 1) * k // (SAMPLE - 1) for k in range(SAMPLE)}):
        part = next((part for part in parts if part.start <= i < part.start + part.num_elements), None)
        if part is None:
            return False
        offset = part.offset + (i - part.start) * dtype.itemsize
        data = read_range(storage, builder.files[part.file].key, offset, dtype.itemsize)
        cast = torch.frombuffer(data, dtype=dtype).to(layer.view.dtype)
        if not torch.equal(cast.view(torch.uint8), layer.file.elements(layer.view, i, 1).view(torch.uint8)):
            return False
    return True


def params_of_fragments(mappings: Sequence[Any], layers: Mapping[str, FileTensor], where: str) -> list[Params]:
    """Return the parameters of each flat group, from the fragments of parameters that each data-parallel rank lists.

    Parameters
    ----------
    mappings
        ``param_slice_mappings`` of each rank: for each group, the begin and length of each parameter's fragment.
    layers
        The tensors of the pipeline's layers, for their shapes.
    """
    if not all(isinstance(of_rank, list) and all(isinstance(group, dict) for group in of_rank) for of_rank in mappings):
        raise CorruptError(f"{where}: has neither param_shapes nor param_slice_mappings; use another copy")
    shapes: list[dict[str, Ints]] = []
    # sizes: elements of each parameter, summed over the fragments of all ranks
    for groups in zip(*mappings, strict=True):
        sizes: dict[str, int] = {}
        for fragments in groups:
            for fqn, fragment in fragments.items():
                length = (attributes_of(fragment) or {}).get("numel")
                if type(length) is not int:
                    raise CorruptError(f"{where}: a fragment has no length; use another copy")
                sizes[fqn] = sizes.get(fqn, 0) + length
        shapes.append({fqn: _shape(fqn, size, layers, where) for fqn, size in sizes.items()})
    return [Params.of(group) for group in shapes]


def _shape(fqn: str, size: int, layers: Mapping[str, FileTensor], where: str) -> Ints:
    """Look up the shape of a parameter of `size` elements in the files of the layers.

    No file holds a tied parameter under its own name. Its shape is that of a layer's parameter with the same number of elements
    and the same name after the layer's index.
    """
    if fqn in layers:
        return layers[fqn].view.shape
    rest = fqn.removeprefix(TIED).partition(".")[2]
    shapes = {layer.view.shape for name, layer in layers.items() if name.partition(".")[2] == rest}
    fitting = [shape for shape in shapes if Params.of({fqn: shape}).numel[0] == size]
    if len(fitting) != 1:
        raise UnsupportedError(f"{where}: the shape of {fqn} is in no file of a layer; save with reshard_ckpt instead")
    return fitting[0]
