"""The two methods of verl's ``FSDPCheckpointManager``, for FSDP1 and FSDP2, through this library.

1. `install` replaces the methods of the class, so that all modules and workers that have the class by any name use them.
2. A save writes the model, the optimizer, the scheduler and the random streams as one checkpoint into the folder that verl names.
   After its commit, verl's own method writes the rest (the config, the tokenizer, ``fsdp_config.json``, a Hugging Face model if
   one is asked for), and removes old folders.
3. A load takes such a folder on any number of ranks. A folder of verl's own files goes to verl's own method if it is of as many
   ranks, and is opened here if not.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ...plugins import CATALOG_KEY, checkpoint
from ...plugins.errors import UsageError
from ...plugins.names import unwrapped
from ...plugins.packages import Replaced, needed

_OWNER = "verl.utils.checkpoint.fsdp_checkpoint_manager"


def install() -> None:
    """Let verl's FSDP checkpoint managers of this process, new ones and old ones, save and load through this library.

    Raises
    ------
    UsageError
        verl is not installed, or is a release without this class.
    """
    with needed("verl", "verl>=0.9"):
        _REPLACED.install(_METHODS)


def uninstall() -> None:
    """Undo `install`: verl's class gets its own methods back."""
    _REPLACED.uninstall()


_REPLACED = Replaced(lambda: [importlib.import_module(_OWNER).FSDPCheckpointManager])


def save_checkpoint(
    self: Any, local_path: str | None, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
) -> None:
    """Save in the place of ``FSDPCheckpointManager.save_checkpoint``: one checkpoint, and verl's other files after its commit."""
    if local_path is None:
        return
    contents = self.checkpoint_save_contents
    only_adapters = self.should_save_lora_only and self._has_lora()
    left_out = [name for name in _names(self.model) if not _is_adapter(name)] if only_adapters else []
    checkpoint.save(local_path, _state(self, contents), exclude=left_out)
    self.checkpoint_save_contents = [content for content in contents if content not in ("model", "optimizer", "extra")]
    try:
        _REPLACED.stock["save_checkpoint"](self, local_path, hdfs_path, global_step, max_ckpt_to_keep)
    finally:
        self.checkpoint_save_contents = contents


def load_checkpoint(self: Any, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
    """Load in the place of ``FSDPCheckpointManager.load_checkpoint``, also verl's own folders of other numbers of ranks."""
    if local_path is None:
        return
    is_own = os.path.exists(os.path.join(local_path, CATALOG_KEY))
    of_rank = f"_world_size_{self.world_size}_rank_{self.rank}.pt"
    if not is_own and any(os.path.exists(os.path.join(local_path, stem + of_rank)) for stem in ("model", "optim", "extra_state")):
        _REPLACED.stock["load_checkpoint"](self, local_path, hdfs_path, del_local_after_load)
        return
    state = _state(self, self.checkpoint_load_contents)
    may_miss = []
    if not is_own:  # verl keeps the state of a tied parameter under its first name alone, and the random streams by rank
        first = {name for name, _ in self.model.named_parameters()}
        later = [name for name, _ in self.model.named_parameters(remove_duplicate=False) if name not in first]
        may_miss = [*(f"optimizer.state.{unwrapped(name)}" for name in later), "extra_state.rng"]
    if "model" in state and self._has_lora():
        saved = [name for name in checkpoint.catalog(local_path).names if name.startswith("model.")]
        if self.is_lora_only_state_dict(dict.fromkeys(saved)):
            may_miss += [name for name in _names(self.model) if not _is_adapter(name)]
    checkpoint.load(local_path, state, allow_missing=may_miss, ignore=() if self.lr_scheduler else ["extra_state.lr_scheduler"])
    if "extra_state" in state:
        self.load_rng_state(state["extra_state"]["rng"].value)


_METHODS = {method.__name__: method for method in (save_checkpoint, load_checkpoint)}


def _state(manager: Any, contents: Any) -> dict[str, Any]:
    """Return the state to save or to fill: model, optimizer and the rest, as `contents` asks for them.

    It has the same names that verl's own files get when this library opens them.
    """
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = manager.model
    if "optimizer" in contents:
        state["optimizer"] = manager.optimizer
    if "extra" in contents:
        # On another number of ranks, each keeps the random stream that it has: no two may get the same one.
        rng = checkpoint.PerRank(manager.get_rng_state(), combine=lambda values, rank, size: manager.get_rng_state())
        state["extra_state"] = {"rng": rng}
        if manager.lr_scheduler is not None:
            state["extra_state"]["lr_scheduler"] = manager.lr_scheduler
    absent = [name for name, part in state.items() if part is None]
    if absent:
        raise UsageError(
            f"{absent[0]}: is one of the contents {list(contents)} of the checkpoint, and this manager has none; leave it out"
        )
    return state


def _names(model: Any) -> list[str]:
    return [f"model.{unwrapped(name)}" for name in (*dict(model.named_parameters()), *dict(model.named_buffers()))]


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".adapter_" in name  # as verl tells them
