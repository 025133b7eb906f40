"""The keys of the files of a checkpoint, the ids and names in them, and the contents of the two smallest: timeline and manifest.

Keys are relative to the checkpoint; ``docs/format.md`` is the specification.

1. The *timeline* of a save is JSON with one row for each step, so that any tool can read it. The reader checks every field.
2. The *manifest* has the SHA-256 of all files, in the form of ``sha256sum -c``. Each line has 64 hexadecimal digits, two spaces,
   and the path of a file below the checkpoint's folder. Block checksums find accidents. To find forgery too, sign this one small
   text with a tool of your own; check the signature first, and then the files.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from ..core.catalog.specs import Mesh
from ..core.timeline import Step, Timeline
from ..core.words import plural
from ..errors import CorruptError

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


FORMAT = "reshard_ckpt.timeline"
VERSION = 1
MAX_TIMELINE_BYTES = 256 << 20
"""The largest timeline that is read: some hundred steps of each of 16,384 ranks."""

_FIELDS = ["rank", "name", "thread", "start_s", "end_s", "num_bytes"]
_DIGITS = 6
"""Decimals of a time in seconds: microseconds."""


def encode_timeline(timeline: Timeline) -> bytes:
    """Encode a timeline; times are rounded to microseconds."""
    mesh = timeline.mesh
    document = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": timeline.save_id,
        "began_s": round(timeline.began_s, _DIGITS),
        "mesh": None if mesh is None else {"axes": mesh.axes, "sizes": mesh.sizes},
        "uncertainty_s": [round(u, _DIGITS) for u in timeline.uncertainty_s],
        "fields": _FIELDS,
        "steps": [
            [s.rank, s.name, s.thread, round(s.start_s, _DIGITS), round(s.end_s, _DIGITS), s.num_bytes] for s in timeline.steps
        ],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode_timeline(data: bytes, *, where: str) -> Timeline:
    """Decode what `encode_timeline` made.

    Raises
    ------
    CorruptError
        The data are not a timeline, or one of another version.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"{document['format']!r} of version {document['version']!r}, wanted {FORMAT!r} of version {VERSION}")
        uncertainty = tuple(_number(u) for u in document["uncertainty_s"])
        return Timeline(
            _text(document["save_id"]),
            _number(document["began_s"]),
            _mesh(document["mesh"], len(uncertainty)),
            uncertainty,
            tuple(_step(row, len(uncertainty)) for row in document["steps"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptError(
            f"{where}: is no timeline: {type(error).__name__}: {error}; delete it, nothing else needs it"
        ) from error


def _step(row: Any, num_ranks: int) -> Step:
    rank, name, thread, start, end, num_bytes = row
    step = Step(_count(rank), _text(name), _text(thread), _number(start), _number(end), _count(num_bytes))
    if step.rank >= num_ranks or step.end_s < step.start_s:
        raise ValueError(f"a step of rank {rank} of {num_ranks} from {start} to {end}")
    return step


def _mesh(value: Any, num_ranks: int) -> Mesh | None:
    if value is None:
        return None
    mesh = Mesh(tuple(_text(axis) for axis in value["axes"]), tuple(_count(size) for size in value["sizes"]))
    if len(mesh.axes) != len(mesh.sizes) or len(mesh.axes) > 64 or mesh.size != num_ranks:
        raise ValueError(f"a mesh {value} of {plural(num_ranks, 'rank')}")
    return mesh


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no time")
    return float(value)


MAX_MANIFEST_BYTES = 1 << 30
"""The largest manifest that is read: some ten million files."""

# A star before the path says "binary", which makes no difference.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def encode_manifest(digests: Mapping[str, bytes]) -> bytes:
    """Encode a manifest, sorted by path."""
    return "".join(f"{digests[key].hex()}  {key}\n" for key in sorted(digests)).encode()


def decode_manifest(data: bytes, *, where: str) -> dict[str, bytes]:
    """Decode a manifest; return the digests by path.

    Raises
    ------
    CorruptError
        A line has another form, or a path is listed twice.
    """
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise CorruptError(f"{where}: is no text, so no manifest; use another checkpoint") from None
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            what = "lists a file twice" if match else "is no '<SHA-256>  <path>'"
            raise CorruptError(f"{where}: line {number} {what}: {line[:200]!r}; use another checkpoint")
        digests[match[2]] = bytes.fromhex(match[1])
    return digests
