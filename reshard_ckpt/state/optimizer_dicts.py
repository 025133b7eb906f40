"""The forms in which an optimizer's state dict occurs: by number, by FQN, and flattened; conversions between them.

1. *By number*, as torch's ``state_dict()`` gives it, which numbers the parameters of all groups in a row:
   ``{"state": {0: …}, "param_groups": [{"params": [0]}]}``.
2. *By FQN*: the same with the names of the parameters in place of numbers.
3. *Flattened*: ``{"state.layer.weight.exp_avg": …, "param_groups.layer.weight.lr": …}``, as torch's ``get_optimizer_state_dict``
   gives it with ``flatten_optimizer_state_dict=True``. Trainers with pipeline stages use it, for such dicts can be put together.
   It is saved by FQN, so that a checkpoint holds the same names whichever of the two a trainer uses.

All code that reads or writes one of these forms, in a live state or in a file of another library, uses the functions here.
The parameter groups that they return are by FQN: hyperparameters, and ``params``, the FQNs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

from ..core.catalog.names import GROUPS, STATE, unwrapped
from ..core.catalog.param_groups import are_groups, comparable, hyperparameters, named_group

Form = Literal["by number", "by FQN", "flattened"]


def form_of(value: Mapping[Any, Any]) -> Form | None:
    """Return the form of an optimizer's state dict; None for a dict that is not one."""
    if value.get(GROUPS) is None:
        return "flattened" if is_flattened(value) else None
    if is_numbered(value):
        return "by number"
    return "by FQN" if is_optimizer_tree(value) else None


class PlainDict(dict[Any, Any]):
    """A dict that is saved entry by entry as it is, even if it looks like a numbered optimizer state dict."""


def is_numbered(value: Any) -> bool:
    """Tell whether a value is the state dict of an optimizer that numbers its parameters.

    >>> is_numbered({"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    True
    >>> is_numbered({"state": {}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]})
    False
    >>> is_numbered({"state": {}, "param_groups": [{"lr": 0.1, "params": []}]})
    False
    """
    is_plain = not isinstance(value, Mapping) or isinstance(value, PlainDict)
    return not is_plain and isinstance(value.get(STATE), Mapping) and are_numbered_groups(value.get(GROUPS))


def are_numbered_groups(value: Any) -> bool:
    """Tell whether a value is a list of parameter groups that have parameters, all of them ints."""
    return (
        are_groups(value)
        and any(group["params"] for group in value)
        and all(type(number) is int for group in value for number in group["params"])
    )


def beside_numbers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other entries of a numbered state dict: without its groups, and without the state of numbered parameters."""
    numbers = {number for group in tree["param_groups"] for number in group["params"]}
    state = {k: v for k, v in tree["state"].items() if type(k) is not int or k not in numbers or not isinstance(v, Mapping)}
    rest = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    return {**rest, "state": state} if state else rest


def is_optimizer_tree(value: Mapping[Any, Any]) -> bool:
    """Tell whether a dict looks like an optimizer's state dict keyed by FQN."""
    state, groups = value.get("state"), value.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(key, str) and isinstance(entry, Mapping) for key, entry in state.items())
        and are_named_groups(groups)
    )


def are_named_groups(value: Any) -> bool:
    """Tell whether a value is a list of parameter groups whose ``"params"`` are strings."""
    return are_groups(value) and all(isinstance(name, str) for group in value for name in group["params"])


def is_flattened(value: Any) -> bool:
    """Tell whether a value is the flattened state dict of an optimizer: each key is a path with dots.

    A model whose modules are called ``state`` and ``param_groups`` has such keys too. It is recognized by tensors with dims among
    the hyperparameters, or by state of a parameter that has no hyperparameters.

    >>> is_flattened({"state.w.step": 1, "param_groups.w.lr": 0.1}), is_flattened({"state": {}, "param_groups": []})
    (True, False)
    """
    prefixes = (f"{STATE}.", f"{GROUPS}.")
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key.startswith(prefixes) for key in value):
        return False
    groups = _groups(value)
    hyperparameters = [each for group in groups.values() for each in group.values()]
    return (
        bool(groups)
        and "" not in groups
        and not any(getattr(each, "ndim", 0) for each in hyperparameters)
        and all(fqn in groups for fqn, _, _ in _states(value, groups))
    )


class GroupOfEach(list[dict[str, Any]]):
    """A list of parameter groups with one group for each parameter, as a flattened state dict gives them."""


