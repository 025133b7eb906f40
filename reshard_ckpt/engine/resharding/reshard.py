"""Offline resharding: a checkpoint is written anew for another topology, by any number of processes.

1. Every process makes the same plan from the same catalog (`plan`). The save id is a hash of both (`identity`). So a reshard that
   was killed and started again finds its own finished files, and never those of another request.
2. The new ranks' files are divided over the processes. Each process writes its share, several files side by side (`write_order`),
   from a stream of the old files (`loading.stream`), and reads the new files back (`read_back`).
3. Process 0 checks that all files are there and publishes the catalog, as for any save.

Collectives, in order: `agree_on_id` broadcasts process 0's save id; `commit` gathers the receipts, and `publish` follows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...comm.protocol import Comm, merge_of_all, value_of_first
from ...core.catalog.specs import item_bytes_of
from ...core.planning.load_plan import plan_load
from ...errors import UsageError
from ...format.files import BLOCK_BYTES, digest128, digests_file_bytes, digests_key
from ...storage.protocol import DISK, Lock, Storage
from ..common.files import DIGESTS_BYTES, FileDigests
from ..common.progress import OnProgress, Tally
from ..common.resuming import finished_digests, identity
from ..common.tensor_bytes import slices
from ..loading.stream import WINDOW_BYTES, Run, RunReader, Window, check_covered, in_turn, pieces_of
from ..saving.commit import publish
from ..saving.messages import Receipt, WrittenFile, decode_receipt, encode_receipt
from ..saving.options import PreviousCheckpoint, SaveContents
from ..saving.write import WRITE_BYTES, FileLayout, ShardFileWriter, keys_of, receipt_of
from .plan import ReshardPlan
from .read_back import ReadBack, WrittenBlocks
from .write_order import Item, Slice, divide, group_ranks, shared_axes, windows

_WHOLE_FILES = 1 << 62

AT_ONCE_BYTES = 512 << 20
"""Bytes of files that are written at once to a store with slow round trips."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The result of one process: a receipt for each new rank that it wrote for, the bytes that it read from the source, and the
    bytes of files that an earlier attempt had finished."""

    receipts: dict[int, Receipt]
    bytes_read: int
    bytes_kept: int


def save_id_of(plan: ReshardPlan, *, verify: bool) -> str:
    """Return the save id of the result. It depends only on the plan, which includes the source catalog, and on `verify`."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(max(plan.catalog.created_s, 0)))
    return f"{when}-{identity(plan, verify)}"


def agree_on_id(comm: Comm, save_id: str) -> str:
    """Return the save id, after checking that it equals process 0's. Collective.

    Raises
    ------
    UsageError
        This process's id differs: it was given other options, or another source.
    """
    said: str = value_of_first(comm, lambda: save_id)
    if said != save_id:
        raise UsageError(
            f"process {comm.rank} would write {save_id}, process 0 {said}: they were given other options, or see other sources; "
            "pass the same to all"
        )
    return said


def groups_of(comm: Comm, plan: ReshardPlan) -> list[list[int]]:
    """Return this process's share of the new ranks: groups whose files are written side by side."""
    shapes = [spec.shape for spec in plan.specs[: len(plan.placed)]]
    groups = group_ranks(plan.mesh, shared_axes(plan.mesh, shapes, plan.placed))
    return divide(groups, plan.plan.bytes_by_rank().tolist(), comm.size)[comm.rank]


def sources_of(plan: ReshardPlan, ranks: Sequence[int]) -> list[int]:
    """Return the old files that the files of some new ranks are made from, as far as their digests fit into memory together."""
    catalog, runs = plan.catalog, [item.run for rank in ranks for item in plan.items(rank)]
    if not runs:
        return []
    source = np.array([run.tensor for run in runs], np.int64)
    files = np.unique(plan_load(catalog, source, pieces_of(catalog, runs), _WHOLE_FILES).file)
    sizes = np.cumsum([digests_file_bytes(catalog.files[file].size) for file in files.tolist()])
    kept: list[int] = files[sizes <= DIGESTS_BYTES].tolist()
    return kept


