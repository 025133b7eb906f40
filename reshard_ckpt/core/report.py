"""Reports of saves and loads, and messages that list many problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MAX_NAMED = 10
"""Problems spelled out in one message; the rest is counted."""


def summarize(problems: Sequence[str], advice: str) -> str:
    """Make one message of all problems, and of what to do next.

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


def summarize_kinds(problems: Mapping[str, Sequence[str]], advice: str) -> str:
    """Make one message of problems by kind: where not all are listed, some of each kind are.

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
    if total <= MAX_NAMED:
        return summarize([line for lines in problems.values() for line in lines], advice)
    out = [f"{total} problems; {advice}:"]
    left = MAX_NAMED
    num = sum(bool(lines) for lines in problems.values())
    # The kinds with few lines take less than their part, which is left for the others.
    shown = {}
    for kind in sorted(problems, key=lambda kind: len(problems[kind])):
        if problems[kind]:
            shown[kind] = min(len(problems[kind]), max(left // num, 1))
            left -= shown[kind]
            num -= 1
    for kind, lines in problems.items():
        out += [f"  {line}" for line in lines[: shown.get(kind, 0)]]
        if (more := len(lines) - shown.get(kind, 0)) > 0:
            out.append(f"  … and {more} more {kind}")
    return "\n".join(out)


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport:
    """Figures of one save on this rank, for metrics.

    Attributes
    ----------
    path, save_id
        Where the checkpoint is, as the caller gave it, and which save it is.
    num_bytes
        Bytes that this rank wrote.
    total_bytes
        Bytes of all files of the checkpoint; rank 0 alone knows, None on the others.
    duration_s
        Seconds from the call until the checkpoint was committed on all ranks.
    stall_s
        Seconds of these in which training was held up: all of them in `save`; until `async_save` returned, and while somebody
        waited in ``staged()``, as optimizers do that are held back.
    """

    path: str
    save_id: str
    num_bytes: int
    total_bytes: int | None
    duration_s: float
    stall_s: float

    def __repr__(self) -> str:
        times = f"duration_s={self.duration_s:.3f}, stall_s={self.stall_s:.3f}"
        return f"SaveReport(path={self.path!r}, num_bytes={self.num_bytes}, {times})"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of a load on this rank, and the problems of all ranks.

    The tuples hold one line for each thing that did not load, on any rank; with ``strict=True`` they are empty.

    Attributes
    ----------
    missing, unexpected, shape, dtype, uncovered
        Wanted but not saved; saved but not wanted by any rank; of another global shape; of another dtype; not wholly covered
        by saved shards.
    values
        Values that are missing or do not fit: hyperparameters, per-rank values of another world size.
    kept
        What the checkpoint lacks and may lack (``allow_missing=``): it keeps its value, which is no problem.
    saved_as
        Tensors that this rank loaded from another name, which differs only in what wrappers put into it: no problem.
    converted
        Tensors that this rank loaded into another dtype (``cast=``): no problem.
    num_tensors
        Tensors that this rank loaded.
    num_bytes, bytes_read
        Bytes that this rank wanted, and that it read from storage.
    bytes_unverified
        How many of the bytes that this rank wanted no checksum has verified: all of a format without checksums, or with
        ``verify=False``; 0 of this library's own.
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

    @property
    def problems(self) -> tuple[str, ...]:
        """All lines."""
        return tuple(line for lines in self.by_kind.values() for line in lines)

    @property
    def by_kind(self) -> dict[str, tuple[str, ...]]:
        """The lines of each kind, in the words of messages."""
        return {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.shape,
            "of another dtype": self.dtype,
            "not covered": self.uncovered,
            "values": self.values,
        }

    def loaded(
        self,
        num_tensors: int,
        num_bytes: int,
        bytes_read: int,
        converted: Sequence[str] = (),
        saved_as: Sequence[str] = (),
        *,
        bytes_unverified: int = 0,
    ) -> LoadReport:
        """Add what this rank loaded."""
        return replace(
            self,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            bytes_read=bytes_read,
            bytes_unverified=bytes_unverified,
            converted=tuple(converted),
            saved_as=tuple(saved_as),
        )
