"""A storage writer with which `torch.distributed.checkpoint.save` saves as `checkpoint.save` does.

DCP calls these methods in this order. Only the names in its plans matter here:

1. `prepare_local_plan` notes the names that this rank's planner plans to write.
2. `prepare_global_plan`, on the coordinator, counts the ranks that take part.
3. `write_data` is collective: it saves the planner's state dict from all these ranks. They agree on the part that each of them
   writes, write it, and commit.
4. `finish`, on the coordinator, completes DCP's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..checkpoint.saving import save
from ..comm import ALONE
from ..core.catalog.names import GROUPS, STATE
from ..core.report import summarize
from ..core.trees import Path, map_tree, name_of, unflatten
from ..errors import CheckpointError, UnsupportedError, UsageError
from ..format.values import encode_value
from ..formats.dcp.values import torch_saved
from ..state.entries import Opaque
from ..state.optimizer_dicts import are_named_groups
from ..state.tensors import is_tensor_like
from .arguments import Path as Folder
from .arguments import StorageFolder, check_collective, check_flattens, shared_errors
from .state_dicts import saving_form
from .torch_errors import rank_prefix


class ReshardWriter(StorageFolder, StorageWriter):
    """Writes checkpoints of this library for `torch.distributed.checkpoint.save` and `async_save`.

    Their planner may leave out and rename parts of the state. A planner that changes tensors or values on their way to the
    storage is refused by name.

    Parameters
    ----------
    path
        The folder of the checkpoint, which all ranks share; ``checkpoint_id=`` of a call takes its place.
    process_group
        The ranks that save together, if ``process_group=`` of the call names fewer than all.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed.checkpoint as dcp
    >>> folder = tempfile.mkdtemp()
    >>> metadata = dcp.save({"w": torch.arange(4)}, storage_writer=ReshardWriter(folder))
    >>> from reshard_ckpt import checkpoint
    >>> checkpoint.read(folder)
    {'w': tensor([0, 1, 2, 3])}
    """

    def __init__(self, path: Folder, *, process_group: Any = None) -> None:
        StorageFolder.__init__(self, path)
        self._process_group = process_group
        self._planned: frozenset[str] | None = None
        self._save_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An async save in another process pickles the writer. There, the ranks that save are the default group.
        return {**vars(self), "_process_group": None}

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        self._go_to(checkpoint_id)
        self._planned = self._save_id = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        check_collective(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # A planner that keeps its plans sends an unusable one for "as before".
        self._planned = frozenset(item.index.fqn for item in plan.items) if getattr(plan, "usable", True) else None
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # DCP's coordinator sends the number of ranks that save along with each rank's plan.
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        group = self._group(plan.storage_data)
        with shared_errors("save", self._at, group):
            form = _form(planner, self._planned)
        try:
            self._save_id = save(self._at, form, process_group=group).save_id
        except CheckpointError as error:
            if not rank_prefix(error):  # the other rank raises its error itself, so that DCP names only that rank
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_meta = self.storage_meta()

    def _group(self, num_ranks: object) -> Any:
        """Return the process group of the ranks that save. Refuse a group whose size is not the number of ranks in DCP's save."""
        if not isinstance(num_ranks, int):
            raise UnsupportedError("the plan is not one that this writer prepared; use the planner with this writer alone")
        if num_ranks == 1:
            return ALONE
        if dist.get_world_size(self._process_group) != num_ranks:
            raise UsageError(
                f"torch's save is called by {num_ranks} ranks, and ReshardWriter knows "
                f"{dist.get_world_size(self._process_group)}; pass process_group= of the call to ReshardWriter too"
            )
        return self._process_group


def _form(planner: SavePlanner, planned: frozenset[str] | None) -> dict[str, Any]:
    """Return the state to save: the planned entries of the planner's state dict, nested again."""
    _check_planner(planner)
    assert isinstance(planner, DefaultSavePlanner)
    state, paths = planner.state_dict, getattr(planner, "mappings", {})
    if type(planner).create_local_plan is not DefaultSavePlanner.create_local_plan:
        if planned is None:
            raise UnsupportedError(
                f"planner={type(planner).__name__}: has its own create_local_plan, and keeps plans; leave out enable_plan_caching"
            )
        if unknown := [f"{name}: planned, but not in the planner's state dict" for name in planned if name not in state]:
            raise UnsupportedError(summarize(unknown, "rename what is in the state dict in set_up_planner"))
        state = {name: value for name, value in state.items() if name in planned}
    leaves = [(paths.get(name, (name,)), value) for name, value in state.items()]
    return saving_form(map_tree(_with_state, unflatten((path, _saved_as(path, value)) for path, value in leaves)))


def _check_planner(planner: SavePlanner) -> None:
    """Refuse a planner with a method that changes the tensors and values of its state dict on their way to the storage."""
    kind, default = type(planner), DefaultSavePlanner
    for method in ("resolve_data", "lookup_object", "transform_object"):
        if getattr(kind, method, None) is not getattr(default, method):
            raise UnsupportedError(
                f"planner={kind.__name__}: its {method} changes what is saved, and ReshardWriter saves the planner's state dict "
                "itself; change the state dict in set_up_planner, or save with torch's FileSystemWriter"
            )
    check_flattens(planner)


def _saved_as(path: Path, value: Any) -> Any:
    """Return a tensor or plain value as it is, and any other object pickled, as DCP would store it."""
    # A list is saved as one value, and cannot have a part that only DCP decodes.
    if is_tensor_like(value) or any(type(key) is int for key in path):
        return value
    try:
        encode_value(value, name_of(path))
    except UnsupportedError:
        return Opaque(torch_saved(value))
    return value


def _with_state(path: Path, node: Any) -> Any:
    """Add an empty state to the state dict of an optimizer that has only groups: DCP leaves empty dicts out."""
    if isinstance(node, Mapping) and STATE not in node and are_named_groups(node.get(GROUPS)):
        return {STATE: {}, **node}
    return node
