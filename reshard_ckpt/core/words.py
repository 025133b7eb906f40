"""Words of messages: articles, numbers with their nouns, shortened lists, and a check that text can be written at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
