"""The catalog as one file: encode it, and decode it without trust in the file.

1. *Encode*: each table of the catalog is a section of columns (`columns`); sections with their digests make one msgpack map.
2. *Decode*: verify the digests, read each column into an array, and check the whole (`catalog_check`). So no
   other module need doubt an index or a range.
3. *Newer writers* may add sections and fields. This reader passes over them, unless the writer lists them as critical.

``docs/format.md`` specifies the file; keep the two in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import msgpack
import numpy as np

from ..core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorTable, ValueEntry
from ..core.catalog.names import divided, link_columns
from ..core.catalog.packed import PackedRows
from ..core.catalog.specs import CODES, AxisPlacement, Mesh, ValueKind
from ..core.geometry.runs import I64
from ..errors import CorruptError, UnsupportedError
from .catalog_check import excessive_claims, link_problems, problems
from .columns import Table, pack_bytes, pack_ints, pack_matrix, pack_table, pack_texts, unpack_map
from .files import digest128
from .values import decode_value, encode_value

FORMAT = "reshard_ckpt.catalog"
VERSION = 2
_LINKS = ("optimizer", "key", "parameter")

MAX_CATALOG_BYTES = 1 << 30
"""The largest catalog that is read: some 30 million rows."""

HEAD_BYTES = 128
"""Number of bytes at the beginning of a catalog that are never the same for two saves: they have the digest of the first section,
which has the save's id."""

_SECTIONS: dict[str, dict[str, str]] = {
    "info": {"plain": "save_id created_s mesh metadata critical lossy compacted_from folder"},
    "placements": {"ints": "num_axes dim num_coords coords turn num_sections sections", "texts": "axis kind"},
    "files": {"texts": "key digests_key save_id checkpoint", "ints": "size rank", "bytes": "digest packed"},
    "tensors": {
        "texts": "name dtypes",
        "ints": "dtype kind ndim alias placement num_rows optimizer key parameter",
        "matrix": "shape",
    },
    "boxes": {"plain": "count", "matrix": "offsets lengths"},
    "rows": {"ints": "box start count file offset"},
    "values": {"texts": "name", "bytes": "path data", "ints": "kind inline num_blobs blobs optimizer key parameter"},
}
"""The fields of each section of a catalog, by the form in which they are stored: a form of columns (`_PACK`), or plain
msgpack."""

_PACK: dict[str, Callable[[Any], Any]] = {
    "ints": pack_ints,
    "texts": pack_texts,
    "bytes": pack_bytes,
    "matrix": pack_matrix,
    "plain": lambda value: value,
}
_FORMS = {
    section: {field: form for form, fields in forms.items() for field in fields.split()} for section, forms in _SECTIONS.items()
}
_TEXTS = ("compacted_from", "folder")
"""The fields of the section `info` that are absent where their text is empty."""

_KNOWN = frozenset(_SECTIONS) | {f"{section}.{field}" for section, forms in _FORMS.items() for field in forms}


def encode_catalog(catalog: Catalog) -> bytes:
    """Return the bytes of a catalog file; equal catalogs have equal bytes.

    Raise `UnsupportedError` if `decode_catalog` would refuse the catalog.
    """
    for problem in problems(catalog):
        raise UnsupportedError(f"catalog: {problem}; this state cannot be saved as it is")
    try:
        bodies = _encode_sections(catalog)
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"catalog: {error.object!r:.200} is not valid text (a lone surrogate); rename it") from error
    sections = {name: {"digest": section_digest(name, body), "body": body} for name, body in bodies.items()}
    packed: bytes = msgpack.packb({"format": FORMAT, "version": VERSION, "sections": sections})
    if len(packed) > MAX_CATALOG_BYTES:
        raise UnsupportedError(
            f"catalog: {len(packed)} bytes, over the {MAX_CATALOG_BYTES} that are read; save fewer, larger shards"
        )
    return packed


def decode_catalog(data: bytes | memoryview, *, is_checked: bool = False) -> Catalog:
    """Read and check a catalog file.

    Raise `CorruptError` if the file is damaged or hostile, or a newer version wrote it in a way that this version cannot read.

    Parameters
    ----------
    data
        All of the file.
    is_checked
        Whether another process has decoded these very bytes without an error: their contents are not checked again.
    """
    if len(data) > MAX_CATALOG_BYTES:
        raise CorruptError(f"catalog: {len(data)} bytes, over the {MAX_CATALOG_BYTES} that are read; use another checkpoint")
    open_section = _open_sections(data)
    info = open_section("info")
    # First of all: the list of critical sections decides whether the rest can be read.
    unknown = [item for item in info.field("critical", list) if type(item) is not str or item not in _KNOWN]
    if unknown:
        raise CorruptError(
            f"catalog: written by a newer version, which says that {unknown!r:.200} must be understood; upgrade reshard_ckpt"
        )
    catalog = _decode_tables(info, open_section)
    if is_checked:
        return catalog
    for problem in chain(problems(catalog), excessive_claims(catalog, len(data))):
        raise CorruptError(f"catalog: {problem}; use another checkpoint")
    # Only files of foreign formats have no digests, and foreign formats have no catalog file.
    unproved = next((file.key for file in catalog.files if not file.digests_key), None)
    if unproved is not None:
        raise CorruptError(f"catalog: file {unproved} has no digests; use another checkpoint")
    return catalog