def grouped(parameters: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Group the parameters that have the same hyperparameters.

    >>> grouped([("a", {"lr": 1}), ("b", {"lr": 2}), ("c", {"lr": 1})])
    [{'lr': 1, 'params': ['a', 'c']}, {'lr': 2, 'params': ['b']}]
    """
    found: dict[Any, dict[str, Any]] = {}
    for fqn, group in parameters:
        own = hyperparameters(group)
        found.setdefault(comparable(own), {**own, "params": []})["params"].append(fqn)
    return list(found.values())


class OptimizerGroups(NamedTuple):
    """The parameter groups of an optimizer in a file of another library, with parameters by name where the file has names.

    `named` maps the number of a parameter, as text, to its name, if the file has both. `by_number` tells whether the file numbers
    any parameter.
    """

    groups: list[dict[str, Any]]
    named: Mapping[str, str]
    by_number: bool = False


def groups_from_list(found: Sequence[Mapping[str, Any]]) -> OptimizerGroups | None:
    """Convert parameter groups that list numbers or FQNs to groups by FQN; return None if a parameter is neither.

    A number without a name in ``param_names`` becomes the same number as text.
    """
    groups, named = [], {}
    for group in found:
        params, names = group.get("params"), param_names(group)
        if not isinstance(params, list) or not all(type(p) in (int, str) for p in params):
            return None
        if names is not None:
            named.update({str(p): unwrapped(name) for p, name in zip(params, names, strict=True) if isinstance(p, int)})
        groups.append(named_group(group, (named.get(str(p), str(p)) for p in params)))
    by_number = any(isinstance(param, int) for group in found for param in group["params"])
    return OptimizerGroups(groups, named, by_number)


def param_names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the ``param_names`` of a group, which torch adds to optimizers made from ``named_parameters()``; else None."""
    params, names = group.get("params"), group.get("param_names")
    if not isinstance(params, list | tuple) or not isinstance(names, list | tuple) or len(names) != len(params):
        return None
    return list(names) if all(isinstance(name, str) for name in names) else None


def names_by_number(groups: Sequence[Mapping[str, Any]]) -> dict[int, str] | None:
    """Map the number of each parameter to its name in ``param_names``. Return None if a group has no names, or names repeat."""
    names: dict[int, str] = {}
    for group in groups:
        own = param_names(group)
        if own is None:
            return None
        names.update(zip(group["params"], own, strict=True))
    return names if len(set(names.values())) == len(names) == sum(len(group["params"]) for group in groups) else None


def saved_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict by FQN in the form to save.

    Parameters of a `GroupOfEach` with equal hyperparameters are put into one group; other groups stay.
    """
    if not isinstance(groups, GroupOfEach):
        return groups
    return grouped((fqn, group) for group in groups for fqn in group["params"])


class Flattened:
    """Wraps a flattened state dict as an object with ``state_dict()`` by FQN; loading into it updates the flattened dict."""

    def __init__(self, flat: MutableMapping[str, Any]) -> None:
        self._flat = flat

    def state_dict(self) -> dict[str, Any]:
        return nested(self._flat)

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self._flat.update(flattened(self._flat, tree))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a flattened optimizer state dict to one by FQN, in which each parameter has a group of its own."""
    groups = _groups(flat)
    state: dict[str, dict[str, Any]] = {}
    for fqn, key, name in _states(flat, groups):
        state.setdefault(fqn, {})[key] = flat[name]
    return {STATE: state, GROUPS: GroupOfEach({**group, "params": [fqn]} for fqn, group in groups.items())}


def flat_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield every hyperparameter of every parameter: its key in a flattened state dict, and its value."""
    for group in groups:
        for fqn in group["params"]:
            yield from ((f"{GROUPS}.{fqn}.{key}", value) for key, value in group.items() if key != "params")


def flat_hyperparameter(name: str) -> tuple[str, str] | None:
    """Divide the key of a hyperparameter in a flattened state dict into FQN and hyperparameter; None for any other key.

    >>> flat_hyperparameter("param_groups.layer.weight.lr"), flat_hyperparameter("state.layer.weight.step")
    (('layer.weight', 'lr'), None)
    """
    fqn, _, key = name.removeprefix(f"{GROUPS}.").rpartition(".")
    return (fqn, key) if name.startswith(f"{GROUPS}.") else None


def flattened(flat: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a loaded state dict by FQN to a flattened one that has exactly the keys of `flat`."""
    groups = _groups(flat)
    home = {fqn: group for group in tree[GROUPS] for fqn in group["params"]}
    out = {f"{GROUPS}.{fqn}.{key}": home[fqn][key] for fqn, group in groups.items() for key in group}
    return out | {name: tree[STATE][fqn][key] for fqn, key, name in _states(flat, groups)}


def _groups(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each parameter in a flattened state dict, as ``{fqn: {name: value}}``."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if (found := flat_hyperparameter(name)) is not None:
            groups.setdefault(found[0], {})[found[1]] = value
    return groups


def _states(flat: Mapping[str, Any], groups: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Divide each key of state in a flattened state dict; yield FQN, the key of the state, and the whole key.

    FQNs and keys of state may both have dots. A key is divided behind the longest FQN that has a group.
    """
    for name in flat:
        if not name.startswith(f"{STATE}."):
            continue
        rest = name[len(STATE) + 1 :]
        dots = [i for i, char in enumerate(rest) if char == "."]
        at = next((i for i in reversed(dots) if rest[:i] in groups), dots[-1] if dots else len(rest))
        yield rest[:at], rest[at + 1 :], name
