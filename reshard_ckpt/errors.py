"""The errors of this package, grouped by the action that a handler would take.

    CheckpointError
    ├── UsageError            the call or the state is wrong: fix the program
    │   ├── NameCollisionError    two things flatten to one name
    │   ├── UnsupportedError      this cannot be saved or loaded; the message says what to do
    │   └── LayoutError           shards overlap, leave holes, or disagree between ranks
    ├── MismatchError         checkpoint and target disagree: `.problems` lists each one
    ├── CheckpointNotFound    the path holds no committed checkpoint
    ├── CorruptError          bytes are damaged, missing or hostile: use another checkpoint
    ├── StorageError          the disk or store refused: free space, fix rights, try again
    └── PeerError             another rank failed, disagreed or did not arrive: `.ranks` names them

A failure on one rank is raised on every rank, with the class and message of the first failing rank, prefixed by its number. So a
handler needs the same rules on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_UNSHOWN = (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
_HIDDEN = {code: repr(chr(code))[1:-1] for code in _UNSHOWN if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    r"""Escape characters that control a terminal or cannot be written to it, because names may come from anywhere.

    >>> visible("\x1b[2Jmodel")
    '\\x1b[2Jmodel'
    """
    return text.translate(_HIDDEN)


class CheckpointError(Exception):
    """Base of every error that this package raises on purpose. Its text has control characters escaped (`visible`)."""

    def __str__(self) -> str:
        return visible(Exception.__str__(self))  # a `rebuilt` error has another class after this


class UsageError(CheckpointError):
    """The call or the state passed is wrong: fix the program."""


class NameCollisionError(UsageError):
    """Two different things in the state flatten to the same name."""


class UnsupportedError(UsageError):
    """Something that cannot be saved or loaded; the message says what to do instead."""


class LayoutError(UsageError):
    """Shards overlap, leave a region of their tensor uncovered, or disagree between ranks."""


class CheckpointNotFound(CheckpointError):
    """The path holds no committed checkpoint.

    Attributes
    ----------
    looked_for
        A line for each known format: the files that would mark a checkpoint of it. Empty if only one format was asked for.
    """

    def __init__(self, message: str, looked_for: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.looked_for = tuple(looked_for)


class CorruptError(CheckpointError):
    """Bytes of a checkpoint are damaged or missing, or no writer could have written them."""


class StorageError(CheckpointError):
    """The disk or the store refused an operation."""


class MismatchError(CheckpointError):
    """Checkpoint and target disagree.

    Attributes
    ----------
    problems
        One line for each disagreement, including the ones that the message leaves out.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(visible, problems))


class PeerError(CheckpointError):
    """Another rank failed, disagreed, or did not arrive before the deadline.

    Attributes
    ----------
    ranks
        The ranks at fault.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def rebuilt(
    kind: type[CheckpointError], others: tuple[type[BaseException], ...], args: tuple[Any, ...], fields: Mapping[str, Any]
) -> CheckpointError:
    """Make an error of this class that handlers of other packages' classes catch, too.

    Parameters
    ----------
    others
        The classes of other packages. The error is an instance of each of them, too.
    args, fields
        The arguments and attributes of the error.
    """
    combined = _combined(kind, others)
    new = combined.__new__(combined, *args)
    new.args = args
    vars(new).update(fields)
    return new


_COMBINED: dict[tuple[type, ...], type[CheckpointError]] = {}


def _combined(kind: type[CheckpointError], others: tuple[type[BaseException], ...]) -> type[CheckpointError]:
    """Return a subclass of all these errors. It is cached: ``except`` needs the same class each time."""
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__str__": CheckpointError.__str__,  # that of torch's CheckpointException shows only failures
        "__reduce__": lambda self: (rebuilt, (kind, others, self.args, vars(self))),
    }
    cached = _COMBINED.get((kind, *others))
    return cached or _COMBINED.setdefault((kind, *others), type(kind.__name__, (kind, *others), members))
