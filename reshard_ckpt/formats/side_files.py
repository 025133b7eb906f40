"""Small files beside a model that a conversion copies along: its config and its tokenizer."""

from __future__ import annotations

from ..core.catalog.model import Catalog
from ..storage import Storage
from ..storage.protocol import read_range
from .huggingface import INDEX, top_level

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MAX_BYTES = 256 << 20

_STEP_BYTES = 8 << 20


def copy_side_files(source: Storage, catalog: Catalog, target: Storage) -> None:
    """Copy the files directly in the folder of a foreign checkpoint that are of such kinds, and are not its weights.

    Nothing is copied where there is no ``config.json``, or from this library's own checkpoints, whose folders hold nothing else.
    """
    own = {file.key for file in catalog.files}
    if any(file.digests_key for file in catalog.files) or "config.json" not in (keys := top_level(source)):
        return
    for key in keys:
        size = source.size(key)
        if key in own or not key.endswith(SUFFIXES) or key.endswith(INDEX) or size is None or size > MAX_BYTES:
            continue
        with target.create(key) as writer:
            for low in range(0, size, _STEP_BYTES):
                writer.write(read_range(source, key, low, min(_STEP_BYTES, size - low)))
