"""What the caller of a save chose, and one agreed save on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.optim import Optimizer

from ...comm.protocol import Comm
from ...core.catalog.model import ValueEntry
from ...core.planning.save_plan import SavePlan
from ...core.report import SaveReport
from ...errors import UsageError
from ...format.values import decode_value
from ...storage.protocol import Storage
from ..common.progress import OnProgress
from ..common.recorder import Recorder
from .agreement import AgreedPlan
from .local_shards import LocalShards

Hold = str | Optimizer | Sequence[Optimizer]
"""Who holds changes back while a lazy save copies."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What the caller of `save` or `async_save` chose; see there."""

    mesh: Any = None
    process_group: Any = None
    metadata: Any = None
    timeline: bool = True
    sha256: bool = False
    progress: bool | OnProgress = False
    timeout_s: float = 600.0
    staging: str = "eager"
    host_buffer_bytes: int | None = None
    when_busy: str = "wait"
    hold: Hold = "optimizers"
    replicas: str = "verify"
    compare_first: bool = False
    """Replicas are compared before anything is written, and captured again where they differ."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Files by key that rank 0 puts beside the catalog, just before that is published."""
    checked_values: Callable[[tuple[ValueEntry, ...]], tuple[ValueEntry, ...]] = lambda values: values
    """Is shown the values of all ranks on rank 0, where replicas are compared, and returns those to be saved; what it raises, all
    ranks raise."""

    def __post_init__(self) -> None:
        _check_choice("staging", self.staging, ("eager", "lazy"))
        _check_choice("when_busy", self.when_busy, ("wait", "error"))
        _check_choice("replicas", self.replicas, ("verify", "sample"))
        if isinstance(self.hold, str):
            _check_choice("hold", self.hold, ("optimizers", "caller"))
        elif not isinstance(self.hold, Optimizer | list | tuple):
            raise UsageError(f"hold={self.hold!r}: pass 'optimizers', 'caller', an optimizer, or a list of optimizers")
        for optimizer in self.more_held:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(
                    f"hold: {optimizer!r} is no torch optimizer, so its steps cannot be held back; pass hold='caller', and wait "
                    "for staged() before the state changes"
                )
        if self.staging == "eager" and self.hold != "optimizers":
            raise UsageError(f"hold={self.hold!r} is for staging='lazy': an eager save has copied all when async_save returns")

    @property
    def samples_replicas(self) -> bool:
        """Whether large replicas are compared by samples, so that of each the bytes of one rank alone are written."""
        return self.replicas == "sample"

    @property
    def caller_holds(self) -> bool:
        """Whether the caller changes nothing before all is staged, so that nothing need be copied before the call returns."""
        return self.hold == "caller"

    @property
    def more_held(self) -> list[Optimizer]:
        """The optimizers to hold back beside those in the state."""
        if isinstance(self.hold, str):
            return []
        return [self.hold] if isinstance(self.hold, Optimizer) else list(self.hold)


def sample_shift(save_id: str) -> int:
    """Choose where the samples of a save's replicas lie: on all ranks in the same places, and in others in each save."""
    return xxhash.xxh32_intdigest(save_id.encode())


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}: pass one of {', '.join(map(repr, known))}")


@dataclass(frozen=True, slots=True)
class PreviousCheckpoint:
    """What a path held before the first file of a save was made: its catalog's bytes (None: not known), and its folders."""

    catalog: bytes | None
    folders: frozenset[str]


@dataclass(frozen=True, slots=True)
class SaveContents:
    """What rank 0 knows of a save before it sees the files: all that the catalog says beside them.

    Attributes
    ----------
    metadata
        What the user attached.
    created_s
        When it was made, where that is not now, in seconds since 1970.
    """

    plan: SavePlan
    values: Sequence[ValueEntry]
    save_id: str
    metadata: Any = None
    created_s: float | None = None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save on one rank, once all ranks agreed on it.

    Attributes
    ----------
    path
        Where to, as the caller said it.
    metadata
        That of the options, encoded.
    before
        On rank 0: what the path held before any rank could make a file of this save.
    fingerprints
        Those of `agreed`, where they have been taken.
    """

    path: str
    comm: Comm
    storage: Storage
    recorder: Recorder
    options: SaveOptions
    metadata: bytes
    before: PreviousCheckpoint | None
    local_shards: LocalShards
    agreed: AgreedPlan
    fingerprints: NDArray[np.uint64] | None = None

    @property
    def save_id(self) -> str:
        return self.agreed.assignment.save_id

    @property
    def shift(self) -> int | None:
        """The shift of the samples by which replicas are compared, as for `replicas.looked_at`."""
        return sample_shift(self.save_id) if self.options.samples_replicas else None

    @property
    def contents(self) -> SaveContents:
        """What the catalog will say, on rank 0."""
        assert self.agreed.plan is not None
        return SaveContents(self.agreed.plan, self.agreed.values, self.save_id, decode_value(self.metadata, name="metadata"))

    def report(self, num_bytes: int, total_bytes: int | None) -> SaveReport:
        """Report the save, as if it ended now, and its caller had waited for all of it."""
        seconds = self.recorder.now() - self.recorder.began
        return SaveReport(self.path, self.save_id, num_bytes, total_bytes, seconds, seconds)
