"""Offline resharding: any number of processes write a checkpoint anew for another topology (mesh of ranks).

1. Every process makes the same plan from the same catalog (`plan`). The save id ends with a hash of both (`identity`). So a
   reshard that was killed and started again finds its own finished files, and never those of another request.
2. The processes verify the files of an earlier attempt, and keep the finished ones (`keep_finished`).
3. The bytes of the other files are divided over the processes. Each process writes its share, several files side by side
   (`write_order`), from a stream of the old files (`loading.stream`), and reads the new files back in another thread
   (`read_back`).
4. Process 0 joins files that several processes wrote (`common.sections`), checks that all files are there and publishes the
   catalog, as for any save.

Collectives, in order: `agree_on_id` broadcasts process 0's save id; if an earlier attempt left files, `keep_finished` gathers and
broadcasts the kept files; `commit` gathers the written files and sections, and broadcasts the bytes read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from ...comm.protocol import Comm, merge_of_all, value_of_first
from ...core.catalog.model import Catalog
from ...core.catalog.specs import item_bytes_of
from ...core.planning.load_plan import plan_load
from ...errors import UsageError
from ...format.files import BLOCK_BYTES, decode_digests, digest128, digests_file_bytes, digests_key, encode_digests
from ...storage.protocol import DISK, Lock, Storage, at_once, write_file
from ..common.files import DIGESTS_BYTES, FileDigests
from ..common.progress import OnProgress, SharedTally, Tally
from ..common.resuming import finished_digests, identity
from ..common.sections import Section, SectionWriter, join, share
from ..common.tensor_bytes import slices
from ..loading.scales import Dequantizer
from ..loading.stream import WINDOW_BYTES, Run, RunReader, Window, check_covered, pieces_of, read_ahead
from ..saving.commit import publish
from ..saving.messages import WrittenFile, decode_receipts, encode_receipt
from ..saving.options import PreviousCheckpoint, SaveContents
from ..saving.write import WRITE_BYTES, FileLayout, keys_of, receipt_of
from .plan import ReshardPlan
from .read_back import ReadBack, WrittenBlocks
from .write_order import Item, Slice, Span, divide, group_ranks, shared_axes, span_of, windows

_WHOLE_FILES = 1 << 62

AT_ONCE_BYTES = 512 << 20
"""The most bytes of files that are written at the same time to a store with slow round trips."""


class ProcessReport(NamedTuple):
    """The result of a reshard on one process, or of all together.

    It has the files and the sections of files that were written, and the bytes that were read from the source. `kept` are files
    that an earlier attempt had finished; every process has the same ones.
    """

    written: tuple[WrittenFile, ...] = ()
    sections: tuple[Section, ...] = ()
    bytes_read: int = 0
    kept: tuple[WrittenFile, ...] = ()

    @property
    def bytes_kept(self) -> int:
        """The size in bytes of all files in `kept`."""
        return sum(file.size for file in self.kept)


def save_id_of(plan: ReshardPlan, *, verify: bool) -> str:
    """Return the save id of the checkpoint that a reshard writes.

    The id consists of the time at which the source was saved, and a hash of `verify` and of the plan, which includes the catalog
    of the source.
    """
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(max(plan.catalog.created_s, 0)))
    return f"{when}-{identity(plan, verify)}"


def agree_on_id(comm: Comm, save_id: str) -> str:
    """Check that this process has the same save id as process 0, and return it. Collective.

    Raise `UsageError` if this process's id differs: it was given other options, or another source.
    """
    first_id: str = value_of_first(comm, lambda: save_id)
    if first_id != save_id:
        raise UsageError(
            f"process {comm.rank} would write {save_id}, process 0 {first_id}: they were given different options, or see "
            "different sources; pass the same to all"
        )
    return first_id


def groups_of(plan: ReshardPlan) -> list[list[int]]:
    """Divide the new ranks into groups. The files of a group are written side by side, because they need the same source rows."""
    shapes = [spec.shape for spec in plan.specs[: len(plan.placed)]]
    return group_ranks(plan.mesh, shared_axes(plan.mesh, shapes, plan.placed))


def sources_of(plan: ReshardPlan, ranks: Sequence[int]) -> list[int]:
    """Return the old files from which the files of some new ranks are made; as many as have room for their digests in memory."""
    files = _files_of(plan.catalog, [item.run for rank in ranks for item in plan.items(rank)])
    # sizes[i]: bytes of the digests of the first i + 1 files.
    sizes = accumulate(digests_file_bytes(plan.catalog.files[file].size) for file in files)
    return [file for file, size in zip(files, sizes, strict=True) if size <= DIGESTS_BYTES]


def _files_of(catalog: Catalog, runs: Sequence[Run]) -> list[int]:
    """Return the indices of the files of a catalog that hold the bytes of some runs."""
    source = np.array([run.tensor for run in runs], np.int64)
    files: list[int] = np.unique(plan_load(catalog, source, pieces_of(catalog, runs), _WHOLE_FILES).file).tolist() if runs else []
    return files


def keep_finished(
    comm: Comm, target: Storage, layouts: Sequence[FileLayout], there: Mapping[str, int]
) -> tuple[WrittenFile, ...]:
    """Return the files that an earlier attempt has finished. Rank 0 deletes the unfinished files of that attempt. Collective.

    The ranks divide the bytes that must be verified for it.

    Parameters
    ----------
    there
        Keys and sizes of the files of an earlier attempt.
    """
    left = {key for layout in layouts for key in (layout.key, digests_key(layout.key)) if key in there}
    if not left:
        return ()
    whole = [layout for layout in layouts if there.get(layout.key) == layout.num_bytes and digests_key(layout.key) in there]
    finished = []
    for i in share((layout.num_bytes for layout in whole), comm.rank, comm.size):
        # A finished file begins with the header of its layout, and its blocks match its digests.
        key, size, digests_of_it = whole[i].key, whole[i].num_bytes, digests_key(whole[i].key)
        digests = finished_digests(target, key, size, whole[i].header, target, digests_of_it)
        if digests is not None:
            finished.append(WrittenFile(key, size, digest128(digests)))

    def without_others(parts: list[Any]) -> list[Any]:
        kept = [WrittenFile(*file) for part in parts for file in part]
        target.delete(left - set(keys_of(kept)))
        return kept

    return tuple(WrittenFile(*file) for file in merge_of_all(comm, finished, without_others))


def write_share(
    comm: Comm,
    source: Storage,
    target: Storage,
    plan: ReshardPlan,
    save_id: str,
    digests: FileDigests,
    there: Mapping[str, int],
    *,
    report: OnProgress,
    dequantizer: Dequantizer | None,
) -> tuple[ProcessReport, SharedTally]:
    """Write this process's share of the files of all new ranks, group by group, and make it durable. Collective.

    Where the store lets several processes write one file, the windows of all groups are divided evenly, else the new ranks. Raise
    `CorruptError` if the source is damaged, or written bytes differ when they are read back. Finished files stay, for the next
    attempt.

    Parameters
    ----------
    digests
        Reads the digests of the source's files, unless they are not verified.
    there
        Keys and sizes of files of an earlier attempt.
    dequantizer
        Applies the scales of quantized tensors that are converted.
    """
    layouts = [plan.layouts(rank, save_id) for rank in range(plan.mesh.size)]
    kept = keep_finished(comm, target, [layout for files in layouts for layout in files], there)
    done = {file.key for file in kept}
    missing = [[layout for layout in files if layout.key not in done] for files in layouts]
    num_bytes = [sum(_member_bytes(layout) for layout in files) for files in missing]
    is_shared = target.hints.shares_files
    groups = divide(groups_of(plan), num_bytes, *(0, 1) if is_shared else (comm.rank, comm.size))
    # begins[i]: the bytes of all members in the groups before group i; this process writes windows from byte `low` to `high`
    begins = np.cumsum([0, *(sum(num_bytes[rank] for rank in group) for group in groups)]).tolist()
    low, high = (begins[-1] * which // comm.size for which in (comm.rank, comm.rank + 1)) if is_shared else (0, begins[-1])
    tally = SharedTally(comm, "reshard", sum(layout.num_bytes for files in layouts for layout in files), report)
    if comm.rank == 0:
        tally.add(sum(file.size for file in kept))
    reads_back = digests.verify and not target.hints.checks_uploads
    has_headers = comm.rank == 0 or not is_shared  # whether this process writes the files that have no members

    def write(number: int, reader: RunReader) -> tuple[list[WrittenFile | Section], int]:
        files = [missing[rank] for rank in groups[number]]
        items = [
            [item for layout in of_rank for item in of_plan[layout.items]]
            for of_plan, of_rank in zip(map(plan.items, groups[number]), files, strict=True)
        ]
        span = Span(0, None, [0] * len(files), [num_bytes[rank] for rank in groups[number]])
        if low > begins[number] or high < begins[number + 1]:
            span = span_of(items, WINDOW_BYTES, low - begins[number], high - begins[number])
        sections = [_sections(*part, with_empty=has_headers) for part in zip(files, span.begin, span.end, strict=True)]
        outputs = [_Output(target, of_rank, tally) for of_rank in sections]
        before = reader.bytes_read
        _write_group(reader, plan, items, span, outputs, ReadBack(target, enabled=reads_back))
        return [part for output in outputs for part in output.done], reader.bytes_read - before

    own_groups = [
        number
        for number, group in enumerate(groups)
        if (begins[number] < high and begins[number + 1] > low)
        or (has_headers and any(not _member_bytes(layout) for rank in group for layout in missing[rank]))
    ]
    # In a store with slow round trips several groups are written at once, as many as fit into the memory for one large file.
    largest = max((begins[number + 1] - begins[number] for number in own_groups), default=0)
    threads = min(target.hints.requests, AT_ONCE_BYTES // max(largest, 1), len(own_groups))
    if target.hints.requests > DISK.requests and threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-reshard") as pool:
            written = list(
                pool.map(lambda number: write(number, RunReader(source, plan.catalog, digests, dequantizer)), own_groups)
            )
    else:
        shared = RunReader(source, plan.catalog, digests, dequantizer)
        written = [write(number, shared) for number in own_groups]
    files = tuple(part for parts, _ in written for part in parts if isinstance(part, WrittenFile))
    sections = tuple(part for parts, _ in written for part in parts if isinstance(part, Section))
    if comm.rank:
        tally.finish()
    return ProcessReport(files, sections, sum(num_read for _, num_read in written), kept), tally


def _member_bytes(layout: FileLayout) -> int:
    return layout.num_bytes - len(layout.header)


def _write_group(
    reader: RunReader,
    plan: ReshardPlan,
    items: Sequence[Sequence[Item]],
    span: Span,
    outputs: Sequence[_Output],
    read_back: ReadBack,
) -> None:
    """Write one process's windows of a group. The files of ``items[i]`` are written to ``outputs[i]``, side by side."""
    if span.count != 0:
        check_covered(plan.catalog, [item.run for of_output in items for item in of_output])
    # Windows that the reader has asked for and that are not written. Both take them in the same order, so a queue pairs them up.
    under_way: deque[list[Slice]] = deque()

    def runs() -> Iterator[list[Run]]:
        for window in islice(windows(items, WINDOW_BYTES), span.first, None if span.count is None else span.first + span.count):
            under_way.append(window)
            yield [item.run for _, item in window]

    def write(filled: Window) -> list[WrittenBlocks]:
        """Write one window to its files, and return the blocks that can be read back since the last call."""
        slices = under_way.popleft()
        for (output, _), view in zip(slices, filled.parts(), strict=True):
            outputs[output].write(view)
        return [part for output in {output for output, _ in slices} for part in outputs[output].take_written()]

    with ExitStack() as stack:
        for output in outputs:
            stack.enter_context(output)
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-read-back"))
        verified = pool.submit(lambda: None)
        for window in stack.enter_context(closing(read_ahead(reader, runs()))):
            written = write(window)
            verified.result()  # no more than one window behind
            verified = pool.submit(read_back.verify, written)
        verified.result()
        for output in outputs:
            output.finish()
            read_back.verify(output.take_written())
    read_back.verify_rest()


