"""The state of a DeepSpeed engine on this rank, as parts of global tensors, under the same names in saves and loads.

1. The optimizer's own ``state_dict()`` has the live flat tensors, and `places` tells the runs of parameters in them.
   Each run becomes a `FlatShard` over that memory. If tensor-parallel ranks divide the parameter, `model_parallel` tells which
   shard of it the run belongs to.
2. Parameters and buffers without master weights are taken from the module.
3. For a load, state that the checkpoint has and the optimizer lacks is allocated first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from ...plugins.errors import UnsupportedError
from ...plugins.groups import comparable, named_group
from .model_parallel import Parallel, num_tensor_parallel
from .names import MASTER, global_name, is_expert, num_local_experts
from .places import CURE_OF_ENGINES, Params, RankState, advised, open_state, striped_runs

FLAT_OWNERS = (
    "single_partition_of_fp32_groups",  # ZeRO-1 and 2
    "fp32_groups_flat_partition",  # BF16_Optimizer
    "fp32_partitioned_groups_flat",  # ZeRO-3
    "fp32_groups_flat",  # the fp16 and bf16 wrapper without ZeRO
)
"""Attributes in which DeepSpeed's optimizers keep one flat tensor for each group. torch's optimizer updates these tensors."""


Shared = tuple[dict[str, Any], str, Any]
"""A value that all parameters of a flat group share, such as the step: the dict that holds it, its key there, and the value."""


def refuse_unsupported(engine: Any) -> None:
    """Refuse engines whose state cannot be saved or loaded as global tensors.

    Raise `UnsupportedError` if the engine offloads to NVMe, or divides tensors among ranks in an unknown way.
    """
    offload, grid = engine._config.zero_config.offload_param, getattr(engine, "grid", None)
    is_on_nvme = offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"
    if engine.zero_nvme_offload_optimizer() or is_on_nvme:
        raise UnsupportedError(
            "DeepSpeed offloads to NVMe here, where no tensor can be read in place; offload to the CPU instead"
        )
    if grid is not None and grid.get_slice_parallel_world_size() > 1:
        raise UnsupportedError(
            f"this pipeline divides each layer among {grid.get_slice_parallel_world_size()} tensor-parallel ranks, and nothing "
            f"tells how; {CURE_OF_ENGINES}"
        )
    is_auto = num_tensor_parallel(engine) > 1
    if grid is None and not is_auto and engine.mp_world_size > 1:
        raise UnsupportedError(
            f"this engine has {engine.mp_world_size} model-parallel ranks of its own mpu, and only AutoTP and pipelines are "
            f"supported; {CURE_OF_ENGINES}"
        )
    if engine.has_moe_layers:
        # Experts are supported if DeepSpeed's own layers divide them among data-parallel ranks, without other parallelism.
        ways = {
            "together with ZeRO-3": engine.zero_optimization_stage() == 3,
            "together with model parallelism": engine.mp_world_size > 1 or hasattr(engine, "stage_id") or is_auto,
            "by AutoEP": any(type(module).__name__.startswith("AutoEP") for module in engine.module.modules()),
        }
        for way in (way for way, is_used in ways.items() if is_used):
            raise UnsupportedError(f"this model's experts are divided among ranks {way}; {CURE_OF_ENGINES}")
    if getattr(engine, "zenflow", False):
        raise UnsupportedError(f"ZenFlow updates the optimizer's state in a process of its own; {CURE_OF_ENGINES}")
    if hasattr(engine, "super_offload") and engine.super_offload():  # newer releases have it
        raise UnsupportedError(
            "SuperOffload keeps the moments of Adam in a process of its own, and no checkpoint has them, of this library or of "
            "DeepSpeed; leave super_offload out of the config"
        )


def _global_names(engine: Any) -> dict[str, str]:
    """Map the names that experts' parameters and buffers have on this rank to their names in the whole model."""
    from deepspeed.utils import groups

    found: dict[str, str] = {}
    for prefix, module in engine.module.named_modules() if engine.has_moe_layers else ():
        if not hasattr(module, "expert_group_name"):
            continue
        held = [f"{prefix}.{name}" if prefix else name for name in module.state_dict()]
        num_local, rank = num_local_experts(held), groups._get_expert_parallel_rank(module.expert_group_name)
        found |= {name: global_name(name, num_local, rank) for name in held}
    return {name: other for name, other in found.items() if name != other or is_expert(name)}


