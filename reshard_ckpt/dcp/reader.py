"""A storage reader for `torch.distributed.checkpoint.load` that answers DCP's plans from a catalog.

1. `read_metadata` shows each tensor to DCP as one chunk, so DCP's plan has one read for each part that a rank wants.
2. `read_data` loads all of these at once, as `checkpoint.load` does: it reads only the wanted bytes, and verifies every block.
3. The planner gets values as it expects them: encoded by ``torch.save``, under the names that DCP gives to their parts.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..checkpoint.casting import dequantizer_of
from ..core.catalog.model import Catalog
from ..core.catalog.specs import TensorSpec, box_piece
from ..core.report import summarize
from ..engine.loading.load import LoadOptions, fetch, refuse_conflicts, resolve
from ..engine.loading.scales import multiply, parts_of_load
from ..engine.loading.ties import conflicts
from ..errors import MismatchError
from ..format.columns import dtype_code
from ..formats.source import Source, open_source
from ..state.layouts import group_of
from .arguments import Path, StorageFolder
from .metadata import FORMATS_AS_SAVED, DcpValue, all_values, metadata_of


class ReshardReader(StorageFolder, StorageReader):
    """Reads checkpoints for `torch.distributed.checkpoint.load`: all that `checkpoint.load` opens, also those of DCP.

    Parameters
    ----------
    path
        The folder of the checkpoint; ``checkpoint_id=`` of a call takes its place.
    verify
        Verify the checksum of every block that is read, if the checkpoint has checksums.
    process_group
        The ranks that load together, if ``process_group=`` of the call names fewer than all. They decide which of the values of a
        `PerRank` this rank gets.

    Examples
    --------
    >>> import tempfile, torch.distributed.checkpoint as dcp
    >>> from reshard_ckpt import checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> _ = checkpoint.save(folder, {"w": torch.arange(4)})
    >>> state = {"w": torch.zeros(4, dtype=torch.int64)}
    >>> dcp.load(state, storage_reader=ReshardReader(folder))
    >>> state
    {'w': tensor([0, 1, 2, 3])}
    """

    def __init__(self, path: Path, *, verify: bool = True, process_group: Any = None) -> None:
        StorageFolder.__init__(self, path)
        self._verify = verify
        self._process_group = process_group
        self._held = ExitStack()
        self._source: Source | None = None
        self._values: dict[str, DcpValue] = {}

    def reset(self, checkpoint_id: Path | None = None) -> None:
        self._go_to(checkpoint_id)
        self._close()

    def _close(self) -> None:
        self._source, self._values = None, {}
        self._held.close()

    # Not named `kwargs`: after an error, torch would call this again with a rank, and go on without collectives.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        self._close()
        # It stays open until the data are read, so that nobody removes them meanwhile.
        source = self._source = self._held.enter_context(open_source(self._at, FORMATS_AS_SAVED))
        self._values = dict(all_values(source, self._verify, group_of(self._process_group)))
        return metadata_of(source.catalog, self._values, self._path)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._source is None:  # another reader has read the metadata, or this one has read data since
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._read_tensors([item for item in plan.items if item.type == LoadItemType.TENSOR], planner)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn].encoded()))
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        assert self._source is not None
        storage, saved = self._source.storage, self._source.catalog
        targets = [planner.resolve_tensor(item).detach() for item in items]
        wanted = [(_target_spec(saved, item, target), target) for item, target in zip(items, targets, strict=True)]
        # cast: DCP converts to the dtype of the tensor that it loads into. A quantized weight without its scale would be wrong.
        dequantizer = dequantizer_of(self._source, verify=self._verify)
        options = LoadOptions(verify=self._verify, cast=True, quantized=dequantizer.quantized)
        resolved = resolve(saved, wanted, options, window_bytes=storage.hints.read_bytes)
        problems = [line for lines in resolved.problems.values() for line in lines]
        if problems:
            raise MismatchError(summarize(problems, "load what the checkpoint holds"), problems)
        refuse_conflicts(conflicts(storage, saved, resolved.ties, verify=options.verify, quantized=options.quantized))
        scaled = dequantizer.read(parts_of_load(saved, resolved, dequantizer.quantized))
        fetch(storage, saved, resolved, options)
        multiply(scaled)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)


def _target_spec(saved: Catalog, item: ReadItem, target: torch.Tensor) -> TensorSpec:
    """Describe the box that one read item of DCP's plan wants; its elements go to `target`, which the planner has allocated."""
    name, lengths = item.storage_index.fqn, tuple(item.lengths)
    if tuple(target.shape) != lengths:
        problem = f"{name}: the plan reads {lengths}, into a tensor of {tuple(target.shape)}; correct the planner"
        raise MismatchError(problem, [problem])
    chunk = item.storage_index.offset or (0,) * len(lengths)
    offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
    pieces = (box_piece(offsets, lengths, 0, tuple(target.stride())),) if target.numel() else ()
    return TensorSpec(name, dtype_code(target.dtype, name), saved.shape(saved.index(name)), pieces)
