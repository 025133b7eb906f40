"""The description of a state by a framework's own support: each rank's tensors and values, and messages among ranks."""

from __future__ import annotations

from ..checkpoint.reading import read_values
from ..comm import Comm, open_session, values_of_all
from ..comm.protocol import merge_of_all
from ..engine.saving.handle import saves_to
from ..formats.loaded_state import divided_by_rank
from ..state.capture import Captured, Target
from ..state.layouts import group_of
from ..state.state_builder import StateBuilder, zero_outside

__all__ = [
    "Captured",
    "Comm",
    "StateBuilder",
    "Target",
    "divided_by_rank",
    "group_of",
    "merge_of_all",
    "open_session",
    "read_values",
    "saves_to",
    "values_of_all",
    "zero_outside",
]
