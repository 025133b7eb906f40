"""Loading a checkpoint of any layout, from this library or from DeepSpeed, into a DeepSpeed engine in place.

1. Describe the engine's tensors, and allocate optimizer state that the checkpoint has and the engine lacks.
2. Read all values, and choose those of each group. If some do not fit, all ranks raise that here, and no tensor has changed.
3. Load into the memory of 1: each rank reads its own runs of each parameter.
4. Give the values to their owners: hyperparameters to groups, numbers to the loss scaler, its state to the scheduler.
5. Have the optimizer copy its master weights to the parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import TORCH_DTYPES, Catalog, checkpoint, open_storage
from ...plugins.errors import MismatchError, UsageError
from ...plugins.groups import SWITCHES, Groups
from ...plugins.names import Index, paths_of_values
from ...plugins.states import open_session, values_of_all
from ...plugins.trees import unflatten
from .engine_state import EngineState, Shared, base_optimizer, refuse_unsupported
from .names import GROUPS, LATEST, OPTIMIZER, ROOT
from .values import NOT_VALUES

GROUPS_NAME = f"{OPTIMIZER}.{GROUPS}"
Kinds = dict[str, dict[str, tuple[bool, torch.dtype]]]


def kinds_of_state(saved: Catalog) -> Kinds:
    """Return for each FQN and key of the saved optimizer state whether it has the parameter's shape, and the state's dtype."""
    found: Kinds = {}
    for name, link in saved.links().items():
        if link.optimizer != OPTIMIZER:
            continue
        if name in saved:
            index = saved.index(name)
            dtype = TORCH_DTYPES[saved.dtype(index)]
            found.setdefault(link.fqn, {})[link.key] = (bool(saved.shape(index)), dtype)
        else:
            found.setdefault(link.fqn, {})[link.key] = (False, torch.float32)
    return found


def value_keys(saved: Catalog) -> dict[str, tuple[Any, ...]]:
    """Map the name of each tensor and value that DeepSpeed or the user saved below `ROOT` to its path (a tuple of keys)."""
    found = {name: tuple(name.split(".")) for name in saved.names if name.startswith(f"{ROOT}.")}
    return found | {name: path for name, path in paths_of_values(saved).items() if name.startswith(f"{ROOT}.")}


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to load, in a folder or in memory.

    Attributes
    ----------
    path
        The path of the checkpoint, which ``engine.load_checkpoint`` returns.
    load
        Loads into a state in place, with the options of `checkpoint.load`. Collective.
    read
        Reads whole tensors and values by name.
    """

    path: str
    catalog: Catalog
    load: Callable[..., Any]
    read: Callable[[list[str]], dict[str, Any]]


def saved_at(path: str) -> Saved:
    """Open the checkpoint at a path, ready to be loaded; only the catalog is read."""
    return Saved(path, checkpoint.catalog(path), partial(checkpoint.load, path), partial(checkpoint.read, path))


def find_saved(load_dir: str, tag: Any, *, timeout_s: float = 600.0) -> Saved | None:
    """Find the checkpoint of a tag, or of the tag in ``latest`` if `tag` is None; return None without such a file. Collective."""
    tag = latest_of(load_dir, timeout_s=timeout_s) if tag is None else str(tag)
    return None if tag is None else saved_at(os.path.join(load_dir, tag))


_ENGINE_STATES = ("skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd", "lr_scheduler",
                  "optimizer")  # fmt: skip
"""Keys of a DeepSpeed checkpoint that belong to the engine. All other keys are returned to the user as ``client_state``."""


