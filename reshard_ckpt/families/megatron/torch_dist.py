"""`SaveStrategy` and `LoadStrategy`: for Megatron's own ``dist_checkpointing.save`` and ``load``.

Both are subclasses of Megatron's strategies for ``torch_dist``, as its functions replace any other; they are made when they are
first asked for, so that this package can be imported without megatron. Megatron itself then keeps the common state as its version
does, and the checks of trees are its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...errors import UnsupportedError
from .captured import SavedTree
from .loading import load, load_sharded_metadata, load_tensors_metadata
from .requests import request_of
from .saving import begin_tree, save_tree


@lru_cache(maxsize=1)
def save_strategy() -> type:
    """Make the class `SaveStrategy`."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Megatron's strategy for saving ``torch_dist``, writing checkpoints of this library."""

        def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> Any:
            """Copy the state, and write it in the background; return an ``AsyncRequest``."""
            return request_of(begin_tree(str(checkpoint_dir), SavedTree(sharded_state_dict)))

        def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
            """Save the state."""
            save_tree(str(checkpoint_dir), SavedTree(sharded_state_dict))

    return _named(SaveStrategy, "SaveStrategy")


@lru_cache(maxsize=1)
def load_strategy() -> type:
    """Make the class `LoadStrategy`."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
        """Megatron's strategy for loading ``torch_dist``, reading checkpoints of this library, and Megatron's where known."""

        def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            """Load the sharded part of a checkpoint into a tree of nothing else."""
            return load(sharded_state_dict, str(checkpoint_dir), with_common=False)

        def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> dict[str, Any]:
            """Describe the tensors."""
            return load_tensors_metadata(str(checkpoint_dir))

        def load_sharded_metadata(self, checkpoint_dir: Any, *args: Any) -> dict[str, Any]:
            """Describe the tensors and objects."""
            return load_sharded_metadata(str(checkpoint_dir))

        def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
            """Refuse: a checkpoint is never changed."""
            raise UnsupportedError(
                f"{checkpoint_dir}: a committed checkpoint is not changed; load without what is below {key_prefix}, and save that"
            )

    return _named(LoadStrategy, "LoadStrategy")


def _named(kind: type, name: str) -> type:
    """Give a class the name by which it is found, also by those that pickle it."""
    kind.__qualname__, kind.__module__ = name, __package__ or ""
    return kind
