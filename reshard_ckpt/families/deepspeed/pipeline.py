"""The layers of a pipeline: a file for each, whose names begin with the number of the layer.

A *tied* layer stands at several places. Its parameters are called ``tied_modules.<key>.…``, and lie in the optimizers of all
stages that have one of these places: the first counts. The name by layer is a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.catalog.specs import Ints
from ...errors import CorruptError, UnsupportedError
from ...torchfile.archive import FileReader, FileTensor
from ...torchfile.pickle_reader import StandInObject
from ...torchfile.tensors import PickledTensor
from .folder import Rank
from .layout import MODEL, Params

TIED = "tied_modules."
"""What the names of tied modules begin with."""


def open_layers(reader: FileReader, layers: Mapping[Rank, str], where: str) -> dict[str, FileTensor]:
    """Return the tensors of all layers, under the names that the module of the pipeline gives them.

    Raises
    ------
    UnsupportedError
        Layers are divided among tensor-parallel ranks.
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


def tied_names(
    layers: Mapping[str, FileTensor], shapes: Mapping[str, Ints], is_cast: Callable[[FileTensor, str], bool]
) -> dict[str, str]:
    """Find which tensors of layers are those of a tied module: the only one that ends alike, has the same shape, and is the same.

    A layer that no optimizer has, as it is frozen, may end alike and have the same shape.

    Parameters
    ----------
    shapes
        Of the tensors in the catalog, by name.
    is_cast
        Whether a tensor of a layer is one of the catalog, cast to its own dtype.

    Returns
    -------
    The name in the catalog of the tied module's tensor, by the name by layer.
    """
    tied = [name for name in shapes if name.startswith(f"{MODEL}.{TIED}")]
    known = {name.partition(".")[2].partition(".")[0] for name in shapes if name.startswith(f"{MODEL}.")}
    found = {}
    for fqn, layer in layers.items():
        number, _, rest = fqn.partition(".")
        if number in known:
            continue
        alike = [name for name in tied if name.removeprefix(f"{MODEL}.{TIED}").partition(".")[2] == rest]
        same = [name for name in alike if shapes[name] == layer.view.shape and is_cast(layer, name)]
        if len(same) == 1:
            found[fqn] = same[0]
    return found


def params_of_fragments(mappings: Sequence[Any], layers: Mapping[str, FileTensor], where: str) -> list[Params]:
    """Return the parameters of each flat group from the fragments that each data-parallel rank says it holds.

    Parameters
    ----------
    mappings
        ``param_slice_mappings`` of each rank: for each group, where the fragment of each parameter begins and its length.
    layers
        The tensors of the pipeline's layers, for the shapes.
    """
    if not all(isinstance(of_rank, list) and all(isinstance(group, dict) for group in of_rank) for of_rank in mappings):
        raise CorruptError(f"{where}: has neither param_shapes nor param_slice_mappings; use another copy")
    shapes: list[dict[str, Ints]] = []
    for groups in zip(*mappings, strict=True):
        sizes: dict[str, int] = {}
        for fragments in groups:
            for fqn, fragment in fragments.items():
                sizes[fqn] = sizes.get(fqn, 0) + _length(fragment, where)
        shapes.append({fqn: _shape(fqn, size, layers, where) for fqn, size in sizes.items()})
    return [Params.of(group) for group in shapes]


def _length(fragment: Any, where: str) -> int:
    length = fragment.state.get("numel") if isinstance(fragment, StandInObject) and isinstance(fragment.state, dict) else None
    if type(length) is not int:
        raise CorruptError(f"{where}: a fragment has no length; use another copy")
    return length


def _shape(fqn: str, size: int, layers: Mapping[str, FileTensor], where: str) -> Ints:
    """Look up the shape of a parameter; that of a tied one is the shape of a layer of that size that ends alike."""
    if fqn in layers:
        return layers[fqn].view.shape
    rest = fqn.removeprefix(TIED).partition(".")[2]
    shapes = {layer.view.shape for name, layer in layers.items() if name.partition(".")[2] == rest}
    fitting = [shape for shape in shapes if Params.of({fqn: shape}).numel[0] == size]
    if len(fitting) != 1:
        raise UnsupportedError(f"{where}: the shape of {fqn} is in no file of a layer; save with reshard_ckpt instead")
    return fitting[0]
