"""Calls of torch's own functions, for planners, storages and stagers of the caller's own.

If the caller names only a folder, torch's function gets this library's storage, and the checkpoint is an ordinary one. A storage
of the caller's own is used as it is, and writes its own format.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

# From their modules: a trainer may have replaced the calls in the package by this library's.
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ..errors import UnsupportedError, UsageError
from .arguments import Path, check_flattens, group_of, named_path
from .reader import ReshardReader
from .writer import ReshardWriter

try:
    from torch.distributed.checkpoint.staging import DefaultStager
except ImportError:  # torch 2.6 has no DefaultStager
    DefaultStager = None  # type: ignore[assignment, misc]

_OPTIONS: dict[str, tuple[type[Any], type[Any], type[Any] | None]] = {
    "storage_writer": (StorageWriter, ReshardWriter, FileSystemWriter),
    "storage_reader": (StorageReader, ReshardReader, FileSystemReader),
    "async_stager": (AsyncStager, BlockingAsyncStager, DefaultStager),
}
"""For each option of DCP's calls: the base class that its value must have, and two classes that only name a folder or hold
options. For these two classes this library does the work; for any other, torch's own function runs."""

_DEFAULTS = {"no_dist": False, "use_collectives": True}

_CALLS = {"save": save, "async_save": async_save, "load": load}


def is_custom(option: str, given: object) -> bool:
    """Return whether a storage or stager is the caller's own. Raise `UsageError` if its class is not one that DCP takes."""
    base, *supported = _OPTIONS[option]
    return given is not None and type(given) not in supported and _checked(option, given, base)


def is_custom_planner(planner: object, *, saving: bool) -> bool:
    """Return whether a planner is the caller's own. Options of torch's default planner are ignored.

    Raise `UsageError` if its class is not one that DCP takes; or it has ``flatten_state_dict=False``.
    """
    default, base = (DefaultSavePlanner, SavePlanner) if saving else (DefaultLoadPlanner, LoadPlanner)
    check_flattens(planner)
    return planner is not None and type(planner) is not default and _checked("planner", planner, base)


def _checked(option: str, given: object, base: type[Any]) -> bool:
    if not isinstance(given, base):
        raise UsageError(f"{option}={type(given).__name__}: wanted a {base.__name__} of torch.distributed.checkpoint")
    return True


def call_torch(call: str, state_dict: Any, checkpoint_id: Path | None, store: Any, **options: Any) -> Any:
    """Call torch's own `save`, `async_save` or `load`.

    Raise `UnsupportedError` if this release of torch lacks an argument that was given.

    Parameters
    ----------
    call
        The name of the function.
    store
        Its storage argument. A storage that only names a folder is replaced by this library's.
    options
        All other arguments. Those with the default value are left out: not every release of torch has each of them.
    """
    option, path = "storage_reader" if call == "load" else "storage_writer", named_path(checkpoint_id, store)
    ours = _OPTIONS[option][1]
    if is_custom(option, store):
        options["checkpoint_id"] = path
        if not isinstance(store, ours):
            warnings.warn(
                f"{option}={type(store).__name__}: torch's own {call} runs, in that storage's format, without this library's "
                "checksums and commit",
                stacklevel=4,
            )
    else:
        store = ours(path, process_group=group_of(options["process_group"], options["no_dist"]))
    given = {name: value for name, value in options.items() if value is not _DEFAULTS.get(name)}
    lacking = given.keys() - inspect.signature(_CALLS[call]).parameters.keys()
    if lacking == {"no_dist"} and not dist.is_initialized():  # without a group, each release works on its own
        del given["no_dist"]
    elif lacking:
        raise UnsupportedError(
            f"{', '.join(sorted(lacking))}: {call} of torch {torch.__version__} has no such argument, and it runs here because "
            "the planner, the storage or the stager is your own; leave that out, or use a newer torch"
        )
    return _CALLS[call](state_dict, **{option: store}, **given)
