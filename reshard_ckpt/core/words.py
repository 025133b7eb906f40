"""Words of messages and options: articles, numbers with nouns, shortened lists, durations, the name that was probably meant.

A wrong name is compared with a hundred thousand known ones in one pass (`nearest`). Two names are near if they differ in one step
between dots and these two steps are alike, or if one has one step more than the other. Numbers are never alike, because another
layer is not meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from operator import ne
from typing import Any

from ..errors import UnsupportedError, UsageError

MAX_NAME_BYTES = 1 << 16
"""The longest name that a catalog holds, in bytes of UTF-8. A longer one could be written but not read again."""

_VOWEL = re.compile(r"[aeio]|u(?!int|ni|se|tf)", re.IGNORECASE)


def a(noun: str) -> str:
    """Put its article before a noun.

    >>> a("torch.device"), a("argparse.Namespace"), a("uint8")
    ('a torch.device', 'an argparse.Namespace', 'a uint8')
    """
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def check_count(option: str, value: Any, least: int, *, or_none: bool = False) -> None:
    """Raise `UsageError` unless the value of an option is a whole number, `least` or more; or, if that is allowed, None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_count and not (or_none and value is None):
        raise UsageError(f"{option}={value!r}: pass a whole number, {least} or more{', or None' if or_none else ''}")


def plural(count: int, one: str, more: str | None = None) -> str:
    """Put a number before its noun.

    >>> plural(1, "file"), plural(1200, "file"), plural(2, "entry", "entries")
    ('1 file', '1,200 files', '2 entries')
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def few(names: Sequence[str], limit: int = 5) -> str:
    """List the first of many names, and how many more there are.

    >>> few(["a", "b"]), few(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def check_text(text: str, what: str) -> None:
    """Raise an error if a catalog cannot hold this text: it is not valid Unicode, or too long.

    Raises
    ------
    UnsupportedError
        The text has a lone surrogate, as results of `os.fsdecode` may, or more than `MAX_NAME_BYTES` bytes.
    """
    if text.isascii():
        num_bytes = len(text)
    else:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise UnsupportedError(f"{text!r}: {what} with a lone surrogate is no valid text; rename it") from None
    if num_bytes > MAX_NAME_BYTES:
        most = f"over the {MAX_NAME_BYTES} that are read; shorten it"
        raise UnsupportedError(f"{text[:60]!r}…: {what} of {num_bytes} bytes, {most}")


Steps = tuple[str, ...]

ALIKE = 0.6
"""The least similarity of two steps that are alike, from 0 to 1."""

MAX_COMPARED = 300_000
"""The most pairs of names that are compared in all; if most names share half of their steps, some pairs are skipped."""


def nearest(wrong: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Find the nearest known name for each wrong name; wrong names without a near one are left out.

    >>> nearest(["model.layer.1.weight", "layers.1.weight", "step"], ["model.layers.0.weight", "model.layers.1.weight", "extra"])
    {'model.layer.1.weight': 'model.layers.1.weight', 'layers.1.weight': 'model.layers.1.weight'}
    """
    # Two names with one difference share the first half of their steps or the last half, so only such names are compared.
    # by_half: the wrong names with these steps at the beginning (a positive length) or at the end (a negative one).
    by_half: dict[tuple[int, Steps], list[Steps]] = {}
    for name in wrong:
        steps = tuple(name.split("."))
        half = (len(steps) - 1) // 2 or len(steps) - 1
        for key in {(half, steps[:half]), (-half, steps[len(steps) - half :])}:
            by_half.setdefault(key, []).append(steps)
    halves = {half for half, _ in by_half}
    found: dict[str, tuple[float, str]] = {}
    left = MAX_COMPARED
    for other in known:
        theirs = tuple(other.split("."))
        for half in halves:
            # A positive half is that many steps at the beginning, a negative one that many at the end.
            near = by_half.get((half, theirs[:half] if half >= 0 else theirs[half:]), [])
            left -= len(near)
            for steps in near if left > 0 else ():
                score, name = _likeness(steps, theirs), ".".join(steps)
                if score >= ALIKE and score > found.get(name, (0.0, ""))[0]:
                    found[name] = score, other
    return {name: other for name, (_, other) in found.items()}


def _likeness(ours: Steps, theirs: Steps) -> float:
    """Rate the similarity of two names, from 0 to 1."""
    short, long = sorted((ours, theirs), key=len)
    if len(long) == len(short) + 1:
        return 0.9 if any(long[:i] + long[i + 1 :] == short for i in range(len(long))) else 0.0
    if len(long) != len(short) or sum(map(ne, ours, theirs)) != 1:
        return 0.0
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    if any(step.isdigit() for step in differing[0]):
        return 0.0
    return SequenceMatcher(None, *differing[0], autojunk=False).ratio()


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
