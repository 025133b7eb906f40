"""Decoding the sections of a catalog file: each column becomes an array, after its count is compared with its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorTable, ValueEntry
from ..core.catalog.names import divided
from ..core.catalog.specs import CODES, AxisPlacement, Mesh, StateLink, ValueKind
from ..core.geometry.runs import I64
from ..errors import CorruptError
from .catalog_check import link_problems
from .columns import Table
from .values import decode_value

LINK_FIELDS = ("optimizer", "key", "parameter")


def decode_tables(info: Table, open_section: Callable[[str], Table]) -> Catalog:
    """Read all sections of a catalog. The section `info` is open already; `open_section` opens another by its name.

    Raises
    ------
    CorruptError
        A column is missing, or has another type or length than it must have.
    """
    placements = _decode_placements(open_section("placements"))
    tensors = _decode_tensors(open_section("tensors"))
    return Catalog(
        save_id=info.field("save_id", str),
        created_s=info.field("created_s", float),
        mesh=_decode_mesh(info),
        metadata=decode_value(info.field("metadata", bytes), name="metadata"),
        tensors_table=tensors,
        placements=placements,
        boxes=_decode_boxes(open_section("boxes")),
        rows=_decode_rows(open_section("rows")),
        files=_decode_files(open_section("files")),
        values_table=_decode_values(open_section("values"), tensors.names),
    )


def _decode_mesh(info: Table) -> Mesh | None:
    mesh = info.fields.get("mesh")
    if mesh is None and "mesh" in info.fields:
        return None
    fields = Table("info.mesh", info.field("mesh", dict), 0)
    axes, sizes = fields.field("axes", list), fields.field("sizes", list)
    if any(type(axis) is not str for axis in axes) or any(type(size) is not int for size in sizes):
        raise info.corrupt("mesh", "is not made of names and sizes")
    return Mesh(tuple(axes), tuple(sizes))


def _split(table: Table, field: str, counts: I64, items: list[Any]) -> list[tuple[Any, ...]]:
    """Divide the items of a flat column among the entries: entry i gets the next ``counts[i]`` items."""
    if len(counts) and int(counts.max()) > len(items):
        raise table.corrupt(field, f"counts {int(counts.max())} of {len(items)} items")
    bounds = [0, *np.cumsum(counts).tolist()]
    if bounds[-1] != len(items):
        raise table.corrupt(field, f"counts {bounds[-1]} items, but there are {len(items)}")
    return [tuple(items[begin:end]) for begin, end in pairwise(bounds)]


def _decode_placements(table: Table) -> tuple[tuple[AxisPlacement, ...], ...]:
    num_axes, axis = table.ints("num_axes"), table.texts("axis")
    count = len(axis)
    coords = _split(table, "num_coords", table.ints("num_coords", count), table.ints("coords").tolist())
    kind, dim = table.texts("kind", count), table.ints("dim", count).tolist()
    turn = table.ints("turn", count).tolist()
    sections = _split(table, "num_sections", table.ints("num_sections", count), table.ints("sections").tolist())
    axes = [
        AxisPlacement(axis[i], kind[i], dim[i] - 1 if dim[i] else None, coords[i], turn[i] - 1 if turn[i] else None, sections[i])
        for i in range(count)
    ]
    return tuple(_split(table, "num_axes", num_axes, axes))


def _refuse_repeated(table: Table, field: str, names: Sequence[str]) -> None:
    """Refuse a column that stores one name for all entries: a few bytes would become many objects before any check."""
    if len(names) > 1 and names[0] == names[-1]:
        raise table.corrupt(field, f"holds {names[0]!r:.80} twice")


def _decode_files(table: Table) -> tuple[FileEntry, ...]:
    keys = table.texts("key")
    count = len(keys)
    _refuse_repeated(table, "key", keys)
    columns = (
        keys,
        table.ints("size", count).tolist(),
        table.texts("digests_key", count),
        table.byte_strings("digest", count),
        table.texts("save_id", count),
        table.ints("rank", count).tolist(),
        table.texts("checkpoint", count),
    )
    return tuple(_from_here(FileEntry(*entry)) for entry in zip(*columns, strict=True))


def _from_here(file: FileEntry) -> FileEntry:
    if not file.checkpoint:
        return file
    digests_key = file.digests_key and f"{file.folder}{file.digests_key}"
    return replace(file, key=f"{file.folder}{file.key}", digests_key=digests_key)


def _decode_links(table: Table, count: int) -> dict[str, I64]:
    """Read the columns that link optimizer state to parameters."""
    optimizer, key, parameter = (table.ints(field, count) for field in LINK_FIELDS)
    return {"optimizer": optimizer, "key": key, "parameter": parameter - 1}


def _decode_tensors(table: Table) -> TensorTable:
    names = table.texts("name")
    count = len(names)
    row_start = np.zeros(count + 1, np.int64)
    num_rows = table.ints("num_rows", count)
    if count and int(num_rows.max()) > table.max_count:
        raise table.corrupt("num_rows", f"gives a tensor {int(num_rows.max())} rows")
    np.cumsum(num_rows, out=row_start[1:])
    return TensorTable(
        names=tuple(names),
        dtype=_decode_dtypes(table, count),
        kind=np.minimum(table.ints("kind", count), 255).astype(np.uint8),
        ndim=table.ints("ndim", count),
        shape=table.matrix("shape", count),
        alias=table.ints("alias", count) - 1,
        placement=table.ints("placement", count) - 1,
        row_start=row_start,
        **_decode_links(table, count),
    )


def _decode_dtypes(table: Table, count: int) -> Any:
    """Read the dtypes: a catalog has its own list of codes, because `CODES` may grow from version to version."""
    listed, dtype = table.texts("dtypes"), table.ints("dtype", count)
    unknown = [code for code in listed if code not in CODES]
    if unknown:
        raise table.corrupt("dtypes", f"lists {unknown!r:.200}: damaged, or written by a newer version")
    if count and int(dtype.max()) >= len(listed):
        raise table.corrupt("dtype", f"is {int(dtype.max())}, of {len(listed)}")
    return np.array([CODES.index(code) for code in listed], np.uint8)[dtype]


def _decode_boxes(table: Table) -> BoxTable:
    count = table.field("count", int)
    if not 0 <= count <= table.max_count:
        raise table.corrupt("count", f"is {count}")
    return BoxTable(table.matrix("offsets", count), table.matrix("lengths", count))


def _decode_rows(table: Table) -> RowTable:
    box = table.ints("box")
    return RowTable(box, *(table.ints(field, len(box)) for field in ("start", "count", "file", "offset")))


def _decode_values(table: Table, tensors: Sequence[str]) -> tuple[ValueEntry, ...]:
    names = table.texts("name")
    count = len(names)
    _refuse_repeated(table, "name", names)
    paths, kinds = table.byte_strings("path", count), table.ints("kind", count).tolist()
    unknown = set(kinds) - set(ValueKind)
    if unknown:
        raise table.corrupt("kind", f"holds {sorted(unknown)}: damaged, or written by a newer version")
    data = _split(table, "inline", np.minimum(table.ints("inline", count), 2), table.byte_strings("data"))
    blobs = _split(table, "num_blobs", table.ints("num_blobs", count), table.ints("blobs").tolist())
    if any(len(item) > 1 for item in data):
        raise table.corrupt("inline", "is neither 0 nor 1")
    links = _value_links(table, names, _decode_links(table, count), tensors)
    return tuple(
        ValueEntry(names[i], paths[i], ValueKind(kinds[i]), data[i][0] if data[i] else None, blobs[i], links[i])
        for i in range(count)
    )


def _value_links(table: Table, names: Sequence[str], columns: dict[str, I64], tensors: Sequence[str]) -> list[StateLink | None]:
    for problem in link_problems(names, **columns, num_tensors=len(tensors)):
        raise CorruptError(f"catalog: {table.name}: {problem}; use another checkpoint")
    rows = zip(names, *(columns[field].tolist() for field in LINK_FIELDS), strict=True)
    return [divided(name, o, k, None if p < 0 else tensors[p]) if k else None for name, o, k, p in rows]
