"""The catalog as one file: encode it, and decode it without trust in the file.

1. *Encode*: each table of the catalog is a section of columns (`columns`); sections with their digests make one msgpack map.
2. *Decode*: verify the digests, read each column into an array (`catalog_decode`), and check the whole (`catalog_check`). So no
   other module need doubt an index or a range.
3. *Newer writers* may add sections and fields. This reader passes over them, unless the writer lists them as critical.

``docs/format.md`` specifies the file; keep the two in step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import msgpack
import numpy as np

from ..core.catalog.model import Catalog, FileEntry, TensorTable
from ..core.catalog.names import link_columns
from ..core.catalog.specs import CODES, AxisPlacement
from ..errors import CorruptError, UnsupportedError
from .catalog_check import bombs, problems
from .catalog_decode import LINK_FIELDS, decode_tables
from .checksums import digest128
from .columns import Table, pack_bytes, pack_ints, pack_matrix, pack_table, pack_texts, unpack_map
from .values import encode_value

FORMAT = "reshard_ckpt.catalog"
VERSION = 2

MAX_CATALOG_BYTES = 1 << 30
"""The largest catalog that is read: some 30 million rows."""

_SECTIONS: dict[str, frozenset[str]] = {
    "info": frozenset({"save_id", "created_s", "mesh", "metadata", "critical"}),
    "placements": frozenset({"num_axes", "axis", "kind", "dim", "num_coords", "coords", "turn", "num_sections", "sections"}),
    "files": frozenset({"key", "size", "digests_key", "digest", "save_id", "rank", "checkpoint"}),
    "tensors": frozenset({"name", "dtypes", "dtype", "kind", "ndim", "shape", "alias", "placement", "num_rows", *LINK_FIELDS}),
    "boxes": frozenset({"count", "offsets", "lengths"}),
    "rows": frozenset({"box", "start", "count", "file", "offset"}),
    "values": frozenset({"name", "path", "kind", "inline", "data", "num_blobs", "blobs", *LINK_FIELDS}),
}
_KNOWN = frozenset(_SECTIONS) | {f"{section}.{field}" for section, fields in _SECTIONS.items() for field in fields}


def encode_catalog(catalog: Catalog) -> bytes:
    """Return the bytes of a catalog file; equal catalogs have equal bytes.

    Raises
    ------
    UnsupportedError
        `decode_catalog` would refuse the catalog.
    """
    for problem in problems(catalog):
        raise UnsupportedError(f"catalog: {problem}; this state cannot be saved as it is")
    try:
        bodies = _encode_sections(catalog)
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"catalog: {error.object!r:.200} is no valid text (a lone surrogate); rename it") from error
    sections = {name: {"digest": section_digest(name, body), "body": body} for name, body in bodies.items()}
    packed: bytes = msgpack.packb({"format": FORMAT, "version": VERSION, "sections": sections})
    if len(packed) > MAX_CATALOG_BYTES:
        raise UnsupportedError(
            f"catalog: {len(packed)} bytes, over the {MAX_CATALOG_BYTES} that are read; save fewer, larger shards"
        )
    return packed


def decode_catalog(data: bytes | memoryview) -> Catalog:
    """Read and check a catalog file.

    Parameters
    ----------
    data
        All of the file.

    Raises
    ------
    CorruptError
        The file is damaged or hostile, or a newer version wrote it in a way that this version cannot read.
    """
    if len(data) > MAX_CATALOG_BYTES:
        raise CorruptError(f"catalog: {len(data)} bytes, over the {MAX_CATALOG_BYTES} that are read; use another checkpoint")
    open_section = _open_sections(data)
    info = open_section("info")
    _check_critical(info)  # first: its list of critical sections decides whether the rest can be read
    catalog = decode_tables(info, open_section)
    for problem in chain(problems(catalog), bombs(catalog, len(data))):
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
    boxes, rows = catalog.boxes, catalog.rows
    columns = {"box": rows.box, "start": rows.start, "count": rows.count, "file": rows.file, "offset": rows.offset}
    sections = {
        "info": _encode_info(catalog),
        "placements": _encode_placements(catalog.placements),
        "files": _encode_files(catalog.files),
        "tensors": _encode_tensors(catalog.tensors_table),
        "boxes": {
            "count": len(boxes.offsets),
            "offsets": pack_matrix(boxes.offsets),
            "lengths": pack_matrix(boxes.lengths),
        },
        "rows": {name: pack_ints(column) for name, column in columns.items()},
        "values": _encode_values(catalog),
    }
    return {name: pack_table(fields) for name, fields in sections.items()}


def _encode_info(catalog: Catalog) -> dict[str, Any]:
    mesh = catalog.mesh
    return {
        "save_id": catalog.save_id,
        "created_s": float(catalog.created_s),
        "mesh": None if mesh is None else {"axes": list(mesh.axes), "sizes": list(mesh.sizes)},
        "metadata": encode_value(catalog.metadata, "metadata"),
        "critical": [],
    }


def _encode_placements(placements: tuple[tuple[AxisPlacement, ...], ...]) -> dict[str, Any]:
    axes = [axis for placement in placements for axis in placement]
    return {
        "num_axes": pack_ints([len(placement) for placement in placements]),
        "axis": pack_texts([axis.axis for axis in axes]),
        "kind": pack_texts([axis.kind for axis in axes]),
        "dim": pack_ints([0 if axis.dim is None else axis.dim + 1 for axis in axes]),
        "num_coords": pack_ints([len(axis.coords) for axis in axes]),
        "coords": pack_ints([c for axis in axes for c in axis.coords]),
        "turn": pack_ints([0 if axis.turn is None else axis.turn + 1 for axis in axes]),
        "num_sections": pack_ints([len(axis.sections) for axis in axes]),
        "sections": pack_ints([size for axis in axes for size in axis.sections]),
    }


def _encode_files(files: tuple[FileEntry, ...]) -> dict[str, Any]:
    return {
        # The key below the folder of the checkpoint that has the file; that folder is another column.
        "key": pack_texts([file.key.removeprefix(file.folder) for file in files]),
        "size": pack_ints([file.size for file in files]),
        "digests_key": pack_texts([file.digests_key.removeprefix(file.folder) for file in files]),
        "digest": pack_bytes([file.digest for file in files]),
        "save_id": pack_texts([file.save_id for file in files]),
        "rank": pack_ints([file.rank for file in files]),
        "checkpoint": pack_texts([file.checkpoint for file in files]),
    }


def _encode_tensors(table: TensorTable) -> dict[str, Any]:
    used, dtype = np.unique(table.dtype, return_inverse=True)
    return {
        "name": pack_texts(table.names),
        "dtypes": pack_texts([CODES[code] for code in used.tolist()]),
        "dtype": pack_ints(dtype),
        "kind": pack_ints(table.kind),
        "ndim": pack_ints(table.ndim),
        "shape": pack_matrix(table.shape),
        "alias": pack_ints(table.alias + 1),
        "placement": pack_ints(table.placement + 1),
        "num_rows": pack_ints(np.diff(table.row_start)),
        "optimizer": pack_ints(table.optimizer),
        "key": pack_ints(table.key),
        "parameter": pack_ints(table.parameter + 1),
    }


def _encode_values(catalog: Catalog) -> dict[str, Any]:
    values, tensors = catalog.values_table, {name: catalog.index(name) for name in catalog.names}
    links = link_columns(catalog.value_names, [value.link for value in values], tensors)
    return {
        "name": pack_texts([value.name for value in values]),
        "path": pack_bytes([value.path for value in values]),
        "kind": pack_ints([value.kind for value in values]),
        "inline": pack_ints([value.data is not None for value in values]),
        "data": pack_bytes([value.data for value in values if value.data is not None]),
        "num_blobs": pack_ints([len(value.blobs) for value in values]),
        "blobs": pack_ints([blob for value in values for blob in value.blobs]),
        "optimizer": pack_ints(links["optimizer"]),
        "key": pack_ints(links["key"]),
        "parameter": pack_ints(links["parameter"] + 1),
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


def _check_critical(info: Table) -> None:
    unknown = [item for item in info.field("critical", list) if type(item) is not str or item not in _KNOWN]
    if unknown:
        raise CorruptError(
            f"catalog: written by a newer version, which says that {unknown!r:.200} must be understood; upgrade reshard_ckpt"
        )
