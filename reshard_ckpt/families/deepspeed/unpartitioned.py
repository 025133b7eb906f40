"""Finding the names of the parameters that an optimizer without ZeRO holds: a wrapper for fp16 or bf16, or torch's own.

The file lists the optimizer's parameters by position alone. Three kinds are recognized:

1. *Flat* master weights (the fused wrapper). Cast to half precision, they are the module's tensors, bit for bit. So the next
   parameter is the first unused tensor of the module whose elements, at both ends and in the middle, equal the cast there.
2. Master weights *apart* (the wrapper that does not flatten): one tensor for each parameter, compared in the same way.
3. torch's own optimizer in full precision: a parameter is recognized by the shape of its state. If parameters of one shape are in
   several groups, or some are frozen, shapes do not tell, and the optimizer is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...plugins import Ints
from ...plugins.errors import CorruptError
from ...plugins.torchfile import FileTensor, PickledTensor, TorchFile
from .places import Params

SAMPLE = 64
"""Number of elements to compare at each of three places of a parameter."""

Read = Callable[[TorchFile, PickledTensor, int, int], torch.Tensor]
"""Reads elements of a file's tensor: takes the file, the tensor, the first element, and the number of elements."""


def flat_groups(
    masters: Sequence[PickledTensor], file: TorchFile, module: Sequence[FileTensor], read: Read
) -> list[Params] | None:
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
            one = next((c for c in unused if prod(c.view.shape) <= total - at and _is_cast(c, file, master, at, read)), None)
            if one is None:
                return None
            unused.remove(one)
            names[one.fqn] = one.view.shape
            at += prod(one.view.shape)
        found.append(Params.of(names))
    return found


def _is_cast(one: FileTensor, file: TorchFile, master: PickledTensor, at: int, read: Read) -> bool:
    """Tell whether the master weights from element `at` on, cast to a tensor's dtype, equal the tensor at three places."""
    view, size = one.view, prod(one.view.shape)
    if not size or not view.is_row_major:
        return False
    length = min(SAMPLE, size)
    for low in sorted({0, (size - length) // 2, size - length}):
        cast = read(file, master, at + low, length).to(view.dtype)
        if not torch.equal(cast.view(torch.uint8), read(one.file, view, low, length).view(torch.uint8)):
            return False
    return True


def apart(
    masters: Sequence[Sequence[PickledTensor]], file: TorchFile, module: Sequence[FileTensor], read: Read
) -> list[list[str]] | None:
    """Find the names of master weights that are one tensor for each parameter; return None if the bytes do not prove them."""
    unused = list(module)
    found = []
    for group in masters:
        names = []
        for master in group:
            one = next((c for c in unused if c.view.shape == master.shape and _is_cast(c, file, master, 0, read)), None)
            if one is None:
                return None
            unused.remove(one)
            names.append(one.fqn)
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
    for one in module:
        by_shape.setdefault(one.view.shape, []).append(one.fqn)
    # wanted[s]: number of parameters of shape s; homes[s]: number of groups that have parameters of shape s
    wanted = Counter(shapes.values())
    homes = Counter(shape for group in groups for shape in {shapes[number] for number in group})
    if any(homes[shape] > 1 or count != len(by_shape.get(shape, ())) for shape, count in wanted.items()):
        return None
    waiting = {shape: iter(names) for shape, names in by_shape.items()}
    return [[next(waiting[shapes[number]]) for number in group] for group in groups]


def _shape_of(state: Any) -> Ints | None:
    """Return the one shape that the tensors of a parameter's state have; None if they have several shapes, or none."""
    values = state.values() if isinstance(state, dict) else ()
    shapes = {value.shape for value in values if isinstance(value, PickledTensor) and value.shape}
    return shapes.pop() if len(shapes) == 1 else None


def numbers_of(base: Mapping[str, Any], where: str) -> list[list[int]]:
    """Return the numbers of the parameters in each group of a torch optimizer's state dict."""
    groups = base.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        raise CorruptError(f"{where}: its optimizer has no param_groups as torch's have; use another copy")
    return [list(group["params"]) for group in groups]
