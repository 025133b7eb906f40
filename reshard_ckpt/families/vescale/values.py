"""The state that veScale's calls are given: its optimizers, as state by parameter, and the mesh of the job.

The ``state_dict()`` of a ``DistributedOptimizer`` is ``{"param_group_meta": groups, dtype: {(chunk, name): state}}``. State of at
least one dim is an ``OptimizerStateSpec``. It has the box of the whole tensor that a tensor-parallel rank holds (`global_shape`,
`local_shape`, `global_offset`), and in `local_tensor`, flat, either the whole box or the range of it that `dp_ranks_ranges` gives
this data-parallel rank.

1. In a save, each spec is a `FlatShard`: a run of a box. veScale gathers or sends state before it writes; this does not.
2. In a load, the optimizer takes back whole boxes, and cuts its range out of them. So a box is allocated for each spec, and only
   this rank's range of it is loaded.
3. The optimizer's own tables tell the group of each parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import FlatShard
from ...plugins.errors import LayoutError, UnsupportedError, UsageError
from ...plugins.groups import named_group
from .names import GROUP_META, GROUPS, MODEL, OPTIMIZER, STATE

_SPEC = ("global_shape", "local_shape", "global_offset", "local_tensor", "dp_ranks_ranges")


def is_distributed(optimizer: Any) -> bool:
    """Tell whether an object is a ``DistributedOptimizer``."""
    return hasattr(optimizer, "param_to_name") and hasattr(optimizer, "model_param_group_index_map")


def is_spec(value: Any) -> bool:
    """Tell whether an object is an ``OptimizerStateSpec``."""
    return all(hasattr(value, field) for field in _SPEC)


class DistributedState:
    """A ``DistributedOptimizer`` whose state is shown by parameter name; `state_dict` and `load_state_dict` convert it."""

    def __init__(self, optimizer: Any, *, loading: bool) -> None:
        self._optimizer = optimizer
        if loading:
            # Before the first step, the state to load into does not exist; veScale's own `load` makes it, too.
            begin = getattr(sys.modules.get(type(optimizer).__module__), "initialize_optimizer_state", None)
            if begin is not None:
                begin(optimizer)
        self._saved: dict[Any, Any] = optimizer.state_dict()
        self._boxes: list[tuple[Any, torch.Tensor]] = []
        state: dict[str, dict[str, Any]] = {}
        for name, entry in self._parameters():
            if name in state:
                raise UnsupportedError(f"optimizer: two model chunks have a parameter {name}; give them distinct names")
            state[name] = {key: self._part(name, key, value, loading) for key, value in entry.items()}
        self._tree = {STATE: state, GROUPS: list(map(named_group, self._saved[GROUP_META], self._members()))}

    def state_dict(self) -> dict[str, Any]:
        return self._tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Put a loaded state into the optimizer, in the form of its own ``state_dict()``. By then all ranks have loaded."""
        for spec, box in self._boxes:
            spec.local_tensor = box.reshape(tuple(spec.local_shape))
        for name, entry in self._parameters():
            entry |= {key: value for key, value in tree[STATE][name].items() if not is_spec(entry.get(key))}
        # home: the saved group of each parameter. Groups that have no parameter on this rank stay as they are.
        home = {fqn: group for group in tree[GROUPS] for fqn in group["params"]}
        for group, members in zip(self._saved[GROUP_META], self._members(), strict=True):
            if members:
                group |= {key: value for key, value in home[members[0]].items() if key != "params"}
        self._optimizer.load_state_dict(self._saved)

    def _parameters(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each parameter that has a part on this rank, and the dict of its state."""
        for dtype, entries in self._saved.items():
            if dtype != GROUP_META:
                for key, entry in entries.items():
                    yield key[1] if isinstance(key, tuple) else str(key), entry

    def _part(self, name: str, key: str, value: Any, loading: bool) -> Any:
        """Return an entry of the state to save or load: an ``OptimizerStateSpec`` becomes a `FlatShard`, any other value stays.

        With `loading`, the shard is a range of a new whole box, which `load_state_dict` gives to the optimizer.
        """
        if not is_spec(value):
            return value
        shape, offset = tuple(value.local_shape), tuple(value.global_offset)
        start, stop = 0, prod(shape)
        if value.dp_ranks_ranges:
            own = value.dp_ranks_ranges[dist.get_rank() if dist.is_initialized() else 0]
            start, stop = own.start, own.end
        held = value.local_tensor.detach()
        if held.numel() != stop - start:
            raise LayoutError(
                f"optimizer: {name}.{key} has {held.numel()} elements, and dp_ranks_ranges give it {stop - start} of a box of "
                f"{shape}; pass an optimizer whose state is its own"
            )
        if loading:
            box = torch.zeros(prod(shape), dtype=held.dtype, device=held.device)
            self._boxes.append((value, box))
            held = box[start:stop]
        return FlatShard(held.reshape(-1), tuple(value.global_shape), start, pieces=[(offset, shape)])

    def _members(self) -> list[list[str]]:
        """Return for each group the names of the parameters that have a part on this rank."""
        optimizer, groups = self._optimizer, self._saved[GROUP_META]
        members: list[list[str]] = [[] for _ in groups]
        local = {name for name, _ in self._parameters()}
        for param, (group, _) in optimizer.model_param_group_index_map.items():
            name = optimizer.param_to_name[param]
            name = name[1] if isinstance(name, tuple) else name
            if name in local and group < len(members):
                members[group].append(name)
        return members


def opened(checkpoint_state: Mapping[str, Any], *, loading: bool) -> dict[str, Any]:
    """Convert the argument of veScale's calls to a state that this library saves and loads.

    Raises
    ------
    UsageError
        The argument has another key than ``"model"`` and ``"optimizer"``.
    """
    unknown = sorted(str(key) for key in checkpoint_state if key not in (MODEL, OPTIMIZER))
    if unknown:
        raise UsageError(
            f"checkpoint_state has {', '.join(map(repr, unknown))}: veScale's calls take 'model' and 'optimizer'; save anything "
            "else with reshard_ckpt.checkpoint.save"
        )
    state = dict(checkpoint_state)
    optimizer = state.get(OPTIMIZER)
    if is_distributed(optimizer):
        state[OPTIMIZER] = DistributedState(optimizer, loading=loading)
    elif optimizer is not None:
        inner = getattr(optimizer, "optimizer", None)  # torch's, in a `BasicOptimizer`
        state[OPTIMIZER] = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    return state


def job_mesh(checkpoint_state: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the axes and sizes of the job's mesh, from a DTensor of veScale's class whose mesh has all ranks in order.

    Return None if the model has no such DTensor, or torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    model = checkpoint_state.get(MODEL)
    modules = [one for one in (model if isinstance(model, list | tuple) else [model]) if isinstance(one, torch.nn.Module)]
    for tensor in (tensor for module in modules for tensor in module.parameters()):
        mesh = getattr(tensor, "device_mesh", None)
        ranks = getattr(mesh, "mesh", None)
        names = getattr(mesh, "mesh_dim_names", None)
        is_torch = type(tensor).__module__.startswith("torch.")
        if not is_torch and names and ranks is not None and ranks.flatten().tolist() == [*range(dist.get_world_size())]:
            return dict(zip(names, ranks.shape, strict=True))
    return None
