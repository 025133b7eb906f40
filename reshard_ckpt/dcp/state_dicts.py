"""Conversion between the state dicts of DCP's calls and the state for `checkpoint.save` and `checkpoint.load`.

The *form* of a state dict is the tree of plain dicts for `checkpoint.save` and `checkpoint.load`. It has the same tensors, and
differs in three ways:

1. A `Stateful` at the top level is replaced by the result of its ``state_dict()``. Loading passes that dict to
   ``load_state_dict``.
2. An ``io.BytesIO`` is replaced by its bytes.
3. For a load, a tensor on the meta device is replaced by an empty one on the device of the job, as DCP does.

The names in a checkpoint are the keys of the state dict, with the parts that wrappers add: torch's own calls look for such names.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ..comm.group import current_accelerator
from ..core.trees import Path, children, leaves, map_tree, name_of
from ..errors import UsageError
from ..formats.dcp.names import is_taken_apart
from ..state.optimizer_dicts import PlainDict, is_numbered
from ..state.shards import Value
from ..state.tensors import is_tensor_like
from ..state.walk import PLAIN, Verbatim

Make = Callable[[torch.Tensor], torch.Tensor]


def call_state_dicts(state_dict: Mapping[str, Any], *, in_order: bool) -> dict[str, Any]:
    """Return the state dict with the result of ``state_dict()`` in the place of each object.

    Parameters
    ----------
    in_order
        Ask the objects in the order of their keys, as DCP does in a load: their ``state_dict()`` may call collectives.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"state_dict: wanted a dict such as {{'model': model.state_dict()}}, got {type(state_dict).__name__}")
    keys = sorted(state_dict) if in_order else list(state_dict)
    state = {key: state_dict[key] for key in keys}
    objects = {key: value for key, value in state.items() if isinstance(value, Stateful) and not isinstance(value, type)}
    return state | {key: value.state_dict() for key, value in objects.items()}


def saving_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of a state dict that `checkpoint.save` saves; see the module's docstring for *form*."""
    return Verbatim({key: _form(value, lambda tensor: tensor) for key, value in state.items()})


def loading_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of a state dict that `checkpoint.load` fills; afterwards `restore` puts its content into the state dict."""
    return Verbatim({key: _form(value, _materialize) for key, value in state.items()})


def _form(value: Any, make: Make) -> Any:
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, Mapping) and value:
        children = {key: _form(child, make) for key, child in value.items()}
        # DCP's names are the keys, so the parameters of a numbered optimizer keep their numbers.
        return PlainDict(children) if is_numbered(value) else children
    if type(value) in (list, tuple):
        items = [_form(child, make) for child in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def hold_whole(node: Any, has: Callable[[str], bool], path: Path = ()) -> Any:
    """Replace each tuple of tensors in a form by a `Value` if the checkpoint has the tuple under one name; return the form.

    DCP takes no tuple apart. A list without other tensors is one value, too, and may have such tuples in it.

    Parameters
    ----------
    has
        Tells whether the checkpoint has a tensor or a plain value of this name, readable or not.
    """
    if isinstance(node, Mapping):
        for key, child in node.items():
            node[key] = hold_whole(child, has, (*path, key))  # type: ignore[index]
    elif isinstance(node, list | tuple) and not PLAIN.issuperset(map(type, node)) and any(map(is_tensor_like, leaves(node))):
        apart = leaves(node, lambda child: None if isinstance(child, tuple) else children(child))
        if has(name_of(path)) and not any(map(is_tensor_like, apart)):
            return Value(node)
        if type(node) is list:
            return [hold_whole(child, has, (*path, i)) for i, child in enumerate(node)]
    return node


def _materialize(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "local_shards") or not tensor.is_meta:  # a ShardedTensor is asked nothing else: each access warns
        return tensor
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
        # With shape and strides, because shards may be uneven.
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.size(), stride=tensor.stride()
        )
    # The job's device is the accelerator, or the CPU if the job uses only gloo, or no process group.
    uses_accelerator = dist.is_available() and dist.is_initialized() and str(dist.get_backend()) != "gloo"
    return torch.empty_like(tensor, device=(current_accelerator() if uses_accelerator else None) or "cpu")


def restore(value: Any, form: Any) -> Any:
    """Put a form that `checkpoint.load` has filled back into `value`, the same part of the caller's state dict.

    Dicts and lists are changed in place and returned. Any other value is returned new, for the caller to store.
    """
    if isinstance(form, Value):
        # Loaded values have their tensors on the CPU. These go to the device of the tensors that they replace.
        held = (_materialize(leaf).device for leaf in leaves(value) if isinstance(leaf, torch.Tensor))
        device = next(held, torch.device("cpu"))
        form = map_tree(lambda _, node: node.to(device) if isinstance(node, torch.Tensor) else node, form.value)
    if isinstance(value, io.BytesIO):
        return io.BytesIO(form) if isinstance(form, bytes) else form
    if isinstance(value, Mapping) and value and isinstance(form, Mapping):
        # A dict in a list of the checkpoint may lack keys, with ``allow_partial_load``: they keep their values.
        for key in [key for key in value if key in form]:
            child = restore(value[key], form[key])
            if value[key] is not child:
                value[key] = child  # type: ignore[index]
        return value
    if type(value) is list and type(form) is list and (len(form) == len(value) or all(map(is_taken_apart, (value, form)))):
        # Each item of a list with dicts has names of its own: more saved ones are ignored, and ones that are not saved stay.
        value[: len(form)] = [restore(child, new) for child, new in zip(value, form, strict=False)]
        return value
    return form
