"""The strategies by name: those of Lightning's ``Trainer`` and of Fabric, each with the checkpoints of this library.

The classes derive from Lightning's, so each is made on first use: this package can be imported without Lightning. The package is
``lightning``, or ``pytorch_lightning`` where that alone is installed or imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any

from ...plugins.packages import Replaced, needed
from .fabric import FabricSaves
from .saving import TrainerSaves, WholeFileLoads, is_ours, read_whole

STRATEGIES: dict[str, tuple[type, str, str]] = {
    "ReshardDDPStrategy": (WholeFileLoads, "pytorch", "DDPStrategy"),
    "ReshardFSDPStrategy": (TrainerSaves, "pytorch", "FSDPStrategy"),
    "ReshardModelParallelStrategy": (TrainerSaves, "pytorch", "ModelParallelStrategy"),
    "ReshardFabricDDPStrategy": (FabricSaves, "fabric", "DDPStrategy"),
    "ReshardFabricFSDPStrategy": (FabricSaves, "fabric", "FSDPStrategy"),
    "ReshardFabricModelParallelStrategy": (FabricSaves, "fabric", "ModelParallelStrategy"),
}
"""For the name of each strategy here: the class that saves and loads; and of Lightning's strategy, the part and the name."""


@cache
def strategy(name: str) -> type:
    """Make the strategy class of this name, a key of `STRATEGIES`, as a subclass of Lightning's.

    Raises
    ------
    UsageError
        Lightning is not installed.
    """
    saves, part, of_lightning = STRATEGIES[name]
    base = getattr(_module(part, "strategies"), of_lightning)
    return type(name, (saves, base), {"__doc__": f"Lightning's `{of_lightning}`. {saves.__doc__}", "__module__": __name__})


def install() -> None:
    """Let ``load_from_checkpoint`` of Lightning's modules read checkpoints of this library too."""
    _REPLACED.install({"pl_load": _pl_load})


def _pl_load(path: Any, *arguments: Any, **options: Any) -> Any:
    """Load a file as Lightning's ``pl_load`` does; a checkpoint of this library is read whole instead."""
    is_path = not hasattr(path, "read") and not str(path).startswith(("http://", "https://"))
    if is_path and is_ours(str(path)):
        return read_whole(str(path))
    return _REPLACED.stock["pl_load"](path, *arguments, **options)


def _module(part: str, name: str) -> Any:
    """Import a module of Lightning's part ``pytorch`` or ``fabric``, which may also be installed as a package of its own."""
    alone = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}[part]
    is_alone = (alone in sys.modules and "lightning" not in sys.modules) or importlib.util.find_spec("lightning") is None
    with needed("lightning", "lightning>=2.6"):
        return importlib.import_module(f"{alone}.{name}" if is_alone else f"lightning.{part}.{name}")


_REPLACED = Replaced(lambda: [_module("pytorch", "core.saving")])
