"""The parts of wanted tensors that no rank holds any more, as pieces, after some ranks of a job are lost.

The catalog describes the state in the memory of the ranks that are left.

1. Count the elements of every wanted piece that the catalog has (`load_plan`). Most pieces are there whole, or not at all.
2. Cut each of the other pieces into boxes, and remove the elements that the catalog's rows have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..catalog.model import Catalog
from ..catalog.specs import Ints, Piece, TensorSpec, piece_columns
from ..geometry.runs import I64, decompose
from .load_plan import plan_load

_WHOLE_WINDOW = 1 << 60

Box = tuple[Ints, Ints]
"""A box as its lowest corner and the corner behind its highest element."""


def lost_parts(specs: Sequence[TensorSpec], catalog: Catalog) -> list[TensorSpec | None]:
    """Reduce each spec to the pieces that the catalog lacks; return None for a spec whose pieces the catalog has completely.

    Tensors are matched by name, and have the same shape as in the catalog.
    """
    saved = [i for i, spec in enumerate(specs) if spec.name in catalog]
    source = np.array([catalog.index(specs[i].name) for i in saved], np.int64)
    chosen = [specs[i] for i in saved]
    wanted = piece_columns(chosen)
    # covered: the number of elements that the catalog has of each piece of the chosen specs, in order.
    covered = iter(plan_load(catalog, source, wanted, _WHOLE_WINDOW).covered.tolist())
    out: list[TensorSpec | None] = [spec if any(piece.count for piece in spec.pieces) else None for spec in specs]
    for i in saved:
        left: list[Piece] = []
        for piece in specs[i].pieces:
            count = next(covered)
            if count == 0:
                left.append(piece)
            elif count < piece.count:
                # boxes: the piece as boxes; then without the elements that the rows of the tensor have.
                whole = piece.boxes()
                boxes = _as_pairs(np.array([box.offsets for box in whole]), np.array([box.lengths for box in whole]))
                for low, high in _boxes_of(catalog, catalog.source(catalog.index(specs[i].name)), len(piece.lengths)):
                    boxes = [part for box in boxes for part in _difference(box, low, high)]
                for low, high in boxes:
                    lengths = tuple(np.subtract(high, low).tolist())
                    left.append(piece.inner(np.subtract(low, piece.offsets).tolist(), lengths))
        out[i] = replace(specs[i], pieces=tuple(left)) if out[i] is not None and left else None
    return out


def _difference(box: Box, low: Ints, high: Ints) -> list[Box]:
    """Remove the elements from corner `low` to `high` from a box; return boxes that tile the rest."""
    begin, end = map(list, box)
    if any(first >= last or first >= b or last <= a for a, b, first, last in zip(begin, end, low, high, strict=True)):
        return [box]
    out: list[Box] = []
    for dim, (first, last) in enumerate(zip(low, high, strict=True)):
        # The slabs before and behind the box along this dim; along the dims before it, only the part that they share.
        if begin[dim] < first:
            out.append((tuple(begin), (*end[:dim], first, *end[dim + 1 :])))
            begin[dim] = first
        if last < end[dim]:
            out.append(((*begin[:dim], last, *begin[dim + 1 :]), tuple(end)))
            end[dim] = last
    return out


def _boxes_of(catalog: Catalog, tensor: int, ndim: int) -> list[Box]:
    """Return the boxes of a tensor's elements that the catalog has, `ndim` dims each."""
    row = catalog.rows_of(tensor)
    rows, box = catalog.rows, catalog.rows.box[row]
    lengths = catalog.boxes.lengths[box]
    # cut: the rows as boxes; offsets: where these begin in the tensor, padded on the left as all of the catalog.
    cut = decompose(lengths, rows.start[row], rows.count[row])
    offsets = catalog.boxes.offsets[box][cut.parent] + cut.offsets
    width = offsets.shape[1]
    return _as_pairs(offsets[:, width - ndim :], cut.lengths[:, width - ndim :])


def _as_pairs(offsets: I64, lengths: I64) -> list[Box]:
    return [(tuple(low), tuple(high)) for low, high in zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)]
