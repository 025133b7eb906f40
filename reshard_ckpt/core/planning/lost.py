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
from ..geometry.runs import decompose
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
                boxes = piece.boxes()
                for low, high in _boxes_of(catalog, catalog.source(catalog.index(specs[i].name)), len(piece.lengths)):
                    boxes = [part for box in boxes for part in _without(box, low, high)]
                left += boxes
        out[i] = replace(specs[i], pieces=tuple(left)) if out[i] is not None and left else None
    return out


def _without(box: Piece, low: Ints, high: Ints) -> list[Piece]:
    """Remove the elements from corner `low` to `high` from a piece that is a whole box; return such pieces that tile the rest."""
    # begin, end: the removed part of the box, counted from the box's own corner.
    begin = [max(at - offset, 0) for at, offset in zip(low, box.offsets, strict=True)]
    end = [min(at - offset, length) for at, offset, length in zip(high, box.offsets, box.lengths, strict=True)]
    if any(first >= last for first, last in zip(begin, end, strict=True)):
        return [box]
    out: list[Piece] = []
    inner, lengths = [0] * len(begin), list(box.lengths)
    for dim, (first, last) in enumerate(zip(begin, end, strict=True)):
        # The slabs before and behind the removed part along this dim; along the dims before it, only the range of that part.
        for start, stop in ((0, first), (last, lengths[dim])):
            if start < stop:
                inner[dim], lengths[dim] = start, stop - start
                out.append(box.inner(inner, tuple(lengths)))
        inner[dim], lengths[dim] = first, last - first
    return out


def _boxes_of(catalog: Catalog, tensor: int, ndim: int) -> list[Box]:
    """Return the boxes of a tensor's elements that the catalog has, `ndim` dims each."""
    row = catalog.rows_of(tensor)
    rows, box = catalog.rows, catalog.rows.box[row]
    lengths = catalog.boxes.lengths[box]
    # cut: the rows as boxes; offsets: where these begin in the tensor, padded on the left as all of the catalog.
    cut = decompose(lengths, rows.start[row], rows.count[row])
    offsets = catalog.boxes.offsets[box][cut.parent] + cut.offsets
    own = slice(offsets.shape[1] - ndim, None)
    return list(zip(map(tuple, offsets[:, own].tolist()), map(tuple, (offsets + cut.lengths)[:, own].tolist()), strict=True))
