"""Writing a checkpoint of any size as one file of ``torch.save``: torch pickles the structure, and the bytes follow as a stream.

1. Build the state of placeholder tensors: views of one sparse file, that take neither memory nor disk.
2. Pickle it with ``torch.save`` under ``skip_data``, which leaves the bytes out.
3. Write a zip of stored records: the pickle, then the bytes of each storage, aligned as torch aligns them.

An optimizer gets the form of ``optimizer.state_dict()``: parameters by number, and their names in ``param_names``.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ..core.catalog.links import GROUPS, STATE, groups_name, optimizer_of
from ..core.catalog.model import Catalog, ValueEntry
from ..core.catalog.specs import StateLink, ValueKind, row_major_strides
from ..errors import NameCollisionError, StorageError, UnsupportedError
from ..format.torch_dtypes import TORCH_DTYPES
from ..format.values import check_keys, decode_path
from ..state.paths import Index, saved_path
from ..torchfile.zip_records import ALIGNMENT, NewRecord, ZipRecords, write_records
from .tensor_stream import ByteStream, TensorBytes, aliases_of, in_natural_order


def write_torch(path: str, catalog: Catalog, values: Mapping[str, Any], bytes_of: TensorBytes) -> None:
    """Write one file that ``torch.load(path, weights_only=True, mmap=True)`` reads, and make it durable.

    Parameters
    ----------
    path
        Of the file, which must not be there.
    values
        All values of the catalog, by name.

    Raises
    ------
    UnsupportedError
        torch would refuse to load a value without running code.
    StorageError
        There is no room for the file.
    """
    _check_values(values)
    with tempfile.TemporaryDirectory(prefix=".description-", dir=os.path.dirname(path)) as folder:
        try:
            placeholders = _make_placeholders(catalog, os.path.join(folder, "nothing"))
            state = _state(catalog, values, placeholders)
            pickled, version, sizes = _pickle_state(state, os.path.join(folder, "state.pt"))
        except RuntimeError as error:  # what torch makes of a full disk
            raise StorageError(f"{path}: cannot write: {error}; free space there, or write to another path") from error
    index_of = {id(tensor): catalog.source(catalog.index(name)) for name, tensor in placeholders.items()}
    tensors = list(_tensors_in_order(state))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    wanted = [index_of[id(tensor)] for tensor in tensors if id(tensor) in index_of and tensor.numel()]
    parts = ByteStream(bytes_of(wanted))
    stored = zip(tensors, sizes, strict=True)
    with open(path, "xb") as file:
        records: list[NewRecord] = [
            ("data.pkl", len(pickled), [pickled]),
            ("byteorder", len(sys.byteorder), [sys.byteorder.encode()]),
            *(
                (f"data/{number}", size, parts.take(size) if id(tensor) in index_of else [_storage_bytes(tensor)])
                for number, (tensor, size) in enumerate(stored)
            ),
            ("version", len(version), [version]),
        ]
        write_records(file.write, records)
        file.flush()
        os.fsync(file.fileno())


def _make_placeholders(catalog: Catalog, path: str) -> dict[str, torch.Tensor]:
    """Make tensors of the right shapes over a sparse file; an alias is the tensor whose bytes it shares."""
    aliases = aliases_of(catalog)
    dtypes = [TORCH_DTYPES[catalog.dtype(index)] for index in range(len(catalog.tensors_table.names))]
    own = [index for index in in_natural_order(catalog) if catalog.tensors_table.names[index] not in aliases]
    sizes = [prod(catalog.shape(index)) * dtypes[index].itemsize for index in own]
    begin = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    backing = torch.UntypedStorage.from_file(path, True, max(begin[-1], 1))  # shared: a private map would count as memory
    placeholders: dict[str, torch.Tensor] = {}
    for index, at, size in zip(own, begin, sizes, strict=False):
        shape = catalog.shape(index)
        # torch.save refuses storages of different types at one place, which an empty part of the file would be.
        storage = backing[at : at + size] if size else torch.empty(0, device="cpu").untyped_storage()
        tensor = torch.empty(0, dtype=dtypes[index], device="cpu").set_(storage, 0, shape, row_major_strides(shape))
        placeholders[catalog.tensors_table.names[index]] = tensor
    return placeholders | {name: placeholders[source] for name, source in aliases.items()}


def _pickle_state(state: Any, path: str) -> tuple[bytes, bytes, list[int]]:
    """Return what ``torch.save`` writes without data: the pickle, the format's version, the sizes of all storages in order."""
    with torch.serialization.skip_data():
        torch.save(state, path)
    with open(path, "rb") as file:
        zipped = ZipRecords(file, path)
        sizes = [zipped.size(f"data/{number}") for number in range(len(zipped.storages()))]
        return zipped.read("data.pkl"), zipped.read("version"), sizes


