"""`save` and `async_save`: the calls of ``megatron.core.dist_checkpointing`` on the engine of `checkpoint.save`.

`captured` describes the content of a rank. Replicas are compared before anything is written. Megatron's own ``metadata.json`` is
written beside the catalog, because Megatron's programs recognize a checkpoint by it. From 0.19 on, Megatron's
``dist_checkpointing.save`` hands the common state to a strategy as an object. Its ``load`` reads that object with torch's DCP,
unless there is a ``common.pt``; so this library writes one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...checkpoint import SaveHandle
from ...checkpoint.saving import begin_captured, save_captured
from .captured import SavedTree
from .errors import megatron_compatible
from .sharded_names import COMMON, COMMON_FILE, checked_objects, metadata_of
from .strictness import check_strategy

_CONFIG = {
    "metadata.json": json.dumps(
        {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    ).encode()
}


@megatron_compatible
def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    replicas: str = "main",
    process_group: Any = None,
) -> Any:
    """Save a sharded state dict, with the arguments of ``megatron.core.dist_checkpointing.save``.

    Unlike Megatron's function, this one also takes optimizer objects in the tree.

    Parameters
    ----------
    sharded_state_dict
        Megatron's tree of `ShardedTensor`, `ShardedTensorFactory`, `ShardedObject`, `LocalNonpersistentObject`, common values
        and optimizers. Megatron's function changes it; this one does not.
    checkpoint_dir
        A folder that all ranks share.
    sharded_strategy, common_strategy
        None, or one of Megatron's strategies for ``torch_dist``; this library writes in its place.
    validate_access_integrity, preprocess_common_before_consistancy_check, async_strategy
        Ignored. Every save checks that all of each tensor and object is declared; the common state is taken from rank 0.
    async_sharded_save
        Copy the state, write in the background, and return an ``AsyncRequest`` for Megatron's ``AsyncCallsQueue``.
    content_metadata
        Saved in the common state, under the key ``content_metadata``.
    verify_integrity
        Also write a manifest with the SHA-256 of every file.
    replicas
        What happens if the replicas of a tensor differ: ``"main"`` saves the main one with a warning; ``"error"`` raises
        `LayoutError`.
    process_group
        The ranks that save together; all, by default.

    Returns
    -------
    None or AsyncRequest

    Raises
    ------
    LayoutError
        No rank declares some region of a tensor, an object or a part of it has no main replica, or shards overlap; the message
        names them, on every rank.
    UsageError
        Something in the tree cannot be saved; the message says what to do.
    """
    check_strategy("sharded_strategy", sharded_strategy)
    check_strategy("common_strategy", common_strategy)
    tree = SavedTree(sharded_state_dict, content_metadata, replicas, process_group)
    if async_sharded_save:
        from .requests import request_of

        return request_of(begin_tree(checkpoint_dir, tree, sha256=verify_integrity))
    save_tree(checkpoint_dir, tree, sha256=verify_integrity)
    return None


@megatron_compatible
def async_save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    verify_integrity: bool = False,
    replicas: str = "main",
    process_group: Any = None,
) -> SaveHandle:
    """Save as `save` does, in the background: the state may change as soon as this returns.

    Returns
    -------
    SaveHandle
        Its ``result()`` returns once the checkpoint is committed, or raises the error of the save.
    """
    tree = SavedTree(sharded_state_dict, content_metadata, replicas, process_group)
    return begin_tree(checkpoint_dir, tree, sha256=verify_integrity)


@megatron_compatible
def save_tree(path: str, tree: SavedTree, *, sha256: bool = False) -> None:
    """Save a tree, and return after the commit."""
    save_captured(path, tree.capture, **_options(tree, sha256))


@megatron_compatible
def begin_tree(path: str, tree: SavedTree, *, sha256: bool = False) -> SaveHandle:
    """Copy a tree, and save the copy in the background; return once it is copied."""
    return begin_captured(path, tree.capture, **_options(tree, sha256))


def _options(tree: SavedTree, sha256: bool) -> dict[str, Any]:
    common = _common_file(tree.tree)
    return {
        "process_group": tree.process_group,
        "metadata": metadata_of(tree.tree, common.get(COMMON_FILE)),
        "sha256": sha256,
        "beside": _CONFIG | common,
        "checked_values": checked_objects,
    }


def _common_file(tree: Mapping[Any, Any]) -> dict[str, bytes]:
    """Return ``common.pt`` by its key, if the tree has the common state as an object and this rank holds its main replica."""
    common: Any = tree.get(COMMON)
    if getattr(common, "key", None) != COMMON or common.replica_id != 0:
        return {}
    file = io.BytesIO()
    torch.save(common.data, file)
    return {COMMON_FILE: file.getvalue()}
