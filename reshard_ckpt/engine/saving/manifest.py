"""The SHA-256 manifest of a save: hashed while the files are written, kept beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...errors import UsageError
from ...format.keys import CATALOG_KEY, manifest_key
from ...format.manifest import encode_manifest
from ...storage.protocol import Storage
from .messages import Receipt


def keep_manifest(storage: Storage, save_id: str, catalog: bytes, receipts: Sequence[Receipt]) -> None:
    """Write the manifest of a save whose catalog is about to be published, and make it durable."""
    digests = {CATALOG_KEY: hashlib.sha256(catalog).digest()}
    for file in (file for receipt in receipts for file in receipt.files):
        digests[file.key], digests[file.digests_key] = file.sha256, file.digests_sha256
    key = manifest_key(save_id)
    with storage.create(key) as writer:
        writer.write(encode_manifest(digests))
    storage.sync([key])


def refuse_half_hashed(receipts: Sequence[Receipt], sha256: bool) -> None:
    """Refuse a save of which rank 0 was asked for a manifest, and other ranks were not, or the other way round.

    Raises
    ------
    UsageError
        A manifest of some of the files would be none.
    """
    others = [rank for rank, receipt in enumerate(receipts) if any(bool(file.sha256) != sha256 for file in receipt.files)]
    if others:
        raise UsageError(f"sha256={sha256} on rank 0, {not sha256} on ranks {others}: pass the same on every rank")
