"""Reading a folder of torch_checkpointing as one checkpoint, without running any code in its files.

1. ``metadata.pkl``, a pickle of plain data, marks the folder. It has the number of ranks, and the ranks and files of each item
   that was saved with a resharder. The files of any other item are ``<item>_<rank>.pt``.
2. Each file is one of ``torch.save``. Its DTensors say which part of a global tensor they are, as in `rank_files`. A plain tensor
   beside them is the same on all ranks.
3. An item in the form of an optimizer's state dict is one. An item without tensors, or with plain tensors that differ between
   ranks, has values of each rank.
"""

from __future__ import annotations

import re
from typing import Any

from ..core.trees import leaves
from ..errors import CorruptError, UnsupportedError
from ..state.optimizer_dicts import form_of
from ..storage import Storage
from ..storage.protocol import read_range
from ..torchfile.pickle_reader import read_pickle
from ..torchfile.tensors import PickledTensor
from .rank_files import MODEL, RankFolder, are_alike, has_parts
from .source import Format, Source

NAME = "torch_checkpointing"
METADATA_KEY = "metadata.pkl"

_VERSION = "2.0"
_FILE = re.compile(r"([A-Za-z][\w.-]*?)_(\d{1,7})\.pt")
_MAX_RANKS = 1 << 24


def open_torch_checkpointing(storage: Storage, key: str | None) -> Source | None:
    """Open a folder of torch_checkpointing; return None for anything else; see `Format.open`."""
    size = storage.size(METADATA_KEY) if key is None else None
    if size is None:
        return None
    where = f"{storage.url}: {METADATA_KEY}"
    try:
        saved = read_pickle(read_range(storage, METADATA_KEY, 0, size), {}, name=where)
    except UnsupportedError:
        return None  # a pickle of objects, which another library wrote
    if not isinstance(saved, dict) or not {"metadata", "world_size", "version"} <= saved.keys():
        return None
    if saved["version"] != _VERSION:
        raise UnsupportedError(f"{where} has version {saved['version']!r}, and {_VERSION!r} is known; use torch_checkpointing")
    folder = RankFolder(storage, NAME)
    present = {path for path, _ in storage.list()}
    for item, paths in _items(saved, present, folder, where):
        absent = [path for path in paths if path not in present]
        if absent:
            raise CorruptError(f"{storage.url}: {absent[0]} is missing, a file of {item}; copy it along")
        _add(folder, item, paths)
    return Source(folder.storage, folder.builder.finish(), NAME)


def _items(saved: dict[str, Any], present: set[str], folder: RankFolder, where: str) -> list[tuple[str, list[str]]]:
    """Return each saved item, such as the model, with its files in order of rank. The model is first: it names the parameters.

    `saved` is the content of ``metadata.pkl``, `present` the keys of all files. Raise `CorruptError` if the metadata do not have
    the form that the package writes.
    """
    found: dict[str, list[str]] = {}
    try:
        num_ranks = _number(saved["world_size"])
        for item, entry in saved["metadata"].items():
            groups = (group for of_path in entry["nested_path_to_metadata"].values() for group in of_path)
            ranks = sorted({_number(rank) for group in groups for rank in group["ranks"]})
            layouts = [entry["rank_to_layout_info"].get(rank) for rank in ranks]
            kinds = {layout["serialization_format"]["type"] for layout in layouts if layout is not None}
            found[item] = [
                layout["file_path"] if layout is not None else f"{item}_{rank}.pt"
                for layout, rank in zip(layouts, ranks, strict=True)
            ]
            if kinds - {"TorchSerialization"}:
                folder.builder.unreadable(
                    item,
                    UnsupportedError(f"{where}: {item} was saved by {sorted(kinds)}, which is not read; use torch_checkpointing"),
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{where} has another form than torch_checkpointing writes ({error!r}); use another copy") from None
    claimed = {path for paths in found.values() for path in paths}
    found = {item: paths for item, paths in found.items() if not folder.builder.is_unreadable(item)}
    for path in sorted(present - claimed):
        if (match := _FILE.fullmatch(path)) and match[1] not in found and not folder.builder.is_unreadable(match[1]):
            # One more than there are files: enough to name one that is missing, whatever number the metadata say.
            of_ranks = [f"{match[1]}_{rank}.pt" for rank in range(min(num_ranks, len(present) + 1))]
            # Rank 0 alone saves some items.
            found[match[1]] = of_ranks[:1] if present.isdisjoint(of_ranks[1:]) else of_ranks
    return sorted(found.items(), key=lambda item: (item[0] != MODEL, item[0]))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_RANKS:
        raise ValueError(f"a number of ranks of {value!r}")
    return value


def _add(folder: RankFolder, item: str, paths: list[str]) -> None:
    files = [folder.open(path) for path in paths]
    if all(isinstance(file.content, dict) and form_of(file.content) is not None for file in files):
        folder.add_optimizer(item, files, plain_on_all=True)
    elif has_parts(files) or (
        any(isinstance(leaf, PickledTensor) for file in files for leaf in leaves(file.content))
        and (item == MODEL or are_alike(files))
    ):
        folder.add_tensors(item, files)
    else:
        folder.add_values(item, paths)


FORMAT = Format(
    NAME, f"a folder of torch_checkpointing with {METADATA_KEY}, such as model_0.pt", open_torch_checkpointing, order=60
)
