"""Is every byte of a checkpoint as it was written? Reads all files, block by block, and says what is wrong where."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..core.catalog import Catalog
from ..core.match import faults_of
from ..core.save_plan import item_bytes_of
from ..core.tiling import describe_region
from ..errors import CheckpointError
from ..format.checksums import Digests, block_digest
from ..storage.protocol import Storage
from .read import WINDOW_BYTES, check_files, few, num_threads, open_blocks


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes
    ----------
    problems
        One line for each thing that is wrong: the file, the bytes, and the tensors or values that these hold.
    num_files, num_bytes
        What was read.
    """

    problems: tuple[str, ...]
    num_files: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_all(storage: Storage, catalog: Catalog) -> VerifyReport:
    """Read every byte that the catalog refers to, a window at a time, in several threads."""
    problems = list(_structure(catalog))
    windows: list[tuple[int, int, Digests]] = []
    for index, entry in enumerate(catalog.files):
        try:
            check_files(storage, catalog, [index])
            digests = open_blocks(storage, catalog, [index]).of_file.get(index)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if digests is None:
            continue  # a foreign file has no checksums: that it is there, whole, is all that can be said
        windows += [(index, low, digests) for low in range(0, entry.size, WINDOW_BYTES)]
    with ThreadPoolExecutor(num_threads(len(windows)), thread_name_prefix="reshard-ckpt-verify") as pool:
        for found in pool.map(lambda window: list(_window_problems(storage, catalog, *window)), windows):
            problems += found
    return VerifyReport(tuple(problems), len(catalog.files), sum(entry.size for entry in catalog.files))


def _structure(catalog: Catalog) -> Iterator[str]:
    table = catalog.tensors_table
    for fault in faults_of(catalog, np.arange(len(table.names))):
        region = describe_region(fault.low, fault.high, int(table.ndim[fault.tensor]))
        what = "shards overlap at" if fault.rows else "no shard holds"
        yield f"{table.names[fault.tensor]}: {what} {region}"


def _window_problems(storage: Storage, catalog: Catalog, index: int, low: int, digests: Digests) -> Iterator[str]:
    entry = catalog.files[index]
    size = min(WINDOW_BYTES, entry.size - low)
    data = memoryview(bytearray(size))
    try:
        storage.read_into(entry.key, low, [data])
    except CheckpointError as error:
        yield str(error)
        return
    for at in range(0, size, digests.block_bytes):
        block = data[at : at + digests.block_bytes]
        if block_digest(block) != int(digests.values[(low + at) // digests.block_bytes]):
            begin, end = low + at, low + at + len(block)
            yield f"{storage.url}: {entry.key} is damaged in bytes {begin}:{end}, which hold {_held(catalog, index, begin, end)}"


def _held(catalog: Catalog, file: int, begin: int, end: int) -> str:
    """The names of what lies in some bytes of a file."""
    table, rows = catalog.tensors_table, catalog.rows
    owner = np.repeat(np.arange(len(table.names)), np.diff(table.row_start))
    sizes = rows.count * item_bytes_of(table.dtype)[owner]
    hit = np.flatnonzero((rows.file == file) & (rows.offset < end) & (rows.offset + sizes > begin) & (sizes > 0))
    values = {i: value.name for value in catalog.values_table for i in value.blobs}
    names = [values.get(i, table.names[i]) for i in np.unique(owner[hit]).tolist()]
    return few(names) if names else "its header alone"
