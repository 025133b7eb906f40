"""The summary of a checkpoint: numbers of tensors, elements, bytes and files, computed from columns to be fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry.runs import I64, Mask, volumes
from .model import Catalog, TensorKind
from .specs import CODES, Mesh, item_bytes_of


@dataclass(frozen=True, slots=True)
class Portion:
    """Totals over a set of tensors: elements and bytes of the whole tensors, each counted once, aliases not at all."""

    num_tensors: int
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The main numbers of a checkpoint.

    Attributes
    ----------
    save_id, created_s
        The id of the save that wrote the checkpoint, and its time, in seconds since 1970.
    step
        The training step, if ``metadata["step"]`` or a value tells it (`step_of`).
    mesh
        The mesh of the job that saved it, if known.
    num_tensors, num_aliases
        The number of tensors, and the number of tensors that share the bytes of another one.
    num_parameters
        Elements of all tensors that are not optimizer state; buffers count too.
    num_bytes, num_shards
        The bytes and the shards of all tensors, without aliases.
    num_values
        The number of values, which are the parts of the state that are not tensors.
    num_files, file_bytes, num_ranks
        The number of shard files, their size in bytes, and the number of ranks that wrote them.
    bytes_referred, checkpoints
        The bytes of tensors that lie in files of other checkpoints, and the folders of these checkpoints, relative to this one.
    dtypes, roots
        The totals for each dtype, and for the tensors below each top-level key.
    """

    save_id: str
    created_s: float
    step: int | None
    mesh: Mesh | None
    num_tensors: int
    num_aliases: int
    num_parameters: int
    num_bytes: int
    num_shards: int
    num_values: int
    num_files: int
    file_bytes: int
    num_ranks: int
    bytes_referred: int
    checkpoints: tuple[str, ...]
    dtypes: dict[str, Portion]
    roots: dict[str, Portion]


def summarize_catalog(catalog: Catalog, step: int | None = None) -> Summary:
    """Count the tensors, values, files and bytes of a catalog."""
    table = catalog.tensors_table
    elements = volumes(table.shape)
    sizes = elements * item_bytes_of(table.dtype)
    is_tensor = table.kind == TensorKind.TENSOR
    # own[t]: entry t is a tensor with bytes of its own, not a blob and not an alias.
    own = is_tensor & (table.alias < 0)

    def share(chosen: Mask) -> Portion:
        held = chosen & own
        return Portion(int(chosen.sum()), int(elements[held].sum()), int(sizes[held].sum()))

    codes = np.unique(table.dtype[is_tensor]).tolist()
    # root[t]: the top-level key of entry t.
    root = np.array([name.split(".", 1)[0] for name in table.names], str)
    return Summary(
        save_id=catalog.save_id,
        created_s=catalog.created_s,
        step=step,
        mesh=catalog.mesh,
        num_tensors=int(is_tensor.sum()),
        num_aliases=int((is_tensor & (table.alias >= 0)).sum()),
        num_parameters=int(elements[own & (table.key == 0)].sum()),
        num_bytes=int(sizes[own].sum()),
        num_shards=int(np.diff(table.row_start)[own].sum()),
        num_values=len(catalog.values_table),
        num_files=len(catalog.files),
        file_bytes=sum(file.stored_bytes for file in catalog.files),
        num_ranks=len({file.rank for file in catalog.files}),
        bytes_referred=int(bytes_by_file(catalog)[[bool(file.checkpoint) for file in catalog.files]].sum()),
        checkpoints=tuple(sorted({file.checkpoint for file in catalog.files if file.checkpoint})),
        dtypes={CODES[code]: share(is_tensor & (table.dtype == code)) for code in codes},
        roots={name: share(is_tensor & (root == name)) for name in np.unique(root[is_tensor]).tolist()},
    )


def bytes_by_file(catalog: Catalog) -> I64:
    """Count the bytes that the catalog's rows take in each of its files, (F,) int64."""
    return np.bincount(catalog.rows.file, weights=catalog.row_bytes, minlength=len(catalog.files)).astype(np.int64)


def step_of(metadata: object, values: Sequence[tuple[str, object]]) -> int | None:
    """Return the training step: from the user's metadata, else from the value whose name has the fewest dots; or None.

    Only integers count, and only values whose names end with ``step``, ``global_step`` or ``iteration``.

    >>> step_of(None, [("extra.sampler.step", 3), ("extra.step", 100)])
    100
    """
    in_metadata = metadata.get("step") if isinstance(metadata, dict) else None
    named = [(name, value) for name, value in values if name.rsplit(".", 1)[-1] in ("step", "global_step", "iteration")]
    ordered = [in_metadata, *(value for _, value in sorted(named, key=lambda item: (item[0].count("."), item[0])))]
    return next((value for value in ordered if isinstance(value, int) and not isinstance(value, bool)), None)
