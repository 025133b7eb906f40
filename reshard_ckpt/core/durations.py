"""Durations as people write them: "6h", "10min", "1.5 s"."""

from __future__ import annotations

import math
import re

from ..errors import UsageError

_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0, "days": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


def duration_s(text: str | float, *, option: str) -> float:
    """Convert a duration to seconds; a number is taken as seconds.

    >>> duration_s("6h", option="mtbf"), duration_s("10min", option="persist_every"), duration_s(90, option="mtbf")
    (21600.0, 600.0, 90.0)

    Raises
    ------
    UsageError
        The text is not a duration, or the duration is not above zero.
    """
    seconds = math.nan
    if isinstance(text, str):
        match = _DURATION.fullmatch(text.lower())
        if match and match[2] in _UNITS:
            seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    if not 0 < seconds < math.inf:
        raise UsageError(f'{option}={text!r}: wanted a duration above zero: seconds, or text such as "90s", "10min", "6h", "2d"')
    return seconds


def duration_text(seconds: float) -> str:
    """Write a duration with two or three digits, in the unit that fits.

    >>> duration_text(0.25), duration_text(42), duration_text(600), duration_text(23400), duration_text(10 * 86400)
    ('250 ms', '42 s', '10 min', '6.5 h', '10 d')
    """
    for limit, unit, name in ((1.0, 0.001, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} d"
