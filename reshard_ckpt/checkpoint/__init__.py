"""Save and load checkpoints: the public functions. Each one calls the functions of other packages that do its steps, in order."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .inspecting import Inspection, catalog, inspect
    from .intervals import GoodputReport, goodput
    from .live import LiveReshard, reshard_live
    from .loading import load
    from .plotting import plot
    from .reading import read, timeline, verify, write_manifest
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

_MODULES = {
    "..core.report": "LoadReport SaveReport",
    "..core.timeline": "Timeline",
    "..engine.checking.verify": "VerifyReport",
    "..engine.resharding.compact": "CompactReport",
    "..engine.saving.handle": "SaveHandle",
    "..manager.manager": "Manager",
    "..manager.recovering": "recover",
    "..manager.restoring": "LoadedStep",
    "..manager.sizes": "Sizes sizes",
    "..memory.options": "Memory",
    "..state.shards": "PerRank Value",
    "..state.touched_rows": "TouchedRows",
    ".compacting": "compact",
    ".comparing": "Diff diff",
    ".converting": "ConvertReport convert",
    ".inspecting": "Inspection catalog inspect",
    ".intervals": "GoodputReport goodput",
    ".live": "LiveReshard reshard_live",
    ".loading": "load",
    ".plotting": "plot",
    ".reading": "read timeline verify write_manifest",
    ".recovering": "RecoveryReport",
    ".resharding": "ReshardReport reshard",
    ".saving": "async_save prepare save",
}
"""The public names of each module. A module is imported when one of its names is first used: importing all takes 0.6 s.

If torch is already imported, the modules for saving are imported at once: see the end of this file."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    # A program that has torch most likely trains. Its first save, for which training waits, need not import these modules then.
    importlib.import_module(".saving", __name__)
