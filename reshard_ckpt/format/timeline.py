"""Timelines of saves as columns: a few bytes for each timed step, so that rank 0 can keep the steps of 16,384 ranks.

1. A rank encodes its steps by `encode_steps`, as a msgpack list of integers: for each step the code of its name and thread, the
   gap since the previous step's end, the duration, and the bytes. Times are microseconds; the gap is negative if two threads
   worked at once.
2. The file is msgpack: the names and threads that the codes count, the mesh, the columns of the ranks, and the steps of each rank
   as it has sent them. `decode_timeline` checks every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..core.catalog.specs import Mesh
from ..core.report import plural
from ..core.timeline import STEP_NAMES, STEP_THREADS, Step, Timeline
from ..errors import CorruptError

FORMAT = "reshard_ckpt.timeline"
VERSION = 3
MAX_TIMELINE_BYTES = 256 << 20
"""The largest timeline in bytes that is read: some thousand steps of each of 16,384 ranks."""

_SECOND = 1_000_000
_LAST = 1 << 63
"""The end of the range of valid times, in microseconds."""


def encode_steps(steps: Iterable[tuple[str, str, float, float, int]], began_s: float) -> bytes:
    """Encode the steps of one rank, each as (name, thread, start, end, bytes). A name without a code becomes ``"other"``."""
    numbers: list[int] = []
    before = 0
    for name, thread, start_s, end_s, num_bytes in sorted(steps, key=lambda step: step[2]):
        start, end = (max(round((at - began_s) * _SECOND), 0) for at in (start_s, end_s))
        label = name if name in STEP_NAMES else "other"
        code = STEP_NAMES.index(label) * len(STEP_THREADS) + STEP_THREADS.index(thread)
        numbers += (code, start - before, max(end - start, 0), num_bytes)
        before = max(start, end)
    packed: bytes = msgpack.packb(numbers)
    return packed


def encode_timeline(
    save_id: str,
    began_s: float,
    mesh: Mesh | None,
    shift_s: NDArray[np.float64],
    uncertainty_s: NDArray[np.float64],
    steps: Sequence[bytes],
) -> bytes:
    """Encode the timeline of all ranks.

    Parameters
    ----------
    shift_s, uncertainty_s
        By rank: seconds from the start of the timeline to the moment from which the rank counts its times, and
        `Timeline.uncertainty_s`.
    steps
        The bytes of `encode_steps` of each rank, by rank.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": save_id,
        "began_s": began_s,
        "mesh": None if mesh is None else [mesh.axes, mesh.sizes],
        "names": STEP_NAMES,
        "threads": STEP_THREADS,
        "shift_s": shift_s.astype("<f8").tobytes(),
        "uncertainty_s": uncertainty_s.astype("<f4").tobytes(),
        "length": np.array([len(data) for data in steps], "<u4").tobytes(),
        "steps": b"".join(steps),
    }
    packed: bytes = msgpack.packb(document)
    return packed


def decode_timeline(data: bytes, *, where: str) -> Timeline:
    """Decode a timeline that `encode_timeline` encoded.

    Raise `CorruptError` if the data are not a timeline, or one of another version.
    """
    try:
        document = msgpack.unpackb(data, use_list=False)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"{document['format']!r} of version {document['version']!r}, wanted {FORMAT!r} of version {VERSION}")
        names, threads = (tuple(map(_text, document[field])) for field in ("names", "threads"))
        began, shifts, uncertainty = (
            _times(document[field], dtype) for field, dtype in (("began_s", ""), ("shift_s", "<f8"), ("uncertainty_s", "<f4"))
        )
        lengths = np.frombuffer(document["length"], "<u4").tolist()
        steps: list[Step] = []
        at = 0
        for rank, (shift, length) in enumerate(zip(shifts, lengths, strict=True)):
            if at + length > len(document["steps"]):
                raise ValueError(f"the steps of rank {rank} are cut off")
            steps += _steps(document["steps"][at : at + length], rank, shift, names, threads)
            at += length
        if at != len(document["steps"]) or len(uncertainty) != len(lengths):
            raise ValueError(f"{len(lengths)} ranks have {at} bytes and {len(uncertainty)} clocks")
        mesh = _mesh(document["mesh"], len(lengths))
        return Timeline(_text(document["save_id"]), began[0], mesh, tuple(uncertainty), tuple(steps))
    except (ValueError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise CorruptError(
            f"{where}: is not a timeline: {type(error).__name__}: {error}; delete it, nothing else needs it"
        ) from error


def _steps(data: bytes, rank: int, shift_s: float, names: Sequence[str], threads: Sequence[str]) -> Iterator[Step]:
    """Decode the steps of one rank, which `encode_steps` encoded, and yield them."""
    numbers, end = msgpack.unpackb(data), 0
    if type(numbers) is not list or any(type(number) is not int for number in numbers):
        raise ValueError(f"the steps of rank {rank} are not integers")
    for code, gap, length, num_bytes in zip(*[iter(numbers)] * 4, strict=True):
        start = end + gap
        end = start + length
        if min(code, start, length, num_bytes) < 0 or end > _LAST:
            raise ValueError(f"a step of rank {rank} from {start} to {end}")
        name, thread = names[code // len(threads)], threads[code % len(threads)]
        yield Step(rank, name, thread, shift_s + start / _SECOND, shift_s + end / _SECOND, num_bytes)


def _mesh(value: Any, num_ranks: int) -> Mesh | None:
    if value is None:
        return None
    mesh = Mesh(tuple(map(_text, value[0])), tuple(map(_count, value[1])))
    if len(mesh.axes) != len(mesh.sizes) or len(mesh.axes) > 64 or mesh.size != num_ranks:
        raise ValueError(f"a mesh {value} of {plural(num_ranks, 'rank')}")
    return mesh


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _times(value: Any, dtype: str) -> list[float]:
    """Return a list of times from one float, or from the bytes of many. Raise a `TypeError` if one is not finite, or negative."""
    times = np.frombuffer(value, dtype) if dtype else np.array([value], np.float64) if type(value) is float else None
    if times is None or not np.isfinite(times).all() or (times < 0).any():
        raise TypeError(f"{value!r:.80} is not a time")
    return [float(time) for time in times]
