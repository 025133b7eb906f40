"""`load`: the call of `torch.distributed.checkpoint`, by the engine of `checkpoint.load`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from glob import escape
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from ..checkpoint.loading import Prepare, load_target, target_of
from ..comm import Comm
from ..core.catalog.model import Catalog
from ..core.catalog.problems import not_saved
from ..core.catalog.specs import ValueKind
from ..core.report import LoadReport, few, summarize
from ..core.trees import children, children_of_dict, flatten, name_of
from ..engine.loading.load import LoadOptions
from ..errors import MismatchError
from ..formats.dcp.names import is_taken_apart, taken_apart
from ..state.capture import Target
from ..state.targets import Prefixes
from .arguments import Path, group_of, load_path, named_path, shared_errors
from .metadata import FORMATS_AS_SAVED
from .state_dicts import call_state_dicts, hold_whole, loading_form, restore
from .torch_calls import call_torch, is_custom, is_custom_planner
from .torch_errors import rank_prefix, torch_compatible


@torch_compatible("storage_reader")
def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: Path | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Load into a state dict, in place, on all ranks together, as `torch.distributed.checkpoint.load` is called.

    The checkpoint must have each entry of the state dict; its other entries are ignored. Tensors are written in place, other
    values are put into the dict, and objects get their state through ``load_state_dict``.

    Parameters
    ----------
    state_dict
        As for `save`. Each rank may ask for other keys.
    checkpoint_id
        The folder of a checkpoint of this library, of DCP, or of another format that `checkpoint.load` opens.
    storage_reader
        A `ReshardReader` or `FileSystemReader`, for the folder that it names. With any other, torch's own function runs.
    planner
        None, or a plain `DefaultLoadPlanner`: with ``allow_partial_load=True``, entries that the checkpoint lacks keep their
        values. With any other, torch's own function runs, with a `ReshardReader`.
    process_group
        The ranks that load together; all, by default.
    no_dist
        This process loads on its own.

    Raises
    ------
    UsageError
        An argument has a type that DCP does not take.
    MismatchError
        The checkpoint lacks an entry, or has it with another shape; nothing was changed.
    CheckpointError
        As `checkpoint.load`. All of these are torch's `CheckpointException` too.
    """
    if is_custom("storage_reader", storage_reader) or is_custom_planner(planner, saving=False):
        given = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
        call_torch("load", state_dict, checkpoint_id, storage_reader, **given)
        return
    group = group_of(process_group, no_dist)
    with shared_errors("load", named_path(checkpoint_id, storage_reader), group):
        path, partial = load_path(checkpoint_id, storage_reader), planner is not None and bool(planner.allow_partial_load)
        state = call_state_dicts(state_dict, in_order=True)
        form = loading_form(state)
    empty = [name_of(at) for at, leaf in flatten(form, _children) if at and isinstance(leaf, Mapping)]
    # DCP copies into a tensor of any dtype, so another dtype is a warning here. Its folders have no entry for an empty dict, so
    # one in the state dict may be missing. `allow_partial_load` passes over missing names alone, as with DCP.
    options = LoadOptions(cast=True, allow_missing=partial or [*map(escape, empty)], offered=())
    try:
        report, saved = load_target(
            path, _target_of(form), options, only_wanted=True, formats=FORMATS_AS_SAVED, process_group=group
        )
    except MismatchError as error:
        raise _with_dcp_wording(error).with_traceback(error.__traceback__) from error.__cause__
    _warn(path, empty, report, saved)
    for key, value in state.items():
        loaded = restore(value, form[key])
        if isinstance(state_dict[key], Stateful):
            state_dict[key].load_state_dict(loaded)
        else:
            state_dict[key] = loaded


def _target_of(form: dict[str, Any]) -> Prepare:
    """Return a `Prepare` function for a form, as `target_of` does; it also checks that no key of a dict in a list is missing.

    DCP gives each of these keys a name. Tuples of tensors that the checkpoint has under one name become values in `form`.
    """
    lists = {name_of(at): leaf for at, leaf in flatten(form, children_of_dict) if type(leaf) is list}

    def prepare(saved: Catalog, comm: Comm) -> Target:
        plain = {one.name for one in saved.values_table if one.kind is ValueKind.PLAIN}
        hold_whole(form, lambda name: name in plain or name in saved or name in saved.unreadable)
        target = target_of(form, adds=False)(saved, comm)
        in_lists = lists.keys() & plain

        def check(values: Mapping[str, Any]) -> list[str]:
            return [*target.check(values), *(line for name in in_lists for line in _lacking(name, lists[name], values[name]))]

        return replace(target, check=check)

    return prepare


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a dict or list that is not empty; None for anything else, a leaf."""
    below = children(node)
    return below if below is not None and node else None


def _lacking(name: str, wanted: Any, saved: Any) -> Iterator[str]:
    """Compare a dict or list with the saved one of the same name, and yield a problem for each entry that the saved one lacks.

    A list without dicts is one value, of any length.
    """
    if isinstance(wanted, Mapping) and isinstance(saved, Mapping):
        for key, child in wanted.items():
            if key in saved:
                yield from _lacking(f"{name}.{key}", child, saved[key])
            else:
                yield from (not_saved(name_of(at)) for at, _ in flatten(child, children_of_dict, (name, key)))
    elif type(wanted) is type(saved) is list and is_taken_apart(wanted) and is_taken_apart(saved):
        for i, (child, other) in enumerate(zip(wanted, saved, strict=False)):
            yield from _lacking(f"{name}.{i}", child, other)
        for i in range(len(saved), len(wanted)):
            yield from (not_saved(name_of(at)) for at, _ in taken_apart((name, i), wanted[i]))


def _with_dcp_wording(error: MismatchError) -> MismatchError:
    """Return the same error with the phrases of DCP's message, which programs search for, and with advice for DCP's `load`.

    An error of another kind is returned as it is.
    """
    phrases = [phrase for ours, phrase in _DCP_WORDING.items() if any(ours in line for line in error.problems)]
    if not phrases:
        return error
    advice = "change the state dict to what the checkpoint has"
    if all(_MISSING in line for line in error.problems):
        advice = "pass planner=DefaultLoadPlanner(allow_partial_load=True) to load the rest"
    return MismatchError(f"{rank_prefix(error)}{', '.join(phrases)}: {summarize(error.problems, advice)}", error.problems)


_MISSING = ": not in the checkpoint"
_DCP_WORDING = {_MISSING: "Missing key in checkpoint", ": saved with global shape": "Size mismatch"}


def _warn(path: Path, empty: Sequence[str], report: LoadReport, saved: Catalog) -> None:
    """Warn of tensors converted to another dtype, and of empty dicts below which the checkpoint has entries.

    DCP itself warns of neither.
    """
    if report.converted:
        warnings.warn(f"{path}: converted to the dtype of the state dict: {few(report.converted, 3, '; ')}", stacklevel=3)
    if not empty:
        return
    prefixes = Prefixes((*saved.names, *saved.value_names))
    passed_over = [name for name in empty if prefixes.include(name)]
    if passed_over:
        where = few(passed_over, 3, "; ")
        warnings.warn(
            f"{path}: nothing was loaded below {where}, where the state dict is empty and the checkpoint is not; "
            "make the state exist before loading (get_optimizer_state_dict does for an optimizer)",
            stacklevel=3,
        )
