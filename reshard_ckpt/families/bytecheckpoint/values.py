"""Reading ``extra_state``: a torch file of each rank, with any content of the user.

Values that are equal on all ranks are named ``extra_state.<path>``. All others are named ``extra_state_of_rank.<rank>.<path>``.
ByteCheckpoint itself gives each rank its own values, and gives new ranks those of rank 0, which may be wrong for them.
"""

from __future__ import annotations

import re
from typing import Any

from ...plugins import CatalogBuilder, Storage, serve_state
from ...plugins.errors import CheckpointError, CorruptError, UnsupportedError
from ...plugins.names import name_of
from ...plugins.states import divided_by_rank
from ...plugins.torchfile import read_object

MAX_BYTES = 1 << 30
EXTRA = "extra_state"
_FILE = re.compile(rf"{EXTRA}/extra_state_rank_(\d{{1,9}})\.pt")


def add_extra_state(builder: CatalogBuilder, storage: Storage) -> tuple[Storage, dict[str, str]]:
    """Add the extra state of all ranks to a catalog.

    Returns
    -------
    Storage
        The store that serves the tensors of the extra state, too.
    dict of str
        Names, each mapped to advice for a load that does not find it.
    """
    found = {int(match[1]): key for key, _ in storage.list() if (match := _FILE.fullmatch(key))}
    if not found:
        return storage, {}
    try:
        absent = next((rank for rank in range(len(found)) if rank not in found), None)
        if absent is not None:
            raise CorruptError(f"{storage.url}: has {EXTRA} of rank {max(found)} and none of rank {absent}; copy it along")
        states = [_load(storage, found[rank]) for rank in range(len(found))]
        state, own = divided_by_rank(states, EXTRA)
        names = ", ".join(map(name_of, own[:5]))
        advice = f"{names} of {EXTRA} differ between ranks; ask for them as {EXTRA}_of_rank.<rank>.<name>"
        return serve_state(builder, storage, state, f"{EXTRA}/tensors"), {EXTRA: advice} if own else {}
    except CheckpointError as error:
        builder.unreadable(EXTRA, error)
        return storage, {EXTRA: str(error)}


def _load(storage: Storage, key: str) -> dict[str, Any]:
    state = read_object(bytes(storage.read(key, limit=MAX_BYTES)), f"{storage.url}: {key}", tagged=None)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UnsupportedError(f"{storage.url}: {key} holds something else than a dict by name; load it with torch")
    return state
