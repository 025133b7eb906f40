"""The check of a catalog, column by column: every index, length and range must be one that a save could have made.

Each function yields problems, the worst first. Callers take only the first problem: a later check relies on the earlier ones (an
index is in range, a product does not overflow). Nothing here checks that the rows of a tensor tile it: a load checks this for the
regions that it wants.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite, prod

import numpy as np

from ..core.catalog.model import BoxTable, Catalog, TensorKind, TensorTable
from ..core.catalog.names import STATE
from ..core.catalog.specs import CODES, ValueKind, item_bytes_of
from ..core.geometry.columns import columns_of
from ..core.geometry.runs import I64, Mask
from ..core.report import MAX_NAME_BYTES
from .columns import MAX_COLUMNS, MAX_MEMBERS

MAX_BYTES = 2**62
"""The most bytes that a file or a tensor may have, so that sums of two such numbers still fit in an int64."""

CELLS_PER_BYTE, MIN_CELLS = 16, 1 << 20
"""Limits of the numbers (cells) that runs which are not boxes may be cut into: `CELLS_PER_BYTE` for each byte of the file, but
`MIN_CELLS` in any case. A save has fewer than 8 for each byte: in a large table a row takes at least 4 bytes, and a run of a
tensor of 4 dims is cut into 28 numbers."""

_NAME = r"(?!\.\.?(?:/|\Z))[^/\x00-\x1f\x7f\\]+"
_SAFE = re.compile(f"{_NAME}(?:/{_NAME})*")
_MAX_KEY_CHARS = 1024
"""The longest key of a file. File systems allow paths of 4,096 bytes, with the folder."""


def problems(catalog: Catalog) -> Iterator[str]:
    """Yield texts about the problems of a catalog, of most kinds only about the first one.

    If there are none, all its indices and ranges can be trusted.
    """
    yield from _info(catalog)
    yield from _texts(catalog)
    yield from _files(catalog)
    yield from _tensors(catalog.tensors_table, len(catalog.placements), len(catalog.rows.box))
    yield from _aliases(catalog.tensors_table)
    yield from _links(catalog.tensors_table)
    yield from _boxes(catalog.boxes, catalog.tensors_table)
    yield from _rows(catalog)
    yield from _values(catalog)


def excessive_claims(catalog: Catalog, num_bytes: int) -> Iterator[str]:
    """Yield texts about claims of a catalog that no save makes and that would cost a reader much memory or time.

    There is at most one text for each kind of claim. `num_bytes` is the size of its file.
    """
    rows = catalog.rows
    sizes = np.array([file.size for file in catalog.files], np.float64)
    used = np.bincount(rows.file, weights=catalog.row_bytes, minlength=len(sizes))
    for bad in _first(used > sizes):
        yield f"rows of {int(used[bad])} bytes in all lie in {catalog.files[bad].key}, which has {int(sizes[bad])}"
    # Planners cut a run that is not a box into 2 D - 1 boxes of D dims each.
    lengths = catalog.boxes.lengths
    parts = 2 * np.maximum((lengths > 1).sum(axis=1), 1) - 1
    cells = int((parts[rows.box] * (rows.count != lengths.prod(axis=1)[rows.box])).sum()) * lengths.shape[1]
    if cells > CELLS_PER_BYTE * num_bytes + MIN_CELLS:
        yield f"its {len(rows.box)} rows come apart into boxes of {cells} numbers, too many for a file of {num_bytes} bytes"


def is_safe_key(key: str) -> bool:
    """Return whether a file's key is a path that stays below the root of its store.

    >>> is_safe_key("s1/rank00000-0.safetensors"), is_safe_key("../elsewhere"), is_safe_key("/etc/passwd")
    (True, False, False)
    """
    return len(key) <= _MAX_KEY_CHARS and _SAFE.fullmatch(key) is not None


def _is_in(folder: str, key: str) -> bool:
    """Return whether a file's key is a path below a folder."""
    return key.startswith(folder) and is_safe_key(key[len(folder) :])


