"""The call for which ranks open a session, encoded to be compared; and the errors if calls differ or ranks are late or gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .wire import Refusal, name_ranks


def call_of(kind: str, subject: str) -> bytes:
    """Encode a call, such as "save" of "/ckpt/step_100", as bytes: ranks compare them to see that all make the same call."""
    return json.dumps([kind, subject]).encode()


def different_calls_refusal(calls: Sequence[bytes]) -> Refusal:
    """Make the refusal (the error for all ranks) of different calls. It lists the ranks by call, and blames the minority."""
    count = Counter(calls)
    usual = max(count, key=lambda call: (count[call], call == calls[0]))
    by_call = {call: [rank for rank, made in enumerate(calls) if made == call] for call in dict.fromkeys(calls)}
    lines = "; ".join(f"{name_ranks(ranks)}: {kind} {subject!r}" for (kind, subject), ranks in _spelled(by_call))
    message = f"ranks called different things: {lines}; every rank must make the same calls in the same order"
    return Refusal("PeerError", message, tuple(rank for rank, made in enumerate(calls) if made != usual))


def late_refusal(call: bytes, rank: int) -> Refusal:
    """Make the refusal (the error for all ranks) for a rank that came too late for the same call twice in a row."""
    kind, subject = json.loads(call)
    message = (
        f"rank {rank} came too late for {kind} {subject!r} twice in a row, so it has probably left one out; "
        "this call fails on all ranks, so that they are in step from the next one on"
    )
    return Refusal("PeerError", message, (rank,), absent=(rank,))


def expired_refusal(title: str, absent: tuple[int, ...], timeout_s: float) -> Refusal:
    """Make the refusal (the error for all ranks) when the time of a step is over.

    It blames the absent ranks, or rank 0 if no rank is known to be absent.
    """
    if absent:
        return Refusal("PeerError", f"{title}: {did_not_arrive(absent, timeout_s)}", absent, absent=absent)
    why = "it hangs, or is slow: its own log says why, and timeout_s= allows it more time"
    message = f"{title}: rank 0 did not answer within {timeout_s:g} s; {why}"
    return Refusal("PeerError", message, (0,), absent=(0,))


def ended_refusal(title: str, ranks: tuple[int, ...]) -> Refusal:
    """Make the refusal (the error for all ranks) when the processes of these ranks have ended."""
    what = f"the {'process' if len(ranks) == 1 else 'processes'} of {name_ranks(ranks)} ended"
    return Refusal("PeerError", f"{title}: {what} before this was done; their own logs say why", ranks, absent=ranks)


def did_not_arrive(ranks: Sequence[int], timeout_s: float) -> str:
    """Return the sentence of an error message that says which ranks did not arrive, and the likely reasons."""
    return (
        f"{name_ranks(ranks)} did not arrive within {timeout_s:g} s. Did every rank make this call? Else they are slow "
        "(timeout_s= allows more time), hang, or have failed: their own logs say why"
    )


def _spelled(by_call: Mapping[bytes, list[int]]) -> Iterator[tuple[tuple[str, str], list[int]]]:
    for call, ranks in list(by_call.items())[:8]:
        kind, subject = json.loads(call)
        yield (kind, subject), ranks
