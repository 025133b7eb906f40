"""`load` and what looks into a checkpoint: the calls of ``megatron.core.dist_checkpointing``, by the engine of `checkpoint.load`.

1. The tree is lowered. Its tensors are filled in place, whatever layout they were saved from; each rank reads what it wants.
2. Common state and objects are decoded from plain values; nothing is unpickled.
3. Where a saved tensor is smaller, and `allow_shape_mismatch` is set, the rest is zero.
4. What stands in the tree's places is merged into the common state, as Megatron does. An optimizer that stands in the tree as
   itself is given its groups and its step; its common state is what is returned in its place.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from ...checkpoint import LoadReport, catalog
from ...checkpoint.loading import load_wanted
from ...checkpoint.reading import read_values
from ...errors import UsageError
from .errors import megatron_compatible
from .optimizers import SHARDING
from .sharded_names import CONTENT_METADATA, common_state, key_of_object, keys_of_catalog
from .strictness import check_strategy, parse_mode
from .wanted import WantedTree, is_common, tensors_of

_FORM, _FLAT = "distrib_optim_sharding_type", "fully_sharded_model_space"


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
    """Load into a sharded state dict, as ``megatron.core.dist_checkpointing.load`` is called; optimizers may stand in it.

    Parameters
    ----------
    sharded_state_dict
        As for `save`; made for loading, as with ``is_loading=True``. Its tensors are written in place.
    checkpoint_dir
        A checkpoint of this library, or of Megatron where its format is known here.
    sharded_strategy, common_strategy
        As for `save`.
    validate_access_integrity
        Accepted: what is loaded is always proved to be covered.
    strict
        Megatron's `StrictHandling`, or its value.
    verify_integrity
        Verify every byte before any tensor changes, rather than as it is read.
    process_group
        The ranks that load together; all, by default.
    with_common
        False leaves the saved common state out of what is returned, for Megatron's own `load`, which reads ``common.pt`` by
        itself: that is checked to be of this checkpoint, where this library wrote it.

    Returns
    -------
    dict, or (dict, set, set)
        The tree with tensors and values in the places of its leaves, merged into the saved common state. Where `strict` says to
        return them, also the missing and the unexpected keys.

    Raises
    ------
    MismatchError
        The checkpoint lacks something, or has it with another shape; nothing was changed.
    CheckpointError
        As `checkpoint.load`.
    """
    check_strategy("sharded_strategy", sharded_strategy)
    check_strategy("common_strategy", common_strategy)
    mode = parse_mode(strict)
    wanted = WantedTree(sharded_state_dict, mode, str(checkpoint_dir), with_common=with_common)
    report = load_wanted(
        checkpoint_dir,
        wanted.prepare,
        verify_first=verify_integrity,
        rename=keys_of_catalog,
        process_group=process_group,
    )
    _warn_of_casts(checkpoint_dir, report)
    if mode.startswith("return"):
        return wanted.result, set(wanted.keys.missing), set(wanted.keys.unexpected)
    return wanted.result


def _warn_of_casts(path: str, report: LoadReport) -> None:
    if report.converted:
        more = len(report.converted) - 3
        shown = "; ".join(report.converted[:3]) + (f"; and {more} more" if more > 0 else "")
        warnings.warn(f"{path}: converted to the dtypes of the tree: {shown}", stacklevel=3)


@megatron_compatible
def load_common_state_dict(checkpoint_dir: str) -> dict[Any, Any]:
    """Load what is not sharded, as ``megatron.core.dist_checkpointing.load_common_state_dict`` is called; in one process.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or it is damaged.
    """
    found, values = read_values(checkpoint_dir, is_common)
    return common_state(found, values)


def load_content_metadata(checkpoint_dir: str | None = None, *, preloaded_state_dict: dict[str, Any] | None = None) -> Any:
    """Return the ``content_metadata`` that was saved; None where there was none.

    A training program makes its tree for loading by what this says. Up to 0.15 an optimizer's tree may be flat; a Megatron that
    has no flat tensors any more is told of the form that it has instead, in which `load` fills the same state.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise UsageError("load_content_metadata: pass checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    saved = preloaded_state_dict.get(CONTENT_METADATA)
    if isinstance(saved, dict) and saved.get(_FORM) == _FLAT and _lacks_flat_tensors():
        return {**saved, _FORM: SHARDING}
    return saved


def _lacks_flat_tensors() -> bool:
    """Tell whether this program has imported a Megatron, of 0.16 or newer, that refuses flat tensors."""
    sharded_tensor = getattr(sys.modules.get("megatron.core.dist_checkpointing.mapping"), "ShardedTensor", None)
    return sharded_tensor is not None and not hasattr(sharded_tensor, "from_rank_offsets_flat")


@megatron_compatible
def load_tensors_metadata(checkpoint_dir: str, sharded_strategy: Any = None) -> dict[str, Any]:
    """Describe the tensors of a checkpoint, as ``megatron.core.dist_checkpointing.load_tensors_metadata`` is called.

    Returns
    -------
    dict
        For each key a `ShardedTensor` without data or sharding: its global shape and dtype are the saved ones.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor  # needs the package only here

    found = tensors_of(catalog(checkpoint_dir))
    return {key: ShardedTensor.from_rank_offsets(key, tensor).without_data() for key, tensor in found.items()}


@megatron_compatible
def load_sharded_metadata(checkpoint_dir: str, sharded_strategy: Any = None, common_strategy: Any = None) -> dict[str, Any]:
    """Describe the tensors and the objects of a checkpoint, as Megatron's function of this name does."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found = catalog(checkpoint_dir)
    names = [keys_of_catalog(found)(name) for name in found.value_names if key_of_object(name) is not None]
    objects = {name: ShardedObject.empty_from_unique_key(name) for name in names}
    return {**objects, **load_tensors_metadata(checkpoint_dir)}


def load_plain_tensors(checkpoint_dir: str) -> Any:
    """Load all tensors whole, without the common state: as Megatron's function of this name does."""
    found = load_tensors_metadata(checkpoint_dir)
    loaded = load(found, checkpoint_dir)
    return {key: loaded[key] for key in found}