def base_optimizer(engine: Any) -> Any:
    """Return torch's optimizer inside of DeepSpeed's wrappers; None if the engine has no optimizer."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class EngineState:
    """The tensors and optimizer state of a DeepSpeed engine on this rank, by their names in the whole model.

    Parameters
    ----------
    engine
        A ``DeepSpeedEngine`` or ``PipelineEngine``.
    loading
        Whether to include all that this rank holds. A save leaves out parameters that an earlier stage of a pipeline also holds.
    """

    def __init__(self, engine: Any, *, loading: bool = False) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._renamed = _global_names(engine)
        self.names: dict[Any, str] = {param: self.name(name) for param, name in engine.param_names.items()}
        self._parallel = Parallel(engine, loading=loading)
        self._flat = self._flat_params()

    def name(self, local: str) -> str:
        """Convert the name of a parameter or buffer on this rank to its name in the whole model."""
        return self._renamed.get(local, local)

    def _flat_params(self) -> list[Params] | None:
        """Return the parameters of each flat group of the optimizer, in order; None if it does not flatten parameters."""
        engine, optimizer = self._engine, self._optimizer
        if not any(hasattr(optimizer, key) for key in FLAT_OWNERS):
            return None
        # ZeRO and BF16_Optimizer give shapes of whole parameters; without ZeRO, parameters are whole on every rank.
        if engine.zero_optimization() or hasattr(optimizer, "bf16_groups"):
            shapes = engine._get_zero_param_shapes()
        else:
            shapes = [{engine.param_names[p]: p.shape for p in group} for group in optimizer.fp16_groups]
        return [Params.of({self.name(name): tuple(shape) for name, shape in of_group.items()}) for of_group in shapes]

    @property
    def optimizer_state(self) -> RankState | None:
        """Flat tensors and other state of the optimizer on this rank; None if the optimizer does not flatten its parameters."""
        if self._flat is None:
            return None
        group = getattr(self._optimizer, "dp_process_group", None)
        rank: int | list[int] = 0 if group is None else dist.get_rank(group=group)
        if self._renamed:  # with experts, each group has its own process group
            rank = [dist.get_rank(group=of) for of in self._optimizer.real_dp_process_group]
        with advised(CURE_OF_ENGINES):
            return open_state(self._flat, self._optimizer.state_dict(), rank, "the optimizer of the engine")

    def groups(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of the optimizer's groups, with the names of their parameters under ``params``."""
        found = base_optimizer(self._engine).param_groups
        return [named_group(group, names) for group, names in zip(found, self.group_names(), strict=True)]

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each group of torch's optimizer."""
        if self._flat is None:
            return [[self.names[param] for param, _ in group] for group in self._apart()]
        # ZeRO-3 has several flat sub-groups for one group of torch's optimizer; otherwise there is one for each.
        homes = getattr(self._optimizer, "sub_group_to_group_id", None)
        found: list[list[str]] = [[] for _ in base_optimizer(self._engine).param_groups]
        for i, params in enumerate(self._flat):
            found[i if homes is None else homes[i]] += params.names
        return found

    def tensors(self, *, with_state: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the module's tensors by FQN (master weights if there are any), and the optimizer's state by FQN and key.

        Parameters
        ----------
        with_state
            Whether to return the optimizer's state.
        """
        model: dict[str, Any] = {}
        state: dict[str, dict[str, Any]] = {}
        # Master weights stand for their parameters in the model. Parameters without them come from the module below.
        for fqn, key, value in self._entries():
            if key == MASTER:
                model[fqn] = value
            elif with_state:
                state.setdefault(fqn, {})[key] = value
        trained = {name for params in self._flat or () for name in params.names}
        for fqn, part in self._module_parts(trained):
            model[fqn] = part
        # Tied parameters have second names, too.
        for name, param in self._engine.module.named_parameters(remove_duplicate=False):
            first = self.names.get(param)
            if first is not None and first != self.name(name) and first in model:
                model[self.name(name)] = model[first]
        return model, state

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """Yield this rank's optimizer state: the FQN of a parameter, a key of its state, and the shard or value at that key."""
        if self._optimizer is None:
            return
        flat = self.optimizer_state
        if flat is None:
            yield from self._entries_apart()
            return
        for group in flat.groups:
            runs = group.runs
            columns = (column.tolist() for column in (runs.param, runs.at, runs.start, runs.count))
            for param, at, start, count in zip(*columns, strict=True):
                fqn, shape = group.params.names[param], group.params.shapes[param]
                if self._parallel.saves(fqn):
                    for key, tensor in group.tensors.items():
                        yield fqn, key, self._parallel.part(fqn, shape, tensor.detach()[at : at + count], start)
                    # Scalars such as the step belong to the group: repeat them for each parameter with elements on this rank.
                    for key, value in group.values.items():
                        yield fqn, key, value.clone() if isinstance(value, torch.Tensor) else value

    def _entries_apart(self) -> Iterator[tuple[str, str, Any]]:
        """Yield FQN, key, and shard or value of an optimizer that does not flatten: of torch's own state, and master weights."""
        state = base_optimizer(self._engine).state
        for param, owner in chain.from_iterable(self._apart()):
            fqn = self.names[param]
            if not self._parallel.saves(fqn):
                continue
            if owner is not param:
                yield fqn, MASTER, self._parallel.whole(fqn, owner.detach())
            for key, value in state.get(owner, {}).items():
                is_part = isinstance(value, torch.Tensor) and value.shape == owner.shape and value.ndim > 0
                yield fqn, key, self._parallel.whole(fqn, value) if is_part else value

    def _apart(self) -> Iterator[list[tuple[Any, Any]]]:
        """Yield a list for each group of an optimizer that does not flatten parameters: pairs of a parameter and its owner.

        The owner is the tensor that torch's optimizer updates: the parameter itself, or its master weights.
        """
        masters = getattr(self._optimizer, "fp32_groups", None)
        owners = masters or [group["params"] for group in base_optimizer(self._engine).param_groups]
        params = self._optimizer.fp16_groups if masters else owners
        for group, owned in zip(params, owners, strict=True):
            yield list(zip(group, owned, strict=True))

    def _module_parts(self, trained: set[str]) -> Iterator[tuple[str, Any]]:
        """Yield the FQN and the shard of each parameter on this rank whose master weights are not saved.

        `trained` has the FQNs of the parameters whose master weights are saved in flat tensors.
        """
        apart = chain.from_iterable(self._apart()) if self._optimizer is not None and self._flat is None else ()
        # Skip parameters whose master weights are saved.
        skipped = trained | {self.names[param] for param, owner in apart if owner is not param}
        for local, param in self._engine.module.named_parameters():
            fqn = self.name(local)
            if fqn in skipped or not self._parallel.saves(fqn):
                continue
            if hasattr(param, "ds_id"):
                if (part := self._stripe(fqn, param)) is not None:
                    yield fqn, part
            else:
                yield fqn, self._parallel.whole(fqn, param.detach())

    def _stripe(self, fqn: str, param: Any) -> Any:
        """Return this rank's stripe of a frozen parameter of ZeRO-3, over the live memory; None if it has no elements here."""
        group = self._optimizer.dp_process_group
        runs = striped_runs(Params.of({fqn: tuple(param.ds_shape)}), dist.get_world_size(group=group), dist.get_rank(group=group))
        if not len(runs.param):
            return None
        start, count = int(runs.start[0]), int(runs.count[0])
        return self._parallel.part(fqn, tuple(param.ds_shape), param.ds_tensor.detach().reshape(-1)[:count], start)

    def buffers(self, *, of_experts_alone: bool = False) -> dict[str, torch.Tensor]:
        """Return the module's live buffers by name.

        All data-parallel ranks have the same ones, except for the buffers of experts, which `of_experts_alone` selects.
        """
        found = {}
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    local = f"{prefix}.{name}" if prefix else name
                    if not of_experts_alone or local in self._renamed:
                        found[self.name(local)] = buffer
        return found

    def allocate(self, kinds: Mapping[str, Mapping[str, tuple[bool, torch.dtype]]]) -> None:
        """Allocate the state that the checkpoint has and the optimizer lacks, filled with zeros.

        Parameters
        ----------
        kinds
            For each FQN of a parameter and each key of its saved state: whether the state has the parameter's shape, and the
            state's dtype.
        """
        base = base_optimizer(self._engine)
        for names, owner in self._owners():
            wanted = {key: kind for fqn in names for key, kind in kinds.get(fqn, {}).items()}
            state = base.state[owner]
            for key, (is_part, dtype) in wanted.items():
                if key not in state:
                    state[key] = (
                        torch.zeros_like(owner, dtype=dtype, requires_grad=False) if is_part else torch.zeros((), dtype=dtype)
                    )

    def _owners(self) -> Iterator[tuple[Sequence[str], Any]]:
        """Yield pairs for the tensors that torch's optimizer updates: the names of the parameters in a tensor, and the tensor."""
        if self._flat is not None:
            owners = next(getattr(self._optimizer, key) for key in FLAT_OWNERS if hasattr(self._optimizer, key))
            yield from zip((params.names for params in self._flat), owners, strict=True)
            return
        yield from (((self.names[param],), owner) for group in self._apart() for param, owner in group)

    def shared_values(self, entries: Mapping[str, Mapping[str, Any]]) -> list[Shared]:
        """Return the values that the parameters of a flat group share, such as the step, from the saved value of each parameter.

        Raise `UnsupportedError` if the saved values differ among the parameters of one group, or are not numbers where the
        optimizer has one.
        """
        base = base_optimizer(self._engine)
        chosen = []
        # A flat group has one value for all of its parameters, so the saved values of these must agree.
        for names, owner in self._owners():
            state = base.state[owner]
            for key in {key for fqn in names for key in entries.get(fqn, {})}:
                found = {fqn: entries[fqn][key] for fqn in names if key in entries.get(fqn, {})}
                (first, value), *others = found.items()
                name = f"optimizer.state.{first}.{key}"
                for fqn, other in others:
                    if comparable(_shown(value)) != comparable(_shown(other)):
                        raise UnsupportedError(
                            f"{name} is {_shown(value)} and that of {fqn} {_shown(other)}; both are in one flat group here, "
                            "which has one value; put them into groups of their own"
                        )
                if isinstance(state.get(key), torch.Tensor | Number) and not isinstance(value, torch.Tensor | Number):
                    raise UnsupportedError(f"{name} is {value!r:.60}, where the optimizer has a number; save it as one")
                chosen.append((state, key, value))
        return chosen

    def update_parameters(self) -> None:
        """Copy loaded master weights to the parameters of the module, which are often of half precision."""
        optimizer = self._optimizer
        # Optimizers with `update_lp_params` copy by themselves. The others are told apart by the attribute with their masters.
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
            _update_stripes(optimizer)
        elif hasattr(optimizer, "fp32_groups_flat"):
            for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
                for param, master in zip(group, flat.data.split([p.numel() for p in group]), strict=True):
                    param.data.copy_(master.view_as(param))
        elif hasattr(optimizer, "fp32_groups"):
            for param, master in chain.from_iterable(self._apart()):
                param.data.copy_(master.data)


def _update_stripes(optimizer: Any) -> None:
    """Copy the master weights of ZeRO-3 to this rank's stripes of the parameters, as ZeRO-3's ``load_state_dict`` does."""
    for flat, masters, parts in zip(
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp32_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups,
        strict=True,
    ):
        if masters.numel():
            flat.data.copy_(masters.data)
        for part, updated in zip(parts, optimizer.unflatten(flat, parts), strict=True):
            part.data = updated.data
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)


def _shown(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
