"""Reading ``extra_state``: a torch file of each rank, with any content of the user.

Values that are equal on all ranks are named ``extra_state.<path>``. All others are named ``extra_state_of_rank.<rank>.<path>``.
ByteCheckpoint itself gives each rank its own values, and gives new ranks those of rank 0, which may be wrong for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...core.catalog.model import ValueEntry
from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...format.values import encode_value
from ...formats.catalog_builder import foreign_file, whole
from ...formats.dcp.read import MoreContents
from ...formats.unreadable import without_unreadable
from ...state.capture import capture
from ...state.scan import Verbatim
from ...storage import LocalStorage
from ...storage.protocol import Storage
from ...torchfile.objects import read_object
from ...torchfile.tensors import TENSOR_TABLE

MAX_BYTES = 1 << 30
EXTRA, OF_RANK = "extra_state", "extra_state_of_rank"

_FILE = re.compile(rf"{EXTRA}/extra_state_rank_(\d{{1,9}})\.pt")


def read_extra_state(storage: Storage, format: str) -> tuple[MoreContents, dict[str, torch.Tensor], dict[str, str]]:
    """Read the extra state of all ranks.

    Returns
    -------
    MoreContents
        The tensors, files, values and errors to add to the catalog.
    dict of tensors
        The tensors by key of the file in which they are to be served.
    dict of str
        Advice for loads that miss a name, by the name that it concerns.
    """
    found = {int(match[1]): key for key, _ in storage.list() if (match := _FILE.fullmatch(key))}
    if not found:
        return MoreContents(), {}, {}
    try:
        absent = next((rank for rank in range(len(found)) if rank not in found), None)
        if absent is not None:
            raise CorruptError(f"{storage.url}: has {EXTRA} of rank {max(found)} and none of rank {absent}; copy it along")
        common, own = _divided({rank: _load(storage, found[rank]) for rank in range(len(found))})
    except CheckpointError as error:
        return MoreContents(unreadable={EXTRA: error}), {}, {EXTRA: str(error)}
    # Values that are equal on all ranks go below `EXTRA`, the others below `OF_RANK` and the number of their rank.
    state: dict[str, Any] = {EXTRA: common} if common else {}
    advice = {}
    if own:
        state[OF_RANK] = {str(rank): {} for rank in found}
        for path, by_rank in own.items():
            for rank, value in by_rank.items():
                _put(state[OF_RANK][str(rank)], path, value)
        names = ", ".join(".".join(path) for path in list(own)[:5])
        advice = {EXTRA: f"{names} of {EXTRA} differ between ranks; ask for them as {OF_RANK}.<rank>.<name>"}
    kept, unreadable = without_unreadable(state)
    captured = capture(Verbatim(kept))
    # The tensors become files of their own, which a `StridedStorage` serves: entry i of `captured` is file i.
    strided = {f"{EXTRA}/tensors/{i}": entry.memory.detach() for i, entry in enumerate(captured.tensors)}
    files = [foreign_file(key, tensor.numel() * tensor.itemsize, format) for key, tensor in strided.items()]
    specs = [entry.spec for entry in captured.tensors]
    tensors = [whole(spec.name, spec.dtype, spec.shape, i, 0) for i, spec in enumerate(specs)]
    values = [ValueEntry(value.name, value.path, value.kind, value.data) for value in captured.values]
    return MoreContents(tensors, files, values, unreadable), strided, advice


def _load(storage: Storage, key: str) -> dict[str, Any]:
    if not isinstance(storage, LocalStorage):
        raise UnsupportedError(f"{storage.url}: {key} is a torch file, which is read from local folders; copy it to one")
    state = read_object(bytes(storage.read(key, limit=MAX_BYTES)), f"{storage.url}: {key}", TENSOR_TABLE)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UnsupportedError(f"{storage.url}: {key} holds something else than a dict by name; load it with torch")
    return state


def _leaves(node: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, child in node.items():
        if isinstance(child, Mapping) and child and all(isinstance(name, str) for name in child):
            yield from _leaves(child, (*path, key))
        else:
            yield (*path, key), child


def _put(node: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value


def _divided(states: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[int, Any]]]:
    """Divide the states of ranks: the values that are equal on all, as a tree, and all others by path and rank."""
    by_path: dict[tuple[str, ...], dict[int, Any]] = {}
    for rank, state in states.items():
        for path, value in _leaves(state):
            by_path.setdefault(path, {})[rank] = value
    common: dict[str, Any] = {}
    own: dict[tuple[str, ...], dict[int, Any]] = {}
    for path, by_rank in by_path.items():
        first, *rest = by_rank.values()
        if len(by_rank) == len(states) and all(_alike(first, other) for other in rest):
            _put(common, path, first)
        else:
            own[path] = by_rank
    return common, own


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        return one.dtype == other.dtype and one.shape == other.shape and _bytes_of(one) == _bytes_of(other)
    try:
        return encode_value(one, "") == encode_value(other, "")
    except CheckpointError:
        return False


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
