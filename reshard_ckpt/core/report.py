"""How are many problems said in one message?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    The tuples hold one line for each thing that did not load, on any rank; with ``strict=True`` they are empty.

    Attributes
    ----------
    missing, unexpected, shape, dtype, uncovered
        Wanted but not saved; saved but not wanted by any rank; of another global shape; of another dtype; not wholly covered
        by saved shards.
    values
        Values that are missing or do not fit: hyperparameters, per-rank values of another world size.
    converted
        Tensors that this rank loaded into another dtype (``cast=``): no problem.
    num_tensors
        Tensors that this rank loaded.
    num_bytes, bytes_read
        Bytes that this rank wanted, and that it read from storage.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    bytes_read: int = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """All lines."""
        return self.missing + self.unexpected + self.shape + self.dtype + self.uncovered + self.values

    def loaded(self, num_tensors: int, num_bytes: int, bytes_read: int, converted: Sequence[str] = ()) -> LoadReport:
        """The same, with what this rank loaded."""
        return replace(self, num_tensors=num_tensors, num_bytes=num_bytes, bytes_read=bytes_read, converted=tuple(converted))
