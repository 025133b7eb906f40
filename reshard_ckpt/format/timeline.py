"""Timelines as JSON, with one row for each step, so that any tool can read them. The reader checks every field."""

from __future__ import annotations

import json
import math
from typing import Any

from ..core.catalog.specs import Mesh
from ..core.timeline import Step, Timeline
from ..core.words import plural
from ..errors import CorruptError

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
