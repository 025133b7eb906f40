"""`background_saves`, a callback with which the ``Trainer`` of transformers saves its FSDP checkpoints in the background.

1. While ``train`` runs, the functions of `calls` begin a save and return once the state may change. One save runs at a time: the
   save of the optimizer waits for that of the model, and the next model's for both.
2. The ``Trainer`` removes old folders right after it has begun a save. With ``save_total_limit=2`` or more, the previous folder,
   which is committed by then, stays; a limit of 1 is refused.
3. ``train`` returns when the last save is committed, or raises its error.
4. ``get_last_checkpoint``, and so ``resume_from_checkpoint=True``, passes over folders whose save was killed.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from pathlib import Path
from typing import Any

from ...plugins import CATALOG_KEY, checkpoint
from ...plugins.errors import UsageError
from ...plugins.packages import needed, newest_step

_OF_DCP = ".metadata"


class Background:
    """The saves that run in the background. `is_on` says whether a new save begins in the background or blocks."""

    def __init__(self) -> None:
        self.is_on = False
        self._saves: list[checkpoint.SaveHandle] = []

    def save(self, path: str, state: dict[str, Any], **options: Any) -> None:
        """Save a state to a path with `checkpoint.async_save` if `is_on` is set, else with `checkpoint.save`."""
        if self.is_on:
            self._saves.append(checkpoint.async_save(path, state, **options))
        else:
            checkpoint.save(path, state, **options)

    def wait(self) -> None:
        """Wait for all background saves. If any failed, then raise the error of the oldest of these."""
        first: Exception | None = None
        while self._saves:
            try:
                self._saves.pop(0).result()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first


BACKGROUND = Background()


def background_saves() -> Any:
    """Make a callback of the ``Trainer``, by which its FSDP checkpoints are saved in the background.

    Raises
    ------
    UsageError
        transformers is not installed.
    """
    return _callback_class()()


@cache
def _callback_class() -> type:
    names = ("trainer", "trainer_utils", "trainer_callback")
    with needed("transformers", "transformers"):
        modules: list[Any] = [importlib.import_module(f"transformers.{name}") for name in names]
    trainer, utils, callbacks = modules

    for module in (trainer, utils):
        module.get_last_checkpoint = partial(newest_step, is_whole=is_whole)

    class BackgroundSaves(callbacks.TrainerCallback):  # type: ignore[misc, name-defined]
        """Saves FSDP checkpoints of the Trainer in the background."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if args.save_total_limit == 1:
                raise UsageError(
                    "save_total_limit=1: the Trainer would remove the last committed checkpoint while the next is being written; "
                    "pass 2 or more, or leave background_saves() out"
                )
            BACKGROUND.is_on = True

        def on_train_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            BACKGROUND.is_on = False
            BACKGROUND.wait()

    return BackgroundSaves


def is_whole(folder: Path) -> bool:
    """Tell whether the Trainer can resume from a folder: its own state is there, and each checkpoint in it is committed."""
    parts = [*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")]
    return (folder / "trainer_state.json").exists() and all(
        not part.is_dir() or (part / CATALOG_KEY).exists() or (part / _OF_DCP).exists() for part in parts
    )
