"""Reports of saves and loads, and helpers for messages: lists of problems, plurals, durations, checks of options.

`nearest` finds the known name that a wrong one probably meant, in one pass over a hundred thousand names. Two names are near if
they differ in one part between dots and these two parts are alike, or if one has one part more than the other. Numbers are never
alike, because another layer is not meant.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from operator import ne
from typing import Any

from ..errors import UnsupportedError, UsageError

MAX_NAMED = 10
"""The most problems that one message spells out; the others are counted."""


def summarize(problems: Sequence[str], advice: str) -> str:
    """Make one message from lines about problems, and advice on what to do.

    >>> print(summarize(["w: missing"], "load with strict=False"))
    w: missing; load with strict=False
    >>> print(summarize(["w: missing", "b: missing"], "load with strict=False"))
    2 problems; load with strict=False:
      w: missing
      b: missing
    """
    return summarize_kinds({"": problems}, advice)


def summarize_kinds(problems: Mapping[str, Sequence[str]], advice: str) -> str:
    """Make one message from lines about problems, grouped by kind; of too many, list some of each kind.

    >>> lines = {"missing": [f"m{i}: not saved" for i in range(20)], "of another shape": ["s: larger"]}
    >>> print(summarize_kinds(lines, "load with strict=False"))  # doctest: +ELLIPSIS
    21 problems; load with strict=False:
      m0: not saved
      ...
      m8: not saved
      … and 11 more missing
      s: larger
    """
    total = sum(len(lines) for lines in problems.values())
    if total == 1:
        [line] = (line for lines in problems.values() for line in lines)
        return f"{line}; {advice}"
    out = [f"{total} problems; {advice}:"]
    left = MAX_NAMED
    num = sum(bool(lines) for lines in problems.values())
    # Kinds with few lines come first: the part of the list that they do not need is left for the others.
    shown = {}
    for kind in sorted(problems, key=lambda kind: len(problems[kind])):
        if problems[kind]:
            shown[kind] = min(len(problems[kind]), max(left // num, 1))
            left -= shown[kind]
            num -= 1
    for kind, lines in problems.items():
        out += [f"  {line}" for line in lines[: shown.get(kind, 0)]]
        if (more := len(lines) - shown.get(kind, 0)) > 0:
            out.append(f"  … and {more} more {kind}".rstrip())
    return "\n".join(out)


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport:
    """The report of one save on this rank: bytes and times.

    Attributes
    ----------
    path, save_id
        The checkpoint's path, as the caller gave it, and the id of the save.
    num_bytes
        Bytes that this rank wrote.
    total_bytes
        Bytes of all files that the save wrote. Only rank 0 knows it; None on other ranks.
    duration_s
        Seconds from the call until the checkpoint was committed on all ranks.
    stall_s
        Seconds of `duration_s` in which training stood still. For `save`, all of them. For `async_save`, the seconds until it
        returned, and the seconds that a caller of ``staged()`` or an optimizer step waited for staging.
    failed_before
        For a manager with ``on_failure="warn"``: the saves in a row that had failed when this one began.
    bytes_referred
        With ``base=``, the bytes of this rank's tensors that are not written again, because they lie unchanged in the base.
    """

    path: str
    save_id: str
    num_bytes: int
    total_bytes: int | None
    duration_s: float
    stall_s: float
    failed_before: int = 0
    bytes_referred: int = 0

    @property
    def bytes_written(self) -> int:
        """Bytes that this rank wrote, the same as `num_bytes`."""
        return self.num_bytes

    def __repr__(self) -> str:
        times = f"duration_s={self.duration_s:.3f}, stall_s={self.stall_s:.3f}"
        referred = f"bytes_referred={self.bytes_referred}, " if self.bytes_referred else ""
        return f"SaveReport(path={self.path!r}, num_bytes={self.num_bytes}, {referred}{times})"


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """The outcome of a load on this rank, and the problems of all ranks.

    The first six attributes are tuples of messages: one line for each tensor or value that did not load, on any rank. They are
    empty with ``strict=True``.

    Attributes
    ----------
    missing, unexpected, shape, dtype, uncovered
        Tensors that were wanted but not saved; saved but not wanted by any rank; saved with another global shape; with another
        dtype; not wholly covered by saved shards.
    values
        Values that are missing or do not fit: hyperparameters, per-rank values of another world size.
    kept
        Tensors and values that the checkpoint lacks, and that ``allow_missing=`` lets keep their value. Not a problem.
    saved_as
        Tensors that this rank loaded from another name, which differs only in parts that module wrappers add. Not a problem.
    converted
        Tensors that this rank loaded into another dtype (``cast=``). Not a problem.
    num_tensors
        Tensors that this rank loaded.
    num_bytes, bytes_read
        Bytes that this rank wanted, and that it read from storage.
    bytes_unverified
        Bytes that this rank wanted and that no checksum has verified: all of them if the format has no checksums, or with
        ``verify=False``; 0 for this library's own format.
    bytes_from_peers
        Bytes that this rank wanted, and that came from the memory of other nodes (see `Memory`).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    saved_as: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    bytes_read: int = 0
    bytes_unverified: int = 0
    bytes_from_peers: int = 0

    def __repr__(self) -> str:
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return f"LoadReport({', '.join(f'{name}={value!r}' for name, value in named.items() if value != ())})"

    @property
    def problems(self) -> tuple[str, ...]:
        """The lines of all problems, of all kinds, in one tuple."""
        return tuple(line for lines in self.by_kind.values() for line in lines)

    @property
    def by_kind(self) -> dict[str, tuple[str, ...]]:
        """Map each kind of problem, in words for messages, to its lines."""
        return {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.shape,
            "of another dtype": self.dtype,
            "not covered": self.uncovered,
            "values": self.values,
        }


