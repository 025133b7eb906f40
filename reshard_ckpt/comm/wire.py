"""Encodings of errors and short messages between ranks: errors as JSON, messages as binary frames; never a pickle."""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import errors
from ..errors import CheckpointError, MismatchError, PeerError

_FRAME = struct.Struct("<IIBI")

# A refusal is one value of the store, of at most 8 MiB, and JSON may take 12 bytes for a character.
_MAX_MESSAGE_CHARS = 64 << 10
_MAX_PROBLEMS_CHARS = 256 << 10
_MAX_NAMED = 16


class Frame(NamedTuple):
    """One rank's message to rank 0, and the `sender` that delivered it: the rank itself, or the leader of its machine.

    If `separate`, the payload has a key of its own, and `payload` here is empty.
    """

    rank: int
    sender: int
    separate: bool
    payload: bytes


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Encode several messages as bytes, end to end."""
    return b"".join([_FRAME.pack(f.rank, f.sender, f.separate, len(f.payload)) + f.payload for f in frames])


def decode_frames(inbox: bytes) -> Iterator[Frame]:
    """Yield the messages in an inbox, in the order in which they arrived."""
    position = 0
    while position < len(inbox):
        if position + _FRAME.size > len(inbox):
            raise _foreign_message(inbox)
        rank, sender, separate, length = _FRAME.unpack_from(inbox, position)
        position += _FRAME.size
        if separate > 1 or position + length > len(inbox):
            raise _foreign_message(inbox)
        yield Frame(rank, sender, bool(separate), inbox[position : position + length])
        position += length


class Refusal(NamedTuple):
    """A refusal: the error that every other rank raises because one rank ended the session, and the ranks that never arrived."""

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()

    def error(self) -> CheckpointError:
        found = getattr(errors, self.kind, None)
        if found is MismatchError:
            return MismatchError(self.message, self.problems)
        if found is PeerError or not (isinstance(found, type) and issubclass(found, CheckpointError)):
            return PeerError(self.message, self.ranks)
        return found(self.message)

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Refusal:
        try:
            kind, message, ranks, problems, absent = json.loads(data)
            return cls(kind, message, tuple(ranks), tuple(problems), tuple(absent))
        except (ValueError, TypeError) as error:  # neither UTF-8 nor JSON
            raise _foreign_message(data) from error


def _foreign_message(data: bytes) -> PeerError:
    """Return the error for a message in the store that this library did not send."""
    return PeerError(
        f"the key-value store holds a message that is not of this session ({data[:40]!r}); another program writes to keys "
        "below 'reshard_ckpt', or ranks run different versions of this library"
    )


def refusal_of(error: BaseException, rank: int) -> Refusal:
    """Convert an error of this rank to a refusal.

    The other ranks raise the same class if it belongs to this package, else `PeerError`.
    """
    if not isinstance(error, CheckpointError):
        # Not `str(error)`, which may itself raise for a class that is not ours.
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        return Refusal("PeerError", f"rank {rank}: {text[:_MAX_MESSAGE_CHARS]}", ranks=(rank,))
    # The nearest public class: `errors` does not have the subclasses of single modules.
    kind = next(base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
    ranks = error.ranks if isinstance(error, PeerError) else ()
    problems = tuple(_at_most(error.problems, _MAX_PROBLEMS_CHARS)) if isinstance(error, MismatchError) else ()
    return Refusal(kind, f"rank {rank}: {str(error)[:_MAX_MESSAGE_CHARS]}", ranks, problems)


def _at_most(lines: Iterable[str], max_chars: int) -> Iterator[str]:
    for line in lines:
        max_chars -= len(line)
        if max_chars < 0:
            return
        yield line


def name_ranks(ranks: Sequence[int]) -> str:
    """Write a list of ranks as text for a message: consecutive ranks as ranges; of many ranges only the first ones.

    >>> name_ranks([3]), name_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    shown = ", ".join("-".join(map(str, bounds)) for bounds in ranges[:_MAX_NAMED])
    more = " and more" if len(ranges) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