def _is_safe_checkpoint(path: str) -> bool:
    """Return whether the path to a checkpoint is "" (the checkpoint itself), or relative with all its ``..`` in front."""
    while path.startswith("../"):
        path = path[3:]
    return path == "" or is_safe_key(path)


def _first(mask: Mask | np.bool_) -> list[int]:
    """Return the index of the first True in a mask, as a list; an empty list if there is none."""
    return [int(mask.argmax())] if mask.any() else []


def _info(catalog: Catalog) -> Iterator[str]:
    if not is_safe_key(catalog.save_id) or "/" in catalog.save_id:
        yield f"its save id {catalog.save_id!r:.80} is not the name of a folder"
    if not isfinite(catalog.created_s):
        yield f"its time of creation is {catalog.created_s}"
    mesh = catalog.mesh
    if mesh is not None and (len(mesh.axes) != len(mesh.sizes) or len(set(mesh.axes)) != len(mesh.axes)):
        yield f"its mesh has axes {mesh.axes} and sizes {mesh.sizes}"
    if mesh is not None and len(mesh.axes) > MAX_MEMBERS:
        yield f"its mesh has {len(mesh.axes)} axes, over the {MAX_MEMBERS} that are read"
    if mesh is not None and (any(size < 1 for size in mesh.sizes) or prod(mesh.sizes) >= 2**31):
        yield f"its mesh has sizes {mesh.sizes}"


def _texts(catalog: Catalog) -> Iterator[str]:
    axes = (axis.axis for placement in catalog.placements for axis in placement)
    texts = (*catalog.tensors_table.names, *catalog.value_names, *axes)
    if max(map(len, texts), default=0) > MAX_NAME_BYTES // 4:  # a character takes at most 4 bytes
        for text in texts:
            if (num_bytes := len(text.encode(errors="replace"))) > MAX_NAME_BYTES:
                yield f"{text[:60]!r}… is a name of {num_bytes} bytes, over the {MAX_NAME_BYTES} that are read"


def _files(catalog: Catalog) -> Iterator[str]:
    for i, file in enumerate(catalog.files):
        if not _is_safe_checkpoint(file.checkpoint):
            yield f"file {file.key} belongs to the checkpoint {file.checkpoint!r:.200}, which is not a relative path"
        if not _is_in(file.folder, file.key) or (file.digests_key and not _is_in(file.folder, file.digests_key)):
            yield f"file {i} is {file.key!r:.200} with digests {file.digests_key!r:.200}: no paths below the checkpoint"
        if len(file.digest) != (16 if file.digests_key else 0):
            yield f"file {file.key} has a digest of {len(file.digest)} bytes"
        if not 0 <= file.size <= MAX_BYTES or file.rank < 0:
            yield f"file {file.key} has {file.size} bytes and rank {file.rank}"
        end = 0
        for rows in file.packed:
            if rows.begin < end or rows.end > file.size:
                yield f"file {file.key} has packed rows that overlap, or lie beyond its {file.size} bytes"
            end = rows.end
    keys = {file.key for file in catalog.files}
    if len(keys) != len(catalog.files):
        yield f"{len(catalog.files)} files have {len(keys)} different keys"


def _tensors(table: TensorTable, num_placements: int, num_rows: int) -> Iterator[str]:
    names, count, width = table.names, len(table.names), table.shape.shape[1]
    if width > MAX_COLUMNS:
        yield f"tensors have up to {width} dims, over the {MAX_COLUMNS} that are read"
    if not all(map(operator.lt, names, islice(names, 1, None))):
        yield "names of tensors are not in order, or one occurs twice"
    for label, column, low, high in (
        ("dtype", table.dtype, 0, len(CODES)),
        ("kind", table.kind, 0, TensorKind.BLOB + 1),
        ("number of dims", table.ndim, 0, width + 1),
        ("alias", table.alias, -1, count),
        ("placement", table.placement, -1, num_placements),
    ):
        if len(column) != count:
            yield f"{count} tensors have {len(column)} entries for {label}"
        for bad in _first((column < low) | (column >= high)):
            yield f"{names[bad]}: its {label} is {int(column[bad])}, of {low} to {high - 1}"
    yield from _shapes(table)
    starts = table.row_start
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != num_rows or (np.diff(starts) < 0).any():
        yield f"the row index of {count} tensors does not divide {num_rows} rows"


