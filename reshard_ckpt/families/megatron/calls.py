"""The calls of ``megatron.core.dist_checkpointing`` on this library's engine.

*Saving*:

1. `states` describes the content of a rank. Replicas are compared before anything is written.
2. Megatron's own ``metadata.json`` is written beside the catalog, because Megatron's programs recognize a checkpoint by it.
3. From 0.19 on, Megatron's ``dist_checkpointing.save`` hands the common state to a strategy as an object. Its ``load`` reads that
   object with torch's DCP, unless there is a ``common.pt``; so this library writes one.

*Loading*:

1. Lower the tree. Tensors are filled in place, whatever layout they were saved from. Each rank reads only its own part.
2. Decode common state and objects from plain values; nothing is unpickled.
3. If a saved tensor is smaller than the wanted one, and ``allow_shape_mismatch`` is set, the rest becomes zero.
4. Merge the loaded leaves into the common state, as Megatron does. An optimizer object in the tree receives its groups and its
   step, and the returned tree has the optimizer's common state in its place.
"""

from __future__ import annotations

import functools
import io
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ...plugins import begin_captured, checkpoint, load_wanted, save_captured
from ...plugins.errors import CheckpointError, UsageError, few, rebuilt
from ...plugins.states import group_of, read_values
from .names import (
    COMMON,
    COMMON_FILE,
    CONFIG,
    CONFIG_FILE,
    CONTENT_METADATA,
    FORM,
    FULLY_RESHARDABLE,
    check_objects,
    key_of_object,
    keys_of_catalog,
)
from .states import SavedTree, WantedTree, check_strategy, is_common, parse_mode, tensors_of
from .values import common_state, metadata_of

FIRST, LAST = (0, 13), (0, 19)
"""The oldest and the newest version of megatron-core that were tested; docs/megatron.md lists the parts."""


def warn_if_untested() -> None:
    """Warn if this program has imported a megatron-core that has not been tested."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    if isinstance(version, str):
        _judge(version)


@lru_cache(maxsize=8)
def _judge(version: str) -> None:
    """Warn about an untested version, once for each version, on rank 0."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if (release is None or not FIRST <= release <= LAST) and group_of(None).rank == 0:
        tested = " to ".join(".".join(map(str, bound)) for bound in (FIRST, LAST))
        warnings.warn(
            f"megatron-core {version}: the calls of reshard_ckpt.megatron have been run with {tested} only; load a checkpoint "
            "into a job of another layout once, and compare, before relying on it",
            stacklevel=4,
        )


P = ParamSpec("P")
R = TypeVar("R")
_CORE = "megatron.core.dist_checkpointing.core"


def megatron_compatible(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that its errors are also Megatron's and torch's, if the program has imported Megatron.

    Megatron's own functions raise ``CheckpointingException``. Its strategies for ``torch_dist`` raise torch's
    ``CheckpointException``, which does not derive from `Exception`. Programs catch either of them, so an error here is both.
    """

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        warn_if_untested()
        try:
            return function(*args, **options)
        except CheckpointError as error:
            theirs = getattr(sys.modules.get(_CORE), "CheckpointingException", None)
            if theirs is None or isinstance(error, theirs):
                raise
            failures = {group_of(None).rank: (error, traceback.extract_tb(error.__traceback__))}
            fields = {**vars(error), "_failures": failures}
            new = rebuilt(type(error), (theirs, CheckpointException), error.args, fields)
            raise new.with_traceback(error.__traceback__) from error.__cause__

    return call


_FLAT = "fully_sharded_model_space"


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
    options: dict[str, Any] = {"verify_integrity": verify_integrity, "replicas": replicas, "process_group": process_group}
    if async_sharded_save:
        from .strategies import request_of

        return request_of(async_save(sharded_state_dict, checkpoint_dir, content_metadata, **options))
    tree = SavedTree(sharded_state_dict, content_metadata, replicas, process_group)
    save_captured(checkpoint_dir, tree.capture, **_options(tree, verify_integrity))
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
) -> checkpoint.SaveHandle:
    """Save as `save` does, in the background: the state may change as soon as this returns.

    Parameters
    ----------
    sharded_state_dict, checkpoint_dir, content_metadata, verify_integrity, replicas, process_group
        As for `save`.

    Returns
    -------
    SaveHandle
        Its ``result()`` returns once the checkpoint is committed, or raises the error of the save.
    """
    tree = SavedTree(sharded_state_dict, content_metadata, replicas, process_group)
    return begin_captured(checkpoint_dir, tree.capture, **_options(tree, verify_integrity))


def _options(tree: SavedTree, sha256: bool) -> dict[str, Any]:
    """Return the options of this library's save for a tree, with the files that Megatron looks for beside the catalog."""
    beside = {CONFIG_FILE: json.dumps(CONFIG).encode()}
    common: Any = tree.tree.get(COMMON)
    # The tree may have the common state as an object. The rank that holds its main replica writes ``common.pt``.
    if getattr(common, "key", None) == COMMON and common.replica_id == 0:
        file = io.BytesIO()
        torch.save(common.data, file)
        beside[COMMON_FILE] = file.getvalue()
    return {
        "process_group": tree.process_group,
        "first_metadata": partial(metadata_of, tree.tree, beside.get(COMMON_FILE)),  # only its rank has the file's digest
        "sha256": sha256,
        "beside": beside,
        "check_names": check_objects,
    }


@megatron_compatible
def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = "assume_ok_unexpected",
    *,
    verify_integrity: bool = False,
    process_group: Any = None,
    with_common: bool = True,
) -> Any:
    """Load into a sharded state dict, with the arguments of ``megatron.core.dist_checkpointing.load``.

    Unlike Megatron's function, this one also takes optimizer objects in the tree, and fills them in place.

    Parameters
    ----------
    sharded_state_dict
        As for `save`; made for loading, as with ``is_loading=True``. Its tensors are written in place.
    checkpoint_dir
        A checkpoint of this library, or one of Megatron in a format that this library reads.
    sharded_strategy, common_strategy
        As for `save`.
    validate_access_integrity
        Ignored: every load checks that the saved tensors cover the wanted ones.
    strict
        Megatron's `StrictHandling`, or its value.
    verify_integrity
        Verify every byte before any tensor changes. By default, bytes are verified as they are read.
    process_group
        The ranks that load together; all, by default.
    with_common
        False leaves the saved common state out of the result. Megatron's own `load` needs this: it reads ``common.pt`` itself.
        If this library wrote that file, it is checked to belong to this checkpoint.

    Returns
    -------
    dict, or (dict, set, set)
        The saved common state, with the loaded tensors and values in the places of the tree's leaves. The modes of `strict`
        that begin with ``return`` add the missing and the unexpected keys.

    Raises
    ------
    MismatchError
        The checkpoint lacks something, or has it with another shape; nothing has changed.
    CheckpointError
        As `checkpoint.load`.
    """
    check_strategy("sharded_strategy", sharded_strategy)
    check_strategy("common_strategy", common_strategy)
    mode = parse_mode(strict)
    wanted = WantedTree(sharded_state_dict, mode, str(checkpoint_dir), with_common=with_common)
    report = load_wanted(
        checkpoint_dir, wanted.prepare, verify_first=verify_integrity, rename=keys_of_catalog, process_group=process_group
    )
    if report.converted:
        warnings.warn(f"{checkpoint_dir}: converted to the dtypes of the tree: {few(report.converted, 3, '; ')}", stacklevel=2)
    if mode.startswith("return"):
        return wanted.result, set(wanted.keys.missing), set(wanted.keys.unexpected)
    return wanted.result


