"""``extra_state``: a torch file of each rank, with whatever the user put in.

What all ranks have alike is ``extra_state.<path>``. What they do not is ``extra_state_of_rank.<rank>.<path>``: ByteCheckpoint
itself gives each rank its own, and ranks that were not there rank 0's, which may be wrong for them.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...core.catalog.model import ValueEntry
from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...format.values import encode_value
from ...state.capture import capture
from ...state.scan import Verbatim
from ...storage import LocalStorage
from ...storage.protocol import Storage
from ..catalog_builder import foreign_file, whole
from ..dcp.heads import read_object
from ..dcp.read import MoreContents
from ..unreadable import without_unreadable

MAX_BYTES = 1 << 30
EXTRA, OF_RANK = "extra_state", "extra_state_of_rank"

_FILE = re.compile(rf"{EXTRA}/extra_state_rank_(\d{{1,9}})\.pt")


def extra_files(storage: Storage) -> dict[int, str]:
    """The file of each rank."""
    found = {int(match[1]): key for key, _ in storage.list() if (match := _FILE.fullmatch(key))}
    return dict(sorted(found.items()))


class ExtraState:
    """The extra state of all ranks, on its way to a catalog.

    `strided` are its tensors, which become files of their own; `advice` says where to find what a load misses.
    """

    def __init__(self, storage: Storage, format: str) -> None:
        self.storage, self.format = storage, format
        self.strided: dict[str, torch.Tensor] = {}
        self.advice: dict[str, str] = {}

    def contents(self, num_files: int) -> MoreContents:
        """What belongs to the catalog, whose files so far are `num_files`."""
        files = extra_files(self.storage)
        if not files:
            return MoreContents()
        try:
            loaded = {rank: self._load(key) for rank, key in files.items()}
        except CheckpointError as error:
            return self._unreadable(error)
        absent = next((rank for rank in range(len(files)) if rank not in files), None)
        if absent is not None:
            return self._unreadable(
                CorruptError(f"{self.storage.url}: has {EXTRA} of rank {max(files)} and none of rank {absent}; copy it along")
            )
        common, own = _divided(loaded)
        state: dict[str, Any] = {EXTRA: common} if common else {}
        if own:
            state[OF_RANK] = {str(rank): {} for rank in files}
            for path, by_rank in own.items():
                for rank, value in by_rank.items():
                    _put(state[OF_RANK][str(rank)], path, value)
        kept, unreadable = without_unreadable(state)
        captured = capture(Verbatim(kept))
        files_of = [
            foreign_file(f"{EXTRA}/tensors/{i}", _num_bytes(t.memory), self.format) for i, t in enumerate(captured.tensors)
        ]
        self.strided = {file.key: entry.memory.detach() for file, entry in zip(files_of, captured.tensors, strict=True)}
        tensors = [
            whole(entry.spec.name, entry.spec.dtype, entry.spec.shape, num_files + i, 0)
            for i, entry in enumerate(captured.tensors)
        ]
        values = [ValueEntry(value.name, value.path, value.kind, value.data) for value in captured.values]
        if own:
            names = ", ".join(".".join(path) for path in list(own)[:5])
            self.advice = {EXTRA: f"{names} of {EXTRA} differ between ranks; ask for them as {OF_RANK}.<rank>.<name>"}
        return MoreContents(tensors, files_of, values, unreadable)

    def _unreadable(self, error: CheckpointError) -> MoreContents:
        self.advice = {EXTRA: str(error)}
        return MoreContents(unreadable={EXTRA: error})

    def _load(self, key: str) -> dict[str, Any]:
        if not isinstance(self.storage, LocalStorage):
            raise UnsupportedError(f"{self.storage.url}: {key} is a torch file, which is read from local folders; copy it to one")
        state = _read_archive(bytes(self.storage.read(key, limit=MAX_BYTES)), f"{self.storage.url}: {key}")
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise UnsupportedError(f"{self.storage.url}: {key} holds something else than a dict by name; load it with torch")
        return state


def _read_archive(data: bytes, name: str) -> Any:
    """Read a file of ``torch.save``; pickled with protocol 4, which torch's own reader of plain data does not know."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            if any(member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data) for member in members.values()):
                raise CorruptError(f"{name}: has a compressed member, which torch does not write; use another checkpoint")
            pickled = archive.read(members["data.pkl"])
            storages = {path[5:]: archive.read(member) for path, member in members.items() if path.startswith("data/")}
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise CorruptError(f"{name}: is no file that torch.save wrote ({str(error)[:100]}); use another checkpoint") from None
    return read_object(pickled, storages, name=name)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


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
    """What all ranks have alike, as a tree; and by path what each rank has that is not."""
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
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bytes(one.contiguous().flatten().view(torch.uint8).numpy()) == bytes(
            other.contiguous().flatten().view(torch.uint8).numpy()
        )
    try:
        return encode_value(one, "") == encode_value(other, "")
    except CheckpointError:
        return False