def _shapes(table: TensorTable) -> Iterator[str]:
    names, width = table.names, table.shape.shape[1]
    for bad in _first((table.shape < 0).any(axis=1)):
        yield f"{names[bad]}: its shape {table.shape[bad].tolist()} is negative"
    for bad in _first(((np.arange(width) < width - table.ndim[:, None]) & (table.shape != 1)).any(axis=1)):
        yield f"{names[bad]}: its shape {table.shape[bad].tolist()} has {int(table.ndim[bad])} dims, but is not padded with 1"
    num_bytes = np.maximum(table.shape, 1).prod(axis=1, dtype=np.float64) * item_bytes_of(table.dtype)
    for bad in _first(num_bytes > MAX_BYTES):  # in floats, because products of integers wrap around
        yield f"{names[bad]}: its shape {table.shape[bad].tolist()} is over {MAX_BYTES} bytes"
    is_run = (table.dtype == CODES.index("U8")) & (table.ndim == 1) & (table.alias < 0)
    for bad in _first((table.kind == TensorKind.BLOB) & ~is_run):
        yield f"{names[bad]}: holds a value, but is not a run of U8"


def _aliases(table: TensorTable) -> Iterator[str]:
    here = np.flatnonzero(table.alias >= 0)
    there = table.alias[here]
    different = (
        (table.alias[there] >= 0)
        | (table.dtype[here] != table.dtype[there])
        | (table.kind[here] != table.kind[there])
        | (table.ndim[here] != table.ndim[there])
        | (table.shape[here] != table.shape[there]).any(axis=1)
    )
    for bad in _first(different):
        yield f"{table.names[here[bad]]}: is an alias of {table.names[there[bad]]}, an alias too or of another shape or dtype"
    for bad in _first(np.diff(table.row_start)[here] != 0):
        yield f"{table.names[here[bad]]}: is an alias, but has rows of its own"


def _links(table: TensorTable) -> Iterator[str]:
    yield from link_problems(table.names, table.optimizer, table.key, table.parameter, len(table.names))
    for label, index in (("is state", np.flatnonzero(table.key)), ("has state", table.parameter[table.key > 0])):
        index = index[index >= 0]
        for bad in _first(table.kind[index] == TensorKind.BLOB):
            yield f"{table.names[index[bad]]}: {label} of an optimizer, but holds a value"


def link_problems(names: Sequence[str], optimizer: I64, key: I64, parameter: I64, num_tensors: int) -> Iterator[str]:
    """Yield texts about problems of the links that tie named tensors or values to optimizers and parameters."""
    if {len(optimizer), len(key), len(parameter)} != {len(names)}:
        yield f"{len(names)} entries have {len(optimizer)} optimizers, {len(key)} keys and {len(parameter)} parameters as links"
    for bad in _first((optimizer < 0) | (key < 0) | (parameter < -1) | (parameter >= num_tensors)):
        yield f"{names[bad]}: is linked by {int(optimizer[bad])} and {int(key[bad])} parts to tensor {int(parameter[bad])}"
    for bad in _first((key == 0) & ((optimizer != 0) | (parameter >= 0))):
        yield f"{names[bad]}: has a parameter, but no key of state"
    linked = np.flatnonzero(key)
    for i, first, last in zip(linked.tolist(), optimizer[linked].tolist(), key[linked].tolist(), strict=True):
        parts = names[i].split(".")
        if len(parts) < first + last + 2 or parts[first] != STATE:
            yield f"{names[i]}: does not divide into an optimizer of {first} parts, {STATE!r}, a parameter and a key of {last}"


