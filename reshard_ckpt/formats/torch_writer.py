"""Writing a checkpoint of any size as one file of ``torch.save``: torch pickles the structure, and the bytes are streamed.

1. Build the state from placeholder tensors: views of one sparse file, which take neither memory nor disk.
2. Pickle it with ``torch.save`` under ``skip_data``, which leaves the bytes out.
3. Write a zip of uncompressed records: the pickle, then the bytes of each storage, aligned as torch aligns them. Several
   processes divide the storages (`shared_files`).

An optimizer gets the form of ``optimizer.state_dict()``: parameters by number, and their names in ``param_names``.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ..comm.protocol import Comm, SoloComm
from ..core.catalog.model import Catalog, ValueEntry
from ..core.catalog.names import GROUPS, STATE, groups_name, optimizer_of
from ..core.catalog.specs import StateLink, ValueKind, row_major_strides
from ..core.trees import put
from ..engine.loading.stream import Run, whole_run
from ..errors import StorageError, UnsupportedError
from ..format.dtypes import TORCH_DTYPES
from ..format.values import check_keys, decode_path
from ..state.describe import Index, saved_path
from ..storage import LocalStorage
from ..torchfile.zip_records import ALIGNMENT, ZipRecord, ZipRecords, directory, lay_out_records, whole_record
from .shared_files import NewFile, NewPart, write_files
from .source import BytesOf
from .tensor_stream import aliases_of, in_natural_order


def write_torch(path: str, catalog: Catalog, values: Mapping[str, Any], bytes_of: BytesOf, *, comm: Comm | None = None) -> None:
    """Write one file that ``torch.load(path, weights_only=True, mmap=True)`` reads, and make it durable.

    Parameters
    ----------
    path
        The path of the file, which must not exist.
    values
        All values of the catalog, by name.
    comm
        The ranks that share the work, by tensors; by default this process alone.

    Raises
    ------
    UnsupportedError
        torch would refuse to load a value without running code.
    StorageError
        The disk is full.
    """
    _check_values(values)
    above, name = os.path.split(path)
    with tempfile.TemporaryDirectory(prefix=".description-", dir=above) as folder:
        try:
            placeholders = _make_placeholders(catalog, os.path.join(folder, "nothing"))
            state = _state(catalog, values, placeholders)
            pickled, version, sizes = _pickle_state(state, os.path.join(folder, "state.pt"))
        except RuntimeError as error:  # torch raises this if the disk is full
            raise StorageError(f"{path}: cannot write: {error}; free space there, or write to another path") from error
    # index_of: by id of a placeholder, the catalog index of its bytes. tensors[n]: the tensor whose storage is record n.
    index_of = {id(tensor): catalog.source(catalog.index(name)) for name, tensor in placeholders.items()}
    tensors = list(_tensors_in_order(state))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    runs = [
        whole_run(catalog, index) if (index := index_of.get(id(tensor))) is not None and tensor.numel() else None
        for tensor in tensors
    ]
    held: dict[str, bytes | memoryview] = {
        f"data/{n}": _storage_bytes(tensor) for n, tensor in enumerate(tensors) if runs[n] is None
    }
    literal: dict[str, bytes | memoryview] = {
        "data.pkl": pickled,
        "byteorder": sys.byteorder.encode(),
        **held,
        "version": version,
    }
    data_sizes = [(f"data/{n}", size) for n, size in enumerate(sizes)]
    first = [(name, len(literal[name])) for name in ("data.pkl", "byteorder")]
    records = lay_out_records([*first, *data_sizes, ("version", len(version))])
    with LocalStorage(above) as storage:
        file = _zip_file(name, records, literal, {f"data/{n}": run for n, run in enumerate(runs) if run is not None})
        write_files(comm or SoloComm(), storage, [file], bytes_of)


def _zip_file(
    key: str, records: Sequence[ZipRecord], literal: Mapping[str, bytes | memoryview], runs: Mapping[str, Run]
) -> NewFile:
    """Lay out a file of these records; the data of each are literal bytes, or a run of a tensor."""
    parts: list[NewPart] = []
    before: list[bytes] = []  # literal bytes behind the last part
    for record in records:
        if record.name in runs:
            before.append(record.head)
            parts.append(NewPart(runs[record.name], record.size, b"".join(before), record.tail))
            before = []
        else:
            before.append(whole_record(record, literal[record.name]))
    rest = b"".join(before)
    known = {name: zlib.crc32(data) for name, data in literal.items()}

    def end(crcs: Sequence[int]) -> bytes:
        found = iter(crcs)
        return rest + directory(records, [next(found) if one.name in runs else known[one.name] for one in records])

    return NewFile(key, b"", tuple(parts), end)


def _make_placeholders(catalog: Catalog, path: str) -> dict[str, torch.Tensor]:
    """Make tensors of the right shapes over a sparse file; an alias is the same tensor as the one whose bytes it shares."""
    aliases = aliases_of(catalog)
    dtypes = [TORCH_DTYPES[catalog.dtype(index)] for index in range(len(catalog.tensors_table.names))]
    own = [index for index in in_natural_order(catalog) if catalog.tensors_table.names[index] not in aliases]
    sizes = [prod(catalog.shape(index)) * dtypes[index].itemsize for index in own]
    begin = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    backing = torch.UntypedStorage.from_file(path, True, max(begin[-1], 1))  # shared: the system counts private maps as memory
    placeholders: dict[str, torch.Tensor] = {}
    for index, at, size in zip(own, begin, sizes, strict=False):
        shape = catalog.shape(index)
        # An empty part of the file would lie at the place of the next one, and torch.save refuses two dtypes at one place.
        storage = backing[at : at + size] if size else torch.empty(0, device="cpu").untyped_storage()
        tensor = torch.empty(0, dtype=dtypes[index], device="cpu").set_(storage, 0, shape, row_major_strides(shape))
        placeholders[catalog.tensors_table.names[index]] = tensor
    return placeholders | {name: placeholders[source] for name, source in aliases.items()}


def _pickle_state(state: Any, path: str) -> tuple[bytes, bytes, list[int]]:
    """Pickle a state without its data; return the pickle, the format's version, and the sizes of all storages in order."""
    with torch.serialization.skip_data():
        torch.save(state, path)
    with open(path, "rb") as file:
        zipped = ZipRecords(file, path)
        sizes = [zipped.size(f"data/{number}") for number in range(len(zipped.storages()))]
        return zipped.read("data.pkl"), zipped.read("version"), sizes


