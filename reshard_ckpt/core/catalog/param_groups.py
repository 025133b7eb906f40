"""The groups of optimizers: which hyperparameters each parameter has, whatever the order of groups and whichever rank holds them.

A group is ``{hyperparameter: value, ..., "params": [FQN, ...]}``. Groups have no names, and pipeline stages hold different
parts of one, so the FQN is what matches:

1. *Saving*: the k-th group of a rank with certain hyperparameters is the same group as the k-th one of another rank with equal
   ones; their parameters are united. A parameter with different hyperparameters on two ranks is an error.
2. *Loading*: a target group takes the hyperparameters of the saved groups that hold its parameters; if those differ, there is no
   right answer, and that is a problem to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import LayoutError

Group = Mapping[str, Any]

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes, not what: they suit the job that runs, so a target keeps its own and differences do not matter."""

NOT_SAVED = frozenset({"params", "param_names"})
"""Keys of a torch group that name its parameters; FQNs take their place."""


def are_groups(value: Any) -> bool:
    """Whether something is a list of groups, whose parameters may be names or numbers."""
    return isinstance(value, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in value
    )


NO_GROUP = "no saved group holds parameter "
"""How the line of a parameter begins of which the checkpoint knows no hyperparameters."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The hyperparameters for one target group, and what stands in the way.

    There are none for a group without parameters, nor where saved groups disagree.
    """

    hyperparameters: dict[str, Any]
    problems: tuple[str, ...] = ()


def merge(groups_of: Sequence[tuple[str, Sequence[Group]]], *, name: str) -> list[dict[str, Any]]:
    """The groups of the whole job.

    Parameters
    ----------
    groups_of
        Who (for messages, such as ``"rank 3"``) holds which groups. Ranks with the same groups need be given only once.
    name
        What the groups are called in messages.

    Returns
    -------
    The groups in the order in which they are first seen, each FQN once.

    Raises
    ------
    LayoutError
        One parameter has different hyperparameters in two places.

    Examples
    --------
    >>> merge([("rank 0", [{"lr": 1, "params": ["a"]}]), ("rank 1", [{"lr": 1, "params": ["b"]}])], name="optimizer.param_groups")
    [{'lr': 1, 'params': ['a', 'b']}]
    """
    merged: list[dict[str, Any]] = []
    by_key: dict[tuple[Any, int], int] = {}
    home: dict[str, tuple[int, str]] = {}
    for who, groups in groups_of:
        seen: dict[Any, int] = {}
        for group in groups:
            key = comparable(hyperparameters(group))
            occurrence = seen[key] = seen.get(key, -1) + 1
            at = by_key.setdefault((key, occurrence), len(merged))
            if at == len(merged):
                merged.append({**hyperparameters(group), "params": []})
            for fqn in group["params"]:
                known, first = home.setdefault(fqn, (at, who))
                if known != at:
                    _check_same(merged[known], group, f"{name}: parameter {fqn}", first, who)
    for fqn, (at, _) in home.items():
        merged[at]["params"].append(fqn)
    return [group for group in merged if group["params"]]


def _check_same(merged: Group, group: Group, what: str, first: str, second: str) -> None:
    for key, one, other in differences(merged, group):
        raise LayoutError(
            f"{what} has {key} {_short(one)} on {first} and {_short(other)} on {second}; give it the same hyperparameters "
            "wherever it is held"
        )


class Groups:
    """Saved groups, indexed by FQN, for many target groups of many parameters.

    Parameters
    ----------
    saved
        The groups of the checkpoint.

    Examples
    --------
    >>> groups = Groups([{"lr": 1, "params": ["a", "b"]}, {"lr": 2, "params": ["c"]}])
    >>> groups.select(["b", "a"], name="group 0").hyperparameters
    {'lr': 1}
    >>> print(*groups.select(["b", "c"], name="group 0").problems)
    group 0: draws from saved groups 0 (b) and 1 (c), whose lr differs: 1 and 2; split the target group, or save them equal
    """

    def __init__(self, saved: Sequence[Group]) -> None:
        self._saved = saved
        self._home = {fqn: i for i, group in enumerate(saved) for fqn in group["params"]}

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._home

    def select(self, fqns: Iterable[str], *, name: str, target: Group | None = None) -> Selection:
        """The hyperparameters for a target group that holds `fqns`, and that messages call `name`.

        With the target group itself, also whether it is one of the same kind of optimizer.
        """
        sources: dict[int, str] = {}
        unknown: list[str] = []
        for fqn in fqns:
            at = self._home.get(fqn)
            if at is None:
                unknown.append(fqn)
            else:
                sources.setdefault(at, fqn)
        problems = [
            f"{name}: {NO_GROUP}{fqn}; load with strict=False to keep the group's own hyperparameters for it" for fqn in unknown
        ]
        if not sources:
            return Selection({}, tuple(problems))
        (first, first_fqn), *others = sources.items()
        conflicts = [
            f"{name}: draws from saved groups {first} ({first_fqn}) and {at} ({fqn}), whose {key} differs: {_short(one)} and "
            f"{_short(other)}; split the target group, or save them equal"
            for at, fqn in others
            for key, one, other in differences(self._saved[first], self._saved[at])
            if key not in SWITCHES
        ]
        if target is not None:
            conflicts += _other_kind(self._saved[first], target, name)
        return Selection({} if conflicts else hyperparameters(self._saved[first]), (*problems, *conflicts))


def _other_kind(saved: Group, target: Group, name: str) -> list[str]:
    """A line if each has hyperparameters that the other lacks; one alone may have more: releases and schedulers add some."""
    lacking = [key for key in hyperparameters(saved) if key not in target and key not in SWITCHES]
    extra = [key for key in hyperparameters(target) if key not in saved and key not in SWITCHES]
    if not lacking or not extra:
        return []
    return [
        f"{name}: saved by another kind of optimizer, with {', '.join(lacking)}, where this one has {', '.join(extra)}; make the "
        "optimizer of the kind that was saved, or leave it out of the state"
    ]


def differences(one: Group, other: Group) -> list[tuple[str, Any, Any]]:
    """The hyperparameters that differ, with both values; one that is not there counts as ``MISSING``."""
    one, other = hyperparameters(one), hyperparameters(other)
    keys = [*one, *(key for key in other if key not in one)]
    pairs = ((key, one.get(key, MISSING), other.get(key, MISSING)) for key in keys)
    return [(key, a, b) for key, a, b in pairs if comparable(a) != comparable(b)]


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def comparable(value: Any) -> Any:
    """A hashable stand-in, equal for equal values: of containers, arrays and tensors (which are told by their ``tolist``) too.

    A NaN equals itself, and ``1`` equals ``1.0`` but not ``True``.

    >>> comparable({"lr": 0.1, "betas": [0.9, 0.99]}) == comparable({"betas": [0.9, 0.99], "lr": 0.1})
    True
    """
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and value != value:
        return ("nan",)
    if isinstance(value, Mapping):
        return ("map", frozenset((comparable(k), comparable(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(comparable(v) for v in value))
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return ("array", str(value.dtype), tuple(value.shape), comparable(value.tolist()))
    try:
        hash(value)
    except TypeError:
        return (type(value).__name__, repr(value))
    return value


def hyperparameters(group: Group) -> dict[str, Any]:
    """All of a group but what names its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_SAVED}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
