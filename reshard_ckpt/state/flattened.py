"""An optimizer's *flattened* state dict, by parameter, and the nested one that it stands for.

torch's ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True`` gives ``{"state.layer.weight.exp_avg": …,
"param_groups.layer.weight.lr": …}``, which trainers with pipeline stages use, for such dicts can be put together. What is
saved is the nested form, so that a checkpoint holds the same names whichever of the two a trainer uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ..core.catalog.links import GROUPS, STATE
from ..core.catalog.param_groups import comparable


def is_flattened(value: Any) -> bool:
    """Whether something is an optimizer's flattened state dict.

    >>> is_flattened({"state.w.step": 1, "param_groups.w.lr": 0.1}), is_flattened({"state": {}, "param_groups": []})
    (True, False)
    """
    if not isinstance(value, Mapping):
        return False
    prefixes = (f"{STATE}.", f"{GROUPS}.")
    keys = list(value)
    return all(isinstance(k, str) and k.startswith(prefixes) for k in keys) and any(k.startswith(prefixes[1]) for k in keys)


class Apart(list[dict[str, Any]]):
    """Groups of one parameter each, as a flattened state dict has them; those with equal hyperparameters are saved as one."""

    def together(self) -> list[dict[str, Any]]:
        """The groups, equal ones as one."""
        found: dict[Any, dict[str, Any]] = {}
        for group in self:
            key = comparable({name: value for name, value in group.items() if name != "params"})
            found.setdefault(key, {**group, "params": []})["params"] += group["params"]
        return list(found.values())


class Flattened:
    """A flattened state dict as an object whose state is the nested one; what is loaded goes back into the flattened one."""

    def __init__(self, flat: MutableMapping[str, Any]) -> None:
        self._flat = flat

    def state_dict(self) -> dict[str, Any]:
        return nested(self._flat)

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self._flat.update(flattened(self._flat, tree))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict by parameter, each of which is a group, from a flattened one."""
    groups = _groups(flat)
    state: dict[str, dict[str, Any]] = {}
    for fqn, key, name in _states(flat, groups):
        state.setdefault(fqn, {})[key] = flat[name]
    return {STATE: state, GROUPS: Apart({**group, "params": [fqn]} for fqn, group in groups.items())}


def flattened(flat: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a loaded state dict by parameter says for each key of the flattened one that it was made of."""
    groups = _groups(flat)
    home = {fqn: group for group in tree[GROUPS] for fqn in group["params"]}
    out = {f"{GROUPS}.{fqn}.{key}": home[fqn][key] for fqn, group in groups.items() for key in group}
    return out | {name: tree[STATE][fqn][key] for fqn, key, name in _states(flat, groups)}


def _groups(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The hyperparameters of each parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith(f"{GROUPS}."):
            fqn, _, key = name[len(GROUPS) + 1 :].rpartition(".")
            groups.setdefault(fqn, {})[key] = value
    return groups


def _states(flat: Mapping[str, Any], groups: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Parameter and key of each name of the state; keys may have dots themselves, so the parameters are the known ones."""
    for name in flat:
        if not name.startswith(f"{STATE}."):
            continue
        rest = name[len(STATE) + 1 :]
        dots = [i for i, char in enumerate(rest) if char == "."]
        at = next((i for i in reversed(dots) if rest[:i] in groups), dots[-1] if dots else len(rest))
        yield rest[:at], rest[at + 1 :], name
