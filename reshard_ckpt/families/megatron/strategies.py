"""`SaveStrategy` and `LoadStrategy`: for Megatron's own ``dist_checkpointing.save`` and ``load``, and its ``AsyncCallsQueue``.

Both derive from Megatron's strategies for ``torch_dist``, because its functions replace any other strategy. Each class is made on
first use, so that this package can be imported without megatron. With them, Megatron itself saves the common state and checks the
trees, in the way of its version.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ...plugins import checkpoint
from ...plugins.errors import UnsupportedError
from .calls import async_save, load, load_sharded_metadata, load_tensors_metadata, save


def request_of(handle: checkpoint.SaveHandle) -> Any:
    """Wrap a save that is under way in an ``AsyncRequest``, which Megatron's ``AsyncCallsQueue`` can schedule.

    Megatron runs the function of a request in another process, forked or spawned. It finalizes the request once these processes
    have ended on all ranks. But here, threads of this process save. So the function in the other process only waits for them:

    1. This process holds a lock on a temporary file until the save is over. The lock is of POSIX: a forked process does not hold
       it too, and the system releases it when this process dies.
    2. The function waits for that lock. If the file is gone, the save is over.
    3. The first function that finalizes the request raises the error of the save, if any, on all ranks.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # needs the package only here

    return AsyncRequest(wait_for, (locked_until_over(handle),), [handle.result])


def locked_until_over(handle: checkpoint.SaveHandle) -> str:
    """Lock a temporary file until a save is over; return its path."""
    file, path = tempfile.mkstemp(prefix="reshard-ckpt-")
    fcntl.lockf(file, fcntl.LOCK_EX)

    def release(_: checkpoint.SaveHandle) -> None:
        os.close(file)  # with it goes the lock, also where a cleaner of old files has removed the path
        os.unlink(path)

    handle.add_done_callback(release)
    return path


def wait_for(path: str) -> None:
    """Wait until the save behind a lock is over; any other process of this machine can call it."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)


@lru_cache(maxsize=1)
def save_strategy() -> type:
    """Return the class `SaveStrategy`, made on the first call."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Megatron's strategy for saving ``torch_dist``, writing checkpoints of this library."""

        def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> Any:
            """Save a tree in the background, after copying it; return an ``AsyncRequest`` that waits for the commit."""
            return request_of(async_save(sharded_state_dict, str(checkpoint_dir)))

        def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
            """Save a tree, in this library's format."""
            save(sharded_state_dict, str(checkpoint_dir))

    return _named(SaveStrategy, "SaveStrategy")


@lru_cache(maxsize=1)
def load_strategy() -> type:
    """Return the class `LoadStrategy`, made on the first call."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
        """Megatron's strategy for loading ``torch_dist``. It reads this library's checkpoints and known formats of Megatron."""

        def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            """Load the tensors and objects of a checkpoint into a tree without common state."""
            return load(sharded_state_dict, str(checkpoint_dir), with_common=False)

        def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> dict[str, Any]:
            """Describe the tensors of a checkpoint, by key."""
            return load_tensors_metadata(str(checkpoint_dir))

        def load_sharded_metadata(self, checkpoint_dir: Any, *args: Any) -> dict[str, Any]:
            """Describe the tensors and objects of a checkpoint, by key."""
            return load_sharded_metadata(str(checkpoint_dir))

        def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
            """Raise `UnsupportedError`: a committed checkpoint never changes."""
            raise UnsupportedError(
                f"{checkpoint_dir}: a committed checkpoint is not changed; load without what is below {key_prefix}, and save that"
            )

    return _named(LoadStrategy, "LoadStrategy")


def _named(kind: type, name: str) -> type:
    """Give a class the module and name by which pickle finds it again."""
    kind.__qualname__, kind.__module__ = name, __package__ or ""
    return kind