MAX_NAME_BYTES = 1 << 16
"""The longest name that a catalog holds, in bytes of UTF-8. A longer one could be written but not read again."""

_VOWEL = re.compile(r"[aeio]|u(?!int|ni|se|tf)", re.IGNORECASE)


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun.

    >>> with_article("torch.device"), with_article("argparse.Namespace"), with_article("uint8")
    ('a torch.device', 'an argparse.Namespace', 'a uint8')
    """
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def type_in_words(value: Any) -> str:
    """Return the name of a value's type, with "a" or "an" before it."""
    return with_article(type(value).__name__)


def check_count(option: str, value: Any, least: int, *, or_none: bool = False) -> None:
    """Raise `UsageError` unless the option's value is an int of at least `least`, or None with `or_none`."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_count and not (or_none and value is None):
        raise UsageError(f"{option}={value!r}: pass a whole number, {least} or more{', or None' if or_none else ''}")


def check_choice(option: str, value: object, choices: Collection[str]) -> None:
    """Raise `UsageError` unless the option's value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{option}={value!r}: pass one of {', '.join(map(repr, choices))}")


def check_patterns(option: str, patterns: object) -> None:
    """Raise `UsageError` unless the option's value is a list of name patterns or, for most options, a bool."""
    only_lists = option in ("ignore", "exclude")
    if isinstance(patterns, str):  # taken letter by letter, "model.*" would be the pattern "*" among others
        other = "" if only_lists else ", or True for all"
        raise UsageError(f"{option}={patterns!r}: pass a list of patterns, as in {option}=[{patterns!r}]{other}")
    if only_lists and isinstance(patterns, bool):
        other = "; strict=False loads whatever fits" if option == "ignore" else ""
        raise UsageError(f"{option}={patterns}: pass a list of patterns{other}")
    # A map of patterns to dtypes is for `reshard` and `convert`; here its dtypes would be passed over in silence.
    if isinstance(patterns, bool):
        return
    if not isinstance(patterns, Collection) or isinstance(patterns, dict) or not all(isinstance(p, str) for p in patterns):
        raise UsageError(f"{option}={patterns!r}: pass a list of patterns, each of them text")
    for pattern in patterns:
        check_text(pattern, f"a pattern of {option}=")


