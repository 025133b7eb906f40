"""Adding an optimizer without ZeRO to a catalog: a wrapper for fp16 or bf16, or torch's own.

The file lists the optimizer's parameters by position alone. Three kinds are recognized:

1. *Flat* master weights (the fused wrapper). Cast to half precision, they are the module's tensors, bit for bit. So the next
   parameter is the first unused tensor of the module whose elements, at both ends and in the middle, equal the cast there.
2. Master weights *apart* (the wrapper that does not flatten): one tensor for each parameter, compared in the same way.
3. torch's own optimizer in full precision: a parameter is recognized by the shape of its state. If parameters of one shape are in
   several groups, or some are frozen, shapes do not tell, and the optimizer is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...plugins import Ints
from ...plugins.errors import CorruptError
from ...plugins.groups import named_group
from ...plugins.torchfile import FileTensor, PickledTensor, TorchFile
from .model_parallel import ModelParallelParts
from .names import OPTIMIZER, ROOT, parameter_name, state_link
from .places import Params, open_state
from .values import GroupTensors, StateAdder, add_shard

SAMPLE = 64
"""The number of elements to compare at each of three places of a parameter, to prove its name by bytes."""


def add_without_zero(
    mp: int,
    model: TorchFile,
    state: Mapping[str, Any],
    module: Sequence[FileTensor],
    parts: ModelParallelParts,
    adder: StateAdder,
    *,
    in_order: bool,
) -> None:
    """Add the optimizer of one model-parallel rank, or make it unreadable if its parameters have no provable names.

    Parameters
    ----------
    state
        The state dict of the optimizer, from the file `model`.
    module
        The tensors of the module that may be parameters, in order.
    in_order
        Whether the rank is a stage of a pipeline: its layers follow those of the stage before.
    """
    where = f"{adder.builder.where}: {model.key}"
    if "fp32_groups_flat" in state:
        params = flat_groups(state["fp32_groups_flat"], model, module)
        if params is not None:
            opened = open_state(params, state, 0, where)
            for group in opened.groups:
                tensors = GroupTensors(adder.builder, group.params, parts.shards(mp, group.params))
                for key, tensor in group.tensors.items():
                    tensors.add(model, key, tensor, group.runs)
                adder.shared(model, group, tensors.shards)
            adder.groups(model, opened.param_groups)
            if mp == 0:
                adder.tree(model, (ROOT, OPTIMIZER), opened.values)
            return
    elif "fp32_groups" in state:
        if (names := apart(state["fp32_groups"], model, module)) is not None:
            _add_apart(mp, model, state, names, module, parts, adder)
            return
    else:
        base, numbers = state.get("state"), numbers_of(state, where)
        candidates = [one for one in module if not parts.has_home(one.fqn)][: sum(map(len, numbers))] if in_order else module
        if isinstance(base, dict) and (names := by_shapes(numbers, base, candidates)) is not None:
            _add_apart(mp, model, state, names, module, parts, adder)
            return
    adder.refuse(where)


def _add_apart(
    mp: int,
    model: TorchFile,
    state: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    module: Sequence[FileTensor],
    parts: ModelParallelParts,
    adder: StateAdder,
) -> None:
    """Add the optimizer state that one model-parallel rank, `mp`, saved with a tensor for each parameter."""
    base = state.get("optimizer_state_dict", state)
    numbers = numbers_of(base, model.key)
    # fqns: the name of each parameter by its number; part_of: the part of each that this model-parallel rank holds, by name
    fqns = {number: fqn for of, group in zip(numbers, names, strict=True) for number, fqn in zip(of, group, strict=True)}
    shapes = {tensor.fqn: tensor.view.shape for tensor in module}
    params = Params.of({fqn: shapes[fqn] for fqn in fqns.values()})
    part_of = dict(zip(params.names, parts.shards(mp, params), strict=True))
    for master, fqn in zip((m for group in state.get("fp32_groups", ()) for m in group), fqns.values(), strict=False):
        if part_of[fqn].readable:
            add_shard(adder.builder, model, parameter_name(fqn), master, part_of[fqn])
    # State in the shape of its parameter is a shard of the global state; any other is an entry for the whole parameter.
    for number, entries in base["state"].items():
        fqn = fqns[number]
        for key, value in entries.items() if part_of[fqn].readable else ():
            if isinstance(value, PickledTensor) and value.shape == shapes[fqn]:
                add_shard(adder.builder, model, state_link(fqn, key).name, value, part_of[fqn], state_link(fqn, key))
            else:
                adder.entry(model, state_link(fqn, key), value)
    adder.groups(model, list(map(named_group, base["param_groups"], names)))
    read_above = ("fp32_groups", "optimizer_state_dict", "state", "param_groups")
    values = {key: value for key, value in state.items() if key not in read_above}
    if values and mp == 0:
        adder.tree(model, (ROOT, OPTIMIZER), values)


def flat_groups(masters: Sequence[PickledTensor], file: TorchFile, module: Sequence[FileTensor]) -> list[Params] | None:
    """Find the parameters of flat groups; return None if the bytes do not prove them.

    Parameters
    ----------
    masters, file
        The flat master weights of each group, and the file that holds them.
    module
        The tensors of the module that may be parameters, in order.
    """
    unused = list(module)
    found = []
    for master in masters:
        at, total = 0, prod(master.shape)
        names: dict[str, Ints] = {}
        while at < total:
            tensor = next((c for c in unused if prod(c.view.shape) <= total - at and _is_cast(c, file, master, at)), None)
            if tensor is None:
                return None
            unused.remove(tensor)
            names[tensor.fqn] = tensor.view.shape
            at += prod(tensor.view.shape)
        found.append(Params.of(names))
    return found


def _is_cast(tensor: FileTensor, file: TorchFile, master: PickledTensor, at: int) -> bool:
    """Tell whether the master weights from element `at` on, cast to the dtype of `tensor`, equal its elements at three places."""
    view, size = tensor.view, prod(tensor.view.shape)
    if not size or not view.is_row_major:
        return False
    length = min(SAMPLE, size)
    for low in sorted({0, (size - length) // 2, size - length}):
        cast = file.elements(master, at + low, length).to(view.dtype)
        if not torch.equal(cast.view(torch.uint8), tensor.file.elements(view, low, length).view(torch.uint8)):
            return False
    return True


def apart(masters: Sequence[Sequence[PickledTensor]], file: TorchFile, module: Sequence[FileTensor]) -> list[list[str]] | None:
    """Compare master weights, one tensor for each parameter, with the module's tensors; return the names in each group.

    Return None if the bytes do not prove the names.
    """
    unused = list(module)
    found = []
    for group in masters:
        names = []
        for master in group:
            tensor = next((c for c in unused if c.view.shape == master.shape and _is_cast(c, file, master, 0)), None)
            if tensor is None:
                return None
            unused.remove(tensor)
            names.append(tensor.fqn)
        found.append(names)
    return found


def by_shapes(groups: Sequence[Sequence[int]], state: Mapping[Any, Any], module: Sequence[FileTensor]) -> list[list[str]] | None:
    """Find the names of the parameters of torch's own optimizer; return None if the shapes of their state do not tell them.

    Parameters
    ----------
    groups
        The numbers of the parameters in each group.
    state
        The state of each parameter, by number.
    """
    shapes = {number: shape for group in groups for number in group if (shape := _shape_of(state.get(number))) is not None}
    if len(shapes) != sum(map(len, groups)):
        return None
    by_shape: dict[Ints, list[str]] = {}
    for tensor in module:
        by_shape.setdefault(tensor.view.shape, []).append(tensor.fqn)
    # wanted[s]: number of parameters of shape s; homes[s]: number of groups that have parameters of shape s
    wanted = Counter(shapes.values())
    homes = Counter(shape for group in groups for shape in {shapes[number] for number in group})
    if any(homes[shape] > 1 or count != len(by_shape.get(shape, ())) for shape, count in wanted.items()):
        return None
    waiting = {shape: iter(names) for shape, names in by_shape.items()}
    return [[next(waiting[shapes[number]]) for number in group] for group in groups]


def _shape_of(state: Any) -> Ints | None:
    """Return the shape of the tensors in a parameter's state, without scalars; None if shapes differ, or there is no tensor."""
    values = state.values() if isinstance(state, dict) else ()
    shapes = {value.shape for value in values if isinstance(value, PickledTensor) and value.shape}
    return shapes.pop() if len(shapes) == 1 else None


def numbers_of(base: Mapping[str, Any], where: str) -> list[list[int]]:
    """Return the numbers of the parameters in each group of a torch optimizer's state dict."""
    groups = base.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        raise CorruptError(f"{where}: its optimizer has no param_groups as torch's have; use another copy")
    return [list(group["params"]) for group in groups]
