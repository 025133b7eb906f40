"""Save and load checkpoints: the public functions, each a straight line through the rooms."""

from __future__ import annotations

from ..adapters.shards import PerRank
from ..core.report import LoadReport
from ..core.timeline import Timeline
from ..engine.async_save import SaveHandle
from ..engine.verify import VerifyReport
from .comparing import Diff, diff
from .converting import ConvertReport, convert
from .inspecting import Inspection, inspect
from .loading import load
from .managing import LoadedStep, Manager
from .plotting import plot
from .reading import catalog, read, timeline, verify, write_manifest
from .resharding import ReshardReport, reshard
from .saving import async_save, prepare, save

__all__ = [
    "ConvertReport",
    "Diff",
    "Inspection",
    "LoadReport",
    "LoadedStep",
    "Manager",
    "PerRank",
    "ReshardReport",
    "SaveHandle",
    "Timeline",
    "VerifyReport",
    "async_save",
    "catalog",
    "convert",
    "diff",
    "inspect",
    "load",
    "plot",
    "prepare",
    "read",
    "reshard",
    "save",
    "timeline",
    "verify",
    "write_manifest",
]
