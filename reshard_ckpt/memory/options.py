"""What a user chooses of the memory tier."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from .node import FOLDER


@dataclass(frozen=True, slots=True)
class Memory:
    """Keep the newest checkpoints of a run in the memory of its nodes, for ``Manager(memory=…)``.

    Parameters
    ----------
    copies
        How many other nodes hold a copy of what a node has.
    generations
        How many saves to keep. The memory of one more is needed: for the one that is being filled, or written to the store.
    max_bytes
        The most that the tier may take on a node, of all its ranks and copies together; by default what there is.
    folder
        A tmpfs that outlives the job's processes.
    drop_on_clean_exit
        Whether a clean `Manager.close` frees the memory, once the newest save is in the store. By default memory stays for the
        next job.
    """

    copies: int = 1
    generations: int = 2
    max_bytes: int | None = None
    folder: str = FOLDER
    drop_on_clean_exit: bool = False

    def __post_init__(self) -> None:
        for option, least in (("copies", 0), ("generations", 1)):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Memory({option}={value!r}): pass a whole number, {least} or more")
        if not isinstance(self.drop_on_clean_exit, bool):
            raise UsageError(f"Memory(drop_on_clean_exit={self.drop_on_clean_exit!r}): pass True or False")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise UsageError(f"Memory(max_bytes={self.max_bytes!r}): pass a number of bytes above 0, or None")