def _tensors_in_order(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors whose storages are records 0, 1, …: those of the state, in the order in which a pickle meets them."""
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
    """Return the storage of a tensor that is part of a value."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,)).numpy().data


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer of the state: the number of each parameter, and which parameters are second names of another."""

    name: str
    numbers: Mapping[str, int]
    tied: frozenset[str]

    @property
    def above(self) -> tuple[str, ...]:
        """Return where the optimizer goes."""
        return tuple(self.name.split(".")) if self.name else ()

    def path(self, link: StateLink) -> tuple[Any, ...] | None:
        """Return where a part of its state goes; None if it is there under another name."""
        fqn = link.fqn
        return None if fqn in self.tied else (*self.above, STATE, self.numbers.get(fqn, fqn), *link.key.split("."))

    def numbered(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return its groups as ``optimizer.state_dict()`` has them."""
        names = [[fqn for fqn in group["params"] if fqn not in self.tied] for group in groups]
        return [
            {**group, "params": [self.numbers[fqn] for fqn in own], "param_names": own}
            for group, own in zip(groups, names, strict=True)
        ]


def _optimizers(catalog: Catalog, values: Mapping[str, Any]) -> list[_Optimizer]:
    """List the optimizers of a state; a parameter with two names is one for torch."""
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
    """Build the state as nested dicts: the keys of the state, and below them names as modules have them."""
    optimizers = {one.name: one for one in _optimizers(catalog, values)}
    links = {name: link for name, link in catalog.links().items() if link.optimizer in optimizers}
    root: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        path = _path(name) if (link := links.get(name)) is None else optimizers[link.optimizer].path(link)
        if path is not None:
            _put(root, path, tensor)
    check_keys(decode_path(entry.path) for entry in catalog.values_table)
    for entry in catalog.values_table:
        path = _value_path(entry) if (link := links.get(entry.name)) is None else optimizers[link.optimizer].path(link)
        if path is not None and entry.kind is not ValueKind.PARAM_GROUPS:
            _put(root, path, values[entry.name])
    having = {link.optimizer for link in links.values()}
    for one in optimizers.values():
        _put(root, (*one.above, GROUPS), one.numbered(values[groups_name(one.name)]))
        if one.name not in having:
            _put(root, (*one.above, STATE), {})
    return root


def _put(root: dict[Any, Any], path: Iterable[Any], value: Any) -> None:
    """Set the value at a path of nested dicts."""
    *above, last = path
    node = root
    for key in above:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise NameCollisionError(f"{'.'.join(map(str, above))}: is a value, and has others below it; rename one of them")
    if last in node:
        raise NameCollisionError(f"{'.'.join(map(str, (*above, last)))}: two things have this name; rename one of them")
    node[last] = value


def _path(name: str) -> tuple[str, ...]:
    """Return where a tensor goes: below the first part of its name."""
    top, dot, rest = name.partition(".")
    return (top, rest) if dot else (name,)


def _value_path(entry: ValueEntry) -> tuple[Any, ...]:
    """Return where a value goes: where it was, unless that was in a list, whose other elements may be anything."""
    path = saved_path(decode_path(entry.path))
    return _path(entry.name) if any(isinstance(key, Index) for key in path) else path


def _check_values(values: Mapping[str, Any]) -> None:
    """Refuse by name what torch would not load again: one such value would make the whole file unloadable."""
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
    except Exception:  # whatever torch raises: it would raise it for the whole file, too
        return False
    return True
