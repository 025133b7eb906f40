"""Incremental saves: refer to the bytes that an earlier checkpoint, the *base*, already holds, and write the rest.

1. Each write item of this rank is matched with the rows of the base by its place in the global tensor (`plan_load`), whatever the
   layout was then. A *span* is the part of a file of the base whose bytes one item holds in the same order.
2. Spans that follow each other in a file form a *stretch*. Each block of the file that lies in a stretch is hashed from this
   rank's memory. If the digest is the one of the base, these bytes are *unchanged*.
3. The catalog refers to unchanged bytes where they lie: in the file that holds them, never through the catalog of the base. So a
   chain of incremental saves is read as fast as a full one.
"""

from __future__ import annotations

import os
import posixpath
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ...core.catalog.model import Catalog, FileEntry, TensorKind
from ...core.catalog.specs import PieceColumns, width_of
from ...core.catalog.summary import bytes_by_file
from ...core.geometry.columns import ColumnTable, concatenated, is_new, lex_order
from ...core.geometry.runs import I64, pad_rows, ranges, strides_of, volumes
from ...core.planning.load_plan import plan_load
from ...errors import CorruptError, StorageError, UsageError
from ...format.files import BLOCK_BYTES, RUN_LOCK_KEY, BlockHasher, Digests, num_blocks
from ...storage import open_storage, unlinked_path
from ...storage.protocol import Storage
from ..common.files import open_files
from ..common.tensor_bytes import LocalRun, bytes_in_place, chunks
from .local_shards import LocalShards
from .messages import RunColumns, StoredRuns

MIN_LIVE = 0.25
"""If less than this share of a base's file is still needed, those bytes are written anew, so that the file can be deleted."""

_REWRITTEN = 0.1
"""The most bytes that one save writes anew in order to free files of the base, as a share of the needed bytes; it may always
write those of one file anew. Files with the smallest share of needed bytes come first."""

_ONE_WINDOW = 1 << 62
"""A window size for `plan_load` that is larger than any file, so that no span is cut."""

Views: TypeAlias = Sequence[memoryview | None]
"""For each write item of this rank, its bytes in host memory; None if they are not in order there."""

_HEADER = -1
"""In place of an item's index, marks a span that is the header of a file."""


class Base(NamedTuple):
    """The checkpoint that an incremental save may refer to.

    Attributes
    ----------
    storage, catalog
        The base, open for reading.
    files
        For each file of the base, the entry with which the new checkpoint's catalog refers to it; None if it may not.
    verify
        Compare bytes of the base with those of this rank, not their digests alone.
    """

    storage: Storage
    catalog: Catalog
    files: Sequence[FileEntry | None]
    verify: bool


def base_beside(url: str, storage: Storage, catalog: Catalog, *, verify: bool, min_live: float = MIN_LIVE) -> Base:
    """Make a checkpoint in `storage` the base of an incremental save to `url`; `min_live` as in `MIN_LIVE`.

    Raise `UsageError` if the two do not lie in one folder. Only there does deleting a checkpoint look for others that refer to
    it.
    """
    folder, _, name = unlinked_path(url).rpartition("/")
    base_url = unlinked_path(storage.url)
    base_folder, _, base_name = base_url.rpartition("/")
    is_link = os.path.islink(base_url)  # to a checkpoint that was moved to another folder; or to one that a run there may remove
    if is_link:
        with open_storage(os.path.dirname(os.path.realpath(base_url))) as there:
            base_folder = base_folder if there.size(RUN_LOCK_KEY) is None else there.url
    if folder != base_folder or folder.endswith(":/"):
        raise UsageError(
            f"base={storage.url}: lies in another folder than {url}, so deleting it would not keep the files that the new "
            "checkpoint refers to; save beside the base, or leave base= out"
        )
    sizes = np.array([file.size for file in catalog.files], np.int64)
    files = [_entry_beside(file, base_name, name) for file in catalog.files]
    if is_link:  # its files that lie in other checkpoints may be beside the folder that it was moved to, and not here
        with open_storage(folder) as here:
            sizes_here = here.stat([posixpath.normpath(f"{name}/{file.key}") if file else name for file in files])
        files = [file if size is not None else None for file, size in zip(files, sizes_here, strict=True)]
    for i in _left_behind(sizes, bytes_by_file(catalog), min_live).tolist():
        files[i] = None
    return Base(storage, catalog, files, verify)


