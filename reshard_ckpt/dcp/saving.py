"""How does a trainer that calls DCP save? With the same calls, by `checkpoint.save` and its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoint.saving import begin_save
from ..checkpoint.saving import save as save_checkpoint
from ..comm import open_session
from ..core.report import SaveReport
from ..engine.saving.handle import RunningSave
from ..engine.saving.options import SaveOptions
from ..errors import CheckpointError
from ..storage import resolved_path
from .arguments import Path, check_collective, group_of, named_path, save_path, stages_later
from .by_torch import by_torch, is_dcps_alone, is_own_planner
from .calls import called_as_torch
from .described import SavedMetadata
from .forms import opened, saving_form
from .raised import as_torch_raises

try:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
except ImportError:  # older releases, such as 2.6, have none

    class AsyncCheckpointerType(Enum):  # type: ignore[no-redef]
        """What saves in the background."""

        THREAD = "thread"
        PROCESS = "process"

    @dataclass
    class AsyncSaveResponse:  # type: ignore[no-redef]
        """The futures of an async save: the state may change, and the checkpoint is committed."""

        staging_completion: Future[None]
        upload_completion: Future[None]


__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "SaveFuture", "async_save", "raised_on_all", "save"]

Made = TypeVar("Made")


@called_as_torch("storage_writer")
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
        writer writes what it does.
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
        What was saved, on every rank. It is read from the checkpoint when it is first looked at.

    Raises
    ------
    UnsupportedError
        An argument asks for what is DCP's alone, or the state holds what cannot be saved.
    CheckpointError
        As `checkpoint.save`. All of these are torch's `CheckpointException` too.
    """
    if is_dcps_alone("storage_writer", storage_writer) or is_own_planner(planner, saving=True):
        options = {"planner": planner, "process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives}
        path = named_path(checkpoint_id, storage_writer)
        done: Metadata = by_torch("save", state_dict, "storage_writer", path, storage_writer=storage_writer, **options)
        return done
    group = group_of(process_group, no_dist)

    def make() -> tuple[Path, dict[str, Any]]:
        check_collective(use_collectives)
        path = save_path(checkpoint_id, storage_writer)
        return path, saving_form(opened(state_dict, in_order=False))

    path, form = raised_on_all("save", named_path(checkpoint_id, storage_writer), group, make)
    return SavedMetadata.of(path, resolved_path(path), save_checkpoint(path, form, process_group=group).save_id)


@called_as_torch(None)
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
        ``THREAD`` or ``PROCESS``: threads of this process save in either case; the guide "Coming from DCP" says why.
    async_stager
        None: the state may change once this returns. A `DefaultStager` with ``use_async_staging``: it may change once
        ``staging_completion`` is done. With one of the caller's own, torch's own function runs.

    Returns
    -------
    concurrent.futures.Future or AsyncSaveResponse
        The future of the commit, whose result is as what `save` returns; or with an asynchronous stager those of staging and
        commit.
    """
    kind = AsyncCheckpointerType(getattr(async_checkpointer_type, "value", async_checkpointer_type))
    own = [is_dcps_alone("storage_writer", storage_writer), is_dcps_alone("async_stager", async_stager)]
    if any(own) or is_own_planner(planner, saving=True):
        options = {"planner": planner, "process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives}
        options |= {
            "async_stager": async_stager,
            "async_checkpointer_type": None if kind is AsyncCheckpointerType.THREAD else kind,
        }
        path = named_path(checkpoint_id, storage_writer)
        response: Future[Metadata] = by_torch(
            "async_save", state_dict, "storage_writer", path, storage_writer=storage_writer, **options
        )
        return response
    group = group_of(process_group, no_dist)

    def make() -> tuple[Path, dict[str, Any], bool]:
        check_collective(use_collectives)
        path = save_path(checkpoint_id, storage_writer)
        return path, saving_form(opened(state_dict, in_order=False)), stages_later(async_stager)

    path, form, later = raised_on_all("save", named_path(checkpoint_id, storage_writer), group, make)
    save = begin_save(path, form, SaveOptions(process_group=group, waits_for_staging=later)).running
    upload = _upload(save, path)
    # Torch says that the result of the second is None, and makes it the metadata.
    return AsyncSaveResponse(staging_completion=save.staged, upload_completion=upload) if later else upload  # type: ignore[arg-type]


class SaveFuture(Future[Metadata]):
    """The future of a save; who asks it has been told of an error, which is otherwise raised by the next save."""

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
    at = resolved_path(path)  # now: the process may change its working folder

    def done(committed: Future[SaveReport]) -> None:
        error = committed.exception()
        if error is None:
            upload.set_result(SavedMetadata.of(path, at, save.save_id))
        else:
            upload.set_exception(as_torch_raises(error) if isinstance(error, CheckpointError) else error)

    save.committed.add_done_callback(done)
    return upload


def raised_on_all(kind: str, path: Path | None, group: Any, make: Callable[[], Made]) -> Made:
    """What `make` returns; an error in it is raised on all ranks, which would otherwise wait for this one in their session."""
    try:
        return make()
    except Exception:
        with open_session(kind, str(path), process_group=group):
            raise