@megatron_compatible
def load_common_state_dict(checkpoint_dir: str) -> dict[Any, Any]:
    """Load the common state, which is not sharded, in one process, as Megatron's function of this name does.

    Parameters
    ----------
    checkpoint_dir
        A checkpoint of this library or of Megatron.

    Raises
    ------
    CheckpointError
        The path holds no checkpoint, or a damaged one.
    """
    found, values = read_values(checkpoint_dir, is_common)
    return common_state(found, values)


def load_content_metadata(checkpoint_dir: str | None = None, *, preloaded_state_dict: dict[str, Any] | None = None) -> Any:
    """Return the ``content_metadata`` of a checkpoint; None if it was saved without them.

    A training program builds its tree for loading according to this. Megatron up to 0.15 may have saved the optimizer as flat
    tensors. If the running Megatron has no flat tensors any more, this returns the newer form instead; `load` fills the same
    state from it.

    Parameters
    ----------
    checkpoint_dir
        A checkpoint of this library or of Megatron.
    preloaded_state_dict
        The common state, if `load_common_state_dict` has loaded it already; then `checkpoint_dir` is not read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise UsageError("load_content_metadata: pass checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    saved = preloaded_state_dict.get(CONTENT_METADATA)
    # Megatron 0.16 and newer have no flat tensors.
    sharded_tensor = getattr(sys.modules.get("megatron.core.dist_checkpointing.mapping"), "ShardedTensor", None)
    has_flat = sharded_tensor is None or hasattr(sharded_tensor, "from_rank_offsets_flat")
    if isinstance(saved, dict) and saved.get(FORM) == _FLAT and not has_flat:
        return {**saved, FORM: FULLY_RESHARDABLE}
    return saved


@megatron_compatible
def load_tensors_metadata(checkpoint_dir: str, sharded_strategy: Any = None) -> dict[str, Any]:
    """Describe the tensors of a checkpoint, with the arguments of ``megatron.core.dist_checkpointing.load_tensors_metadata``.

    Parameters
    ----------
    checkpoint_dir
        A checkpoint of any format that can be opened.
    sharded_strategy
        Ignored: this library opens every format by itself.

    Returns
    -------
    dict
        For each key, a `ShardedTensor` without data and without sharding, with the saved global shape and dtype.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor  # needs the package only here

    found = tensors_of(checkpoint.catalog(checkpoint_dir))
    return {key: ShardedTensor.from_rank_offsets(key, tensor).without_data() for key, tensor in found.items()}


@megatron_compatible
def load_sharded_metadata(checkpoint_dir: str, sharded_strategy: Any = None, common_strategy: Any = None) -> dict[str, Any]:
    """Describe the tensors and the objects of a checkpoint, by key, as Megatron's function of this name does.

    Parameters
    ----------
    checkpoint_dir
        A checkpoint of any format that can be opened.
    sharded_strategy, common_strategy
        Ignored: this library opens every format by itself.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found = checkpoint.catalog(checkpoint_dir)
    names = [keys_of_catalog(found)(name) for name in found.value_names if key_of_object(name) is not None]
    objects = {name: ShardedObject.empty_from_unique_key(name) for name in names}
    return {**objects, **load_tensors_metadata(checkpoint_dir)}


def load_plain_tensors(checkpoint_dir: str) -> Any:
    """Load all tensors whole, by key, without the common state, as Megatron's function of this name does.

    Parameters
    ----------
    checkpoint_dir
        A checkpoint of any format that can be opened.
    """
    found = load_tensors_metadata(checkpoint_dir)
    loaded = load(found, checkpoint_dir)
    return {key: loaded[key] for key in found}
