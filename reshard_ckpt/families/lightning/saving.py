"""`TrainerSaves`: the part of a strategy of Lightning's ``Trainer`` that saves, loads and removes checkpoints.

A checkpoint has the names ``model.<fqn>``, ``optimizer.…`` (all optimizers together) and ``trainer``: one value with the rest of
the dict that the ``Trainer`` and its callbacks make, as rank 0 has it.

1. The ``Trainer`` asks for the state of the model: it gets the tensors themselves, not copies. Hooks may remove some, which are
   then left out. It asks for the state of each optimizer, and gets an empty dict: optimizers are saved as objects.
2. `save_checkpoint` begins a save in the background, after the one before, and returns once the state may change.
3. `remove_checkpoint`, which ``ModelCheckpoint`` calls after that, waits in the background for the commit. If the save fails, the
   old checkpoint stays.
4. `teardown`, at the end of ``fit``, waits for the last save and raises its error.
5. `load_checkpoint` loads after the model is set up, into model and optimizers as they lie on these ranks.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...plugins import CATALOG_KEY, checkpoint, open_storage
from ...plugins.errors import CheckpointError, CheckpointNotFound, UsageError
from ...plugins.names import unwrapped

OPTIMIZERS = "optimizer_states"
STATE_DICT = "state_dict"

_Strategy: Any = object
"""A base class without types: `TrainerSaves` calls methods of Lightning's strategy, which stands behind it in the bases of each
class that `strategies.strategy` makes."""


class TrainerSaves(_Strategy):  # type: ignore[misc]
    """Saves in the background into this library's format; checkpoints that Lightning wrote load too.

    Parameters
    ----------
    background
        Save in the background while ``fit`` runs. False waits for each commit.
    save_options
        Options of `checkpoint.async_save`.
    arguments, options
        Passed on to the constructor of Lightning's own strategy.
    """

    def __init__(self, *arguments: Any, background: bool = True, save_options: Mapping[str, Any] | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self._background, self._save_options = background, dict(save_options or {})
        self._save: checkpoint.SaveHandle | None = None
        self._given: dict[str, Any] = {}
        self._removals: list[threading.Event] = []
        self._has_failed = False

    loads_whole_files = False
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the tensors of the model by name, without copying or gathering them."""
        if _is_fsdp1(self.model):  # its state_dict() would gather
            self._given = {unwrapped(name): parameter for name, parameter in self.model.named_parameters()}
        else:
            self._given = self.lightning_module.state_dict()
        return dict(self._given)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dict: `save_checkpoint` saves the optimizers themselves."""
        return {}

    def save_checkpoint(self, content: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begin to save model, optimizers and the rest of `content` at a path, on all ranks."""
        if storage_options is not None:
            raise UsageError("storage_options: are for Lightning's CheckpointIO, which is not used here; leave them out")
        path = str(self.broadcast(filepath))
        self._wait_for_removals()
        state: dict[str, Any] = {"model": self.model}
        if OPTIMIZERS in content and self.optimizers:
            state["optimizer"] = _one_or_all(self.optimizers)
        if self.is_global_zero:
            state["trainer"] = checkpoint.Value({key: value for key, value in content.items() if key != STATE_DICT})
        options = {"exclude": self._left_out(content[STATE_DICT]), **self._save_options}
        if self._background and self.lightning_module.trainer.state.status == "running":
            self._save = checkpoint.async_save(path, state, **options)
        else:
            checkpoint.save(path, state, **options)

    def _left_out(self, given: Mapping[str, Any]) -> list[str]:
        """Return the names of the model's tensors that a hook has removed from the state dict, to leave them out."""
        changed = [name for name, value in given.items() if value is not self._given.get(name)]
        if changed:
            raise UsageError(
                f"{changed[0]}: a hook put another tensor into state_dict ({len(changed)} in all), as averages of weights do; "
                "the module itself is saved, so put such tensors under a key of their own in on_save_checkpoint"
            )
        every = self._given if _is_fsdp1(self.model) else nn.Module.state_dict(self.lightning_module)
        return [f"model.{unwrapped(name)}" for name in every if name not in given]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once the save in progress is committed."""
        if not self.is_global_zero:
            return
        over = threading.Event()
        self._removals.append(over)

        def remove(save: checkpoint.SaveHandle | None) -> None:
            try:
                if save is None or not save.failed():
                    _remove(filepath, super(TrainerSaves, self).remove_checkpoint)
            except (CheckpointError, OSError) as error:
                warnings.warn(f"{filepath}: saved, but this older checkpoint is not removed: {error}", stacklevel=2)
            finally:
                over.set()

        if self._save is None:
            remove(None)
        else:
            self._save.add_done_callback(remove)

    def _wait_for_removals(self) -> None:
        while self._removals:
            self._removals.pop().wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers in place, and return the rest of the checkpoint."""
        path = str(self.broadcast(checkpoint_path))
        is_fitting = self.lightning_module.trainer.state.fn == "fit"
        if not is_ours(path):
            content: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            if self.loads_whole_files:
                super().load_model_state_dict(content, strict=self.lightning_module.strict_loading)
                if is_fitting and OPTIMIZERS in content:
                    super().load_optimizer_state_dict(content)
            return content
        rest: dict[str, Any] = checkpoint.read(path, ["trainer"])["trainer"]
        state: dict[str, Any] = {"model": self.model}
        if is_fitting and OPTIMIZERS in rest and self.optimizers:
            state["optimizer"] = _one_or_all(self.optimizers)
        checkpoint.load(path, state, strict=self.lightning_module.strict_loading)
        return rest

    def load_model_state_dict(self, content: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the model."""

    def load_optimizer_state_dict(self, content: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the optimizers."""

    def on_exception(self, exception: BaseException) -> None:
        """Remember that ``fit`` failed, so that the error of a save does not hide the one of ``fit``."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait for the last save, and raise its error."""
        save, self._save = self._save, None
        try:
            if save is not None:
                save.result()
        except CheckpointError as error:
            if not self._has_failed:
                raise
            warnings.warn(f"the last save failed: {error}", stacklevel=2)
        finally:
            self._wait_for_removals()
            super().teardown()


class WholeFileLoads(TrainerSaves):
    """`TrainerSaves` for strategies such as DDP's, whose own checkpoint is one file with the whole state; that file loads too."""

    loads_whole_files = True


def is_ours(path: str) -> bool:
    """Whether a path holds a checkpoint of this library."""
    if os.path.isfile(path):
        return False
    with open_storage(path) as storage:
        return storage.size(CATALOG_KEY) is not None


def newest(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest committed checkpoint in a folder, to pass as ``ckpt_path=``; None if there is none.

    The newest has the largest ``global_step``, because clocks of machines differ; the time of the save decides only between equal
    steps. So remove newer checkpoints if you go back to an older one. Fabric's checkpoints have no step: there the time decides.

    Parameters
    ----------
    folder
        The ``dirpath`` of a ``ModelCheckpoint``, which need not exist yet.
    """
    with open_storage(folder) as storage:
        names = [name for name in storage.folders() if storage.size(f"{name}/{CATALOG_KEY}") is not None]
    paths = [f"{os.fspath(folder).rstrip('/')}/{name}" for name in names]
    return max(paths, key=_place_in_run, default=None)


def _place_in_run(path: str) -> tuple[int, float]:
    catalog = checkpoint.catalog(path)
    trainer = checkpoint.read(path, ["trainer"])["trainer"] if "trainer" in catalog.value_names else {}
    return trainer.get("global_step", -1), catalog.created_s


def read_whole(path: str) -> dict[str, Any]:
    """Read a checkpoint into the dict that Lightning itself would have written, without the state of optimizers."""
    found = checkpoint.read(path, ["model", "trainer"])
    if "trainer" not in found:
        raise CheckpointNotFound(
            f"{path}: no strategy of Lightning saved this checkpoint: it has no value named trainer; load it with checkpoint.load"
        )
    return {**found.pop("trainer"), STATE_DICT: {name.removeprefix("model."): tensor for name, tensor in found.items()}}


def _remove(path: Any, remove_of_lightning: Any) -> None:
    if not os.path.islink(path) and is_ours(str(path)):
        # First the catalog, so that half a checkpoint never looks whole.
        with open_storage(path) as storage:
            storage.delete([CATALOG_KEY])
            storage.sync([CATALOG_KEY])
    remove_of_lightning(path)


def _one_or_all(optimizers: Any) -> Any:
    return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def _is_fsdp1(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
