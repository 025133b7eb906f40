"""The tensors that one rank has to save: the memory of each piece, and the columns that describe the pieces to other ranks.

1. `local_values` splits values: small ones go into the catalog, large and per-rank ones become blobs, which are saved as tensors.
2. `describe_local` puts the specs of tensors and blobs into columns, with the memory of each row beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...core.catalog.specs import Mesh, TensorSpec, ValueKind, ValueSpec, blob_name, box_piece, row_major_strides
from ...core.planning.local_metadata import LocalMetadata, build_local_metadata
from ...format.shard_file import opaque_name
from ..common.blobs import Blob, byte_blob
from ..common.memo import Memo
from ..common.tensor_bytes import LocalPiece, LocalRun, LocalTensor
from .messages import RunColumns

INLINE_BYTES = 4096
"""Encoded plain values above this size become blobs, which are kept in the shard files."""


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The tensors of this rank, and the memory of their pieces.

    Attributes
    ----------
    specs
        One spec for each tensor and each blob.
    rows
        For each row of the metadata (one piece), the index of its spec and the memory of the piece.
    """

    specs: Sequence[TensorSpec]
    rows: Sequence[tuple[int, LocalPiece]]
    local_metadata: LocalMetadata

    def runs(self, columns: RunColumns) -> list[LocalRun]:
        """Return the memory of each run in `columns`."""
        return [LocalRun(self.rows[row][1], start, count) for row, start, count in columns]


def describe_local(tensors: Sequence[LocalTensor], values: Sequence[ValueSpec], mesh: Mesh | None, rank: int) -> LocalShards:
    """Put the tensors and values that this rank saves into columns, with the memory behind each row."""
    inline, blobs = local_values(values, rank)
    saved = [(_with_piece(spec), memory) for spec, memory in tensors] + [(blob.spec, blob.tensor) for blob in blobs]
    specs = [spec for spec, _ in saved]
    rows = [(i, LocalPiece(memory, piece)) for i, (spec, memory) in enumerate(saved) for piece in spec.pieces]
    per_rank = {len(tensors) + i: blob.own for i, blob in enumerate(blobs) if blob.own is not None}
    local_metadata = _LOCAL_METADATA.get(
        (specs, len(blobs), mesh, per_rank), lambda: build_local_metadata(specs, len(blobs), mesh, per_rank)
    )
    return LocalShards(specs, rows, replace(local_metadata, values=tuple(inline)))


_LOCAL_METADATA: Memo[tuple[list[TensorSpec], int, Mesh | None, dict[int, str]], LocalMetadata] = Memo(2)
"""Cached columns of the last two states, without their values, which change from save to save."""


def _with_piece(spec: TensorSpec) -> TensorSpec:
    """Give a tensor with no elements and no pieces one empty piece, so that some rank writes its name."""
    if spec.pieces or 0 not in spec.shape:
        return spec
    piece = box_piece((0,) * len(spec.shape), spec.shape, 0, row_major_strides(spec.shape))
    return replace(spec, pieces=(piece,))


def local_values(values: Sequence[ValueSpec], rank: int) -> tuple[list[ValueSpec], list[Blob]]:
    """Make blobs of per-rank values and of values too large for the catalog.

    Returns
    -------
    tuple
        All values that are not opaque, without bytes if the value became a blob; and the blobs.
    """
    inline: list[ValueSpec] = []
    blobs: list[Blob] = []
    for value in values:
        own = value.kind is ValueKind.PER_RANK
        if value.is_opaque and value.data is not None:
            blobs.append(byte_blob(opaque_name(value.name), torch.frombuffer(bytearray(value.data), dtype=torch.uint8)))
            continue
        if value.data is not None and (own or (value.kind is ValueKind.PLAIN and len(value.data) > INLINE_BYTES)):
            data = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            blobs.append(byte_blob(blob_name(value.name, rank if own else None), data, value.name if own else None))
            value = replace(value, data=None)
        inline.append(value)
    return inline, blobs
