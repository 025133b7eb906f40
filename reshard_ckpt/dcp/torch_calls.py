"""Calls that torch's own functions run: those with planners, storages and stagers of the caller's own.

Where the caller names only a folder, torch's function gets this library's storage, and the checkpoint is an ordinary one. A
storage of the caller's own is used as it is, and decides what is written.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

# By name, and not from the package: a trainer may have put this library's calls in there.
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ..errors import UsageError
from .arguments import check_flattens
from .reader import ReshardReader
from .writer import ReshardWriter

try:
    from torch.distributed.checkpoint.staging import DefaultStager
except ImportError:  # older releases, such as 2.6, have none
    DefaultStager = None  # type: ignore[assignment, misc]

_OPTIONS: dict[str, tuple[type[Any], type[Any], type[Any] | None]] = {
    "storage_writer": (StorageWriter, ReshardWriter, FileSystemWriter),
    "storage_reader": (StorageReader, ReshardReader, FileSystemReader),
    "async_stager": (AsyncStager, BlockingAsyncStager, DefaultStager),
}
"""What DCP takes, and of that the types that this library takes: it uses the folder that they name, or their options."""

_DEFAULTS = {"no_dist": False, "use_collectives": True}

_CALLS = {"save": save, "async_save": async_save, "load": load}


def is_custom(option: str, given: object) -> bool:
    """Return whether a storage or stager is the caller's own.

    Raises
    ------
    UsageError
        It is nothing that DCP takes.
    """
    base, *supported = _OPTIONS[option]
    return given is not None and type(given) not in supported and _checked(option, given, base)


def is_custom_planner(planner: object, *, saving: bool) -> bool:
    """Return whether a planner is the caller's own; the options of torch's default planner have no effect here.

    Raises
    ------
    UsageError
        It is nothing that DCP takes; or it leaves nested dicts closed.
    """
    default, base = (DefaultSavePlanner, SavePlanner) if saving else (DefaultLoadPlanner, LoadPlanner)
    check_flattens(planner)
    return planner is not None and type(planner) is not default and _checked("planner", planner, base)


def _checked(option: str, given: object, base: type[Any]) -> bool:
    if not isinstance(given, base):
        raise UsageError(f"{option}={type(given).__name__}: wanted a {base.__name__} of torch.distributed.checkpoint")
    return True


def call_torch(call: str, state_dict: Any, option: str, path: str | os.PathLike[str] | None, **options: Any) -> Any:
    """Call torch's own function.

    Parameters
    ----------
    call
        Its name, here and there.
    option
        What its storage is called; one that only names a folder is replaced by this library's, for the folder `path`.
    options
        All others. Those with the default value are left out, for not every release has each of them.
    """
    store, ours = options.pop(option), _OPTIONS[option][1]
    if is_custom(option, store):
        options["checkpoint_id"] = path
        if not isinstance(store, ours):
            warnings.warn(
                f"{option}={type(store).__name__}: torch's own {call} runs, in that storage's format, without this library's "
                "checksums and commit",
                stacklevel=4,
            )
    else:
        store = ours(path, process_group=options["process_group"]) if ours is ReshardWriter else ours(path)
    given = {name: value for name, value in options.items() if value is not _DEFAULTS.get(name)}
    return _CALLS[call](state_dict, **{option: store}, **given)
