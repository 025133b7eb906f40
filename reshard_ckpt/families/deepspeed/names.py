"""The names of DeepSpeed's tensors and values: parameters below ``model``, state by parameter, all else below ``deepspeed``."""

from __future__ import annotations

from ...plugins.names import StateLink

NAME = "deepspeed"
"""The name of the format."""

ROOT = "deepspeed"
"""The first key of the names of values."""

MODEL, OPTIMIZER = "model", "optimizer"
STATE, GROUPS = "state", "param_groups"
MASTER = "fp32"
"""The key of the master weights; it stands among the keys of the optimizer's state."""


def parameter_name(fqn: str) -> str:
    """Return the name of a parameter or buffer, given its FQN."""
    return f"{MODEL}.{fqn}"


def state_link(fqn: str, key: str) -> StateLink:
    """Return the link of an entry of the optimizer's state to its parameter."""
    return StateLink(OPTIMIZER, fqn, key, parameter_name(fqn))
