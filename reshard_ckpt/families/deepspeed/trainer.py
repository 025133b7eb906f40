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
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...plugins.errors import UsageError
from ...plugins.packages import trainer_steps
from .engine import Engine
from .names import LATEST


def is_whole(folder: Path) -> bool:
    """Tell whether the Trainer can resume from a folder: its own state is there, and DeepSpeed's checkpoint is committed."""
    is_begun = any(folder.glob("global_step*"))
    return (folder / "trainer_state.json").exists() and (not is_begun or (folder / LATEST[0]).exists())


def see_commits() -> None:
    """Change the functions of transformers; a second call does nothing.

    Raises
    ------
    UsageError
        The Trainer of this release lacks one of them.
    """
    transformers, trainer, trainer_utils = (
        importlib.import_module(f"transformers{module}") for module in ("", ".trainer", ".trainer_utils")
    )
    names = ("get_last_checkpoint", "rotate_checkpoints", "sort_checkpoints")
    if not all(hasattr(trainer, name) for name in names) or not hasattr(trainer.Trainer, "_finalize_training"):
        raise UsageError(
            f"install(always=True): transformers {transformers.__version__} has another Trainer than release 5.23, so its saves "
            "in the background cannot be made safe; install transformers 5.23, or attach engines of your own"
        )
    if getattr(trainer.Trainer._finalize_training, "of_reshard_ckpt", False):
        return
    stock_rotate, stock_finalize = trainer.rotate_checkpoints, trainer.Trainer._finalize_training

    def get_last_checkpoint(folder: Any) -> str | None:
        """Return the newest whole checkpoint of a folder; None without one."""
        found = {step: path for step, path in trainer_steps(folder).items() if is_whole(path)}
        return str(found[max(found)]) if found else None

    def rotate_checkpoints(output_dir: Any, save_total_limit: int | None = None, *arguments: Any, **options: Any) -> None:
        """Delete old checkpoints as the stock function does, with one more kept for each that is not whole."""
        if save_total_limit:
            save_total_limit += sum(not is_whole(path) for path in trainer_steps(output_dir).values())
        stock_rotate(output_dir, save_total_limit, *arguments, **options)

    def finalize(self: Any, trial: Any, *arguments: Any) -> Any:
        ours = getattr(self.model_wrapped, "checkpoint_engine", None)
        if isinstance(ours, Engine):
            ours.finish()
            dist.barrier()  # rank 0 has written `latest` now
            if self.args.should_save:
                best = self.state.best_model_checkpoint
                rotate_checkpoints(self._get_output_dir(trial=trial), self.args.save_total_limit, best, use_mtime=True)
        return stock_finalize(self, trial, *arguments)

    finalize.of_reshard_ckpt = True  # type: ignore[attr-defined]
    for module in (trainer, trainer_utils):
        vars(module).update(get_last_checkpoint=get_last_checkpoint, rotate_checkpoints=rotate_checkpoints)
    trainer.Trainer._finalize_training = finalize


def see_commits_in_lightning() -> None:
    """Change the ``DeepSpeedStrategy`` of each package of Lightning that is imported; a second call does nothing."""
    for name in ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed"):
        if name in sys.modules:
            strategy = sys.modules[name].DeepSpeedStrategy
            for method in ("remove_checkpoint", "teardown"):
                if not hasattr(getattr(strategy, method), "of_reshard_ckpt"):
                    setattr(strategy, method, _after_commit(getattr(strategy, method)))


def _after_commit(stock: Callable[..., None]) -> Callable[..., None]:
    """Return a method of Lightning's strategy that waits for the last save, and then calls the stock method."""

    @wraps(stock)
    def call(strategy: Any, *arguments: Any) -> None:
        ours = getattr(strategy.model, "checkpoint_engine", None)
        if isinstance(ours, Engine):
            ours.finish()
        stock(strategy, *arguments)

    call.of_reshard_ckpt = True  # type: ignore[attr-defined]
    return call
