"""Committing what DCP's ranks wrote: their results become the local metadata of a save, and are planned and published alike.

DCP has divided the work already, so each box belongs to the one rank that wrote it, and the plan assigns it to that rank. Making
the plan verifies that the boxes tile every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ..core.catalog.links import links_from_names
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints, Piece, StateLink, TensorSpec, ValueKind, ValueSpec, blob_name, box_piece, row_major_strides
from ..core.planning.local_metadata import LocalMetadata, build_local_metadata, join_metadata
from ..core.planning.save_plan import SavePlan, plan_save
from ..core.report import summarize
from ..engine.saving.commit import publish
from ..engine.saving.messages import EncodedMetadata, Receipt, WrittenFile
from ..engine.saving.options import PreviousCheckpoint, SaveContents
from ..engine.saving.values import merge_values
from ..errors import LayoutError
from ..format.links import listed_parameters
from ..format.values import decode_value, encode_path
from ..storage.protocol import Storage
from .names import KeyedValue, join_leaves
from .placements import with_placements


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one write item was stored: a box of a tensor, or a value as a `blob`, in a file; or a value, encoded, in here."""

    name: str
    dtype: str = ""
    shape: Ints = ()
    offsets: Ints = ()
    lengths: Ints = ()
    blob: str | None = None
    value: bytes | None = None
    file: WrittenFile | None = None
    offset: int = 0

    @property
    def piece(self) -> Piece:
        return box_piece(self.offsets, self.lengths, 0, row_major_strides(self.lengths))


def commit_written(
    storage: Storage,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    save_id: str,
    before: PreviousCheckpoint | None,
) -> Catalog:
    """Publish a checkpoint whose files are all written.

    Parameters
    ----------
    metadata
        DCP's: what there must be, and the paths that its names stand for.
    results
        Of each rank, with a `Stored` for each item, and an `EncodedMetadata`, if it knows how its tensors lie.

    Raises
    ------
    LayoutError
        Boxes overlap or leave holes, or what was planned was not written.
    StorageError
        A file is not seen from here.
    PublishConflict
        Somebody else published at this path meanwhile.
    """
    payloads = [[result.storage_data for result in of_rank] for of_rank in results]
    ranks = [[data for data in of_rank if isinstance(data, Stored)] for of_rank in payloads]
    _check_all_there(metadata, ranks)
    written = _distinct(ranks)
    local_values = _values(metadata, ranks)
    names = (*metadata.state_dict_metadata, *(value.name for value in local_values))
    links = links_from_names(dict.fromkeys(names), listed_parameters(local_values))
    plan = plan_save(join_metadata([_local_metadata(rows, links) for rows in written]))
    of_ranks = [next((data for data in of_rank if isinstance(data, EncodedMetadata)), None) for of_rank in payloads]
    plan = with_placements(plan, of_ranks)
    values = merge_values([(0, [replace(value, link=links.get(value.name)) for value in local_values])], plan.tables)
    receipts = [_receipt(plan, rank, rows) for rank, rows in enumerate(written)]
    return publish(storage, SaveContents(plan, values, save_id), receipts, before=before)


def _check_all_there(metadata: Metadata, ranks: Sequence[Sequence[Stored]]) -> None:
    found = {stored.name for of_rank in ranks for stored in of_rank}
    problems = [f"{name}: in DCP's metadata, but no rank wrote it" for name in metadata.state_dict_metadata if name not in found]
    if problems:
        raise LayoutError(summarize(problems, "the planner's plans and its metadata must agree"))


def _distinct(ranks: Sequence[Sequence[Stored]]) -> list[list[Stored]]:
    """List what is in files, by rank: tensors before blobs, the boxes of a tensor together, a box of several ranks once."""
    seen: set[tuple[str, Ints, Ints]] = set()
    written: list[list[Stored]] = []
    for of_rank in ranks:
        mine = []
        for stored in of_rank:
            key = (stored.blob or stored.name, stored.offsets, stored.lengths)
            if stored.file is not None and key not in seen:
                seen.add(key)
                mine.append(stored)
        written.append(sorted(mine, key=lambda stored: (stored.blob is not None, stored.blob or stored.name)))
    return written


def _local_metadata(rows: Sequence[Stored], links: Mapping[str, StateLink]) -> LocalMetadata:
    """Describe what a rank wrote, with rows in this order."""
    specs: dict[str, TensorSpec] = {}
    for stored in rows:
        name = stored.blob or stored.name
        known = specs.get(name)
        if known is not None and (known.dtype, known.shape) != (stored.dtype, stored.shape):
            raise LayoutError(
                f"{name}: {known.dtype} {known.shape} and {stored.dtype} {stored.shape} in one plan; correct the planner"
            )
        pieces = (*known.pieces, stored.piece) if known is not None else (stored.piece,)
        specs[name] = TensorSpec(name, stored.dtype, stored.shape, pieces, link=links.get(name))
    num_blobs = len({stored.blob for stored in rows if stored.blob is not None})
    return build_local_metadata(list(specs.values()), num_blobs, None)


def _receipt(plan: SavePlan, rank: int, rows: Sequence[Stored]) -> Receipt:
    """Make the receipt of a rank for the items of the plan, each of which is one of the boxes that it wrote."""
    files = {stored.file.key: stored.file for stored in rows if stored.file is not None}
    number = {key: i for i, key in enumerate(files)}
    items = [rows[local] for local in plan.local[plan.items_of(rank)].tolist()]
    file = [number[stored.file.key] for stored in items if stored.file is not None]
    return Receipt(
        tuple(files.values()),
        np.array(file, np.int64),
        np.array([stored.offset for stored in items], np.int64),
        np.zeros(0, np.uint64),
    )


def _values(metadata: Metadata, ranks: Sequence[Sequence[Stored]]) -> list[ValueSpec]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}

    def path_of(name: str) -> tuple[str | int, ...]:
        return tuple(paths.get(name, (name,)))

    # Of a value that several ranks wrote, the first counts.
    by_name: dict[str, Stored] = {}
    for stored in (s for of_rank in ranks for s in of_rank):
        by_name.setdefault(stored.name, stored)
    payloads = [s for s in by_name.values() if s.value is not None]
    leaves = [KeyedValue(path_of(s.name), decode_value(s.value or b"", name=s.name)) for s in payloads]
    others = [path_of(s.name) for s in by_name.values() if s.value is None]
    aside = [s for s in by_name.values() if s.blob == blob_name(s.name, None)]
    return join_leaves(leaves, others) + [
        ValueSpec(s.name, encode_path(list(path_of(s.name))), ValueKind.PLAIN, None) for s in aside
    ]
