"""Fingerprints of replicas, by which rank 0 compares them: a hash of all of a small piece, of samples of a large one.

A rank that has some of its state on a device sums samples up instead (`staged_fingerprints`). The lowest bit says which was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..common.tensor_bytes import LocalPiece, bytes_in_place, chunks
from .local_shards import LocalShards
from .messages import RunColumns

WHOLE_BYTES = 1 << 20
"""Pieces up to this size are hashed whole."""

NUM_SAMPLES = 16
SAMPLE_BYTES = 64 << 10


def fingerprint(local: LocalPiece, scratch: torch.Tensor) -> int:
    """Return the XXH3-64 of a piece's bytes, or of `NUM_SAMPLES` blocks spread evenly over it, first and last included."""
    piece, item_bytes = local.piece, local.tensor.element_size()
    hasher = xxhash.xxh3_64()
    runs = sampled_runs(local)
    whole = bytes_in_place(local, piece.start, piece.count)
    if whole is not None:  # one view for all samples: making a view takes longer than hashing what it shows
        for start, count in runs:
            hasher.update(whole[(start - piece.start) * item_bytes : (start - piece.start + count) * item_bytes])
        return hasher.intdigest()
    for start, count in runs:
        for chunk in chunks(local, start, count, scratch):
            hasher.update(chunk)
    return hasher.intdigest()


def sampled_runs(local: LocalPiece) -> list[tuple[int, int]]:
    """List the runs of a piece that are hashed."""
    piece, item_bytes = local.piece, local.tensor.element_size()
    if piece.count * item_bytes <= WHOLE_BYTES:
        return [(piece.start, piece.count)]
    size = SAMPLE_BYTES // item_bytes
    last = piece.start + piece.count - size
    return [(piece.start + (last - piece.start) * i // (NUM_SAMPLES - 1), size) for i in range(NUM_SAMPLES)]


def fingerprints(local_shards: LocalShards, checks: RunColumns, chosen: Callable[[int], bool], marks: NDArray[np.uint64]) -> None:
    """Put the fingerprints of all checks of chosen rows into `marks`."""
    scratch = torch.empty(WHOLE_BYTES, dtype=torch.uint8, device="cpu")
    for i, local in checked_pieces(local_shards, checks, chosen):
        marks[i] = fingerprint(local, scratch)
    marks[:] = with_kind(marks, summed=False)


def with_kind(marks: NDArray[np.uint64], *, summed: bool) -> NDArray[np.uint64]:
    """Say in the lowest bit how fingerprints were taken."""
    out: NDArray[np.uint64] = (marks & ~np.uint64(1)) | np.uint64(summed)
    return out


def may_be_alike(marks: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Tell which fingerprints show no difference; of two that were taken in different ways nothing can be said."""
    out: NDArray[np.bool_] = (marks == others) | ((marks ^ others) & np.uint64(1) == 1)
    return out


def checked_pieces(local_shards: LocalShards, checks: RunColumns, chosen: Callable[[int], bool]) -> list[tuple[int, LocalPiece]]:
    columns = zip(*(column.tolist() for column in (checks.local, checks.start, checks.count)), strict=True)
    pieces = [(i, local_shards.rows[row][1], start, count) for i, (row, start, count) in enumerate(columns) if chosen(row)]
    return [(i, LocalPiece(p.tensor, replace(p.piece, start=start, count=count))) for i, p, start, count in pieces]
