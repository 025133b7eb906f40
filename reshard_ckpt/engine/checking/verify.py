"""Verification of a checkpoint: read all files, hash their blocks, and name the damaged parts.

1. The saved runs (rows) of every tensor must tile it, and every file must exist with its size. Several ranks divide the windows
   of all files evenly; rank 0 checks the rows.
2. Several threads read and hash windows of the files. Only a few windows are under way at any time, and digests are opened one
   file at a time, or from an object store of as many files as are read at once, so memory does not grow with the checkpoint.
3. Damaged blocks that are neighbours are one problem, named with the tensors and values in them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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
from ..common.files import FileContents, in_threads, num_threads, open_files
from ..common.progress import OnProgress, SharedTally, Tally
from ..common.sections import share_cut
from ..loading.read import REQUEST_BYTES


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
        """Whether the verification has found no problem."""
        return not self.problems


def verify_all(
    storage: Storage, catalog: Catalog, *, workers: int | None, report: OnProgress, comm: Comm | None = None
) -> VerifyReport:
    """Read and hash every byte that the catalog refers to, and return a report of all problems.

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
        of_catalog = [fault_text(catalog, fault) for fault in faults]
        of_catalog += [str(why) for why in catalog.unreadable.values() if isinstance(why, CorruptError)]
        check.found += [_Problem(-1, i, i, text) for i, text in enumerate(of_catalog)]
    if workers is None:
        workers = num_threads(sum(-(-len(part) // REQUEST_BYTES) for _, part in share), storage.hints)
    in_threads(check.window, check.windows(), workers)
    if comm.size > 1:
        check.found = [_Problem(*problem) for of_rank in merge_of_all(comm, check.found) for problem in of_rank]
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


class _Problem(NamedTuple):
    """A problem with the bytes ``[begin, end)`` of a file, which is given by its index in the catalog.

    `text` is the message; it is empty for damaged blocks, whose message is made last, when neighbouring blocks have been joined.
    File -1 is the catalog itself; there, `begin` and `end` only number the problems.
    """

    file: int
    begin: int
    end: int
    text: str = ""


class _Check:
    """Reads one rank's share of the files for `verify_all`, and collects the problems, in any order."""

    def __init__(self, storage: Storage, catalog: Catalog, share: Sequence[tuple[int, range]], tally: Tally) -> None:
        self.storage, self.catalog, self.share, self.tally = storage, catalog, share, tally
        self.found: list[_Problem] = []
        self._local = threading.local()

    def windows(self) -> Iterator[_Window]:
        """Yield the windows of this rank's files, to be read and hashed.

        A file that is missing or has a wrong size has no windows. It becomes a problem, on the rank whose share has its first
        byte.
        """
        hints = self.storage.hints
        step = hints.requests if hints.requests > DISK.requests else 1  # the digests of so many files are in memory
        for first in range(0, len(self.share), step):
            some = self.share[first : first + step]
            opened = at_once(self.storage, *(partial(self._open, index) for index, _ in some))
            for (index, part), digests in zip(some, opened, strict=True):
                if not isinstance(digests, Digests):
                    self.found += [_Problem(index, 0, 0, digests)] if digests and part.start == 0 else []
                    self.tally.add(len(part))
                    continue
                for low in part[::REQUEST_BYTES]:
                    yield _Window(index, low, digests)

    def _open(self, index: int) -> Digests | str:
        """Check the size of a file and read its block digests.

        Return the digests, or the text of a problem, or "" for a file of another format, which has no digests.
        """
        try:
            return open_files(self.storage, self.catalog, [index], [index]).get(index) or ""
        except CheckpointError as error:
            return str(error)

    def window(self, window: _Window) -> None:
        """Read one window of a file and hash its blocks. Record a problem if it cannot be read, and for each damaged block."""
        entry = self.catalog.files[window.file]
        size = min(REQUEST_BYTES, entry.size - window.low)
        each, end = window.digests.block_bytes, window.low + size
        if not hasattr(self._local, "buffer"):  # of this thread
            largest = max(entry.size for entry in self.catalog.files)
            self._local.buffer = memoryview(bytearray(min(REQUEST_BYTES, largest)))
        data = self._local.buffer[:size]
        try:
            self.storage.read_into(entry.key, window.low, [data])
        except CheckpointError as error:
            self.found.append(_Problem(window.file, window.low, end, str(error)))
        else:
            wrong = wrong_blocks([data], window.low, window.digests.values, each)
            self.found += [_Problem(window.file, low, min(low + each, end)) for low in wrong]
        self.tally.add(size)

    def problems(self) -> Iterator[str]:
        """Yield one line of text for each problem, in order of the files. Damaged ranges that are neighbours become one line."""
        joined: list[_Problem] = []
        for problem in sorted(self.found):
            last = joined[-1] if joined and not joined[-1].text else None
            if last is not None and not problem.text and (last.file, last.end) == (problem.file, problem.begin):
                joined[-1] = last._replace(end=problem.end)
            else:
                joined.append(problem)
        contents = None
        for file, begin, end, text in joined:
            if text:
                yield text
                continue
            contents = contents or FileContents(self.catalog)
            holds = contents.text(file, begin, end)
            yield f"{self.storage.url}: {self.catalog.files[file].key} is damaged in bytes {begin}:{end}, which hold {holds}"
