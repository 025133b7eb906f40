"""Megatron-Bridge: its checkpointing modules use this library's calls of ``dist_checkpointing`` after `install`.

Each of these modules has Megatron's module under one name, to which `install` binds ``reshard_ckpt.megatron``. All else stays
Megatron-Bridge's own: folders, trackers, ``run_config.yaml``, the queue of asynchronous saves.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...plugins.packages import Replaced, needed

_MODULES = (
    "megatron.bridge.training.checkpointing",
    "megatron.bridge.training.post_training.checkpointing",
    "megatron.bridge.training.mlm_compat.arguments",
)
_NAME = "dist_checkpointing"


def install() -> None:
    """Let Megatron-Bridge save and load through this library, on any tensor, pipeline, data and expert parallelism.

    Raises
    ------
    UsageError
        Megatron-Bridge is not installed, or is a release without these modules.
    """
    with needed("Megatron-Bridge", "megatron-bridge>=0.3"):
        for module in _modules():
            getattr(module, _NAME)
        _REPLACED.install({_NAME: importlib.import_module("reshard_ckpt.megatron")})


def uninstall() -> None:
    """Undo `install`: Megatron-Bridge uses Megatron's own ``dist_checkpointing`` again."""
    _REPLACED.uninstall()


def _modules() -> list[Any]:
    return [importlib.import_module(name) for name in _MODULES]


_REPLACED = Replaced(_modules)