def write_share(
    groups: Sequence[Sequence[int]],
    source: Storage,
    target: Storage,
    plan: ReshardPlan,
    save_id: str,
    digests: FileDigests,
    there: frozenset[str],
    *,
    report: OnProgress,
) -> ProcessReport:
    """Write the files of some of the new ranks, group by group, and make them durable.

    Parameters
    ----------
    groups
        This process's share, from `groups_of`.
    digests
        Reads the digests of the source's files, unless they are not verified.
    there
        Keys of files of an earlier attempt.

    Raises
    ------
    CorruptError
        The source is damaged, or written bytes differ when they are read back. Finished files stay, for the next attempt.
    """
    layouts = {rank: plan.layouts(rank, save_id) for group in groups for rank in group}
    tally = Tally("reshard", sum(layout.num_bytes for files in layouts.values() for layout in files), report)
    shared = RunReader(source, plan.catalog, digests)
    reads_back = digests.verify and not target.hints.checks_uploads

    def write(group: Sequence[int], reader: RunReader) -> ProcessReport:
        outputs = [_RankOutput(target, layouts[rank], tally, there) for rank in group]
        _write_group(reader, plan, group, outputs, ReadBack(target, enabled=reads_back))
        receipts = {rank: output.receipt() for rank, output in zip(group, outputs, strict=True)}
        return ProcessReport(receipts, reader.bytes_read, sum(output.bytes_kept for output in outputs))

    # In a store with slow round trips several groups are written at once, as many as fit into the memory for one large file.
    largest = max((sum(layout.num_bytes for rank in group for layout in layouts[rank]) for group in groups), default=0)
    threads = min(target.hints.requests, AT_ONCE_BYTES // max(largest, 1), len(groups))
    if target.hints.requests > DISK.requests and threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-reshard") as pool:
            done = list(pool.map(lambda group: write(group, RunReader(source, plan.catalog, digests)), groups))
        bytes_read = sum(report.bytes_read for report in done)
    else:
        done = [write(group, shared) for group in groups]
        bytes_read = shared.bytes_read
    receipts = {rank: receipt for report in done for rank, receipt in report.receipts.items()}
    if receipts:
        target.sync(keys_of(file for receipt in receipts.values() for file in receipt.files))
    return ProcessReport(receipts, bytes_read, sum(report.bytes_kept for report in done))


def _write_group(
    reader: RunReader, plan: ReshardPlan, ranks: Sequence[int], outputs: Sequence[_RankOutput], read_back: ReadBack
) -> None:
    """Write the files of several new ranks side by side; `outputs[i]` has the files of `ranks[i]`."""
    items = [output.missing(plan.items(rank)) for rank, output in zip(ranks, outputs, strict=True)]
    check_covered(plan.catalog, [item.run for of_output in items for item in of_output])
    # Windows that the reader has asked for and `write` has not seen. Both take them in the same order, so a queue pairs them up.
    under_way: deque[list[Slice]] = deque()

    def runs() -> Iterator[list[Run]]:
        for window in windows(items, WINDOW_BYTES):
            under_way.append(window)
            yield [part.run for part in window]

    def write(filled: Window) -> Callable[[], None]:
        slices = under_way.popleft()
        for part, view in zip(slices, filled.parts(), strict=True):
            outputs[part.output].write(view)
        return partial(
            read_back.verify, [part for output in {part.output for part in slices} for part in outputs[output].take_written()]
        )

    with ExitStack() as stack:
        for output in outputs:
            stack.enter_context(output)
        in_turn(reader, runs(), write)
        for output in outputs:
            output.finish()
            read_back.verify(output.take_written())
    read_back.verify_rest()


class _RankOutput:
    """Writes the files of one new rank, one after the other. Files that an earlier attempt finished are kept unchanged."""

    def __init__(self, storage: Storage, layouts: Sequence[FileLayout], tally: Tally, there: frozenset[str]) -> None:
        self._storage, self._layouts, self._tally, self._there = storage, layouts, tally, there
        self._done = [finished_file(storage, layout) if layout.key in there else None for layout in layouts]
        self._kept = [file is not None for file in self._done]
        self._file: ShardFileWriter | None = None
        self._taken = 0
        self._written: list[WrittenBlocks] = []
        self.bytes_kept = sum(layout.num_bytes for layout, kept in zip(layouts, self._kept, strict=True) if kept)
        tally.add(self.bytes_kept)

    def missing(self, items: Sequence[Item]) -> list[Item]:
        """Return the write items whose files are still to be written."""
        return [item for layout, kept in zip(self._layouts, self._kept, strict=True) if not kept for item in items[layout.items]]

    def write(self, view: memoryview) -> None:
        """Append the next bytes to the current file. All of them belong to one write item, so they never span two files."""
        while self._file is None:
            self._begin()
        file = self._file
        for chunk in slices(view, WRITE_BYTES):
            self._append(file, chunk)
        self._close_if_full(file)

    def _append(self, file: ShardFileWriter, chunk: memoryview) -> None:
        file.write(chunk)
        self._tally.add(len(chunk))

    def _begin(self) -> None:
        """Begin the next missing file, with its header."""
        layout = self._layouts[self._done.index(None)]
        self._storage.delete({layout.key, digests_key(layout.key)} & self._there)  # a killed attempt may have left a part of it
        self._file, self._taken = ShardFileWriter(self._storage, layout), 0
        self._append(self._file, memoryview(layout.header))
        self._close_if_full(self._file)

    def _close_if_full(self, file: ShardFileWriter) -> None:
        if file.num_bytes < file.layout.num_bytes:
            return
        written = file.finish()
        self._written.append(WrittenBlocks(file.layout.key, file.digests, self._taken, written.size))
        self._done[self._done.index(None)] = written
        self._file = None

    def take_written(self) -> list[WrittenBlocks]:
        """Return the block ranges that were written since the last call and can be read back."""
        written, self._written = self._written, []
        if self._file is not None and self._storage.hints.shows_unfinished:  # only its whole blocks have digests yet
            full = len(self._file.digests) * BLOCK_BYTES
            written.append(WrittenBlocks(self._file.layout.key, self._file.digests, self._taken, full))
            self._taken = full
        return written

    def finish(self) -> None:
        """Write the missing files that consist of a header alone. All other files must be complete by now."""
        while None in self._done:
            assert self._file is None, f"{self._file.layout.key if self._file else ''}: bytes are missing"
            self._begin()

    def receipt(self) -> Receipt:
        """Return the receipt of this new rank, as a saving rank would send it."""
        done = (written for written in self._done if written is not None)
        return receipt_of(self._layouts, done, np.zeros(0, np.uint64))

    def __enter__(self) -> _RankOutput:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.abort()


def finished_file(storage: Storage, layout: FileLayout) -> WrittenFile | None:
    """Return the file of this layout if an earlier attempt finished it, else None.

    A finished file begins with the layout's header, and its blocks match its digests.
    """
    digests = finished_digests(storage, layout.key, layout.num_bytes, layout.header, storage, digests_key(layout.key))
    return None if digests is None else WrittenFile(layout.key, layout.num_bytes, digest128(digests))


def commit(
    comm: Comm,
    target: Storage,
    plan: ReshardPlan,
    save_id: str,
    done: ProcessReport,
    before: PreviousCheckpoint | None,
    lease: Lock | None,
) -> ProcessReport:
    """Publish the catalog once all processes have written their share, and return their summed counts without receipts.
    Collective."""
    packed = [[rank, encode_receipt(receipt)] for rank, receipt in done.receipts.items()]

    def published(parts: list[Any]) -> list[int]:
        receipts = {rank: decode_receipt(data) for part in parts for rank, data in part[0]}
        saved = plan.catalog
        lossy = {name: policy for name, policy in saved.lossy.items() if name in plan.plan.tables.names}
        contents = SaveContents(plan.plan, plan.values, save_id, saved.metadata, saved.created_s, before, lossy=lossy)
        _, seen = publish(target, contents, [receipts[rank] for rank in range(plan.mesh.size)], lease=lease)
        seen()
        return [sum(part[1] for part in parts), sum(part[2] for part in parts)]

    return ProcessReport({}, *merge_of_all(comm, [packed, done.bytes_read, done.bytes_kept], published))


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one rank of the new topology in the work: files to write, bytes to read, and where these lie.

    Attributes
    ----------
    num_files, bytes_written
        Its files, headers included.
    bytes_wanted
        Bytes of the old checkpoint that the new files are made from.
    sources
        The old ranks whose files hold these bytes.
    """

    rank: int
    num_files: int
    bytes_written: int
    bytes_wanted: int
    sources: tuple[int, ...]


def rank_share(plan: ReshardPlan, rank: int, save_id: str) -> RankShare:
    """Compute the files and bytes that are written for a new rank, and the old ranks whose files they come from."""
    catalog, layouts = plan.catalog, plan.layouts(rank, save_id)
    runs = [item.run for item in plan.items(rank)]
    source = np.array([run.tensor for run in runs], np.int64)
    files = np.unique(plan_load(catalog, source, pieces_of(catalog, runs), _WHOLE_FILES).file).tolist() if runs else []
    each = item_bytes_of(catalog.tensors_table.dtype)
    return RankShare(
        rank=rank,
        num_files=len(layouts),
        bytes_written=sum(layout.num_bytes for layout in layouts),
        bytes_wanted=sum(run.count * int(each[run.tensor]) for run in runs),
        sources=tuple(sorted({catalog.files[file].rank for file in files})),
    )