def load_checkpoint(
    engine: Any,
    load_dir: str,
    tag: Any = None,
    *,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    timeout_s: float = 600.0,
    find: Callable[[str, Any], Saved | None] = find_saved,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint into an engine. Collective. Other arguments and the result are those of ``engine.load_checkpoint``.

    Parameters
    ----------
    find
        Finds a checkpoint by folder and tag.

    Raises
    ------
    MismatchError
        A tensor does not fit the engine, or the parameters of a group were saved with different hyperparameters.
    UnsupportedError
        The engine cannot be loaded in place; or the parameters of a flat group were saved with different values, such as steps.

    Whichever of these is raised, no tensor has changed.
    """
    refuse_unsupported(engine)
    if custom_load_fn is not None:
        raise UsageError(
            "custom_load_fn: tensors are loaded in place here, not through a function; rename them in the checkpoint"
        )
    found = find(load_dir, tag)
    if found is None:
        return None, None
    saved = found.catalog
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    # The order matters: state must be allocated before tensors are described; what may fail comes before a tensor changes; the
    # optimizer's values go in once all tensors are loaded; parameters are copied from the master weights last.
    _around(engine, "checkpoint_event_prologue")
    held = EngineState(engine, loading=True)
    kinds = kinds_of_state(saved)
    if with_optimizer:
        held.allocate(kinds)
    tree, numbers = _wanted(saved, held, kinds, with_optimizer=with_optimizer)
    with open_session("read the values of", found.path, timeout_s=timeout_s):
        values, shared = _values(found, numbers)
        if with_optimizer:
            of_owners = held.shared_values(shared)
            of_groups = _hyperparameters(held, values.get(GROUPS_NAME))
    ignore = [GROUPS_NAME, *(n for n, link in saved.links().items() if n not in saved and link.optimizer == OPTIMIZER)]
    found.load(tree, strict=load_module_strict, cast=True, ignore=ignore, timeout_s=timeout_s)
    if with_optimizer:
        _set_shared(of_owners)
        for group, hyperparameters in zip(base_optimizer(engine).param_groups, of_groups, strict=True):
            group.update(hyperparameters)
        _set_optimizer(engine.optimizer, values[ROOT].get(OPTIMIZER) or {})
    held.update_parameters()
    if with_optimizer and hasattr(engine.optimizer, "_link_all_hp_params"):
        engine.optimizer._link_all_hp_params()
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
            engine.optimizer._hp_optimizer_states_linked = False
    if not load_module_only:
        _set_engine(engine, values[ROOT], with_scheduler=load_lr_scheduler_states)
    _around(engine, "checkpoint_event_epilogue")
    client_state = {key: value for key, value in values[ROOT].items() if key not in _ENGINE_STATES and key not in NOT_VALUES}
    return found.path, client_state


def latest_of(load_dir: str, *, timeout_s: float = 600.0) -> str | None:
    """Return the tag in ``latest``, or None without such a file. Collective: rank 0, which writes it, reads it for all ranks."""
    own = None
    if dist.get_rank() == 0:
        with open_storage(load_dir) as storage:
            key = next((key for key in LATEST if storage.size(key) is not None), None)
            own = None if key is None else storage.read(key, limit=4096).decode().strip()
    tag: str | None = values_of_all("read latest of", load_dir, own, timeout_s=timeout_s)[0]
    return tag


def _around(engine: Any, method: str) -> None:
    """Call a method of the optimizer if it exists: ZeRO-3's prologue divides parameters, its epilogue gathers small ones."""
    if engine.optimizer is not None and hasattr(engine.optimizer, method):
        getattr(engine.optimizer, method)()


def _wanted(
    saved: Catalog, held: EngineState, kinds: Kinds, *, with_optimizer: bool
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Return a tree of the tensors to load into, and the FQN and key of each saved number to read, by the number's name.

    A flat group has one number, such as the step, for all of its parameters; the checkpoint has one for each parameter, as a
    tensor or as a value.
    """
    model, state = held.tensors(with_state=with_optimizer)
    model |= held.buffers()
    numbers = {name: (link.fqn, link.key) for name, link in saved.links().items() if name not in saved and link.fqn in state}
    for fqn, entries in state.items():
        for key in [key for key, value in entries.items() if _is_scalar(value)]:
            del entries[key]
            kind, name = kinds.get(fqn, {}).get(key), f"{OPTIMIZER}.state.{fqn}.{key}"
            if kind is not None and name in saved:
                entries[key] = torch.zeros((), dtype=kind[1])  # so that the load compares its shape
                if saved.shape(saved.index(name)) == ():
                    numbers[name] = (fqn, key)
    tree: dict[str, Any] = {"model": model} if model else {}
    state = {fqn: entries for fqn, entries in state.items() if entries}
    if state:
        tree[OPTIMIZER] = {"state": state}
    return tree, numbers


def _is_scalar(value: Any) -> bool:
    return (not isinstance(value, torch.Tensor) and not hasattr(value, "layout")) or getattr(value, "ndim", 1) == 0


def _values(found: Saved, numbers: Mapping[str, tuple[str, str]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read all values: the groups of the optimizer, below `ROOT` the tree of DeepSpeed's and the user's values, and `numbers`.

    Return a dict of the groups and the tree, and the numbers by parameter and key.
    """
    keys = value_keys(found.catalog)
    groups = [name for name in [GROUPS_NAME] if name in found.catalog.value_names]
    read = found.read([*keys, *groups, *numbers])
    tree = unflatten(((path[1:], read[name]) for name, path in keys.items()), index=Index)
    shared: dict[str, dict[str, Any]] = {}
    for name, (fqn, key) in numbers.items():
        shared.setdefault(fqn, {})[key] = read[name]
    return {ROOT: tree, GROUPS_NAME: read.get(GROUPS_NAME)}, shared


_OF_MOE = ("moe", "name")


def _hyperparameters(held: EngineState, saved: Any) -> list[dict[str, Any]]:
    """Return for each group of torch's optimizer the hyperparameters that were saved for its parameters.

    Raise `MismatchError` if the parameters of a group were saved with different hyperparameters, or a parameter was in no group.
    """
    names = held.group_names()
    if not saved:
        return [{} for _ in names]
    # "moe" and "name" of a MoE group describe the ranks of the job that saved, so they are not loaded.
    saved = [{key: value for key, value in group.items() if "moe" not in group or key not in _OF_MOE} for group in saved]
    saved_groups = Groups(saved)
    found = [saved_groups.select(fqns, name=f"group {i} of the optimizer") for i, fqns in enumerate(names)]
    problems = [line for selection in found for line in selection.problems]
    if problems:
        raise MismatchError("\n".join(problems), problems)
    return [{key: value for key, value in selection.hyperparameters.items() if key not in SWITCHES} for selection in found]


def _set_shared(chosen: Iterable[Shared]) -> None:
    """Put the values that `EngineState.shared_values` has chosen into the optimizer's state.

    A tensor stays the same tensor, and a number stays a number.
    """
    for state, key, value in chosen:
        if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
            state[key].copy_(value)
        elif isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        else:
            state[key] = value.item() if isinstance(value, torch.Tensor) and key in state else value


def _set_optimizer(optimizer: Any, values: Mapping[str, Any]) -> None:
    """Restore DeepSpeed's own values of the optimizer, such as its loss scaler.

    A scaler that has other attributes than the saved one stays as it is.
    """
    scaler, saved = getattr(optimizer, "loss_scaler", None), values.get("loss_scaler")
    if scaler is not None and isinstance(saved, Mapping) and vars(scaler).keys() == saved.keys():
        vars(scaler).update({key: value for key, value in saved.items() if key != "dtype"})
    # Optimizers with a `loss_scale_config` keep the state of the loss scale there, under the saved keys.
    config = getattr(optimizer, "loss_scale_config", None)
    for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "dynamic_loss_scale"):
        if config is not None and getattr(config, "use_grad_scaling", True) and key in values:
            setattr(config, key, values[key])
    for key in ("overflow", "clip_grad"):
        if key in values and hasattr(optimizer, key):
            setattr(optimizer, key, values[key])


def _set_engine(engine: Any, values: Mapping[str, Any], *, with_scheduler: bool) -> None:
    """Restore an engine's counters, and the state of its data sampler and its random layer-token dropping.

    With `with_scheduler`, also restore the state of its learning-rate scheduler.
    """
    if with_scheduler and engine.lr_scheduler is not None and values.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(values["lr_scheduler"])
    engine.global_steps = values.get("global_steps", engine.global_steps)
    engine.global_samples = values.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = values.get("skipped_steps", engine.skipped_steps)
    engine.loaded_checkpoint_mp_world_size = values.get("mp_world_size", engine.mp_world_size)
    engine.loaded_checkpoint_dp_world_size = values.get("dp_world_size", engine.dp_world_size)
    if engine.random_ltd_enabled() and getattr(engine, "random_ltd_scheduler", None) is not None and values.get("random_ltd"):
        engine.random_ltd_scheduler.load_state_dict(values["random_ltd"])
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled() and values.get("data_sampler"):
        engine.training_dataloader.data_sampler.load_state_dict(values["data_sampler"])