def _left_behind(sizes: I64, live: I64, min_live: float) -> I64:
    """Choose the files of the base that the new save does not refer to, because too few of their bytes are still needed.

    The save writes these bytes again, so that the old files can be deleted. ``live[i]`` of the ``sizes[i]`` bytes of file i are
    needed. Returns the indices of the chosen files.
    """
    # sparse: the files with few needed bytes, in order of their share; rewritten: these bytes, added up so far.
    sparse: I64 = np.flatnonzero(live < min_live * sizes)
    sparse = sparse[np.argsort(live[sparse] / sizes[sparse], kind="stable")]
    rewritten = np.cumsum(live[sparse])
    chosen: I64 = sparse[(rewritten <= _REWRITTEN * live.sum()) | (rewritten == live[sparse])]
    return chosen


def _entry_beside(file: FileEntry, base: str, new: str) -> FileEntry | None:
    """Return the entry of a file of the checkpoint `base`, as the catalog of the checkpoint `new` beside it refers to it.

    None if the file lies outside the folder that holds both.
    """
    holder = posixpath.normpath(f"{base}/{file.checkpoint}")
    if "/" in holder or holder.startswith("."):
        return None
    inside = [posixpath.normpath(f"{base}/{key}").removeprefix(f"{holder}/") for key in file.keys]
    if holder == new:
        return replace(file, key=inside[0], digests_key=inside[1], checkpoint="")
    key, digests_key = (f"../{holder}/{path}" for path in inside)
    return replace(file, key=key, digests_key=digests_key, checkpoint=f"../{holder}")


@dataclass(frozen=True, slots=True)
class Spans(ColumnTable):
    """Ranges ``[begin, end)`` of bytes in files of the base that hold elements of this rank's items, in order.

    A range has elements of `item` from element `start` on, with `each` bytes an element.
    """

    file: I64
    begin: I64
    end: I64
    item: I64
    start: I64
    each: I64


class Unchanged(NamedTuple):
    """The write items of one rank, divided into unchanged parts, which the base holds, and parts that the rank writes.

    Attributes
    ----------
    stored
        The unchanged parts; ``file`` is an index into the files of the base.
    written
        The other parts, whole blocks first; ``local`` is the number of the item, not of its row.
    num_bytes
        Bytes of the unchanged parts.
    member, ahead
        For each written part, the number of the member of a file that holds it, and the byte of the member at which it begins.
        Each part is a member of its own, unless `touched.pick` has packed many.
    """

    stored: StoredRuns
    written: RunColumns
    num_bytes: int
    member: I64
    ahead: I64


def find_unchanged(base: Base, local_shards: LocalShards, items: RunColumns, scratch: torch.Tensor) -> Unchanged:
    """Find the parts of this rank's write items that the base holds; `scratch`, 1-D uint8, is for copies from a device."""
    runs = local_shards.runs(items)
    spans = _with_headers(base, spans_of(base, local_shards, items))
    views = [bytes_in_place(run.local, run.start, run.num_elements) for run in runs]
    found = []
    for file in np.unique(spans.file).tolist():
        try:
            digests = open_files(base.storage, base.catalog, [file], [file])[file]
        except (CorruptError, StorageError) as error:  # the file is missing or damaged
            warnings.warn(f"the save refers to no byte of a file of its base, and writes them anew: {error}", stacklevel=2)
            continue
        found.append(_unchanged_of(base, file, digests, spans.take(spans.file == file), runs, views, scratch))
    each = np.array([run.local.tensor.element_size() for run in runs], np.int64)
    stored = concatenated([StoredRuns.empty(), *found])
    stored = stored.take(lex_order(stored.item, stored.start))
    if base.verify:
        stored = stored.take(np.array([is_equal(base, runs, row, scratch) for row in stored.rows()], bool))
    stored = merged(stored, each)
    written = _rest(items, stored, each)
    member = np.arange(len(written.local))
    return Unchanged(stored, written, int((stored.count * each[stored.item]).sum()), member, np.zeros_like(member))


