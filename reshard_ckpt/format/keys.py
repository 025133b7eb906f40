"""Keys of the files of a checkpoint, and the ids and names in them.

Keys are relative to the checkpoint; ``docs/format.md`` is the specification.
"""

from __future__ import annotations

import re
import secrets
import time

CATALOG_KEY = "catalog.msgpack"
"""The key of the catalog."""
RUN_LOCK_KEY = ".reshard_ckpt.lock"
"""The key of the lock in the root of a run; the job that manages the run holds it."""

SAVE_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}(?:[0-9a-f]{24})?")
"""A time and digits: 8 random ones, or 32 that an offline reshard computes from its request."""


def timeline_key(save_id: str) -> str:
    """Return the key of the timeline of a save."""
    return f"{save_id}/timeline.json"


def new_save_id() -> str:
    """Make the id of one attempt to save: the time, for people, and random digits, to be unique."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def file_key(save_id: str, rank: int, part: int) -> str:
    """Return the key of a rank's shard file.

    >>> file_key("s1", 3, 0)
    's1/rank00003-0.safetensors'
    """
    return f"{save_id}/rank{rank:05d}-{part}.safetensors"


def digests_key(key: str) -> str:
    """Return the key of the digests of a shard file."""
    return key.removesuffix(".safetensors") + ".digests"


def manifest_key(save_id: str) -> str:
    """Return the key of the manifest of a save. It lies beside the files of that save, so that it belongs to no other catalog.

    >>> manifest_key("20260102T030405Z-0123abcd")
    '20260102T030405Z-0123abcd/manifest.sha256'
    """
    return f"{save_id}/manifest.sha256"


def step_name(step: int) -> str:
    """Return the name of the folder of a step, below the root.

    >>> step_name(100)
    'step_100'
    """
    return f"step_{step}"