def _tensors_in_order(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state in the order in which torch pickles them; their storages are the records 0, 1, ….

    A tensor that occurs again is not yielded again.
    """
    seen: set[int] = set()
    waiting = [state]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            if id(thing) not in seen:
                seen.add(id(thing))
                yield thing
        elif isinstance(thing, Mapping):
            waiting += reversed(list(thing.values()))
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            waiting += reversed(list(thing))


def _storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a real tensor's storage: a tensor that is part of a value."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,)).numpy().data


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer of the state: the number of each parameter, and the names that are second names of tied parameters."""

    name: str
    numbers: Mapping[str, int]
    tied: frozenset[str]

    @property
    def above(self) -> tuple[str, ...]:
        """Return the path of the optimizer in the state."""
        return tuple(self.name.split(".")) if self.name else ()

    def path(self, link: StateLink) -> tuple[Any, ...] | None:
        """Return the path of an entry of its state; None if that belongs to a second name."""
        fqn = link.fqn
        return None if fqn in self.tied else (*self.above, STATE, self.numbers.get(fqn, fqn), *link.key.split("."))

    def numbered(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return its groups in the form of ``optimizer.state_dict()``."""
        names = [[fqn for fqn in group["params"] if fqn not in self.tied] for group in groups]
        return [
            {**group, "params": [self.numbers[fqn] for fqn in own], "param_names": own}
            for group, own in zip(groups, names, strict=True)
        ]


def _optimizers(catalog: Catalog, values: Mapping[str, Any]) -> list[_Optimizer]:
    """List the optimizers of a state. A parameter with two names counts once, as in torch."""
    # below: for tied weights of one key of the state, the first name of each second name, without that key
    below = {
        name.partition(".")[2]: source.partition(".")[2]
        for name, source in aliases_of(catalog).items()
        if name.partition(".")[0] == source.partition(".")[0]
    }
    found = []
    for entry in catalog.values_table:
        if entry.kind is ValueKind.PARAM_GROUPS:
            fqns = [fqn for group in values[entry.name] for fqn in group["params"]]
            tied = frozenset(fqn for fqn in fqns if below.get(fqn) in fqns)
            numbers = {fqn: number for number, fqn in enumerate(fqn for fqn in fqns if fqn not in tied)}
            found.append(_Optimizer(optimizer_of(entry.name) or "", numbers, tied))
    return found


def _state(catalog: Catalog, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """Build the state as nested dicts: the keys of the state at the top, and below them the dotted names of modules."""
    optimizers = {one.name: one for one in _optimizers(catalog, values)}
    links = {name: link for name, link in catalog.links().items() if link.optimizer in optimizers}
    root: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        # State of an optimizer goes to torch's numbered form, any other tensor below the first part of its name.
        path = _path(name) if (link := links.get(name)) is None else optimizers[link.optimizer].path(link)
        if path is not None:
            put(root, path, tensor)
    check_keys(decode_path(entry.path) for entry in catalog.values_table)
    for entry in catalog.values_table:
        path = _value_path(entry) if (link := links.get(entry.name)) is None else optimizers[link.optimizer].path(link)
        if path is not None and entry.kind is not ValueKind.PARAM_GROUPS:
            put(root, path, values[entry.name])
    # Groups last. An optimizer without state still needs an empty dict for it, else torch would not load it.
    having = {link.optimizer for link in links.values()}
    for one in optimizers.values():
        put(root, (*one.above, GROUPS), one.numbered(values[groups_name(one.name)]))
        if one.name not in having:
            put(root, (*one.above, STATE), {})
    return root


def _path(name: str) -> tuple[str, ...]:
    """Return the path of a tensor: the first part of its name, then the rest as one key."""
    top, dot, rest = name.partition(".")
    return (top, rest) if dot else (name,)


def _value_path(entry: ValueEntry) -> tuple[Any, ...]:
    """Return the path of a value: its own, unless it was in a list. The list's other elements may be unknown, so use its name."""
    path = saved_path(decode_path(entry.path))
    return _path(entry.name) if any(isinstance(key, Index) for key in path) else path


def _check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that torch would not load again, by name: one of them would make the whole file unloadable."""
    if _is_loadable(values):
        return
    refused = next((name for name, value in values.items() if not _is_loadable(value)), "a value")
    kind = type(values.get(refused)).__name__
    raise UnsupportedError(
        f"{refused}: torch.load refuses what is in this {kind}, unless it may run code; leave it out (exclude=)"
    )


def _is_loadable(value: Any) -> bool:
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception:  # any error of torch here would also occur with the whole file
        return False
    return True
