"""Which tensors belong together? An optimizer's state and its parameters; vectors that were flattened as one; experts.

State of an optimizer is named ``<optimizer>.state.<FQN>.<key>``, its parameter ``<module>.<FQN>``, and the value
``<optimizer>.param_groups`` lists the FQNs in the optimizer's own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STATE = ".state."


@dataclass(frozen=True, slots=True)
class Family:
    """Where a tensor belongs: an optimizer's state (`optimizer`, `fqn`, `key`), or, with `optimizer` "", anything else."""

    optimizer: str
    fqn: str
    key: str
    parameter: str | None
    """The name of the parameter; for what is no state, the tensor itself."""


def families_of(names: Sequence[str], optimizers: Iterable[str]) -> dict[str, Family]:
    """The family of each tensor.

    Parameters
    ----------
    optimizers
        Names that have param_groups: what is below their ``.state.`` is theirs, also without a parameter.

    Examples
    --------
    >>> families_of(["model.w", "opt.state.w.exp_avg"], [])["opt.state.w.exp_avg"]
    Family(optimizer='opt', fqn='w', key='exp_avg', parameter='model.w')
    """
    split = {name: parts for name in names if (parts := _split(name)) is not None}
    wanted = {fqn for _, fqn, _ in split.values()}
    parameters: dict[str, str] = {}
    # The one closest to the root: `norm.weight` is `model.norm.weight`, not that of a layer.
    for name in sorted(names, key=lambda n: n.count(".")):
        if name not in split:
            for suffix in _suffixes(name):
                if suffix in wanted:
                    parameters.setdefault(suffix, name)
    known = set(optimizers)
    out = {}
    for name in names:
        optimizer, fqn, key = split.get(name, ("", name, ""))
        parameter = parameters.get(fqn) if optimizer else name
        if optimizer and parameter is None and optimizer not in known:
            optimizer, fqn, key, parameter = "", name, "", name
        out[name] = Family(optimizer, fqn, key, parameter)
    return out


def _split(name: str) -> tuple[str, str, str] | None:
    optimizer, found, rest = name.partition(STATE)
    fqn, dot, key = rest.rpartition(".")
    return (optimizer, fqn, key) if found and dot else None


def _suffixes(name: str) -> Iterable[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def expert_of(name: str) -> tuple[str, int] | None:
    """The group of experts and the expert that a tensor is of.

    >>> expert_of("model.layers.1.experts.5.w1"), expert_of("model.layers.1.w")
    (('model.layers.1.experts', 5), None)
    """
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if parts[i].endswith("experts") and parts[i + 1].isdecimal():
            return ".".join(parts[: i + 1]), int(parts[i + 1])
    return None


def experts_of(names: Sequence[str], num: int) -> dict[str, int]:
    """The coordinate among `num` that holds each expert's tensors: experts are divided evenly, in order."""
    groups: dict[str, set[int]] = {}
    for name in names:
        if (found := expert_of(name)) is not None:
            groups.setdefault(found[0], set()).add(found[1])
    order = {group: {expert: i for i, expert in enumerate(sorted(experts))} for group, experts in groups.items()}
    out = {}
    for name in names:
        if (found := expert_of(name)) is not None:
            of_group = order[found[0]]
            out[name] = of_group[found[1]] * num // len(of_group)
    return out


def spread(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """Whole things over `num` places: the largest first, each to the place that has least."""
    loads = [0] * num
    out = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        place = min(range(num), key=lambda i: (loads[i], i))
        loads[place] += sizes[name]
        out[name] = place
    return out