def plural(count: int, singular: str, plural_form: str | None = None) -> str:
    """Write a count with its noun, which is plural unless the count is 1.

    >>> plural(1, "file"), plural(1200, "file"), plural(2, "entry", "entries")
    ('1 file', '1,200 files', '2 entries')
    """
    return f"{count:,} {singular if count == 1 else plural_form or singular + 's'}"


def few(names: Sequence[str], limit: int = 5, between: str = ", ") -> str:
    """List at most `limit` names for a message, and count the others.

    >>> few(["a", "b"]), few(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    more = len(names) - limit
    return between.join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def check_text(text: str, what: str) -> None:
    """Raise an error if a text cannot be written to a catalog; the message calls it `what`, such as "a name".

    Raise `UnsupportedError` if the text has a lone surrogate, as results of `os.fsdecode` may, or more than `MAX_NAME_BYTES`
    bytes.
    """
    if text.isascii():
        num_bytes = len(text)
    else:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise UnsupportedError(f"{text!r}: {what} with a lone surrogate is not valid text; rename it") from None
    if num_bytes > MAX_NAME_BYTES:
        most = f"over the {MAX_NAME_BYTES} that are read; shorten it"
        raise UnsupportedError(f"{text[:60]!r}…: {what} of {num_bytes} bytes, {most}")


Steps = tuple[str, ...]

ALIKE = 0.6
"""The least similarity, from 0 to 1, of two parts of names that count as alike."""

MAX_COMPARED = 300_000
"""The most pairs of names that `nearest` compares. Beyond that, if very many names share half of their parts, the rest is
skipped."""


def nearest(wrong: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Map each wrong name to the known name that it probably meant; leave out wrong names without a similar one.

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


def hint_of(wrong: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known name that a wrong one probably meant; "" if no name is similar.

    >>> hint_of("layers.0.wieght", ["layers.0.weight", "layers.0.bias"])
    ' (did you mean layers.0.weight?)'
    """
    meant = nearest([wrong], known).get(wrong)
    return "" if meant is None else f" (did you mean {meant}?)"


def _likeness(ours: Steps, theirs: Steps) -> float:
    """Return the similarity of two names, given as the parts between dots, from 0 to 1."""
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


def duration_s(text: str | float, *, option: str, or_zero: bool = False, other: str = "") -> float:
    """Convert a duration such as "10min" to seconds; a number means seconds.

    With `or_zero`, 0 is allowed. For messages, `option` is the name of the option, and `other` says which other values it takes.

    >>> duration_s("6h", option="mtbf"), duration_s("10min", option="persist_every"), duration_s(90, option="mtbf")
    (21600.0, 600.0, 90.0)

    Raise `UsageError` if the text is not a duration, or the duration is not above zero.
    """
    seconds = math.nan
    if isinstance(text, str):
        match = _DURATION.fullmatch(text.lower())
        if match and match[2] in _UNITS:
            seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(text, int | float) and not isinstance(text, bool):
        seconds = text
    if not (0 < seconds <= sys.float_info.max or (or_zero and seconds == 0)):  # an int may be larger than any float
        what = f"{other}a duration {'of zero or more' if or_zero else 'above zero'}"
        raise UsageError(f'{option}={text!r:.80}: wanted {what}: seconds, or text such as "90s", "10min", "6h", "2d"')
    return float(seconds)


def duration_text(seconds: float) -> str:
    """Write a duration as text with two or three digits, in a unit that fits.

    >>> duration_text(0.25), duration_text(42), duration_text(600), duration_text(23400), duration_text(10 * 86400)
    ('250 ms', '42 s', '10 min', '6.5 h', '10 d')
    """
    for limit, unit, name in ((1.0, 0.001, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} d"


def describe_region(low: Sequence[int], high: Sequence[int], ndim: int) -> str:
    """Write a region from corner `low` to `high` as slices, of its last `ndim` dims.

    >>> describe_region((0, 2, 0), (1, 3, 4), 2)
    '[2:3, 0:4]'
    """
    dims = list(zip(low, high, strict=True))[len(low) - ndim :]
    return "[" + ", ".join(f"{a}:{b}" for a, b in dims) + "]"