def spans_of(base: Base, local_shards: LocalShards, items: RunColumns) -> Spans:
    """Find the bytes of the base that hold elements of the items, as spans in any order.

    Whether they are unchanged is not checked.
    """
    catalog, specs = base.catalog, local_shards.specs
    # source[s]: the tensor of the base with the name, dtype and shape of spec s, or −1; a blob has none.
    source = np.full(len(specs), -1)
    kinds = local_shards.local_metadata.tensors.kind.tolist()
    for s, (spec, found) in enumerate(zip(specs, catalog.found([spec.name for spec in specs]), strict=True)):
        if kinds[s] == TensorKind.TENSOR and found is not None and found[1:] == (spec.dtype, tuple(spec.shape)):
            source[s] = catalog.source(found[0])
    # of[i]: the tensor of item i in the base, or −1. item: the items that have one; each is a wanted piece, in memory of its own.
    of = source[[local_shards.rows[row][0] for row in items.local.tolist()]] if len(items.local) else items.local
    item = np.flatnonzero((of >= 0) & (items.count > 0))
    pieces = [local_shards.rows[row][1].piece for row in items.local[item].tolist()]
    width = width_of(specs)
    lengths = pad_rows([piece.lengths for piece in pieces], width, 1)
    offsets = pad_rows([piece.offsets for piece in pieces], width, 0)
    start = items.start[item]
    wanted = PieceColumns(np.arange(len(item)), offsets, lengths, start, items.count[item], -start, strides_of(lengths))
    plan = plan_load(catalog, of[item], wanted, _ONE_WINDOW)
    # The overlaps that are in order, without gaps, both in the file and in the item.
    each, steps, long = plan.item_bytes, strides_of(plan.lengths), plan.lengths > 1
    in_file = ((plan.src_strides == steps * each[:, None]) | ~long).all(axis=1)
    in_item = ((plan.dst_strides == steps) | ~long).all(axis=1)
    usable = np.array([file is not None for file in base.files], bool)[plan.file] & (plan.src % each == 0)
    keep = np.flatnonzero(in_file & in_item & usable)
    file, begin, each = plan.file[keep], plan.src[keep], each[keep]
    own = item[plan.dest[keep]]
    return Spans(file, begin, begin + volumes(plan.lengths[keep]) * each, own, items.start[own] + plan.dst[keep], each)


def _with_headers(base: Base, spans: Spans) -> Spans:
    """Add a span for the header of each file in `spans`, and leave out spans of bytes that occur twice; sort by file and byte."""
    catalog = base.catalog
    # The bytes before the first row of a file are its header: with them, its first block can be hashed too.
    data_begin = np.full(len(catalog.files), np.iinfo(np.int64).max)
    np.minimum.at(data_begin, catalog.rows.file, catalog.rows.offset)
    used = np.unique(spans.file)
    none = np.zeros_like(used)
    headers = Spans(used, none, data_begin[used], none + _HEADER, none, none + 1)
    both = concatenated([spans, headers])
    both = both.take(lex_order(both.file, both.begin))
    # Tensors that were aliases in the base, and are no more, have the same bytes there: only the first is compared.
    alone = np.ones(len(both.begin), bool)
    alone[1:] = (both.begin[1:] >= both.end[:-1]) | (both.file[1:] != both.file[:-1])
    return both.take(alone)


