"""A storage writer for `torch.distributed.checkpoint.save` that writes shard files, and commits them in `finish`.

1. On the coordinator, `prepare_global_plan` looks at what the path holds, and makes the id of the save.
2. Every rank's `write_data` writes the items of its plan as one shard file. Objects that are plain values are stored as such;
   of all others the planner's bytes are stored, undecoded.
3. `finish` commits as every save does: the shards must tile each tensor, the coordinator must see each file, and the catalog
   appears at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..core.catalog.specs import blob_name, box_piece
from ..core.geometry.dtypes import ITEM_BYTES
from ..engine.common.recorder import Recorder
from ..engine.common.tensor_bytes import LocalPiece, chunks
from ..engine.saving.commit import look
from ..engine.saving.messages import Receipt
from ..engine.saving.options import PreviousCheckpoint
from ..engine.saving.write import WRITE_BYTES, FileLayout, lay_out_members, write_files
from ..errors import LayoutError, UnsupportedError
from ..format.keys import new_save_id
from ..format.shard_file import Member, make_member, opaque_name
from ..format.torch_dtypes import dtype_code
from ..format.values import encode_value
from ..storage import open_storage
from .arguments import Path, StorageFolder, check_collective
from .committing import Stored, commit_written
from .placements import rank_metadata

MAX_SENT_BYTES = 1 << 20
"""A value up to this size goes to the coordinator, which puts it into the catalog; a larger one is written by its rank."""

MAX_SAVE_IDS = 64
"""Ids of saves that are remembered; more than a job has planners that keep plans."""


@dataclass(frozen=True, slots=True)
class SaveTicket:
    """What the coordinator attaches to a rank's plan: the id of the save, and the rank's number."""

    save_id: str
    rank: int


class _UsedSaveIds:
    """How often this process was given each id: a planner that keeps its plans gives an earlier save's id again."""

    def __init__(self) -> None:
        self._lock, self._used = threading.Lock(), OrderedDict[str, int]()

    def take(self, save_id: str) -> str:
        """Return an id that was not used before: the given one, or one derived from it, the same on each rank."""
        with self._lock:
            times = self._used[save_id] = self._used.pop(save_id, -1) + 1
            if len(self._used) > MAX_SAVE_IDS:
                self._used.popitem(last=False)
        if not times:
            return save_id
        return f"{save_id[:-8]}{hashlib.blake2s(f'{save_id} {times}'.encode(), digest_size=4).hexdigest()}"


_USED_SAVE_IDS = _UsedSaveIds()