def _sections(layouts: Sequence[FileLayout], begin: int, end: int, *, with_empty: bool) -> Iterator[tuple[FileLayout, int, int]]:
    """Yield the sections of files to write for a range of their data: each as its file, its first byte and its end there.

    `begin` and `end` count the data of all these files, end to end, without the headers. A section that begins with the first
    byte of a file's data has the header too. With `with_empty`, files that consist of a header alone are also yielded.
    """
    at = 0
    for layout in layouts:
        head, size = len(layout.header), _member_bytes(layout)
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            yield layout, 0 if low == at else head + low - at, head + high - at
        elif with_empty and not size:
            yield layout, 0, head
        at += size


class _Output:
    """Writes sections of the files of one new rank, one after the other. `done` lists the files and sections already written."""

    def __init__(self, storage: Storage, sections: Iterable[tuple[FileLayout, int, int]], tally: Tally) -> None:
        self._storage, self._tally = storage, tally
        self._left = deque(sections)
        self._file: SectionWriter | None = None
        self._taken = 0
        self._written: list[WrittenBlocks] = []
        self.done: list[WrittenFile | Section] = []

    def write(self, view: memoryview) -> None:
        """Append the next bytes to the current file. They belong to one write item, so they never span two files."""
        while self._file is None:
            self._begin()
        file = self._file
        for chunk in slices(view, WRITE_BYTES):
            self._append(file, chunk)
        self._close_if_full(file)

    def _append(self, file: SectionWriter, chunk: memoryview) -> None:
        file.write(chunk)
        self._tally.add(len(chunk))

    def _begin(self) -> None:
        """Begin to write the next section. If it is the first one of its file, write the file's header."""
        layout, low, high = self._left.popleft()
        self._file = SectionWriter(self._storage, layout.key, low, high, layout.num_bytes)
        self._taken = self._file.hashed[0]
        if low == 0:
            self._append(self._file, memoryview(layout.header))
        self._close_if_full(self._file)

    def _close_if_full(self, file: SectionWriter) -> None:
        if not file.is_full:
            return
        if file.is_whole:
            digests = encode_digests(file.digests, BLOCK_BYTES, file.size)
            at_once(self._storage, file.sync, lambda: write_file(self._storage, digests_key(file.key), digests))
            self.done.append(WrittenFile(file.key, file.size, digest128(digests)))
        else:
            self.done.append(file.finish())
        self._written.append(self._not_taken(file))
        self._file = None

    def _not_taken(self, file: SectionWriter) -> WrittenBlocks:
        """Return the blocks of this file that no earlier call has returned."""
        begin, until = file.hashed
        low, self._taken = self._taken, until
        return WrittenBlocks(file.key, file.digests, low, until, begin)

    def take_written(self) -> list[WrittenBlocks]:
        """Return the ranges of blocks that were written since the last call and that the store can read back."""
        written, self._written = self._written, []
        if self._file is not None and self._storage.hints.shows_unfinished:
            written.append(self._not_taken(self._file))
        return written

    def finish(self) -> None:
        """Write the files that consist of a header alone. Call it when all other sections are complete."""
        while self._left:
            assert self._file is None, f"{self._file.key if self._file else ''}: bytes are missing"
            self._begin()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.abort()


