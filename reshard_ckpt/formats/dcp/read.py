"""Reading a folder of ``torch.distributed.checkpoint`` as a checkpoint of this library: a catalog over its files.

1. Decode the names of tensors, chunks and values from ``.metadata``, or from the files that ranks wrote instead (`folder`,
   `metadata`).
2. Find the bytes of the chunks from their heads (`chunks`), and read the values (`values`).
3. Convert the names to those of this library, and make one value of the groups of each optimizer (`names`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...core.catalog.model import Catalog
from ...core.catalog.names import GROUPS
from ...core.catalog.specs import StateLink, ValueKind
from ...core.trees import flatten, name_of, unflatten
from ...errors import CorruptError
from ...format.values import decode_value
from ...state.optimizer_dicts import OptimizerGroups, groups_from_list
from ...storage.protocol import Storage, read_range
from ..catalog_builder import CatalogBuilder
from ..source import Format, RawValue, Source
from .chunks import NAME, FileSizes
from .chunks import locate as locate_chunks
from .folder import Merger, is_folder, read_folder
from .metadata import Metadata, SavedTensor
from .names import GroupEntry, KeyPath, group_entry, groups_from_entries, names_of, renumbered, value_paths
from .values import read_values

MAX_GROUP_ELEMENTS = 1 << 16
"""The most elements of a tensor that is a hyperparameter."""


def open_dcp(
    storage: Storage, key: str | None = None, *, as_saved: bool = False, otherwise: Callable[[bytes, str], Any] | None = None
) -> Source | None:
    """Open a folder of DCP; return None for anything else; see `Format.open`, and `read_values` for `otherwise`."""
    if key is not None or not is_folder(storage):
        return None
    saved = read_folder(storage)
    builder = CatalogBuilder(NAME, storage.url)
    paths = saved.paths if as_saved else names_of(saved)
    _Folder(builder, storage, saved, paths, otherwise).add(by_number=not as_saved)
    catalog = builder.finish()
    return Source(storage, catalog, NAME, advice_on_numbers(catalog), dict(_raw_values(storage, saved)))


def advice_on_numbers(catalog: Catalog) -> dict[str, str]:
    """Map the name of each optimizer that knows parameters only by number to advice for users, for errors of a load."""
    numbered = []
    for value in catalog.values_table:
        if value.kind is ValueKind.PARAM_GROUPS and value.data is not None:
            params = [param for group in decode_value(value.data) for param in group["params"]]
            if any(param.isdigit() for param in params):
                numbered.append(value.name.rpartition(".")[0])
    return {
        name: f"{name} was saved by optimizer.state_dict(), which knows parameters by number alone; say their names, as in "
        f"rename={{f'{name}.state.{{i}}': f'{name}.state.{{n}}' for i, (n, _) in enumerate(model.named_parameters())}}, if the "
        "optimizer was made of model.parameters()"
        for name in numbered
    }


def _raw_values(storage: Storage, saved: Metadata) -> Iterator[tuple[str, RawValue]]:
    """Yield name and `RawValue` of each value whose bytes can be read, even if only unpickling could make an object of it."""
    sizes = FileSizes(storage)
    for name, extent in saved.values.items():
        if name not in saved.unreadable and sizes.problem(name, extent) is None:
            yield name, RawValue(saved.paths[name], extent.file, extent.offset, extent.length)


def add_parts(builder: CatalogBuilder, storage: Storage, parts: Sequence[Metadata], *, parameters: Sequence[str] = ()) -> None:
    """Add the content of folders that another library wrote to a catalog.

    The paths in their metadata are those of this library already. A name with different content in two folders becomes
    unreadable.

    Parameters
    ----------
    parameters
        The names of all parameters of the optimizer, in any order. If its state has one group, which lists as many parameters by
        number, these names take the place of the numbers.
    """
    saved = Merger(storage).merge(parts)
    _Folder(builder, storage, saved, saved.paths, parameters=parameters).add(by_number=True)


def add_tensors(
    builder: CatalogBuilder,
    storage: Storage,
    tensors: Mapping[str, SavedTensor],
    *,
    name_of: Callable[[str], str],
    link_of: Callable[[str], StateLink | None],
) -> None:
    """Locate the chunks of tensors, and add the tensors to a catalog. `name_of` and `link_of` take the names in `tensors`."""
    located = locate_chunks(builder, storage, tensors)
    for fqn, saved in tensors.items():
        name = name_of(fqn)
        with builder.reading(name):
            if fqn in located.unreadable:
                raise located.unreadable[fqn]
            builder.tensor(name, saved.dtype, saved.shape, located.parts[fqn], link=link_of(fqn))


class _Folder:
    """Adds the content of one DCP folder to a catalog. `paths` has this library's path for each DCP name."""

    def __init__(
        self,
        builder: CatalogBuilder,
        storage: Storage,
        saved: Metadata,
        paths: Mapping[str, KeyPath],
        otherwise: Callable[[bytes, str], Any] | None = None,
        parameters: Sequence[str] = (),
    ) -> None:
        self._builder, self._storage, self._saved = builder, storage, saved
        self._parameters = parameters
        self._located = locate_chunks(builder, storage, saved.tensors)
        read = read_values(storage, saved.values, otherwise)
        self._errors = {**self._located.unreadable, **read.unreadable, **saved.unreadable}
        self._values = {name: value for name, value in read.values.items() if name not in self._errors}
        # Entries of optimizer groups are listed apart, by the path of their optimizer.
        self._paths: dict[str, KeyPath] = {}
        self._groups: dict[KeyPath, dict[str, GroupEntry]] = {}
        for fqn, path in paths.items():
            if (found := group_entry(path)) is None:
                self._paths[fqn] = path
            else:
                optimizer, entry = found
                self._groups.setdefault(optimizer, {})[fqn] = entry

    def add(self, *, by_number: bool) -> None:
        """Add all tensors and values to the catalog. Without `by_number`, groups without parameter names stay plain values."""
        # Groups first: they give names to numbered parameters, which changes `_paths` for everything below.
        for optimizer, entries in self._groups.items():
            self._add_groups(optimizer, entries, by_number)
        for fqn in [fqn for fqn in self._values if fqn in self._paths]:
            self._take_whole_groups(fqn, by_number)
        for fqn, path in self._paths.items():
            self._add_tensor(fqn, name_of(path))
        self._add_values()

    def _add_tensor(self, fqn: str, name: str) -> None:
        saved = self._saved.tensors.get(fqn)
        with self._builder.reading(name):  # an error of its own, or the catalog has no such dtype
            if saved is not None and fqn in self._errors:
                raise self._errors[fqn]
            if saved is not None:
                self._builder.tensor(name, saved.dtype, saved.shape, self._located.parts[fqn])

    def _add_values(self) -> None:
        paths = {fqn: path for fqn, path in self._paths.items() if fqn not in self._saved.tensors}
        tensors = (path for fqn, path in self._paths.items() if fqn in self._saved.tensors)
        whole = value_paths(paths.values(), tensors)
        lists: dict[KeyPath, list[tuple[KeyPath, Any]]] = {}
        for fqn, path in paths.items():
            at = whole[path]
            if fqn in self._errors:
                self._builder.unreadable(name_of(at), self._errors[fqn])
            elif at == path:
                self._add_value(path, ValueKind.PLAIN, self._values[fqn])
            else:
                lists.setdefault(at, []).append((path[len(at) :], self._values[fqn]))
        for at, elements in lists.items():
            if not self._builder.is_unreadable(name_of(at)):
                self._add_value(at, ValueKind.PLAIN, unflatten(elements))

    def _add_value(self, path: KeyPath, kind: ValueKind, value: Any) -> None:
        # The encoding of paths has a tuple of one index for a step into a list.
        keys = [(key,) if isinstance(key, int) else key for key in path]
        # A dict, which torch before 2.4 saved as one value, becomes a value for each key.
        for where, leaf in flatten(value, _in_plain_dict if kind is ValueKind.PLAIN else lambda node: None, tuple(keys)):
            self._builder.value(where, leaf, kind)

    def _add_groups(self, optimizer: KeyPath, entries: Mapping[str, GroupEntry], by_number: bool) -> None:
        path = (*optimizer, GROUPS)
        unreadable = [self._errors[fqn] for fqn in entries if fqn in self._errors]
        if unreadable:
            self._builder.unreadable(name_of(path), unreadable[0])
            return
        values = {fqn: self._values[fqn] if fqn in self._values else self._small_tensor(fqn) for fqn in entries}
        found = groups_from_entries(entries, values)
        if found is None or (found.by_number and not by_number):  # not groups, or not wanted: keep the entries as plain values
            self._paths.update({fqn: self._saved.paths[fqn] for fqn in entries})
            return
        self._take_groups(optimizer, found)

    def _take_whole_groups(self, fqn: str, by_number: bool) -> None:
        """If a value is the whole list of an optimizer's groups, take it as groups; `by_number` is as for `add`.

        Before 2.4, torch saved groups without tensors as one such value.
        """
        path, value = self._paths[fqn], self._values[fqn]
        if len(path) < 2 or path[-1] != GROUPS or not isinstance(value, list):
            return
        if all(isinstance(group, dict) for group in value):
            found = groups_from_list(value)
            if found is not None and value and (by_number or not found.by_number):
                del self._paths[fqn]
                self._take_groups(path[:-1], found)

    def _take_groups(self, optimizer: KeyPath, found: OptimizerGroups) -> None:
        groups = found.groups
        if found.by_number and len(groups) == 1 and len(groups[0]["params"]) == len(self._parameters):
            # With one group, all parameters are members of it, so their numbers need not be known.
            groups = [{**groups[0], "params": list(self._parameters)}]
        self._add_value((*optimizer, GROUPS), ValueKind.PARAM_GROUPS, groups)
        if found.named:
            self._paths = {fqn: renumbered(p, optimizer, found.named) for fqn, p in self._paths.items()}

    def _small_tensor(self, fqn: str) -> torch.Tensor:
        """Read a whole tensor that is a hyperparameter, such as a learning rate."""
        saved = self._saved.tensors[fqn]
        if prod(saved.shape) > MAX_GROUP_ELEMENTS:
            raise CorruptError(
                f"{self._storage.url}: {fqn} has shape {saved.shape}, which no hyperparameter has; use another checkpoint"
            )
        out = torch.zeros(saved.shape, dtype=saved.dtype, device="cpu")
        for part in self._located.parts[fqn]:
            file, num_bytes = self._builder.files[part.file].key, prod(part.lengths) * saved.dtype.itemsize
            data = read_range(self._storage, file, part.offset, num_bytes)
            slices = (slice(low, low + length) for low, length in zip(part.offsets, part.lengths, strict=True))
            out[tuple(slices)].copy_(torch.frombuffer(data, dtype=saved.dtype).reshape(part.lengths))
        return out


def _in_plain_dict(node: Any) -> Iterable[tuple[Any, Any]] | None:
    return node.items() if type(node) is dict and node else None


FORMAT = Format(
    NAME,
    "a folder of torch.distributed.checkpoint, which has a .metadata file, or __0.metadata",
    open_dcp,
    order=40,
    takes=("as_saved",),
)
