"""Reports of saves and loads, and messages that list many problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

MAX_NAMED = 10
"""The most problems that one message spells out; the others are counted."""


def summarize(problems: Sequence[str], advice: str) -> str:
    """Make one message from all problems and an advice on the next action.

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
    """Make one message from problems by kind; if there are too many, it lists some of each kind.

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
            out.append(f"  … and {more} more {kind}")
    return "\n".join(out)


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport:
    """Figures of one save on this rank, for metrics.

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
        Seconds of these in which training stood still. For `save`, all of them; for `async_save`, the seconds until it returned,
        and the seconds that a caller of ``staged()`` or an optimizer step waited for staging.
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

    Each of the tuples of problems has one line for each thing that did not load, on any rank. They are empty with
    ``strict=True``.

    Attributes
    ----------
    missing, unexpected, shape, dtype, uncovered
        Tensors that were wanted but not saved; saved but not wanted by any rank; saved with another global shape; with another
        dtype; not wholly covered by saved shards.
    values
        Values that are missing or do not fit: hyperparameters, per-rank values of another world size.
    kept
        Things that the checkpoint lacks although ``allow_missing=`` permits it: they keep their value. Not a problem.
    saved_as
        Tensors that this rank loaded from another name, which differs only in steps that module wrappers add. Not a problem.
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
        """The lines of all problems, of all kinds."""
        return tuple(line for lines in self.by_kind.values() for line in lines)

    @property
    def by_kind(self) -> dict[str, tuple[str, ...]]:
        """The lines of each kind of problem; the kinds are named as in messages."""
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
        bytes_from_peers: int = 0,
    ) -> LoadReport:
        """Return the report with the numbers of this rank's load added."""
        return replace(
            self,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            bytes_read=bytes_read,
            bytes_unverified=bytes_unverified,
            bytes_from_peers=bytes_from_peers,
            converted=tuple(converted),
            saved_as=tuple(saved_as),
        )
