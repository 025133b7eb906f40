"""The checkpoints that `recover` may load if survivors do not have everything, and the step at which a state or checkpoint is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..comm import open_session, value_of_first
from ..core.catalog.model import ValueEntry
from ..core.catalog.specs import ValueKind, ValueSpec
from ..core.report import LoadReport
from ..errors import CheckpointNotFound
from ..format.values import decode_value
from ..formats.source import Path
from ..storage import path_text
from .inspecting import catalog as read_catalog
from .loading import Prepare, load_given

State = Mapping[str, Any]


def steps_in(values: Iterable[ValueSpec | ValueEntry]) -> dict[str, Any]:
    """Map the names of values called ``step`` to these values, except for steps of optimizers and per-rank steps."""
    named = [v for v in values if v.name.rpartition(".")[2] == "step" and v.link is None and v.kind is ValueKind.PLAIN]
    return {v.name: decode_value(v.data, name=v.name) for v in named if v.data is not None}


def step_in(values: Iterable[ValueSpec | ValueEntry]) -> int | None:
    """Return the integer of the values called ``step``; None if none of them is an integer, or if their integers differ."""
    found = {step for step in steps_in(values).values() if isinstance(step, int) and not isinstance(step, bool)}
    return found.pop() if len(found) == 1 else None


class Loaded(NamedTuple):
    """The outcome of a load: the step of the checkpoint (None if unknown), the report, and the tier, as in `LoadedStep.tier`."""

    step: int | None
    report: LoadReport
    tier: str


class Checkpoints(Protocol):
    """The checkpoints that a recovery may load from. All methods but `names` and `go_on_from` are collective."""

    def has(self, step: int) -> bool:
        """Return whether there is a checkpoint of exactly this step."""

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is no checkpoint, or if its step is unknown."""

    def load_part(self, step: int, prepare: Prepare) -> Loaded:
        """Load from the checkpoint of this step only the tensors and values that `prepare` selects from its catalog."""

    def load_newest(self, state: State, reason: str) -> Loaded:
        """Load the newest whole checkpoint; if there is none, raise an error whose message begins with `reason`."""

    def names(self) -> Sequence[str]:
        """List the names of tensors in the newest checkpoint. Each rank does so by itself."""

    def go_on_from(self, step: int) -> None:
        """Record that training continues from this step, even if no checkpoint of it exists."""


@dataclass(frozen=True, slots=True)
class OfPath:
    """A single checkpoint at a path, for a recovery to load from."""

    path: Path
    session: Mapping[str, Any]

    def has(self, step: int) -> bool:
        return self.newest() == step

    def newest(self) -> int | None:
        """Return the step of the checkpoint: its value called ``step``, or else the number at the end of the path."""

        def look() -> int | None:
            found = step_in(read_catalog(self.path).values_table)
            number = re.search(r"\d+$", path_text(self.path).rstrip("/"))
            return int(number[0]) if found is None and number else found

        with open_session("step of", path_text(self.path), **self.session) as comm:
            step: int | None = value_of_first(comm, look)
        return step

    def load_part(self, step: int, prepare: Prepare) -> Loaded:
        return Loaded(step, load_given(self.path, prepare, self.session), "store")

    def load_newest(self, state: State, reason: str) -> Loaded:
        try:
            report = load_given(self.path, state, self.session)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(f"{reason}; {error}") from None
        step = self.newest()
        return Loaded(step, report, "store")

    def names(self) -> Sequence[str]:
        with suppress(CheckpointNotFound):  # nothing was saved yet
            return read_catalog(self.path).names
        return ()

    def go_on_from(self, step: int) -> None:
        pass
