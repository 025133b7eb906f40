"""Optimizer state dicts in files: those whose parameters are numbers that nothing in the file names.

torch numbers the parameters of all groups in a row: ``{"state": {0: …}, "param_groups": [{"params": [0, 1], …}]}``. Only the
program that made the optimizer knows which parameter a number means. An optimizer made of ``model.named_parameters()`` is the
exception: its groups have ``param_names``, by which `state.capture` names its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CorruptError
from ..state.optimizer_dicts import are_numbered_groups, names_by_number

_MAX_DEPTH = 64


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value is the state dict of a torch optimizer, keyed by position."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    state = value["state"]
    keyed = isinstance(state, Mapping) and all(type(key) is int and isinstance(entry, Mapping) for key, entry in state.items())
    return keyed and are_numbered_groups(value["param_groups"])


def advice(state: Mapping[Any, Any]) -> dict[str, str]:
    """Write what to do about each optimizer of a state whose parameters go by number alone, by its name.

    Raises
    ------
    CorruptError
        The state nests too deep, or an optimizer has state of a parameter that is in none of its groups.
    """
    return {
        name: f"{name} is keyed by the positions of parameters, and the file does not hold their names (an optimizer made of "
        "model.named_parameters() saves them): load it with torch.load and load_state_dict of the optimizer, then save it "
        "with checkpoint.save"
        for name in _unnamed(state, ())
    }


def _unnamed(value: Any, path: tuple[Any, ...]) -> Iterator[str]:
    if len(path) > _MAX_DEPTH:
        raise CorruptError(f"{'.'.join(map(str, path[:3]))}…: is nested deeper than {_MAX_DEPTH} levels; use another copy")
    if is_optimizer_state(value):
        names = names_by_number(value["param_groups"])
        if names is None:
            yield ".".join(map(str, path))
            return
        unknown = [key for key in value["state"] if key not in names]
        if unknown:
            raise CorruptError(
                f"an optimizer has state for parameter {unknown[0]}, which is in none of its groups; use another copy"
            )
    elif isinstance(value, Mapping | list | tuple):
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _unnamed(child, (*path, key))
