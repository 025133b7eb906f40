"""Words of messages: articles, numbers with their nouns, shortened lists, and text that can be written at all"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import UnsupportedError

MAX_NAME_BYTES = 1 << 16
"""The longest name that a catalog holds, in UTF-8: what is longer could be written, and not be read again."""

_VOWEL = re.compile(r"[aeio]|u(?!int|ni|se|tf)", re.IGNORECASE)


def a(noun: str) -> str:
    """Put its article before a noun.

    >>> a("torch.device"), a("argparse.Namespace"), a("uint8")
    ('a torch.device', 'an argparse.Namespace', 'a uint8')
    """
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


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
    """Refuse text that no catalog can hold: what is no valid Unicode, and what is too long.

    Raises
    ------
    UnsupportedError
        It has a lone surrogate, as what `os.fsdecode` makes of foreign bytes may, or more than `MAX_NAME_BYTES`.
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
