"""Adding a universal folder of DeepSpeed to a catalog; each parameter has files of its own there.

1. Add the files of each parameter that has a shape in the model states: master weights, and each entry of the state.
2. Replace the numbers of parameters in the groups by names.
3. Add the other values of the optimizer's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...plugins import Ints
from ...plugins.errors import CorruptError
from ...plugins.groups import named_group
from ...plugins.torchfile import FileReader, PickledTensor, TorchFile
from .names import MASTER, OPTIMIZER, ROOT, UNIVERSAL_STATE, parameter_name, state_link
from .places import NOT_SHARED, shapes_in
from .values import StateAdder, add_whole
from .without_zero import numbers_of


def add_universal(
    reader: FileReader, files: Mapping[tuple[str, str], str], models: Sequence[TorchFile], state: StateAdder
) -> None:
    """Add the parameters of a universal folder.

    The folder also has the module's other tensors, cast to float32; these are taken from the module instead.
    """
    where, common = state.builder.where, reader.open(UNIVERSAL_STATE)
    shapes = [(model, of_group) for model in models for of_group in shapes_in(model)]
    shape_of = {fqn: shape for _, of_group in shapes for fqn, shape in of_group.items()}
    for (fqn, key), path in files.items():
        if fqn in shape_of:
            _add_file(fqn, key, reader.open(path), shape_of[fqn], state)
    # Each parameter with a shape must have its master weights.
    missing = next((fqn for fqn in shape_of if (fqn, MASTER) not in files), None)
    if missing is not None:
        raise CorruptError(f"{where}: has no zero/{missing}/fp32.pt; copy it, or use another checkpoint")
    if not isinstance(common.content, dict):
        raise CorruptError(f"{where}: {common.key} holds no optimizer state of DeepSpeed; use another copy")
    for model in models:
        _add_groups(common, shapes_in(model), state)
    values = {key: value for key, value in common.content.items() if key not in NOT_SHARED}
    state.tree(common, (ROOT, OPTIMIZER), values)


def _add_file(fqn: str, key: str, file: TorchFile, shape: Ints, state: StateAdder) -> None:
    view = file.content.get("param") if isinstance(file.content, dict) else file.content
    link = None if key == MASTER else state_link(fqn, key)
    if not isinstance(view, PickledTensor):
        if link is None or isinstance(file.content, dict):
            raise CorruptError(f"{state.builder.where}: {file.key} holds no tensor; use another copy")
        state.entry(file, link, view)
        return
    # ZeRO-3's files are flat, and the model states have the shape. Other files have been joined over tensor-parallel ranks.
    flat = len(view.shape) == 1 and len(shape) != 1 and prod(view.shape) == prod(shape) and view.is_row_major
    whole = view.reshaped(shape) if flat else view
    add_whole(state.builder, file, parameter_name(fqn) if link is None else link.name, whole, link)


def _add_groups(common: TorchFile, shapes: Sequence[Mapping[str, Ints]], state: StateAdder) -> None:
    where = f"{state.builder.where}: {common.key}"
    groups, names = common.content.get("param_groups"), [list(of_group) for of_group in shapes]
    numbers = numbers_of({"param_groups": groups}, where)
    if not all(0 <= number < len(names) for group in numbers for number in group):
        raise CorruptError(f"{where} has groups {numbers} of {len(names)}; use another copy")
    listed = [[fqn for number in group for fqn in names[number]] for group in numbers]
    state.groups(common, list(map(named_group, groups, listed)))
    held = (common.content.get("optimizer_state_dict") or {}).get("state", {})
    for number, entries in held.items():  # only with ZeRO-3, whose step is not in the files of parameters
        for key, value in entries.items():
            if isinstance(value, PickledTensor) and value.shape:
                continue
            for fqn in names[number]:
                state.entry(common, state_link(fqn, key), value)
