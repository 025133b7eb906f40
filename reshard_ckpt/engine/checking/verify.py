"""Verification of a checkpoint: read all files, hash their blocks, and name the damaged parts.

1. The rows of every tensor must tile it, and every file must exist with its size. Several ranks divide the windows of all files
   evenly; rank 0 checks the rows.
2. Several threads read and hash windows of the files. Only a few windows are under way at any time, and digests are opened one
   file at a time, or from an object store of as many files as are read at once, so memory does not grow with the checkpoint.
3. Damaged blocks that are neighbours are one problem, named with the tensors and values in them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np

from ...comm.protocol import Comm, SoloComm, merge_of_all
from ...core.catalog.model import Catalog
from ...core.planning.match import fault_text, faults_of
from ...errors import CheckpointError, CorruptError
from ...format.files import Digests, wrong_blocks
from ...storage.protocol import DISK, Storage, at_once
from ..common.files import FileContents, open_files
from ..common.progress import OnProgress, SharedTally, Tally, silent
from ..common.sections import share_cut
from ..loading.read import REQUEST_BYTES, num_threads


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `checkpoint.verify`.

    Attributes
    ----------
    problems
        One line for each problem: the file, the byte range, and the tensors or values in it.
    num_files, num_bytes
        The number of files of the checkpoint, and their bytes.
    bytes_unverified
        Bytes of files without checksums, such as files of other formats; only their sizes were checked.
    """

    problems: tuple[str, ...]
    num_files: int
    num_bytes: int
    bytes_unverified: int = 0

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify_all(
    storage: Storage,
    catalog: Catalog,
    *,
    workers: int | None = None,
    report: OnProgress = silent,
    comm: Comm | None = None,
) -> VerifyReport:
    """Read every byte that the catalog refers to.

    Collective if `comm` has several ranks: a gather of the problems and a broadcast of them all.

    Parameters
    ----------
    comm
        The ranks that share the reading; by default this process is on its own.
    workers
        Threads that read and hash, each with a buffer of `REQUEST_BYTES`; by default as many as in a load.
    """
    comm = comm or SoloComm()
    share = share_cut((file.size for file in catalog.files), repeat(REQUEST_BYTES), comm.rank, comm.size)
    tally = SharedTally(comm, "verify", catalog.file_bytes, report)
    check = _Check(storage, catalog, share, tally)
    if comm.rank == 0:
        faults = faults_of(catalog, np.arange(len(catalog.tensors_table.names)))
        check.found += [fault_text(catalog, fault) for fault in faults]
        check.found += [str(why) for why in catalog.unreadable.values() if isinstance(why, CorruptError)]
    if workers is None:
        workers = num_threads(sum(-(-len(part) // REQUEST_BYTES) for _, part in share), storage.hints)
    with ThreadPoolExecutor(workers, thread_name_prefix="reshard-ckpt-verify") as pool:
        for found in _in_order(pool, check.window, check.windows(), 2 * workers):
            check.add(found)
    if comm.size > 1:
        by_rank = merge_of_all(comm, check.found)
        check.found = []
        check.add(item if isinstance(item, str) else _Damage(*item) for found in by_rank for item in found)
        tally.finish()
    return VerifyReport(
        problems=tuple(check.problems()),
        num_files=len(catalog.files),
        num_bytes=catalog.file_bytes,
        bytes_unverified=sum(entry.size for entry in catalog.files if not entry.digests_key),
    )


class _Window(NamedTuple):
    file: int
    low: int
    digests: Digests


class _Damage(NamedTuple):
    """A byte range of a file whose digest does not fit."""

    file: int
    begin: int
    end: int


class _Check:
    """One verification, with its findings so far in order of the files: damaged ranges, and messages of other problems."""

    def __init__(self, storage: Storage, catalog: Catalog, share: Sequence[tuple[int, range]], tally: Tally) -> None:
        self.storage, self.catalog, self.share, self.tally = storage, catalog, share, tally
        self.found: list[str | _Damage] = []
        self._local = threading.local()

    def windows(self) -> Iterator[_Window]:
        """Yield the windows to read of each file that exists; a missing file becomes a problem where its first byte is."""
        hints = self.storage.hints
        step = hints.requests if hints.requests > DISK.requests else 1  # the digests of so many files are in memory
        for first in range(0, len(self.share), step):
            some = self.share[first : first + step]
            opened = at_once(self.storage, *(partial(self._open, index) for index, _ in some))
            for (index, part), digests in zip(some, opened, strict=True):
                if not isinstance(digests, Digests):
                    self.found += [digests] if digests and part.start == 0 else []
                    self.tally.add(len(part))
                    continue
                for low in part[::REQUEST_BYTES]:
                    yield _Window(index, low, digests)

    def _open(self, index: int) -> Digests | str:
        """Return the digests of a file; else the problem with the file, or "" for a foreign one, whose size alone is checked."""
        try:
            return open_files(self.storage, self.catalog, [index], [index]).get(index) or ""
        except CheckpointError as error:
            return str(error)

    def window(self, window: _Window) -> list[str | _Damage]:
        """Read and verify one window; runs in the pool's threads."""
        entry = self.catalog.files[window.file]
        size = min(REQUEST_BYTES, entry.size - window.low)
        if not hasattr(self._local, "buffer"):  # of this thread
            largest = max(entry.size for entry in self.catalog.files)
            self._local.buffer = memoryview(bytearray(min(REQUEST_BYTES, largest)))
        data = self._local.buffer[:size]
        try:
            self.storage.read_into(entry.key, window.low, [data])
        except CheckpointError as error:
            return [str(error)]
        finally:
            self.tally.add(size)
        each, end = window.digests.block_bytes, window.low + size
        wrong = wrong_blocks([data], window.low, window.digests.values, each)
        return [_Damage(window.file, low, min(low + each, end)) for low in wrong]

    def add(self, found: Iterable[str | _Damage]) -> None:
        """Add the findings of a window; damage that goes on where the last one ended is joined with it."""
        for item in found:
            last = self.found[-1] if self.found else None
            if isinstance(item, _Damage) and isinstance(last, _Damage) and (last.file, last.end) == (item.file, item.begin):
                self.found[-1] = _Damage(item.file, last.begin, item.end)
            else:
                self.found.append(item)

    def problems(self) -> Iterator[str]:
        """Describe each problem, a line each."""
        contents = None
        for item in self.found:
            if isinstance(item, str):
                yield item
                continue
            contents = contents or FileContents(self.catalog)
            key, begin, end = self.catalog.files[item.file].key, item.begin, item.end
            holds = contents.text(item.file, begin, end)
            yield f"{self.storage.url}: {key} is damaged in bytes {begin}:{end}, which hold {holds}"


def _in_order(
    pool: ThreadPoolExecutor, task: Callable[[_Window], list[str | _Damage]], windows: Iterable[_Window], limit: int
) -> Iterator[list[str | _Damage]]:
    """Yield the results of a task, in order, with at most `limit` of them under way."""
    pending: deque[Future[list[str | _Damage]]] = deque()
    for window in windows:
        pending.append(pool.submit(task, window))
        if len(pending) >= limit:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
