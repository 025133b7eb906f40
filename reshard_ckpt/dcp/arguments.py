"""Parsing and checking the arguments of DCP's calls. `call_torch` handles arguments that only DCP itself can follow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..comm import ALONE, open_session
from ..errors import CheckpointError, UnsupportedError, UsageError
from ..format.files import CATALOG_KEY
from ..formats.dcp.metadata import METADATA_KEY
from ..storage import open_storage, resolved_path

Path = str | os.PathLike[str]


class StorageFolder:
    """Base of `ReshardWriter` and `ReshardReader`: the folder as the caller named it, and its absolute path at that moment."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, resolved_path(path)

    @property
    def checkpoint_id(self) -> Path:
        """The path of the folder, as the caller named it."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell DCP whether this library can open a store at this path."""
        if not isinstance(checkpoint_id, str | os.PathLike):
            return False
        try:
            open_storage(checkpoint_id).close()
        except CheckpointError:
            return False
        return True

    def _go_to(self, checkpoint_id: Path | None) -> None:
        if checkpoint_id:
            self._path, self._at = checkpoint_id, resolved_path(checkpoint_id)


def save_path(checkpoint_id: Path | None, writer: Any) -> Path:
    """Return the path to save to: `checkpoint_id`, or else the folder that the storage writer names.

    Raise `UsageError` if no argument names a path; or the path holds a checkpoint, and the writer must not overwrite it.
    """
    path = load_path(checkpoint_id, writer)
    if getattr(writer, "overwrite", True) is False:
        with open_storage(path) as storage:
            if any(storage.size(key) is not None for key in (CATALOG_KEY, METADATA_KEY)):
                raise UsageError(
                    f"{storage.url}: Checkpoint already exists, and overwrite=False; save to another path, or pass overwrite=True"
                )
    return path


def load_path(checkpoint_id: Path | None, store: Any) -> Path:
    """Return the path to load from: `checkpoint_id`, or else the folder of the storage; raise `UsageError` without either."""
    path = named_path(checkpoint_id, store)
    if not path:
        raise UsageError(f"checkpoint_id={checkpoint_id!r}: pass the folder of the checkpoint")
    return path


def named_path(checkpoint_id: Path | None, store: Any) -> Path | None:
    """Return `checkpoint_id`, or else the folder that the storage `store` names; None without either."""
    return checkpoint_id or getattr(store, "checkpoint_id", None)


def check_collective(use_collectives: bool) -> None:
    """Refuse ``use_collectives=False``: this library writes one catalog, on which all ranks must agree."""
    if not use_collectives:
        raise UnsupportedError(
            "use_collectives=False: ranks agree on one catalog here, over the job's key-value store and without collectives; "
            "leave it out"
        )


def check_flattens(planner: object) -> None:
    """Refuse a planner with ``flatten_state_dict=False``."""
    if not getattr(planner, "flatten_state_dict", True):
        raise UnsupportedError(
            f"planner={type(planner).__name__}(flatten_state_dict=False): nested dicts are always opened here; leave it out"
        )


def group_of(process_group: Any, no_dist: bool) -> Any:
    """Return the process group to use, or `ALONE` with `no_dist`; refuse `no_dist` together with a group."""
    if no_dist and process_group is not None:
        raise UsageError("process_group and no_dist=True: a process on its own has no group; pass one of them")
    return ALONE if no_dist else process_group


@contextmanager
def shared_errors(kind: str, path: Path | None, group: Any) -> Iterator[None]:
    """Raise an error of the ``with`` block, of any class, on all ranks.

    After it, every rank calls `open_session` for the save or load. A rank that failed calls it only to report its error there.
    """
    try:
        yield
    except Exception:
        with open_session(kind, str(path), process_group=group):
            raise
