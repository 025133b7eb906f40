"""DeepSpeed before 0.17.1: calls that it does not yet make on a checkpoint engine.

There, `create` and `commit` receive only the tag, DeepSpeed itself writes ``latest`` at once, and ``destroy`` does not call the
checkpoint engine. So two methods of the engine are replaced while this library is attached:

1. `save_checkpoint` notes the folder of the save, and stops DeepSpeed from writing ``latest``.
2. `destroy` waits for a save that is under way; later releases do that themselves.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

REPLACED = ("save_checkpoint", "destroy")


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The arguments of one save, as ``CheckpointCommitInfo`` of later releases has them."""

    tag: str
    save_dir: str
    save_latest: bool


def tells_tag_alone() -> bool:
    """Tell whether this release passes only the tag to `create`."""
    from deepspeed.runtime.checkpoint_engine import checkpoint_engine

    return not hasattr(checkpoint_engine, "CheckpointCommitInfo")


class OldMethods:
    """The replaced methods of one engine; constructing it replaces them.

    Attributes
    ----------
    info
        The save that DeepSpeed's method is carrying out now; None between saves.
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
        """Save with the engine's own method, and note the folder of the save meanwhile."""
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
        """Wait for a save that is under way, and end the engine."""
        engine = self._engine()
        assert engine is not None
        engine.checkpoint_engine.cleanup()
        type(engine).destroy(engine)
