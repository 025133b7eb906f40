"""What a session is opened for, as ranks compare it, and what they are told where they called different things."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .wire import Refusal, name_ranks


def call_of(kind: str, subject: str) -> bytes:
    """Encode what a session is opened for, as ranks compare it."""
    return json.dumps([kind, subject]).encode()


def disagreement(calls: Sequence[bytes]) -> Refusal:
    """Make the refusal of different calls: which ranks made which, and those in the minority as the ones at fault."""
    count = Counter(calls)
    usual = max(count, key=lambda call: (count[call], call == calls[0]))
    by_call = {call: [rank for rank, made in enumerate(calls) if made == call] for call in dict.fromkeys(calls)}
    lines = "; ".join(f"{name_ranks(ranks)}: {kind} {subject!r}" for (kind, subject), ranks in _spelled(by_call))
    message = f"ranks called different things: {lines}; every rank must make the same calls in the same order"
    return Refusal("PeerError", message, tuple(rank for rank, made in enumerate(calls) if made != usual))


def _spelled(by_call: Mapping[bytes, list[int]]) -> Iterator[tuple[tuple[str, str], list[int]]]:
    for call, ranks in list(by_call.items())[:8]:
        kind, subject = json.loads(call)
        yield (kind, subject), ranks
