"""Optimizers of a checkpoint in the form of ``optimizer.state_dict()``, which numbers the parameters of all groups in a row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.catalog.model import Catalog
from ..core.catalog.names import STATE, optimizer_of
from ..core.catalog.specs import StateLink, ValueKind
from ..state.optimizer_dicts import are_numbered_groups, flat_groups


@dataclass(frozen=True, slots=True)
class NumberedOptimizer:
    """The number of each parameter of an optimizer, and the second names of tied parameters, which have no number.

    `was_numbered` tells that the optimizer was saved by number, without names: its FQNs are the numbers as text.
    """

    name: str
    numbers: Mapping[str, int]
    tied: frozenset[str] = frozenset()
    was_numbered: bool = False

    @property
    def above(self) -> tuple[str, ...]:
        """The keys that lead to the optimizer in the state."""
        return tuple(self.name.split(".")) if self.name else ()

    def path(self, link: StateLink, *, by_name: bool = False) -> tuple[Any, ...] | None:
        """Return the keys that lead to an entry of optimizer state, with the parameter's number, or with its name.

        The second name of a tied parameter has no number, so None is returned for its entries.
        """
        fqn = link.fqn
        if fqn in self.tied and not by_name:
            return None
        return (*self.above, STATE, fqn if by_name else self.numbers.get(fqn, fqn), *link.key.split("."))

    def named(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return groups by FQN, with each tied parameter listed once.

        They have ``param_names``, which torch wants to load into an optimizer made of ``named_parameters()``.
        """
        names = [[fqn for fqn in group["params"] if fqn not in self.tied] for group in groups]
        return [{**group, "params": own, "param_names": [*own]} for group, own in zip(groups, names, strict=True)]

    def flat(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield every hyperparameter of every parameter and second name: its key in a flattened state dict, and its value."""
        return flat_groups({**own, "params": group["params"]} for own, group in zip(self.named(groups), groups, strict=True))

    def numbered(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return groups by FQN as ``optimizer.state_dict()`` has them: parameters by number, and ``param_names``."""
        return [{**group, "params": [self.numbers[fqn] for fqn in group["params"]]} for group in self.named(groups)]


def numbered_optimizers(catalog: Catalog, values: Mapping[str, Any]) -> dict[str, NumberedOptimizer]:
    """Map the name of each optimizer of a checkpoint to its numbered parameters. A tied parameter counts once, as in torch.

    Parameters
    ----------
    values
        All values of the catalog, by name.
    """
    found: dict[str, NumberedOptimizer] = {}
    for entry in catalog.values_table:
        optimizer, groups = optimizer_of(entry.name), values[entry.name]
        if entry.kind is ValueKind.PARAM_GROUPS:
            fqns = [fqn for group in groups for fqn in group["params"]]
            tied = _second_names(catalog, optimizer or "", fqns)
            numbers = {fqn: number for number, fqn in enumerate(fqn for fqn in fqns if fqn not in tied)}
            found[optimizer or ""] = NumberedOptimizer(optimizer or "", numbers, tied)
        elif optimizer is not None and are_numbered_groups(groups):
            numbers = {str(number): number for group in groups for number in group["params"]}
            found[optimizer] = NumberedOptimizer(optimizer, numbers, was_numbered=True)
    return found


def _second_names(catalog: Catalog, optimizer: str, fqns: Collection[str]) -> frozenset[str]:
    """Return the FQNs that name the same parameter as an FQN before them.

    Parameters are the same if they share their bytes below one key of the state, or, if the checkpoint lacks them, if all of
    their optimizer state is shared.
    """
    params: dict[str, set[Any]] = {fqn: set() for fqn in fqns}
    states: dict[str, set[Any]] = {fqn: set() for fqn in fqns}
    for name in catalog.names:
        top, _, fqn = name.partition(".")
        if fqn in params:
            params[fqn].add((top, catalog.source(catalog.index(name))))
    for name, link in catalog.links().items():
        if link.optimizer == optimizer and link.fqn in states and name in catalog:
            states[link.fqn].add((link.key, catalog.source(catalog.index(name))))
    seen: set[Any] = set()
    second: set[str] = set()
    for fqn in fqns:
        own = params[fqn] or ({frozenset(states[fqn])} if states[fqn] else set())
        if not seen.isdisjoint(own):
            second.add(fqn)
        seen |= own
    return frozenset(second)
