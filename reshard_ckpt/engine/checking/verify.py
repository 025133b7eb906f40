"""Verification of a checkpoint: read all files, hash their blocks, and name the damaged parts.

1. The rows of every tensor must tile it, and every file must exist with its size.
2. Several threads read and hash windows of the files. Only a few windows are under way at any time, and digests are opened one
   file at a time, or from an object store of as many files as are read at once, so memory does not grow with the checkpoint.
3. Damaged blocks that are neighbours are one problem, named with the tensors and values in them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...core.catalog.model import Catalog
from ...core.planning.match import fault_text, faults_of
from ...errors import CheckpointError, CorruptError
from ...format.files import Digests, wrong_blocks
from ...storage.protocol import DISK, Storage, at_once
from ..common.files import FileContents, open_files
from ..common.progress import OnProgress, Tally, silent
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


def verify_all(storage: Storage, catalog: Catalog, *, workers: int | None = None, report: OnProgress = silent) -> VerifyReport:
    """Read every byte that the catalog refers to.

    Parameters
    ----------
    workers
        Threads that read and hash, each with a buffer of `REQUEST_BYTES`; by default as many as in a load.
    """
    check = _Check(storage, catalog, Tally("verify", catalog.file_bytes, report))
    faults = faults_of(catalog, np.arange(len(catalog.tensors_table.names)))
    check.found += [fault_text(catalog, fault) for fault in faults]
    check.found += [str(why) for why in catalog.unreadable.values() if isinstance(why, CorruptError)]
    if workers is None:
        workers = num_threads(sum(-(-entry.size // REQUEST_BYTES) for entry in catalog.files), storage.hints)
    with ThreadPoolExecutor(workers, thread_name_prefix="reshard-ckpt-verify") as pool:
        for found in _in_order(pool, check.window, check.windows(), 2 * workers):
            check.add(found)
    return VerifyReport(
        problems=tuple(check.problems()),
        num_files=len(catalog.files),
        num_bytes=catalog.file_bytes,
        bytes_unverified=sum(entry.size for entry in catalog.files if not entry.digests_key),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    file: int
    low: int
    digests: Digests


@dataclass(frozen=True, slots=True)
class _Damage:
    """A byte range of a file whose digest does not fit."""

    file: int
    begin: int
    end: int


class _Check:
    """One verification, with its findings so far in order of the files: damaged ranges, and messages of other problems."""

    def __init__(self, storage: Storage, catalog: Catalog, tally: Tally) -> None:
        self.storage, self.catalog, self.tally = storage, catalog, tally
        self.found: list[str | _Damage] = []
        self._local = threading.local()

    def windows(self) -> Iterator[_Window]:
        """Yield the windows to read of each file that exists; a missing file becomes a problem here."""
        hints, files = self.storage.hints, self.catalog.files
        step = hints.requests if hints.requests > DISK.requests else 1  # the digests of so many files are in memory
        for first in range(0, len(files), step):
            some = range(first, min(first + step, len(files)))
            for index, digests in zip(some, at_once(self.storage, *(partial(self._open, i) for i in some)), strict=True):
                if not isinstance(digests, Digests):
                    self.found += [digests] if digests else []
                    self.tally.add(files[index].size)
                    continue
                for low in range(0, files[index].size, REQUEST_BYTES):
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
        data = self._buffer()[:size]
        try:
            self.storage.read_into(entry.key, window.low, [data])
        except CheckpointError as error:
            return [str(error)]
        finally:
            self.tally.add(size)
        each, end = window.digests.block_bytes, window.low + size
        wrong = wrong_blocks([data], window.low, window.digests.values, each)
        return [_Damage(window.file, low, min(low + each, end)) for low in wrong]

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            largest = max(entry.size for entry in self.catalog.files)
            buffer = self._local.buffer = memoryview(bytearray(min(REQUEST_BYTES, largest)))
        return buffer

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
