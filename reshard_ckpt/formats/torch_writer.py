"""Writing a checkpoint of any size as one file of ``torch.save``, whose tensors are streamed.

1. Build the state as nested dicts, with the dtype and shape of each tensor in its place (`StreamedTensor`), and pickle it.
2. Write a zip of uncompressed records: the pickle, then the bytes of each storage, aligned as torch aligns them. Several
   processes divide the storages (`shared_files`).

An optimizer gets the form of ``optimizer.state_dict()``: parameters by number, and their names in ``param_names``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import torch

from ..comm.protocol import Comm
from ..core.catalog.model import Catalog
from ..core.catalog.names import GROUPS, STATE, groups_name
from ..core.trees import put
from ..engine.loading.stream import whole_run
from ..errors import UnsupportedError
from ..format.dtypes import TORCH_DTYPES
from ..format.values import check_keys, decode_path
from ..state.describe import Index, paths_of_values, saved_path
from ..storage import LocalStorage
from ..torchfile.object_writer import StreamedTensor, described_object, directory_of, laid_out, object_bytes
from ..torchfile.zip_records import whole_record
from .numbered import numbered_optimizers
from .shared_files import NewFile, NewPart, in_natural_order, write_files
from .source import BytesOf


def write_torch(
    path: str, catalog: Catalog, values: Mapping[str, Any], bytes_of: BytesOf, *, is_part: bool = False, comm: Comm
) -> None:
    """Write one file that ``torch.load(path, weights_only=True, mmap=True)`` reads, and make it durable.

    Raise `UnsupportedError` if torch would refuse to load a value without running code, and `StorageError` if the disk is full.

    Parameters
    ----------
    path
        The path of the file, which must not exist.
    values
        All values of the catalog, by name.
    is_part
        Whether the catalog is the part of a state below one of its keys. The name of a tensor is then one key of the file, as
        that of a parameter is in a module's state dict.
    comm
        The ranks that share the work, by tensors.
    """
    _check_values(catalog, values)
    folder, name = os.path.split(path)
    tensors = {
        catalog.tensors_table.names[index]: StreamedTensor(
            catalog.source(index), TORCH_DTYPES[catalog.dtype(index)], catalog.shape(index)
        )
        for index in in_natural_order(catalog)
    }
    records = laid_out(*described_object(_state(catalog, values, tensors, _as_one_key if is_part else _path), path))
    # The data of each record are literal bytes, or those of a tensor of the catalog.
    parts = tuple(
        NewPart(None, 0, whole_record(record, data))
        if isinstance(data, bytes)
        else NewPart(whole_run(catalog, data.index), record.size, record.head, record.tail)
        for record, data in records
    )

    def end(crcs: Sequence[int]) -> bytes:
        return directory_of(records, (crc for part, crc in zip(parts, crcs, strict=True) if part.run is not None))

    with LocalStorage(folder) as storage:
        write_files(comm, storage, [NewFile(name, parts, end)], bytes_of)


def _state(
    catalog: Catalog, values: Mapping[str, Any], tensors: Mapping[str, StreamedTensor], path_of: Callable[[str], tuple[str, ...]]
) -> dict[Any, Any]:
    """Build the state as nested dicts: the keys of the state at the top, and below them the dotted names of modules.

    `path_of` returns the keys for the name of a tensor, or of a value that was in a list.
    """
    optimizers = numbered_optimizers(catalog, values)
    links = {name: link for name, link in catalog.links().items() if link.optimizer in optimizers}
    root: dict[Any, Any] = {}
    leaves = {path for path in paths_of_values(catalog).values() if len(path) == 1}
    for name, tensor in tensors.items():
        # State of an optimizer goes to torch's numbered form.
        path = path_of(name) if (link := links.get(name)) is None else optimizers[link.optimizer].path(link)
        if path is not None:
            put(root, _as_one_key(name) if path[:1] in leaves else path, tensor)
    check_keys(decode_path(entry.path) for entry in catalog.values_table)
    groups = {groups_name(name) for name in optimizers}
    for entry in catalog.values_table:
        if (link := links.get(entry.name)) is not None:
            path = optimizers[link.optimizer].path(link)
        else:
            # A value has its own path, unless it was in a list: the list's other elements may be unknown, so use its name.
            own = saved_path(decode_path(entry.path))
            path = path_of(entry.name) if any(isinstance(key, Index) for key in own) else own
        if path is not None and entry.name not in groups:
            put(root, path, values[entry.name])
    # Groups last. An optimizer without state still needs an empty dict for it, else torch would not load it.
    for member in optimizers.values():
        own = values[groups_name(member.name)]
        put(root, (*member.above, GROUPS), own if member.was_numbered else member.numbered(own))
        reduce(getitem, member.above, root).setdefault(STATE, {})
    return root


def _path(name: str) -> tuple[str, ...]:
    """Split a name at its first dot: the key of the state, and the name below it. A name without a dot is one key."""
    top, dot, rest = name.partition(".")
    return (top, rest) if dot else (name,)


def _as_one_key(name: str) -> tuple[str, ...]:
    return (name,)


def _check_values(catalog: Catalog, values: Mapping[str, Any]) -> None:
    """Refuse values and keys that torch would not load again, by name: one of them would make the whole file unloadable."""
    written = {entry.name: (decode_path(entry.path), values[entry.name]) for entry in catalog.values_table}
    if _is_loadable(written):
        return
    refused = next((name for name, value in written.items() if not _is_loadable(value)), "a value")
    kind = type(values.get(refused)).__name__
    raise UnsupportedError(
        f"{refused}: torch.load refuses what is in this {kind} or in a key that leads to it, unless it may run code; leave it "
        "out (exclude=)"
    )


def _is_loadable(value: Any) -> bool:
    try:
        torch.load(io.BytesIO(object_bytes(value, "")), weights_only=True)
    except MemoryError:
        raise
    except Exception:  # any error of torch here would also occur with the whole file
        return False
    return True