def section_digest(name: str, body: bytes) -> bytes:
    """Return the XXH3-128 of the name and the body of a section."""
    return digest128(name.encode() + b"\0" + body)


# --- encoding -------------------------------------------------------------------------------------------------------------------


def _encode_sections(catalog: Catalog) -> dict[str, bytes]:
    rows = catalog.rows
    sections: dict[str, dict[str, Any]] = {
        "info": _info(catalog),
        "placements": _placement_columns(catalog.placements),
        "files": _file_columns(catalog.files),
        "tensors": _tensor_columns(catalog.tensors_table),
        "boxes": {"count": len(catalog.boxes.offsets), "offsets": catalog.boxes.offsets, "lengths": catalog.boxes.lengths},
        "rows": {"box": rows.box, "start": rows.start, "count": rows.count, "file": rows.file, "offset": rows.offset},
        "values": _value_columns(catalog),
    }
    return {
        section: pack_table({field: _PACK[_FORMS[section][field]](value) for field, value in fields.items()})
        for section, fields in sections.items()
    }


def _info(catalog: Catalog) -> dict[str, Any]:
    mesh = catalog.mesh
    return {
        "save_id": catalog.save_id,
        "created_s": float(catalog.created_s),
        "mesh": None if mesh is None else {"axes": list(mesh.axes), "sizes": list(mesh.sizes)},
        "metadata": encode_value(catalog.metadata, "metadata"),
        "critical": ["files.packed"] if any(file.packed for file in catalog.files) else [],
        **({"lossy": dict(sorted(catalog.lossy.items()))} if catalog.lossy else {}),
        **{field: text for field in _TEXTS if (text := getattr(catalog, field))},
    }


def _placement_columns(placements: tuple[tuple[AxisPlacement, ...], ...]) -> dict[str, Any]:
    axes = [axis for placement in placements for axis in placement]
    return {
        "num_axes": [len(placement) for placement in placements],
        "axis": [axis.axis for axis in axes],
        "kind": [axis.kind for axis in axes],
        # A dim or a turn is stored as its number + 1, because 0 stands for None.
        "dim": [0 if axis.dim is None else axis.dim + 1 for axis in axes],
        "num_coords": [len(axis.coords) for axis in axes],
        "coords": [c for axis in axes for c in axis.coords],
        "turn": [0 if axis.turn is None else axis.turn + 1 for axis in axes],
        "num_sections": [len(axis.sections) for axis in axes],
        "sections": [size for axis in axes for size in axis.sections],
    }


def _file_columns(files: tuple[FileEntry, ...]) -> dict[str, Any]:
    columns: dict[str, Any] = {field: [getattr(file, field) for file in files] for field in _FILE_FIELDS}
    for field in ("key", "digests_key"):  # below the folder of the checkpoint that has the file; the folder is another column
        columns[field] = [getattr(file, field).removeprefix(file.folder) for file in files]
    if any(file.packed for file in files):
        columns["packed"] = [msgpack.packb(file.packed) for file in files]
    return columns


_FILE_FIELDS = ("key", "size", "digests_key", "digest", "save_id", "rank", "checkpoint")
"""The columns that the table of files has in every catalog, in the order of `FileEntry`."""


def _tensor_columns(table: TensorTable) -> dict[str, Any]:
    used, dtype = np.unique(table.dtype, return_inverse=True)
    return {
        "name": table.names,
        "dtypes": [CODES[code] for code in used.tolist()],
        "dtype": dtype,
        "kind": table.kind,
        "ndim": table.ndim,
        "shape": table.shape,
        "alias": table.alias + 1,
        "placement": table.placement + 1,
        "num_rows": np.diff(table.row_start),
        "optimizer": table.optimizer,
        "key": table.key,
        "parameter": table.parameter + 1,
    }


def _value_columns(catalog: Catalog) -> dict[str, Any]:
    values = catalog.values_table
    links = link_columns(catalog.value_names, [value.link for value in values], catalog.indices)
    return {
        "name": catalog.value_names,
        "path": [value.path for value in values],
        "kind": [value.kind for value in values],
        "inline": [value.data is not None for value in values],
        "data": [value.data for value in values if value.data is not None],
        "num_blobs": [len(value.blobs) for value in values],
        "blobs": [blob for value in values for blob in value.blobs],
        **links,
        "parameter": links["parameter"] + 1,
    }


# --- decoding -------------------------------------------------------------------------------------------------------------------


