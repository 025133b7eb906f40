"""The parameter groups of optimizers: the hyperparameters of each parameter, independent of the order of groups and of ranks.

A group is ``{hyperparameter: value, ..., "params": [FQN, ...]}``. Groups have no names, and pipeline stages hold different
parameters of one group, so groups are matched by the FQNs of their parameters:

1. *Saving*: among the groups of one rank with equal hyperparameters, number k is the same group as number k with the same
   hyperparameters on another rank; their parameters are united. A parameter with different hyperparameters on two ranks is an
   error.
2. *Loading*: a group of the loading optimizer takes the hyperparameters of the saved groups that hold its parameters. If those
   differ, no answer is right, and a problem is reported. A group without parameters takes those of the saved group at its index
   if the optimizer has as many groups as were saved, and each group with parameters draws from the one at its own index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import LayoutError
from .names import optimizer_of, state_name
from .problems import Problem

Group = Mapping[str, Any]

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that choose an implementation and do not change results. A load leaves them as they are in the running job."""

NOT_SAVED = frozenset({"params", "param_names"})
"""Keys of a torch parameter group that name its parameters. They are not saved as hyperparameters; FQNs are saved instead."""


def are_groups(value: Any) -> bool:
    """Tell whether a value is a list of parameter groups; their parameters may be names or numbers."""
    return isinstance(value, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in value
    )


class Selection(NamedTuple):
    """The saved hyperparameters for one group of the loading optimizer, and messages about problems.

    The dict is empty if the saved groups with the group's parameters disagree or are of another kind of optimizer, or if no saved
    group stands for the group.
    """

    hyperparameters: dict[str, Any]
    problems: tuple[Problem, ...] = ()


def merge(groups_of: Sequence[tuple[str, Sequence[Group]]], *, name: str) -> list[dict[str, Any]]:
    """Merge the parameter groups of all ranks into the groups of the whole job.

    Parameters
    ----------
    groups_of
        Pairs of a text for messages that says where groups come from, such as ``"rank 3"``, and the groups. List ranks with the
        same groups only once, if you like.
    name
        The name of the groups in messages.

    Returns
    -------
    The groups in the order in which they first occur, each FQN once. A group without parameters on all ranks is one of them.

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
    # by_key: the merged group for each pair of hyperparameters and occurrence on one rank; home: each FQN's group and first
    # holder.
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
                for key, value, other in differences(merged[known], group) if known != at else ():
                    raise LayoutError(
                        f"{name}: parameter {fqn} has {key} {_short(value)} on {first} and {_short(other)} on {who}; give it the "
                        "same hyperparameters wherever it is held"
                    )
    for fqn, (at, _) in home.items():
        merged[at]["params"].append(fqn)
    return merged


class Groups:
    """The parameter groups of a checkpoint, indexed by FQN, to find hyperparameters for groups of the loading optimizer.

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

    def select_all(self, members: Sequence[Sequence[str]], *, name: str, targets: Sequence[Group]) -> list[Selection]:
        """Select for all groups of the loading optimizer, also for those without parameters; `members` are the FQNs of each."""
        is_in_order = len(members) == len(self._saved)
        for i, fqns in enumerate(() if all(members) else members):  # asked only if a group has no parameters
            for fqn in fqns:
                is_in_order = is_in_order and self._home.get(fqn, i) == i
        found = []
        for i, (fqns, target) in enumerate(zip(members, targets, strict=True)):
            at = i if is_in_order and not fqns else None
            found.append(self.select(fqns, name=f"{name}[{i}]", target=target, at=at))
        return found

    def select(self, fqns: Iterable[str], *, name: str, target: Group | None = None, at: int | None = None) -> Selection:
        """Find the hyperparameters for a group of the loading optimizer with the parameters `fqns`; messages call it `name`.

        With `target`, the group itself, also check that both groups are of the same kind of optimizer, and leave out those
        `SWITCHES` that `target` has. For a group without parameters, `at` may be the index of its saved group.
        """
        # sources: each saved group that holds a wanted parameter, with the first such parameter.
        sources: dict[int, str] = {} if at is None else {at: ""}
        unknown: list[str] = []
        for fqn in fqns:
            home = self._home.get(fqn)
            if home is None:
                unknown.append(fqn)
            else:
                sources.setdefault(home, fqn)
        what = "no saved group holds parameter {}; allow_missing= of its state keeps the group's own for it"
        problems = [Problem(name, what.format(fqn), "allow_missing", state_name(_optimizer_of(name), fqn)) for fqn in unknown]
        if not sources:
            return Selection({}, tuple(problems))
        # The first saved group gives the hyperparameters; all others must agree with it.
        (first, first_fqn), *others = sources.items()
        conflicts = [
            Problem(
                name,
                f"draws from saved groups {first} ({first_fqn}) and {other_at} ({fqn}), whose {key} differs: {_short(value)} and "
                f"{_short(other)}; split the target group, or save them equal",
            )
            for other_at, fqn in others
            for key, value, other in differences(self._saved[first], self._saved[other_at])
            if key not in SWITCHES
        ]
        if target is not None:
            conflicts += _other_kind(self._saved[first], target, name)
        chosen = {} if conflicts else hyperparameters(self._saved[first])
        kept = {key: value for key, value in chosen.items() if not (target and key in target and key in SWITCHES)}
        return Selection(kept, (*problems, *conflicts))


