"""``save`` and ``load`` with the signatures of ``vescale.checkpoint``.

1. A model is passed on as it is: modules with DTensors of torch, or of veScale's own class (`families.vescale.objects`).
2. A ``DistributedOptimizer`` of veScale is passed on as the state of its parameters by name (`families.vescale.values`).
3. `load` opens checkpoints of `save`, folders of ``vescale.checkpoint`` itself, and those of any other format.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

from ...plugins import checkpoint, load_wanted
from .names import NAME
from .values import job_mesh, opened

Path = str | os.PathLike[str]

_last: list[checkpoint.SaveHandle] = []
"""The background save that is under way, if any. veScale's `save` returns nothing, so the next call waits for it here."""


def save(path: Path, checkpoint_state: Mapping[str, Any], async_checkpoint: bool = False) -> None:
    """Save a model and an optimizer, with the arguments of ``vescale.checkpoint.save``.

    Parameters
    ----------
    path
        A folder that all ranks share.
    checkpoint_state
        ``{"model": module or list of modules, "optimizer": optimizer}``, or one of the two. The optimizer is veScale's
        ``DistributedOptimizer`` or ``BasicOptimizer``, or one of torch.
    async_checkpoint
        Return once the tensors are copied to host memory. The next save, and the end of the process, wait for this one; an error
        in the background is raised by the next call.

    Raises
    ------
    UsageError
        `checkpoint_state` has another key.
    CheckpointError
        As in `reshard_ckpt.checkpoint.save`.
    """
    _finish_last()
    state, mesh = opened(checkpoint_state, loading=False), job_mesh(checkpoint_state)
    if async_checkpoint:
        _last.append(checkpoint.async_save(path, state, mesh=mesh))
    else:
        checkpoint.save(path, state, mesh=mesh)


def load(path: Path, checkpoint_state: Mapping[str, Any], broadcast_checkpoint: bool = False) -> checkpoint.LoadReport:
    """Load a model and an optimizer in place, with the arguments of ``vescale.checkpoint.load``.

    Parameters
    ----------
    path
        A checkpoint of `save`, a root that ``vescale.checkpoint`` wrote, or any other checkpoint; from any number of ranks and
        pipeline stages.
    checkpoint_state
        As for `save`. Its modules and optimizers change in place.
    broadcast_checkpoint
        Read bytes that several ranks want from storage once, and send them on.

    Raises
    ------
    UsageError
        `checkpoint_state` has another key.
    CheckpointError
        As in `reshard_ckpt.checkpoint.load`.
    """
    _finish_last()
    return load_wanted(path, opened(checkpoint_state, loading=True), as_saved=[NAME], read_once=broadcast_checkpoint)


def _finish_last() -> None:
    while _last:
        _last.pop().result()


atexit.register(_finish_last)