def _open_sections(data: bytes | memoryview) -> Callable[[str], Table]:
    """Verify format and version; return a function that opens a section by its name, and verifies its digest."""
    envelope = unpack_map(data, "catalog")
    if envelope.get("format") != FORMAT:
        raise CorruptError(f"catalog: its format is {envelope.get('format')!r:.80}, not {FORMAT!r}; use another checkpoint")
    version = envelope.get("version")
    if type(version) is int and version > VERSION:
        raise CorruptError(
            f"catalog: version {version}, written by a newer version than this, which reads {VERSION}; upgrade reshard_ckpt"
        )
    if version != VERSION or type(version) is not int:
        raise CorruptError(f"catalog: its version is {version!r:.80}, and this library reads {VERSION}; use another checkpoint")
    sections = envelope.get("sections")
    if type(sections) is not dict:
        raise CorruptError("catalog: it has no sections; use another checkpoint")

    def open_section(name: str) -> Table:
        section = sections.get(name)
        section = section if type(section) is dict else {}
        body = section.get("body")
        if type(body) is not bytes:
            raise CorruptError(f"catalog: its section {name} is missing; use another checkpoint")
        if section.get("digest") != section_digest(name, body):
            raise CorruptError(f"catalog: its section {name} does not match its digest; use another checkpoint")
        # In a table of many rows, some columns differ from row to row, and each of them takes at least 4 bytes a row.
        return Table(name, unpack_map(body, f"catalog: {name}"), max_count=len(data) // 4 + 4096)

    return open_section


def _decode_tables(info: Table, open_section: Callable[[str], Table]) -> Catalog:
    """Read all sections of a catalog. The section `info` is open already; `open_section` opens another by its name.

    Raise `CorruptError` if a column is missing, or has another type or length than it must have.
    """
    lossy = info.fields.get("lossy", {})
    if not isinstance(lossy, dict) or not {str}.issuperset(map(type, (*lossy, *lossy.values()))):
        raise info.corrupt("lossy", "is not a map of text to text")
    tensors = _decode_tensors(open_section("tensors"))
    return Catalog(
        save_id=info.field("save_id", str),
        created_s=info.field("created_s", float),
        mesh=_decode_mesh(info),
        metadata=decode_value(info.field("metadata", bytes), name="metadata"),
        tensors_table=tensors,
        placements=_decode_placements(open_section("placements")),
        boxes=_decode_boxes(open_section("boxes")),
        rows=_decode_rows(open_section("rows")),
        files=_decode_files(open_section("files")),
        values_table=_decode_values(open_section("values"), tensors.names),
        lossy=lossy,
        **{field: info.field(field, str) for field in _TEXTS if field in info.fields},
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
    """Divide the items of a flat column among the entries of a table: entry i gets the next ``counts[i]`` items."""
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
    """Raise an error if a column that should have distinct names stores one name for all: few bytes would make many objects."""
    if len(names) > 1 and names[0] == names[-1]:
        raise table.corrupt(field, f"holds {names[0]!r:.80} twice")


def _decode_files(table: Table) -> tuple[FileEntry, ...]:
    keys = table.texts("key")
    count = len(keys)
    _refuse_repeated(table, "key", keys)
    columns = [table.column(_FORMS["files"][field], field, count) for field in _FILE_FIELDS]
    packed: list[tuple[PackedRows, ...]] = [()] * count
    if "packed" in table.fields:
        packed = [_decode_packed(table, data) for data in table.byte_strings("packed", count)]
    files = []
    for entry in zip(*columns, packed, strict=True):
        file = FileEntry(*entry)
        if file.checkpoint:  # the keys become relative to this checkpoint
            digests_key = file.digests_key and file.folder + file.digests_key
            file = replace(file, key=file.folder + file.key, digests_key=digests_key)
        files.append(file)
    return tuple(files)


def _decode_packed(table: Table, data: bytes) -> tuple[PackedRows, ...]:
    """Decode the packed rows of one file. `catalog_check` checks that they are in order of their place there."""
    try:
        packed = tuple(PackedRows(*rows) for rows in msgpack.unpackb(data, use_list=False)) if data else ()
        if all([*map(type, rows)] == [int, int, int, str, int] and rows.is_sound() for rows in packed):
            return packed
    except (ValueError, TypeError):
        pass
    raise table.corrupt("packed", "is not a list of packed rows")


def _decode_links(table: Table, count: int) -> dict[str, I64]:
    """Read the columns of links, which tie tensors and values of optimizer state to their optimizer, key and parameter."""
    optimizer, key, parameter = (table.ints(field, count) for field in _LINKS)
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
    """Read the dtype of each tensor. A catalog has its own list of codes, because `CODES` may grow from version to version."""
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
    columns = _decode_links(table, count)
    for problem in link_problems(names, **columns, num_tensors=len(tensors)):
        raise CorruptError(f"catalog: {table.name}: {problem}; use another checkpoint")
    linked = zip(names, *(columns[field].tolist() for field in _LINKS), strict=True)
    links = [divided(name, o, k, None if p < 0 else tensors[p]) if k else None for name, o, k, p in linked]
    return tuple(
        ValueEntry(names[i], paths[i], ValueKind(kinds[i]), data[i][0] if data[i] else None, blobs[i], links[i])
        for i in range(count)
    )
