"""Save and load checkpoints: the public functions; each calls the steps of the rooms below in order."""

from __future__ import annotations

from ..core.report import LoadReport, SaveReport
from ..core.timeline import Timeline
from ..engine.checking.verify import VerifyReport
from ..engine.resharding.compact import CompactReport
from ..engine.saving.handle import SaveHandle
from ..manager.manager import Manager
from ..manager.recovering import recover
from ..manager.restoring import LoadedStep
from ..manager.sizes import Sizes, sizes
from ..memory.options import Memory
from ..state.shards import PerRank, Value
from ..state.touched_rows import TouchedRows
from .compacting import compact
from .comparing import Diff, diff
from .converting import ConvertReport, convert
from .inspecting import Inspection, inspect
from .intervals import GoodputReport, goodput
from .live import LiveReshard, reshard_live
from .loading import load
from .plotting import plot
from .reading import catalog, read, timeline, verify, write_manifest
from .recovering import RecoveryReport
from .resharding import ReshardReport, reshard
from .saving import async_save, prepare, save

__all__ = [
    "CompactReport",
    "ConvertReport",
    "Diff",
    "GoodputReport",
    "Inspection",
    "LiveReshard",
    "LoadReport",
    "LoadedStep",
    "Manager",
    "Memory",
    "PerRank",
    "RecoveryReport",
    "ReshardReport",
    "SaveHandle",
    "SaveReport",
    "Sizes",
    "Timeline",
    "TouchedRows",
    "Value",
    "VerifyReport",
    "async_save",
    "catalog",
    "compact",
    "convert",
    "diff",
    "goodput",
    "inspect",
    "load",
    "plot",
    "prepare",
    "read",
    "recover",
    "reshard",
    "reshard_live",
    "save",
    "sizes",
    "timeline",
    "verify",
    "write_manifest",
]
