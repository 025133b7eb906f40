"""The groups of an optimizer: ``{hyperparameter: value, …, "params": [FQN, …]}``, as this library keeps them."""

from __future__ import annotations

from ..core.catalog.param_groups import SWITCHES, Groups, comparable, merge, named_group

__all__ = ["SWITCHES", "Groups", "comparable", "merge", "named_group"]
