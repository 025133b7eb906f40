"""Which arguments of DCP mean something here? What they say is taken; what cannot be followed is refused by name."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ..comm import ALONE
from ..errors import UnsupportedError, UsageError
from ..format.keys import CATALOG_KEY
from ..storage import open_storage
from .reader import ReshardReader
from .writer import ReshardWriter

try:
    from torch.distributed.checkpoint.staging import DefaultStager
except ImportError:  # older releases, such as 2.6, have none
    DefaultStager = None  # type: ignore[assignment, misc]

Path = str | os.PathLike[str]

_INSTEAD = "call torch.distributed.checkpoint.{call} for that, where ReshardWriter and ReshardReader read and write this format"


def save_path(checkpoint_id: Path | None, writer: Any) -> Path:
    """Where to save.

    Raises
    ------
    UsageError
        Nothing says where; or the writer is not to overwrite what is there.
    UnsupportedError
        The writer is another one than those that only name a folder.
    """
    path = _path("save", checkpoint_id, writer, (ReshardWriter, FileSystemWriter), "storage_writer")
    if getattr(writer, "overwrite", True) is False:
        with open_storage(path) as storage:
            if storage.size(CATALOG_KEY) is not None:
                raise UsageError(f"{storage.url}: a checkpoint is there, and overwrite=False; save to another path")
    return path


def load_path(checkpoint_id: Path | None, reader: Any) -> Path:
    """Where to load from; errors as for `save_path`."""
    return _path("load", checkpoint_id, reader, (ReshardReader, FileSystemReader), "storage_reader")


def _path(call: str, checkpoint_id: Path | None, store: Any, known: tuple[type, ...], option: str) -> Path:
    if store is not None and type(store) not in known:
        names = " and ".join(kind.__name__ for kind in known)
        raise UnsupportedError(
            f"{option}={type(store).__name__}: only {names} are taken, for the folder that they name; "
            f"{_INSTEAD.format(call=call)}"
        )
    path = named_path(checkpoint_id, store)
    if not path:
        raise UsageError(f"checkpoint_id={checkpoint_id!r}: pass the folder of the checkpoint")
    return path


def named_path(checkpoint_id: Path | None, store: Any) -> Path | None:
    """The folder that the arguments name, if any."""
    return checkpoint_id or getattr(store, "checkpoint_id", None)


def check_save_planner(planner: Any) -> None:
    """Take a default planner, whose options are about a planning that does not take place, and refuse any other."""
    if planner is not None:
        _check_default(planner, DefaultSavePlanner, "save")


def is_partial(planner: Any) -> bool:
    """Whether a default planner allows what is missing in the checkpoint; any other is refused."""
    if planner is None:
        return False
    _check_default(planner, DefaultLoadPlanner, "load")
    return bool(planner.allow_partial_load)


def _check_default(planner: Any, default: type[Any], call: str) -> None:
    given = f"planner={type(planner).__name__}"
    if type(planner) is not default:
        raise UnsupportedError(f"{given}: nothing of DCP's planning runs here; {_INSTEAD.format(call=call)}")
    if not planner.flatten_state_dict:
        raise UnsupportedError(f"{given}(flatten_state_dict=False): nested dicts are always opened here; leave it out")


def is_async_stager(stager: Any) -> bool:
    """Whether a stager asks for staging in the background; one that does something of its own is refused."""
    if stager is None or type(stager) is BlockingAsyncStager:
        return False
    if DefaultStager is None or type(stager) is not DefaultStager:
        raise UnsupportedError(
            f"async_stager={type(stager).__name__}: staging is the library's own; pass None, or torch's DefaultStager"
        )
    # Private: torch does not say what a DefaultStager was made with. Without it, staging is done before async_save returns.
    return bool(getattr(getattr(stager, "_config", None), "use_async_staging", False))


def check_collective(use_collectives: bool) -> None:
    """Refuse a save in which ranks do not agree."""
    if not use_collectives:
        raise UnsupportedError(
            "use_collectives=False: ranks agree on one catalog here, over the job's key-value store and without collectives; "
            "leave it out"
        )


def group_of(process_group: Any, no_dist: bool) -> Any:
    """The ranks that take part."""
    if no_dist and process_group is not None:
        raise UsageError("process_group and no_dist=True: a process on its own has no group; pass one of them")
    return ALONE if no_dist else process_group
