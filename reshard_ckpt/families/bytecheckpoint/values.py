"""Reading ``extra_state``: a torch file of each rank, with any content of the user.

Values that are equal on all ranks are named ``extra_state.<path>``. All others are named ``extra_state_of_rank.<rank>.<path>``.
ByteCheckpoint itself gives each rank its own values, and gives new ranks those of rank 0, which may be wrong for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...plugins import CatalogBuilder, Storage, serve_state
from ...plugins.errors import CheckpointError, CorruptError, UnsupportedError
from ...plugins.names import name_of
from ...plugins.torchfile import object_bytes, read_object
from ...plugins.trees import flatten, put

MAX_BYTES = 1 << 30
EXTRA, OF_RANK = "extra_state", "extra_state_of_rank"

_FILE = re.compile(rf"{EXTRA}/extra_state_rank_(\d{{1,9}})\.pt")


def add_extra_state(builder: CatalogBuilder, storage: Storage) -> tuple[Storage, dict[str, str]]:
    """Add the extra state of all ranks to a catalog.

    Returns
    -------
    Storage
        The store that serves the tensors of the extra state, too.
    dict of str
        Advice for loads that miss a name, by the name that it concerns.
    """
    found = {int(match[1]): key for key, _ in storage.list() if (match := _FILE.fullmatch(key))}
    if not found:
        return storage, {}
    try:
        absent = next((rank for rank in range(len(found)) if rank not in found), None)
        if absent is not None:
            raise CorruptError(f"{storage.url}: has {EXTRA} of rank {max(found)} and none of rank {absent}; copy it along")
        states = {rank: _load(storage, found[rank]) for rank in range(len(found))}
        state, advice = _named(states)
        return serve_state(builder, storage, state, f"{EXTRA}/tensors"), advice
    except CheckpointError as error:
        builder.unreadable(EXTRA, error)
        return storage, {EXTRA: str(error)}


def _named(states: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the states of all ranks under the names that they get here, and advice."""
    common, own = _divided(states)
    # Values that are equal on all ranks go below `EXTRA`, the others below `OF_RANK` and the number of their rank.
    state: dict[str, Any] = {EXTRA: common} if common else {}
    advice = {}
    if own:
        state[OF_RANK] = {str(rank): {} for rank in states}
        for path, by_rank in own.items():
            for rank, value in by_rank.items():
                put(state[OF_RANK][str(rank)], path, value)
        names = ", ".join(name_of(path) for path in list(own)[:5])
        advice = {EXTRA: f"{names} of {EXTRA} differ between ranks; ask for them as {OF_RANK}.<rank>.<name>"}
    return state, advice


def _load(storage: Storage, key: str) -> dict[str, Any]:
    state = read_object(bytes(storage.read(key, limit=MAX_BYTES)), f"{storage.url}: {key}", tagged=False)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UnsupportedError(f"{storage.url}: {key} holds something else than a dict by name; load it with torch")
    return state


def _divided(states: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[int, Any]]]:
    """Divide the states of ranks: the values that are equal on all, as a tree, and all others by path and rank."""
    by_path: dict[tuple[str, ...], dict[int, Any]] = {}
    for rank, state in states.items():
        for path, value in flatten(state, _children) if state else ():
            by_path.setdefault(path, {})[rank] = value
    common: dict[str, Any] = {}
    own: dict[tuple[str, ...], dict[int, Any]] = {}
    for path, by_rank in by_path.items():
        first, *rest = by_rank.values()
        if len(by_rank) == len(states) and all(_are_alike(first, other) for other in rest):
            put(common, path, first)
        else:
            own[path] = by_rank
    return common, own


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a dict by name; an empty dict, and one with other keys, is one value."""
    return node.items() if isinstance(node, Mapping) and node and all(isinstance(key, str) for key in node) else None


def _are_alike(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and object_bytes(one, "") == object_bytes(other, "")
    except CheckpointError:
        return False
