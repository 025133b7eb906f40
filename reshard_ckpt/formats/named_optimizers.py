"""Optimizer state dicts that are keyed by position, keyed anew by the names of their parameters.

torch numbers the parameters of all groups in a row: ``{"state": {0: …}, "param_groups": [{"params": [0, 1], …}]}``. Only the
program that made the optimizer knows which parameter a number means. An optimizer made of ``model.named_parameters()`` is the
exception: its groups have ``param_names``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CorruptError
from ..state.optimizer_dicts import are_numbered_groups, param_names

_MAX_DEPTH = 64


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value is the state dict of a torch optimizer, keyed by position."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    state = value["state"]
    keyed = isinstance(state, Mapping) and all(type(key) is int and isinstance(entry, Mapping) for key, entry in state.items())
    return keyed and are_numbered_groups(value["param_groups"])


def key_by_name(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, str]]:
    """Key the optimizers of a state by name where the state has the names; return advice for the others."""
    advice: dict[str, str] = {}
    named = _key_by_name(state, (), advice)
    assert isinstance(named, Mapping)
    return named, advice


def _key_by_name(value: Any, path: tuple[Any, ...], advice: dict[str, str]) -> Any:
    if len(path) > _MAX_DEPTH:
        raise CorruptError(f"{'.'.join(map(str, path[:3]))}…: is nested deeper than {_MAX_DEPTH} levels; use another copy")
    if is_optimizer_state(value):
        names = _names(value["param_groups"])
        if names is not None:
            return _key_by(value, names)
        where = ".".join(map(str, path))
        advice[where] = (
            f"{where} is keyed by the positions of parameters, and the file does not hold their names (an optimizer made of "
            "model.named_parameters() saves them): load it with torch.load and load_state_dict of the optimizer, then save it "
            "with checkpoint.save"
        )
        return value
    if type(value) is dict or isinstance(value, Mapping):
        return {key: _key_by_name(child, (*path, key), advice) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_key_by_name(child, (*path, i), advice) for i, child in enumerate(value))
    return value


def _names(groups: list[Mapping[str, Any]]) -> dict[int, str] | None:
    """Return the name of each parameter; None where a group has no names, or two parameters have one name."""
    names: dict[int, str] = {}
    for group in groups:
        own = param_names(group)
        if own is None:
            return None
        names.update(zip(group["params"], own, strict=True))
    num_params = sum(len(group["params"]) for group in groups)
    return names if len(set(names.values())) == len(names) == num_params else None


def _key_by(value: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    unknown = [key for key in value["state"] if key not in names]
    if unknown:
        raise CorruptError(f"an optimizer has state for parameter {unknown[0]}, which is in none of its groups; use another copy")
    groups = []
    for group in value["param_groups"]:
        hyperparameters = {key: item for key, item in group.items() if key != "param_names"}
        groups.append({**hyperparameters, "params": [names[i] for i in group["params"]]})
    state = {names[i]: entry for i, entry in value["state"].items()}
    return {**value, "state": state, "param_groups": groups}
