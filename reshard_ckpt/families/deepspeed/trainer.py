"""Commits of background saves, as the Trainers of transformers and of Lightning see them.

The Trainer writes the folder ``checkpoint-N``, with DeepSpeed's checkpoint ``global_stepN`` in it. That is committed later, in
the background, when the file ``latest`` appears. `see_commits` changes three functions of transformers:

1. ``get_last_checkpoint`` passes over folders that are not whole.
2. ``rotate_checkpoints`` counts only whole folders: a whole one goes only if enough newer ones are whole.
3. Before ``train()`` returns, all ranks wait for the last save, and the folders are rotated once more.

`see_commits_in_lightning` changes two methods of Lightning's ``DeepSpeedStrategy``: the removal of an old checkpoint and the end
of ``fit`` wait for the last save.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...plugins.packages import Replaced, needed, newest_step, trainer_steps
from .engine import Engine
from .names import LATEST


def is_whole(folder: Path) -> bool:
    """Tell whether the Trainer can resume from a folder: its own state is there, and no save of DeepSpeed is unfinished."""
    is_begun = any(folder.glob("global_step*"))
    return (folder / "trainer_state.json").exists() and (not is_begun or (folder / LATEST[0]).exists())


def see_commits() -> None:
    """Replace three functions of transformers, so that its Trainer counts only committed checkpoints; a second call does nothing.

    Raise `UsageError` if the Trainer of this release lacks one of them, so its saves in the background cannot be made safe.
    """
    with needed("the Trainer", "transformers>=5.23"):
        _METHODS.install({"_finalize_training": _finalize_training})
        _FUNCTIONS.install(
            {"get_last_checkpoint": partial(newest_step, is_whole=is_whole), "rotate_checkpoints": _rotate_checkpoints}
        )


_FUNCTIONS = Replaced(lambda: [importlib.import_module(f"transformers.{name}") for name in ("trainer", "trainer_utils")])
_METHODS = Replaced(lambda: [importlib.import_module("transformers.trainer").Trainer])


def _rotate_checkpoints(output_dir: Any, save_total_limit: int | None = None, *arguments: Any, **options: Any) -> None:
    """Delete old checkpoints as transformers' function does, but keep one more for each folder that is not whole."""
    if save_total_limit:
        save_total_limit += sum(not is_whole(path) for path in trainer_steps(output_dir).values())
    _FUNCTIONS.stock["rotate_checkpoints"](output_dir, save_total_limit, *arguments, **options)


def _finalize_training(self: Any, trial: Any, *arguments: Any) -> Any:
    """Before the Trainer's own method runs, wait for the last save, and delete old checkpoints once more."""
    ours = getattr(self.model_wrapped, "checkpoint_engine", None)
    if isinstance(ours, Engine):
        ours.finish()
        dist.barrier()  # rank 0 has written `latest` now
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            _rotate_checkpoints(self._get_output_dir(trial=trial), self.args.save_total_limit, best, use_mtime=True)
    return _METHODS.stock["_finalize_training"](self, trial, *arguments)


def see_commits_in_lightning() -> None:
    """Make two methods of Lightning's ``DeepSpeedStrategy`` wait for the last save; a second call does nothing.

    This changes each package of Lightning that is imported.
    """
    for name in ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed"):
        if name in sys.modules:
            strategy = sys.modules[name].DeepSpeedStrategy
            for method in ("remove_checkpoint", "teardown"):
                if not hasattr(getattr(strategy, method), "of_reshard_ckpt"):
                    setattr(strategy, method, _after_commit(getattr(strategy, method)))


def _after_commit(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of Lightning's strategy so that it first waits for the save in progress."""

    @wraps(stock)
    def call(strategy: Any, *arguments: Any) -> None:
        ours = getattr(strategy.model, "checkpoint_engine", None)
        if isinstance(ours, Engine):
            ours.finish()
        stock(strategy, *arguments)

    call.of_reshard_ckpt = True  # type: ignore[attr-defined]
    return call