def _unchanged_of(
    base: Base, file: int, digests: Digests, spans: Spans, runs: Sequence[LocalRun], views: Views, scratch: torch.Tensor
) -> StoredRuns:
    """Hash this rank's bytes for each block of one file that adjacent spans cover. Return the parts of items in equal blocks."""
    size, block = base.catalog.files[file].size, digests.block_bytes
    equal = np.zeros(len(digests.values) + 2, bool)  # equal[1 + i]: of block i; with a False at both ends
    breaks = np.flatnonzero(spans.begin[1:] != spans.end[:-1]) + 1
    for stretch in np.split(np.arange(len(spans.begin)), breaks):
        begin, end = int(spans.begin[stretch[0]]), int(spans.end[stretch[-1]])
        # first, last: the blocks that lie wholly in the stretch; the last block of a file may be short.
        first, last = -(-begin // block), num_blocks(size, block) if end == size else end // block
        if first >= last:
            continue
        hasher = BlockHasher(block)
        low, high = first * block, min(last * block, size)
        at = begin
        for chunk in _bytes_of(base, file, spans.take(stretch), runs, views, scratch):
            hasher.update(chunk[max(low - at, 0) : max(high - at, 0)])
            at += len(chunk)
        equal[1 + first : 1 + last] = np.array(hasher.close(), np.uint64) == digests.values[first:last]
    # lows, highs: the byte ranges of consecutive equal blocks.
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    lows, highs = edges[::2] * block, np.minimum(edges[1::2] * block, size)
    # Range r meets the spans met[r] to until[r]; one row for each such pair from here on.
    met, until = np.searchsorted(spans.end, lows, side="right"), np.searchsorted(spans.begin, highs, side="left")
    owner, step = ranges(until - met)
    spans = spans.take(met[owner] + step)
    begins, ends = np.maximum(lows[owner], spans.begin), np.minimum(highs[owner], spans.end)
    start = spans.start + (begins - spans.begin) // spans.each
    unchanged = StoredRuns(spans.item, start, (ends - begins) // spans.each, spans.file, begins)
    return unchanged.take(spans.item != _HEADER)


def _bytes_of(
    base: Base, file: int, stretch: Spans, runs: Sequence[LocalRun], views: Views, scratch: torch.Tensor
) -> Iterator[memoryview]:
    """Yield the bytes of adjacent spans of a file: a header as the base checkpoint has it, the rest from this rank's memory."""
    for _, begin, end, item, start, each in stretch.rows():
        if item == _HEADER:
            header = memoryview(bytearray(end))
            base.storage.read_into(base.catalog.files[file].key, 0, [header])
            yield header
        elif (view := views[item]) is not None:
            at = (start - runs[item].start) * each
            yield view[at : at + end - begin]
        else:
            yield from chunks(runs[item].local, start, (end - begin) // each, scratch)


def is_equal(base: Base, runs: Sequence[LocalRun], row: Sequence[int], scratch: torch.Tensor) -> bool:
    """Tell whether a run of elements of this rank has the bytes that the base checkpoint has for it, which are read."""
    item, start, count, file, offset = row
    for chunk in chunks(runs[item].local, start, count, scratch):
        held = memoryview(bytearray(len(chunk)))
        try:
            base.storage.read_into(base.catalog.files[file].key, offset, [held])
        except (CorruptError, StorageError):
            return False
        if held != chunk:
            return False
        offset += len(chunk)
    return True


def merged(runs: StoredRuns, each: I64) -> StoredRuns:
    """Join sorted runs that continue each other both in their item and in one file; ``each[i]`` is the element size of item i."""
    # ahead[i]: the byte at which the item's element 0 would lie, so that it is the same for runs that go on.
    ahead = runs.offset - runs.start * each[runs.item]
    first = is_new(runs.item, runs.file, ahead)
    first[1:] |= runs.start[1:] != runs.start[:-1] + runs.count[:-1]
    begin = np.flatnonzero(first)
    count = np.add.reduceat(runs.count, begin) if len(begin) else runs.count
    return replace(runs.take(begin), count=count)


def _rest(items: RunColumns, stored: StoredRuns, each: I64) -> RunColumns:
    """Return the parts of the items that are not stored in the base.

    Runs of whole blocks come first; `local` is the item's index.
    """
    number = np.arange(len(items.local))
    # Each item begins a gap at its start and behind each stored run, and ends one at each stored run and at its end. In order of
    # item and place, the n-th beginning and the n-th end belong together.
    item = np.concatenate([number, stored.item])
    low = np.concatenate([items.start, stored.start + stored.count])
    high = np.concatenate([items.start + items.count, stored.start])
    by_low, by_high = lex_order(item, low), lex_order(item, high)
    item, low, high = item[by_low], low[by_low], high[by_high]
    keep = (low < high) | (items.count == 0)[item]
    item, start, count = item[keep], low[keep], (high - low)[keep]
    order = np.argsort(count * each[item] % BLOCK_BYTES != 0, kind="stable")
    return RunColumns(item[order], start[order], count[order])
