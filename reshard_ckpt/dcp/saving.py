"""`save` and `async_save`: the calls of `torch.distributed.checkpoint`, by the engine of `checkpoint.save`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoint.saving import begin_save
from ..checkpoint.saving import save as save_checkpoint
from ..core.report import SaveReport
from ..engine.saving.handle import RunningSave
from ..engine.saving.options import SaveOptions
from ..errors import CheckpointError
from ..storage import resolved_path
from .arguments import Path, check_collective, group_of, named_path, save_path, shared_errors
from .metadata import SavedMetadata
from .state_dicts import call_state_dicts, saving_form
from .torch_calls import call_torch, is_custom, is_custom_planner
from .torch_errors import as_torch_error, torch_compatible

try:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
except ImportError:  # torch 2.6 has neither class

    class AsyncCheckpointerType(Enum):  # type: ignore[no-redef]
        """A thread or a process that saves in the background."""

        THREAD = "thread"
        PROCESS = "process"

    @dataclass
    class AsyncSaveResponse:  # type: ignore[no-redef]
        """The futures of an async save: one is done once the state may change, the other once the checkpoint is committed."""

        staging_completion: Future[None]
        upload_completion: Future[None]


__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "SaveFuture", "async_save", "save"]


@torch_compatible("storage_writer")
def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Path | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict, from all ranks together, as `torch.distributed.checkpoint.save` is called.

    Parameters
    ----------
    state_dict
        Tensors, DTensors, plain values and dicts of them; objects with ``state_dict`` and ``load_state_dict``.
    checkpoint_id
        The folder, which all ranks share.
    storage_writer
        A `ReshardWriter` or `FileSystemWriter`, for the folder that it names. With any other, torch's own function runs, and that
        writer writes its own format.
    planner
        None, or a plain `DefaultSavePlanner`. With any other, torch's own function runs, with a `ReshardWriter`.
    process_group
        The ranks that save together; all, by default.
    no_dist
        This process saves on its own.
    use_collectives
        True.

    Returns
    -------
    torch.distributed.checkpoint.metadata.Metadata
        The metadata of the checkpoint, on every rank. They are read from the checkpoint when a field is first used.

    Raises
    ------
    UnsupportedError
        Only DCP can follow an argument, or a part of the state cannot be saved.
    CheckpointError
        As `checkpoint.save`. All of these are torch's `CheckpointException` too.
    """
    if is_custom("storage_writer", storage_writer) or is_custom_planner(planner, saving=True):
        given = {"planner": planner, "process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives}
        done: Metadata = call_torch("save", state_dict, checkpoint_id, storage_writer, **given)
        return done
    group = group_of(process_group, no_dist)
    path, form = _path_and_form(state_dict, checkpoint_id, storage_writer, group, use_collectives)
    return SavedMetadata.of(path, resolved_path(path), save_checkpoint(path, form, process_group=group).save_id)


@torch_compatible(None)
def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Path | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save a state dict while training goes on, as `torch.distributed.checkpoint.async_save` is called.

    Parameters
    ----------
    state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, use_collectives
        As for `save`.
    async_checkpointer_type
        ``THREAD`` or ``PROCESS``: threads of this process save in either case; the guide "Coming from DCP" explains why.
    async_stager
        None: the state may change once this returns. A `DefaultStager` with ``use_async_staging``: it may change once
        ``staging_completion`` is done. With one of the caller's own, torch's own function runs.

    Returns
    -------
    concurrent.futures.Future or AsyncSaveResponse
        The future of the commit, whose result is that of `save`; with an asynchronous stager, the futures of staging and of the
        commit.
    """
    kind = AsyncCheckpointerType(getattr(async_checkpointer_type, "value", async_checkpointer_type))
    own = [is_custom("storage_writer", storage_writer), is_custom("async_stager", async_stager)]
    if any(own) or is_custom_planner(planner, saving=True):
        given = {"planner": planner, "process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives}
        given |= {"async_stager": async_stager, "async_checkpointer_type": None if kind is AsyncCheckpointerType.THREAD else kind}
        response: Future[Metadata] = call_torch("async_save", state_dict, checkpoint_id, storage_writer, **given)
        return response
    group = group_of(process_group, no_dist)
    path, form = _path_and_form(state_dict, checkpoint_id, storage_writer, group, use_collectives)
    # Private: torch has no public way to ask for the options of a DefaultStager. Without it, this stages before it returns.
    later = getattr(getattr(async_stager, "_config", None), "use_async_staging", False)
    # With an asynchronous stager the caller changes nothing before `staging_completion` is done.
    chosen = SaveOptions(process_group=group, staging="lazy", hold="caller") if later else SaveOptions(process_group=group)
    save = begin_save(path, form, chosen).running
    upload = _upload(save, path)
    # torch types the result of the second as None, but returns the metadata too.
    return AsyncSaveResponse(staging_completion=save.staged, upload_completion=upload) if later else upload  # type: ignore[arg-type]


def _path_and_form(
    state_dict: Mapping[str, Any], checkpoint_id: Path | None, writer: Any, group: Any, use_collectives: bool
) -> tuple[Path, dict[str, Any]]:
    """Return the path to save to, and the state for `checkpoint.save`. If this fails on one rank, all ranks raise its error."""
    with shared_errors("save", named_path(checkpoint_id, writer), group):
        check_collective(use_collectives)
        path = save_path(checkpoint_id, writer)
        return path, saving_form(call_state_dicts(state_dict, in_order=False))


class SaveFuture(Future[Metadata]):
    """The future that `async_save` returns. If nobody asks for its result or exception, the next save raises the error."""

    def __init__(self, save: RunningSave) -> None:
        super().__init__()
        self._save = save
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Metadata:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._save.take_error()
        return error


def _upload(save: RunningSave, path: Path) -> SaveFuture:
    upload = SaveFuture(save)
    at = resolved_path(path)  # now, because the process may change its working folder

    def done(committed: Future[SaveReport]) -> None:
        error = committed.exception()
        if error is None:
            upload.set_result(SavedMetadata.of(path, at, save.save_id))
        else:
            upload.set_exception(as_torch_error(error) if isinstance(error, CheckpointError) else error)

    save.committed.add_done_callback(done)
    return upload
