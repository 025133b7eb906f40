"""`upload`, the ``checkpoint_upload_fn`` of Ray Train's ``report``, and `path_of`, where to save in the storage of the run.

The workers save together into the storage of the run, so nothing is copied after that: `upload` waits for the commit. Then Ray
registers the checkpoint, and removes older ones by its own rule. A checkpoint outside of that storage is copied there by rank 0.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

from ...plugins import CATALOG_KEY, open_storage
from ...plugins.errors import CheckpointNotFound, UsageError
from ...plugins.packages import needed
from ...plugins.states import saves_to

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}
"""Maps the name of pyarrow's file system to the beginning of this library's paths: ``s3`` paths begin with ``s3://``."""


def path_of(name: str) -> str:
    """Return the path to save a checkpoint to: a folder in the storage of the run. Call it in a worker.

    Parameters
    ----------
    name
        The name of the folder, the same on all workers.
    """
    storage = _train().get_context().get_storage()
    return _path(storage.storage_filesystem, storage.build_checkpoint_path_from_name(name))


def upload(reported: Any, name: str) -> Any:
    """Wait until the checkpoint that this worker reports is committed, for ``report(checkpoint_upload_fn=upload)``.

    Parameters
    ----------
    reported
        A ``Checkpoint`` of Ray at the path of a save of all workers, which may be under way.
    name
        The name of its folder in the storage of the run, if it has to be copied there.

    Returns
    -------
    ray.train.Checkpoint
        The checkpoint in the storage of the run.

    Raises
    ------
    CheckpointError
        The save failed; or there is no committed checkpoint at that path.
    """
    train = _train()
    storage = train.get_context().get_storage()
    path = _path(reported.filesystem, reported.path)
    for save in saves_to(path):
        save.result()
    with open_storage(path) as opened:
        if opened.size(CATALOG_KEY) is None:
            raise CheckpointNotFound(
                f"{path}: this worker reports it, but it holds no committed checkpoint, and no save to it is under way; save on "
                "all workers to one path, such as path_of(name), before report"
            )
    if path.startswith(_path(storage.storage_filesystem, storage.experiment_fs_path) + "/"):
        there = train.Checkpoint(reported.path, reported.filesystem)
        # With checkpoint_upload_mode=ASYNC, Ray deletes the reported folder after the upload unless it is told not to. Here that
        # is the checkpoint itself, so an empty folder takes its place.
        empty = train.Checkpoint.from_directory(tempfile.mkdtemp(prefix="reshard_ckpt"))
        reported.filesystem, reported.path = empty.filesystem, empty.path
        return there
    if train.get_context().get_world_rank() == 0:
        return storage.persist_current_checkpoint(reported, name)
    return train.Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)


def _path(filesystem: Any, path: str) -> str:
    kind = filesystem.type_name
    if kind not in _SCHEMES:
        raise UsageError(f"{path}: lies in a file system {kind!r} of pyarrow; use one of {', '.join(_SCHEMES)}")
    return os.path.abspath(path) if kind == "local" else _SCHEMES[kind] + path


def _train() -> Any:
    with needed("ray", "ray[train]>=2.60"):
        return importlib.import_module("ray.train")
