"""DeepSpeed before 0.17.1: what it does not tell a checkpoint engine by itself.

There `create` and `commit` get the tag alone, ``latest`` is written at once by DeepSpeed itself, and ``destroy`` does not tell
the checkpoint engine. So two methods of the engine are replaced, as long as this library is attached:

1. `save_checkpoint` says where the save goes, and has DeepSpeed not write ``latest``.
2. `destroy` waits for what is under way, as it does later by itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

REPLACED = ("save_checkpoint", "destroy")


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """What later releases call ``CheckpointCommitInfo``."""

    tag: str
    save_dir: str
    save_latest: bool


def tells_tag_alone() -> bool:
    """Tell whether this release gives `create` the tag alone."""
    from deepspeed.runtime.checkpoint_engine import checkpoint_engine

    return not hasattr(checkpoint_engine, "CheckpointCommitInfo")


class OldMethods:
    """The replaced methods of one engine.

    Attributes
    ----------
    info
        The save that has begun.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.info: CommitInfo | None = None
        for name in REPLACED:
            setattr(engine, name, getattr(self, name))

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as the engine does."""
        engine = self._engine()
        assert engine is not None
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        self.info = CommitInfo(tag, save_dir, save_latest)
        try:
            stock = type(engine).save_checkpoint
            return stock(engine, save_dir, tag, client_state or {}, False, exclude_frozen_parameters)
        finally:
            self.info = None

    def destroy(self) -> None:
        """Wait for what is under way, and end the engine."""
        engine = self._engine()
        assert engine is not None
        engine.checkpoint_engine.cleanup()
        type(engine).destroy(engine)
