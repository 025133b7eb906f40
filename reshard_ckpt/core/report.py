"""How are many problems said in one message?"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 10
"""Problems spelled out in one message; the rest is counted."""


def summarize(problems: Sequence[str], advice: str) -> str:
    """One message for all problems, and what to do next.

    >>> print(summarize(["w: missing"], "load with strict=False"))
    w: missing; load with strict=False
    >>> print(summarize(["w: missing", "b: missing"], "load with strict=False"))
    2 problems; load with strict=False:
      w: missing
      b: missing
    """
    if len(problems) == 1:
        return f"{problems[0]}; {advice}"
    more = len(problems) - MAX_NAMED
    shown = [f"  {line}" for line in problems[:MAX_NAMED]] + ([f"  … and {more} more"] if more > 0 else [])
    return "\n".join([f"{len(problems)} problems; {advice}:", *shown])
