"""The options of the memory tier, which keeps checkpoints in the memory of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.report import check_count
from ..errors import UsageError
from ..storage import path_text
from .node import FOLDER


@dataclass(frozen=True, slots=True)
class Memory:
    """Keep the newest checkpoints of a run in the memory of its nodes, for ``Manager(memory=…)``.

    Parameters
    ----------
    copies
        Number of other nodes that hold a copy of each node's files of a checkpoint.
    generations
        Number of saves to keep. The tier takes memory for one more, which is being filled or written to the store.
    max_bytes
        Upper limit in bytes for all slots on one node: those of all its ranks, and the copies that it holds for other nodes.
        By default the limit is the free memory of the node.
    folder
        Path of a tmpfs whose files outlive the processes of the job.
    drop_on_clean_exit
        Whether a clean `Manager.close` frees the memory as soon as the newest save is in the store. By default the memory stays
        for the next job.
    """

    copies: int = 1
    generations: int = 2
    max_bytes: int | None = None
    folder: str = FOLDER
    drop_on_clean_exit: bool = False

    def __post_init__(self) -> None:
        for option, least in (("copies", 0), ("generations", 1)):
            check_count(option, getattr(self, option), least)
        if not isinstance(self.drop_on_clean_exit, bool):
            raise UsageError(f"Memory(drop_on_clean_exit={self.drop_on_clean_exit!r}): pass True or False")
        check_count("max_bytes", self.max_bytes, 1, or_none=True)
        folder = path_text(self.folder)
        if "://" in folder:
            raise UsageError(f"Memory(folder={folder!r}): the memory of nodes is a tmpfs; pass its path, such as {FOLDER!r}")
        object.__setattr__(self, "folder", folder)  # a Path, and a leading ~, become text
