"""Fingerprints of replicas, by which rank 0 compares them: a hash of all of a small piece, of samples of a large one."""

from __future__ import annotations

import torch
import xxhash

from ..common.tensor_bytes import LocalPiece, bytes_in_place, chunks

WHOLE_BYTES = 1 << 20
"""Pieces up to this size are hashed whole."""

NUM_SAMPLES = 16
SAMPLE_BYTES = 64 << 10


def fingerprint(local: LocalPiece, scratch: torch.Tensor) -> int:
    """Return the XXH3-64 of a piece's bytes, or of `NUM_SAMPLES` blocks spread evenly over it, first and last included."""
    piece, item_bytes = local.piece, local.tensor.element_size()
    hasher = xxhash.xxh3_64()
    if piece.count * item_bytes <= WHOLE_BYTES:
        runs = [(piece.start, piece.count)]
    else:
        size = SAMPLE_BYTES // item_bytes
        last = piece.start + piece.count - size
        runs = [(piece.start + (last - piece.start) * i // (NUM_SAMPLES - 1), size) for i in range(NUM_SAMPLES)]
    whole = bytes_in_place(local, piece.start, piece.count)
    if whole is not None:  # one view for all samples: making a view takes longer than hashing what it shows
        for start, count in runs:
            hasher.update(whole[(start - piece.start) * item_bytes : (start - piece.start + count) * item_bytes])
        return hasher.intdigest()
    for start, count in runs:
        for chunk in chunks(local, start, count, scratch):
            hasher.update(chunk)
    return hasher.intdigest()