def commit(
    comm: Comm,
    target: Storage,
    plan: ReshardPlan,
    save_id: str,
    done: ProcessReport,
    before: PreviousCheckpoint | None,
    lease: Lock | None,
    read_back: ReadBack,
) -> ProcessReport:
    """Join the files that several processes wrote, and publish the catalog once all shares are written. Collective.

    Return the report with the bytes that all processes read.
    """
    packed = [done.written, done.sections, done.bytes_read]

    # Runs on rank 0 with the reports of all processes. A file counts as written only after its sections are joined, and the lease
    # is checked last before the catalog: a job that lost it may have had its files deleted.
    def published(parts: list[Any]) -> int:
        layouts = [plan.layouts(rank, save_id) for rank in range(plan.mesh.size)]
        files = {file.key: file for file in (*done.kept, *(WrittenFile(*columns) for part in parts for columns in part[0]))}
        sections: dict[str, list[Section]] = {}
        for section in (Section(*columns) for part in parts for columns in part[1]):
            sections.setdefault(section.key, []).append(section)
        sizes = {layout.key: layout.num_bytes for of_rank in layouts for layout in of_rank}
        for key, of_file in sections.items():
            digests, written = join(target, key, sizes[key], of_file)
            values = decode_digests(digests, sizes[key]).values.tolist()
            read_back.verify(WrittenBlocks(key, values, low, high) for low, high in written)
            write_file(target, digests_key(key), digests)
            files[key] = WrittenFile(key, sizes[key], digest128(digests))
        none = np.zeros(0, np.uint64)
        receipts = [receipt_of(of_rank, [files[layout.key] for layout in of_rank], none) for of_rank in layouts]
        saved = plan.catalog
        lossy = {name: policy for name, policy in saved.lossy.items() if name in plan.plan.tables.names}
        contents = SaveContents(plan.plan, plan.values, save_id, saved.metadata, saved.created_s, before, lossy=lossy)
        if lease is not None:
            lease.check()
        _, seen = publish(target, contents, decode_receipts(list(map(encode_receipt, receipts))), lease=lease)
        seen()
        return sum(part[2] for part in parts)

    return ProcessReport(bytes_read=merge_of_all(comm, packed, published), kept=done.kept)


@dataclass(frozen=True, slots=True)
class RankShare:
    """The work for one rank of the new topology: files to write, bytes to read, and the old ranks that wrote these bytes.

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
    """Compute the files and bytes that are written for a new rank, and the old ranks from whose files the bytes come."""
    catalog, layouts = plan.catalog, plan.layouts(rank, save_id)
    runs = [item.run for item in plan.items(rank)]
    each = item_bytes_of(catalog.tensors_table.dtype)
    return RankShare(
        rank=rank,
        num_files=len(layouts),
        bytes_written=sum(layout.num_bytes for layout in layouts),
        bytes_wanted=sum(run.count * int(each[run.tensor]) for run in runs),
        sources=tuple(sorted({catalog.files[file].rank for file in _files_of(catalog, runs)})),
    )
