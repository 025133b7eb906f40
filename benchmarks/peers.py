"""The other checkpoint libraries, each in the configuration that serves it best on CPU."""

from __future__ import annotations

import os
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from .state import State


class DcpAsync:
    """DCP's asynchronous saves, with one stager (in shared memory) for all of them, and a process group of their own."""

    def __init__(self, *, pinned: bool = False) -> None:
        options = StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=pinned
        )
        self._stager = DefaultStager(options)
        # Its background thread runs collectives: on the job's own group they would meet the training's.
        self._group = dist.new_group(backend="gloo")

    def save(self, state: dict[str, Any], path: Path, mode: str) -> Future[Any]:
        """Save, and return once the state may change; the mode is ``"thread"`` or ``"process"``."""
        response = dcp.async_save(
            state,
            checkpoint_id=str(path),
            async_checkpointer_type=AsyncCheckpointerType(mode),
            async_stager=self._stager,
            process_group=self._group if mode == "thread" else None,
        )
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            return response.upload_completion
        return response

    def close(self) -> None:
        """Let go of the staged copy."""
        self._stager.close()


def torchsnapshot_problem() -> str | None:
    """Explain why torchsnapshot cannot run here; None if it can."""
    try:
        import torchsnapshot  # noqa: F401
    except ImportError as error:
        return f"not installed ({error}); pip install -e '.[bench]'"
    return None


def torchsnapshot_save(state: State, path: Path) -> None:
    """Save each rank's local tensors (it knows no DTensor), made durable as the others' files are."""
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(path), {"state": StateDict(**_local_tensors(state))})
    for folder, _, files in os.walk(path / str(dist.get_rank())):
        for name in files:
            fd = os.open(Path(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    dist.barrier()


def torchsnapshot_load(state: State, path: Path) -> None:
    """Load into the same layout; it supports no other."""
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(path)).restore({"state": StateDict(**_local_tensors(state))})


def _local_tensors(state: State) -> dict[str, Any]:
    return {name: tensor.to_local() for name, tensor in state.tensors.items()}


def torch_checkpointing_note() -> str:
    """Explain why torch_checkpointing is left out: on several ranks it gathers its metadata through tensors on CUDA."""
    try:
        version = metadata.version("torch_checkpointing")
    except metadata.PackageNotFoundError:
        return "torch_checkpointing: not installed; pip install -e '.[bench]'"
    return f"torch_checkpointing {version}: not measured; from more than one rank it gathers its metadata in CUDA tensors"