class ReshardWriter(StorageFolder, StorageWriter):
    """Writes checkpoints of this library for `torch.distributed.checkpoint.save` and `async_save`.

    What it writes is an ordinary checkpoint: `checkpoint.load` and all tools open it, and it exists from the moment at which it
    is whole. DCP's plans lack how tensors lie on the mesh of the job; it is recorded if the planner holds the state that it
    was given, as torch's own does.

    Parameters
    ----------
    path
        The folder of the checkpoint, which all ranks share; ``checkpoint_id=`` of a call takes its place.

    Examples
    --------
    >>> import tempfile, torch.distributed.checkpoint as dcp
    >>> folder = tempfile.mkdtemp()
    >>> metadata = dcp.save({"w": torch.arange(4)}, storage_writer=ReshardWriter(folder))
    >>> from reshard_ckpt import checkpoint
    >>> checkpoint.read(folder)
    {'w': tensor([0, 1, 2, 3])}
    """

    def __init__(self, path: Path) -> None:
        StorageFolder.__init__(self, path)
        self._save_id: str | None = None
        self._before: PreviousCheckpoint | None = None

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        self._go_to(checkpoint_id)
        self._save_id = self._before = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        check_collective(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save_id = self._save_id = new_save_id()
        with open_storage(self._at) as storage:
            self._before = look(storage)
        return [dataclasses.replace(plan, storage_data=SaveTicket(save_id, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ticket = plan.storage_data
        if not isinstance(ticket, SaveTicket):
            raise UnsupportedError("the plan is not one that this writer prepared; use the planner with this writer alone")
        job = _Job(plan.items, planner)
        with open_storage(self._at) as storage:
            save_id = _USED_SAVE_IDS.take(ticket.save_id)
            layouts = lay_out_members([part.member for part in job.parts], save_id, ticket.rank)
            receipt = write_files(storage, layouts, job.chunks_of, np.zeros(0, np.uint64), Recorder())
        future: Future[list[WriteResult]] = Future()
        future.set_result([*job.results(receipt), *_placement_results(planner, ticket.rank)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save_id = self._save_id or new_save_id()
        with open_storage(self._at) as storage:
            commit_written(storage, metadata, results, save_id=save_id, before=self._before)
        metadata.storage_meta = self.storage_meta()


def _placement_results(planner: SavePlanner, rank: int) -> list[WriteResult]:
    """Wrap this rank's metadata for the coordinator as one more result."""
    found = rank_metadata(planner, rank)
    return [] if found is None else [WriteResult(MetadataIndex(""), 0, found)]


@dataclass(frozen=True, slots=True)
class _Part:
    """One member of the file: a box of a tensor, which the planner is asked for when it is written, or bytes."""

    item: WriteItem
    member: Member
    stored: Stored
    data: bytes | None = None


class _Job:
    """What one rank writes, in the order of its files, and the small values that it sends to the coordinator."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._planner = planner
        self._sent: list[tuple[WriteItem, Stored]] = []
        parts: list[_Part] = []
        for item in items:
            if item.type != WriteItemType.BYTE_IO:
                parts.append(_tensor_part(item))
            elif (part := self._value_part(item)) is not None:
                parts.append(part)
        # Larger elements first, so that every member is aligned.
        self.parts = sorted(parts, key=lambda part: -ITEM_BYTES[part.member.dtype])

    def _value_part(self, item: WriteItem) -> _Part | None:
        """Return the bytes of a large or opaque value; a small one is sent to the coordinator, and None returned."""
        name = item.index.fqn
        data, is_opaque = _encode(item, self._planner)
        if not is_opaque and len(data) <= MAX_SENT_BYTES:
            self._sent.append((item, Stored(name, value=data)))
            return None
        blob = opaque_name(name) if is_opaque else blob_name(name, None)
        size = (len(data),)
        stored = Stored(name, "U8", size, (0,), size, blob=blob)
        return _Part(item, Member(blob, "U8", size, len(data)), stored, data)

    def chunks_of(self, layout: FileLayout) -> Iterator[memoryview]:
        """Yield the bytes of a file, front to back; each tensor is asked for when it is written."""
        yield memoryview(layout.header)
        scratch = torch.empty(WRITE_BYTES, dtype=torch.uint8, device="cpu")
        for part in self.parts[layout.items]:
            if part.data is not None:
                yield memoryview(part.data)
                continue
            tensor, count = self._tensor(part), part.member.num_bytes // ITEM_BYTES[part.member.dtype]
            zeros = (0,) * tensor.ndim
            yield from chunks(
                LocalPiece(tensor, box_piece(zeros, tuple(tensor.shape), 0, tuple(tensor.stride()))), 0, count, scratch
            )

    def _tensor(self, part: _Part) -> torch.Tensor:
        tensor = self._planner.resolve_data(part.item)
        assert isinstance(tensor, torch.Tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        code = dtype_code(tensor.dtype, part.stored.name)
        if (tuple(tensor.shape), code) != (part.stored.lengths, part.stored.dtype):
            stored = part.stored
            raise LayoutError(
                f"{stored.name}: DCP's plan says {stored.dtype} {stored.lengths} at {stored.offsets}, but the local tensor is "
                f"{code} {tuple(tensor.shape)} (torch's offsets are wrong where strided shards are uneven); save with "
                "reshard_ckpt.dcp.save, which works layouts out by itself"
            )
        return tensor

    def results(self, receipt: Receipt) -> list[WriteResult]:
        """Return the results for DCP, with what the coordinator needs to commit."""
        out = [WriteResult(item.index, len(stored.value or b""), stored) for item, stored in self._sent]
        for part, file, offset in zip(self.parts, receipt.file.tolist(), receipt.offset.tolist(), strict=True):
            stored = dataclasses.replace(part.stored, file=receipt.files[file], offset=offset)
            out.append(WriteResult(part.item.index, part.member.num_bytes, stored))
        return out


def _tensor_part(item: WriteItem) -> _Part:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    offsets, lengths, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
    code = dtype_code(data.properties.dtype, name)
    count = torch.Size(lengths).numel()
    member = make_member(name, code, shape, offsets, lengths, 0, count)
    return _Part(item, member, Stored(name, code, shape, offsets, lengths))


def _encode(item: WriteItem, planner: SavePlanner) -> tuple[bytes, bool]:
    """Encode a value; where it is no plain one, return the planner's bytes and True."""
    try:
        return encode_value(_plain(item, planner), item.index.fqn), False
    except UnsupportedError:
        return _resolve(item, planner).getvalue(), True


def _plain(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object itself if the planner gives it; otherwise decode its bytes, if they are tensors and plain data only."""
    if isinstance(planner, DefaultSavePlanner) and _is_default(type(planner)):
        return planner.lookup_object(item.index)
    try:
        return torch.load(_resolve(item, planner), weights_only=True)
    except Exception as error:  # torch raises pickle's errors, zip's and others, which have no class in common
        raise UnsupportedError(f"{item.index.fqn}: is no plain value ({error})") from error


def _is_default(kind: type[DefaultSavePlanner]) -> bool:
    """Return whether planners of this class find and encode objects as torch's default one does."""
    default = DefaultSavePlanner
    return (kind.resolve_data, kind.transform_object, kind.lookup_object) == (
        default.resolve_data,
        default.transform_object,
        default.lookup_object,
    )


def _resolve(item: WriteItem, planner: SavePlanner) -> io.BytesIO:
    """Return the bytes of an object, as the planner makes them."""
    raw = planner.resolve_data(item)
    assert isinstance(raw, io.BytesIO)
    raw.seek(0)
    return raw
