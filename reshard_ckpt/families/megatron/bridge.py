"""Megatron-Bridge: its checkpointing modules use this library's calls of ``dist_checkpointing`` after `install`.

Each of these modules has Megatron's module under one name, to which `install` binds ``reshard_ckpt.megatron``. All else stays
Megatron-Bridge's own: folders, trackers, ``run_config.yaml``, the queue of asynchronous saves.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...plugins.errors import UsageError

_MODULES = (
    "megatron.bridge.training.checkpointing",
    "megatron.bridge.training.post_training.checkpointing",
    "megatron.bridge.training.mlm_compat.arguments",
)
_NAME = "dist_checkpointing"
_STOCK: dict[str, Any] = {}
"""The module that each of `_MODULES` had, while this library's is installed."""


def install() -> None:
    """Let Megatron-Bridge save and load through this library, on any tensor, pipeline, data and expert parallelism.

    Raises
    ------
    UsageError
        Megatron-Bridge is not installed, or is a release without these modules.
    """
    if _STOCK:
        return
    try:
        found = {name: getattr(importlib.import_module(name), _NAME) for name in _MODULES}
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Megatron-Bridge cannot be used here ({error}); pip install 'megatron-bridge>=0.3'") from error
    _STOCK.update(found)
    for name in _MODULES:
        setattr(importlib.import_module(name), _NAME, importlib.import_module("reshard_ckpt.megatron"))


def uninstall() -> None:
    """Give Megatron-Bridge Megatron's own module again."""
    for name, module in _STOCK.items():
        setattr(importlib.import_module(name), _NAME, module)
    _STOCK.clear()