def _boxes(boxes: BoxTable, table: TensorTable) -> Iterator[str]:
    if boxes.offsets.shape != boxes.lengths.shape or boxes.offsets.shape[1] != table.shape.shape[1]:
        width = table.shape.shape[1]
        yield f"boxes have {boxes.offsets.shape} offsets and {boxes.lengths.shape} lengths for tensors of {width} dims"
    for label, matrix in (("offset", boxes.offsets), ("length", boxes.lengths)):
        if matrix.size and (matrix.min() < 0 or matrix.max() > MAX_BYTES):
            yield f"a box has an {label} of {int(matrix.min())} to {int(matrix.max())}"
    for bad in _first(np.maximum(boxes.lengths, 1).prod(axis=1, dtype=np.float64) > MAX_BYTES):
        yield f"box {bad} has lengths {boxes.lengths[bad].tolist()}, over {MAX_BYTES} elements"


def _rows(catalog: Catalog) -> Iterator[str]:
    rows, table, boxes = catalog.rows, catalog.tensors_table, catalog.boxes
    num = [len(column) for column in columns_of(rows)]
    if len(set(num)) > 1:
        yield f"the columns of the rows have {num} entries"
    tensor = catalog.row_tensors
    for label, column, high in (("box", rows.box, len(boxes.lengths)), ("file", rows.file, len(catalog.files))):
        for bad in _first((column < 0) | (column >= high)):
            yield f"{table.names[tensor[bad]]}: row {bad} is of {label} {int(column[bad])}, of {high}"
    yield from _row_boxes(catalog, tensor)
    sizes = np.array([file.size for file in catalog.files], np.int64)
    for bad in _first((rows.offset < 0) | (rows.offset > sizes[rows.file] - catalog.row_bytes)):
        file = catalog.files[int(rows.file[bad])]
        yield (
            f"{table.names[tensor[bad]]}: row {bad} has {int(rows.count[bad])} elements at byte {int(rows.offset[bad])} "
            f"of {file.key}, which has {file.size} bytes"
        )


def _row_boxes(catalog: Catalog, tensor: I64) -> Iterator[str]:
    """Yield texts about the first row of each kind: its box is not within its tensor, or its run not within its box.

    Rows without elements are problems too, unless their tensor has none.
    """
    rows, table, boxes = catalog.rows, catalog.tensors_table, catalog.boxes
    ends = boxes.offsets + boxes.lengths
    for dim in range(ends.shape[1]):
        for bad in _first(ends[:, dim][rows.box] > table.shape[:, dim][tensor]):
            box, shape = int(rows.box[bad]), table.shape[tensor[bad]].tolist()
            offsets, lengths = boxes.offsets[box].tolist(), boxes.lengths[box].tolist()
            yield f"{table.names[tensor[bad]]}: its box at {offsets} of lengths {lengths} is not within its shape {shape}"
    room = boxes.lengths.prod(axis=1)[rows.box]
    for bad in _first((rows.start < 0) | (rows.count < 0) | (rows.start > room - rows.count)):
        yield (
            f"{table.names[tensor[bad]]}: row {bad} is the run of {int(rows.count[bad])} elements from {int(rows.start[bad])} "
            f"of a box of {int(room[bad])}"
        )
    for bad in _first((rows.count == 0) & (table.shape != 0).all(axis=1)[tensor]):
        yield f"{table.names[tensor[bad]]}: row {bad} has no elements, but the tensor has"


def _values(catalog: Catalog) -> Iterator[str]:
    kinds, names = catalog.tensors_table.kind, catalog.value_names
    if len(set(names)) != len(names):
        yield "a name of a value occurs twice"
    for value in catalog.values_table:
        if value.name in catalog:
            yield f"{value.name}: is a tensor and a value"
        if value.kind not in tuple(ValueKind):
            yield f"{value.name}: its kind of value is {value.kind}, written by a newer version"
        if (value.data is None) != bool(value.blobs) or (len(value.blobs) > 1 and value.kind != ValueKind.PER_RANK):
            yield f"{value.name}: has {'no' if value.data is None else 'its'} bytes here, and {len(value.blobs)} blobs"
        if value.kind == ValueKind.PER_RANK and not value.blobs:
            yield f"{value.name}: is a value of each rank's own, but lies in no blobs"
        if any(not 0 <= blob < len(kinds) or kinds[blob] != TensorKind.BLOB for blob in value.blobs):
            yield f"{value.name}: its blobs {value.blobs!r:.80} are not blobs of the catalog"