def groups_beyond(groups: Sequence[Group], older: Sequence[Group]) -> list[Group]:
    """Return the groups of `older` that have parameters, and share none with any group of `groups`.

    >>> groups_beyond([{"lr": 1, "params": ["a"]}], [{"params": ["a", "b"]}, {"lr": 3, "params": ["c"]}, {"params": []}])
    [{'lr': 3, 'params': ['c']}]
    """
    known = {fqn for group in groups for fqn in group["params"]}
    return [group for group in older if group["params"] and known.isdisjoint(group["params"])]


def _other_kind(saved: Group, target: Group, name: str) -> list[Problem]:
    """Return a message if a group was saved by another kind of optimizer: each side has hyperparameters that the other lacks.

    If only one side has more, the kind may be the same, because releases of torch and schedulers add hyperparameters.
    """
    lacking = [key for key in hyperparameters(saved) if key not in target and key not in SWITCHES]
    extra = [key for key in hyperparameters(target) if key not in saved and key not in SWITCHES]
    if not lacking or not extra:
        return []
    what = (
        f"saved by another kind of optimizer, with {', '.join(lacking)}, where this one has {', '.join(extra)}; load "
        "into an optimizer of the kind that was saved, or leave this one out of the state"
    )
    return [Problem(name, what, lacks=state_name(_optimizer_of(name)))]


def _optimizer_of(group: str) -> str:
    """Return the optimizer that has a group of this name, such as ``optimizer.param_groups[0]``."""
    return optimizer_of(group.rpartition("[")[0]) or ""


def differences(first: Group, second: Group) -> list[tuple[str, Any, Any]]:
    """List the hyperparameters in which two groups differ, with both values; a group that lacks one has `MISSING`."""
    first, second = hyperparameters(first), hyperparameters(second)
    keys = [*first, *(key for key in second if key not in first)]
    pairs = ((key, first.get(key, MISSING), second.get(key, MISSING)) for key in keys)
    return [(key, a, b) for key, a, b in pairs if comparable(a) != comparable(b)]


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def comparable(value: Any) -> Any:
    """Return a hashable form of a value such that equal values have equal forms; also of containers, arrays and tensors.

    A NaN equals itself, and ``1`` equals ``1.0`` but not ``True``.

    >>> comparable({"lr": 0.1, "betas": [0.9, 0.99]}) == comparable({"betas": [0.9, 0.99], "lr": 0.1})
    True
    """
    if isinstance(value, bool):
        # A bool comes before numbers, because True == 1 for Python.
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


def named_group(group: Group, fqns: Iterable[str]) -> dict[str, Any]:
    """Return a group with these FQNs as its parameters.

    >>> named_group({"lr": 0.1, "params": [0, 1]}, ["a", "b"])
    {'lr': 0.1, 'params': ['a', 'b']}
    """
    return {**hyperparameters(group), "params": list(fqns)}


def hyperparameters(group: Group) -> dict[str, Any]:
    """Return a parameter group without the keys that list its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_SAVED}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
