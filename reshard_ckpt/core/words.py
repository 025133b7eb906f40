"""Words of messages: articles, numbers with their nouns, shortened lists, and text that can be written at all"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import UnsupportedError

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
    """Refuse text that is no valid Unicode, which no file can hold.

    Raises
    ------
    UnsupportedError
        It has a lone surrogate, as what `os.fsdecode` makes of foreign bytes may.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(f"{text!r}: {what} with a lone surrogate is no valid text; rename it") from None
