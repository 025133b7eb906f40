"""Reading a folder of ``torch.save`` in which each rank has files of its own, as verl writes them, as one checkpoint.

1. ``model_world_size_4_rank_0.pt`` and its siblings hold the model's state dict, ``optim_…`` the optimizer's. Their DTensors say
   which part of a global tensor they are: the shape, the sizes of the mesh, the rank's coordinate and the placements are in the
   pickle, which is read without running any code in it.
2. A plain tensor beside DTensors is the same on all ranks, as buffers are, and is read from the lowest rank. In a model without
   DTensors, plain tensors may be parts of tensors just as well, so one that differs between ranks is unreadable.
3. An optimizer that numbers its parameters was made of ``model.parameters()``. So number `i` is the DTensor `i` of the model's
   file, if there are as many and their shapes agree.
4. Any other file has values of each rank. Values that are equal on all ranks are named ``<stem>.<key>``, all others
   ``<stem>_of_rank.<rank>.<key>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ..core.catalog.names import unwrapped_keys
from ..core.catalog.param_groups import merge, named_group
from ..core.catalog.specs import Ints, ValueKind
from ..core.trees import children_of_dict, flatten, leaves, name_of
from ..errors import CheckpointError, CorruptError, UnsupportedError
from ..format.values import encode_value
from ..state.dtensor import layout_of, placement_of, recognize
from ..state.layouts import Layout
from ..state.optimizer_dicts import GroupOfEach, is_flattened, names_by_number, nested, saved_groups
from ..storage import Storage
from ..torchfile.archive import FileReader, TorchFile
from ..torchfile.pickle_reader import attributes_of, class_of
from ..torchfile.tensors import PickledDTensor, PickledTensor
from .catalog_builder import CatalogBuilder
from .loaded_state import are_equal, divided_by_rank, serve_state
from .source import Format, Source

NAME = "rank-files"
MODEL, OPTIMIZER = "model", "optimizer"

_FILE = re.compile(r"([A-Za-z][\w.-]*?)(?:_world_size_(\d{1,7}))?_rank_?(\d{1,7})\.(?:pt|pth|bin)")
COMPARED_ELEMENTS = 1 << 12
"""The number of elements of a plain tensor to compare at each end; a tensor of up to twice as many is compared whole."""

_PLACEMENTS = "torch.distributed.tensor.placement_types:"
"""The beginning of the class names of torch's placements in a pickle."""


def open_rank_files(storage: Storage, key: str | None) -> Source | None:
    """Open a folder with a file for each rank; return None for anything else; see `Format.open`."""
    if key is not None:
        return None
    sizes: dict[str, dict[int, dict[int, list[str]]]] = {}
    for key, _ in storage.list():
        if match := _FILE.fullmatch(key):
            sizes.setdefault(match[1], {}).setdefault(int(match[2] or 0), {}).setdefault(int(match[3]), []).append(key)
    kinds = {stem: _kind(stem) for stem in sizes}
    if not {MODEL, OPTIMIZER} & set(kinds.values()):
        return None
    models = sorted(stem for stem in sizes if kinds[stem] == MODEL)
    if len(models) > 1:  # they have tensors of the same names
        raise CorruptError(f"{storage.url}: {models[0]}_* and {models[1]}_* are two models; move one of them to another folder")
    numbers = sorted({size for of_stem in sizes.values() for size in of_stem if size or len(of_stem) > 1})
    if len(numbers) > 1:
        raise CorruptError(
            f"{storage.url}: has files of {' and of '.join(map(str, numbers))} ranks, so of several saves; move all but one of "
            "these sets to another folder"
        )
    folder = RankFolder(storage, NAME)
    for stem in sorted(
        sizes, key=lambda stem: (kinds[stem] != MODEL, stem)
    ):  # the model first: it names the optimizer's parameters
        keys = _of_all_ranks(sizes[stem], stem, storage.url)
        if kinds[stem] == MODEL:
            folder.add_tensors(MODEL, [folder.open(key) for key in keys])
        elif kinds[stem] == OPTIMIZER:
            folder.add_optimizer(OPTIMIZER, [folder.open(key) for key in keys], plain_on_all=len(keys) == 1)
        else:
            folder.add_values(stem, keys)
    return Source(folder.storage, folder.builder.finish(), NAME)


def _kind(stem: str) -> str:
    if stem.startswith("optim"):
        return OPTIMIZER
    return MODEL if stem.removeprefix("pytorch_").startswith(MODEL) else stem


def _of_all_ranks(sizes: Mapping[int, Mapping[int, Sequence[str]]], stem: str, where: str) -> list[str]:
    """Return the files of one item, which have the same stem, in order of rank.

    Raise `CorruptError` if the file of a rank is missing, or a rank has two.
    """
    ((size, keys),) = sizes.items()
    absent = [rank for rank in range(size or max(keys) + 1) if rank not in keys]
    if size and max(keys) >= size:
        raise CorruptError(f"{where}: {keys[max(keys)][0]} is of no job of {size} ranks; move it to another folder")
    if absent:
        raise CorruptError(f"{where}: {stem}_* has no file of rank {absent[0]}, beside {keys[min(keys)][0]}; copy it along")
    for first, *others in keys.values():
        if others:
            raise CorruptError(f"{where}: {first} and {others[0]} are of one rank; move one of them to another folder")
    return [keys[rank][0] for rank in sorted(keys)]


class RankFolder:
    """Builds the catalog over a folder with a file of ``torch.save`` for each rank and item. Methods take files in order of rank.

    Attributes
    ----------
    storage
        The store that serves the files, and the values that were encoded.
    """

    def __init__(self, storage: Storage, format: str) -> None:
        self.storage = storage
        self.builder = CatalogBuilder(format, storage.url)
        self._reader = FileReader(storage)
        self._url = storage.url
        self._boxes: dict[str, dict[tuple[Ints, Ints], tuple[PickledTensor, TorchFile]]] = {}
        """The boxes of each tensor that were added, with the first rank's tensor and file: another rank may hold the same."""
        self._first: dict[str, tuple[Any, TorchFile]] = {}
        """The first rank's plain tensors and values that must be the same on all ranks, each with its file."""
        self._params: list[tuple[str, Ints]] = []
        """The name and the shape of each parameter, in the order of the model; a tied one once."""

    def open(self, key: str) -> TorchFile:
        """Read the objects in a file of the folder. Its tensors stay unread."""
        return self._reader.open(key)

    def add_tensors(self, item: str, files: Sequence[TorchFile]) -> None:
        """Add a module's state dict of each rank. A plain tensor is the same on all ranks, a DTensor is a part."""
        compares = len(files) > 1 and not has_parts(files)
        for rank, file in enumerate(files):
            content: dict[str, Any] = {}
            for path, leaf in flatten(self._dict(file.content, file.key), children_of_dict):
                if content.setdefault(name_of(path), leaf) is not leaf:
                    raise CorruptError(
                        f"{self._url}: {file.key} has two tensors or values of the name {item}.{name_of(path)}; load it by torch"
                    )
            names = dict(zip(content, unwrapped_keys(list(content)), strict=True))
            if rank == 0 and item == MODEL:
                self._params = _distinct(content, names)
            for name, value in content.items():
                self._add((item, names[name]), value, file, plain_on_all=True, compares=compares)

    def add_optimizer(self, item: str, files: Sequence[TorchFile], *, plain_on_all: bool) -> None:
        """Add the state dict of an optimizer from each rank. With `plain_on_all`, plain tensors are the same on all ranks."""
        groups_of: list[tuple[str, list[dict[str, Any]]]] = []
        for file in files:
            content = self._dict(file.content, file.key)
            is_flat = is_flattened(content)
            content = nested(content) if is_flat else content
            state, groups = content.get("state"), content.get("param_groups")
            if not isinstance(state, dict) or not isinstance(groups, list):
                raise CorruptError(f"{self._url}: {file.key} holds no state dict of an optimizer; use another copy")
            names = self._names(state, groups)
            if names is None:
                self.builder.unreadable(
                    item,
                    UnsupportedError(
                        f"{self._url}: {file.key} numbers the parameters of the optimizer, and the model's files do not show "
                        "which they are (the flat parameters of FSDP1 have no names); load the model alone, or save with this "
                        "library"
                    ),
                )
                return
            for number, entry in state.items():
                if number == next(iter(state)):  # the steps of one parameter tell
                    self.builder.of_step(file.key, f"step of {names.get(number, number)}", file.number(entry.get("step")))
                for name, value in self._dict(entry, file.key).items():
                    path = (item, "state", names.get(number, str(number)), str(name))
                    self._add(path, value, file, plain_on_all=plain_on_all)
            own = [named_group(file.plain(g), (names.get(p, str(p)) for p in g["params"])) for g in groups]
            groups_of.append((file.key, saved_groups(GroupOfEach(own)) if is_flat else own))
        self.builder.value([item, "param_groups"], merge(groups_of, name=item), ValueKind.PARAM_GROUPS)

    def _names(self, state: Mapping[Any, Any], groups: Sequence[Any]) -> Mapping[Any, str] | None:
        """Map the numbers by which an optimizer's state knows parameters to the parameters' names.

        The mapping is empty if the optimizer's state is keyed by names already. None means that nothing names the numbers.
        """
        if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
            raise CorruptError(f"{self._url}: the optimizer has groups without parameters; use another copy")
        numbers = [number for group in groups for number in group["params"] if type(number) is int]
        if not numbers:
            return {}
        if (named := names_by_number(groups)) is not None:
            return dict(zip(named, unwrapped_keys(list(named.values())), strict=True))
        # Otherwise numbers count the model's parameters in order, if there are as many, and each has the shape of its state.
        # Groups may have another order than the model; then shapes prove it alone, if no two parameters have the same.
        is_proved = len(groups) == 1 or len({shape for _, shape in self._params}) == len(self._params)
        if sorted(numbers) != list(range(len(self._params))) or not is_proved:
            return None
        for number, entry in state.items():
            shapes = (
                {value.shape for value in entry.values() if isinstance(value, PickledDTensor)}
                if isinstance(entry, dict)
                else set()
            )
            if number not in range(len(numbers)) or not shapes <= {self._params[number][1]}:
                return None
        return {number: name for number, (name, _) in enumerate(self._params)}

    def add_values(self, stem: str, keys: Sequence[str]) -> None:
        """Add the values in the files of all ranks below the name `stem`. A value that differs between ranks is named by rank."""
        reader = FileReader(self.storage, tagged="")
        try:
            found = [file.plain(file.content) for file in map(reader.open, keys)]
        except UnsupportedError as error:
            self.builder.unreadable(stem, error)
            return
        if not any(isinstance(content, dict) for content in found) and are_equal(found):
            state = {stem: found[0]}
        else:
            dicts = [content if isinstance(content, dict) else {"value": content} for content in found]
            state, _ = divided_by_rank(dicts, stem, max_depth=1, may_miss=True)
        self.storage = serve_state(self.builder, self.storage, state, stem)

    def _dict(self, content: Any, key: str) -> dict[Any, Any]:
        if not isinstance(content, dict):
            raise CorruptError(
                f"{self._url}: {key} holds a {type(content).__name__} where a state dict has a dict; use another copy"
            )
        return content

    def _add(self, path: tuple[str, ...], value: Any, file: TorchFile, *, plain_on_all: bool, compares: bool = False) -> None:
        name = ".".join(path)
        if self.builder.is_unreadable(name):
            return
        try:
            if compares and not _are_same(self._first.setdefault(name, (value, file)), (value, file)):
                raise UnsupportedError(
                    f"{self._url}: {file.key}: {name} differs from that of the ranks before, and a plain tensor does not say "
                    "which part of a global one it is; load the file of one rank by its own path, if that is what you want"
                )
            if isinstance(value, PickledDTensor):
                layout = _layout(value, f"{self._url}: {file.key}: {name}")
                self._add_part(name, value.local, value.shape, layout, file)
            elif isinstance(value, PickledTensor):
                if value.shape and not plain_on_all:
                    raise UnsupportedError(
                        f"{self._url}: {file.key}: {name} is a plain tensor of shape {value.shape}, as the flat parameters of "
                        "FSDP1 have, so its place in a global tensor is unknown; load the model alone"
                    )
                self._add_part(name, value, value.shape, None, file)
            elif name not in self._boxes:
                self._boxes[name] = {}
                self.builder.value(path, file.plain(value))
        except UnsupportedError as error:
            self._leave_out(name, error)

    def _leave_out(self, name: str, why: CheckpointError) -> None:
        self.builder.tensors.pop(name, None)
        self.builder.unreadable(name, why)

    def _add_part(self, name: str, local: PickledTensor, shape: Ints, layout: Layout | None, file: TorchFile) -> None:
        """Add a rank's local tensor as a part of a global tensor. `layout` is None for a plain tensor, which is the whole one."""
        is_known = name in self._boxes
        boxes = self._boxes.setdefault(name, {})
        self.builder.tensor(name, local.dtype, shape, again=is_known)
        if layout is None:
            if not is_known:
                self.builder.view(name, file, local)
            return
        for box in (box for box in layout.boxes if 0 not in box.lengths):
            first = local.offset + sum(o * s for o, s in zip(box.local_offsets, local.strides, strict=True))
            view = replace(local, offset=first, shape=box.lengths)
            held = boxes.setdefault((box.offsets, box.lengths), (view, file))
            if held[1] is file:
                self.builder.view(name, file, view, box.offsets)
            elif not _are_same(held, (view, file)):
                why = (
                    f"{self._url}: {name} differs between {held[1].key} and {file.key}, which hold the same part of it: files of "
                    "two saves are mixed, or the replicas have drifted apart; use another checkpoint"
                )
                self._leave_out(name, CorruptError(why))
                return


def has_parts(files: Sequence[TorchFile]) -> bool:
    """Tell whether the files of all ranks hold DTensors, which say which part of a global tensor they are."""
    return any(isinstance(leaf, PickledDTensor) for file in files for leaf in leaves(file.content))


def are_alike(files: Sequence[TorchFile]) -> bool:
    """Tell whether plain tensors and values are the same in the files of all ranks, as far as checksums and samples show."""
    leaves_of = [dict(flatten(file.content, children_of_dict)) for file in files]
    try:
        return all(
            found.keys() == leaves_of[0].keys()
            and all(_are_same((leaf, files[0]), (found[path], file)) for path, leaf in leaves_of[0].items())
            for found, file in zip(leaves_of[1:], files[1:], strict=True)
        )
    except CheckpointError:
        return True  # the methods that add the values meet the error again


def _are_same(one: tuple[Any, TorchFile], other: tuple[Any, TorchFile]) -> bool:
    """Tell whether plain tensors or values of two ranks, each with its file, are the same.

    The checksums of their storages tell, unless a tensor is a part of its storage, or the files have none. Then the tensors are
    read: whole, or at both ends if they are large.
    """
    (a, file), (b, another) = one, other
    if isinstance(a, PickledTensor) and isinstance(b, PickledTensor) and replace(a, storage=b.storage) == b:
        crcs = file.crc(a), another.crc(b)
        is_whole = prod(a.shape) * a.dtype.itemsize == a.storage.num_bytes
        if all(crcs) and (is_whole or crcs[0] == crcs[1]):
            return crcs[0] == crcs[1]
    return bool(_sample(a, file) == _sample(b, another))


def _sample(value: Any, file: TorchFile) -> Any:
    """Return a value, or the bytes of a plain tensor (of a large one, those at both ends), for a comparison of ranks."""
    if not isinstance(value, PickledTensor):
        return encode_value(file.plain(value), file.key)
    # Elements in memory from the first to the last.
    count = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True)) if prod(value.shape) else 0
    part = min(count, COMPARED_ELEMENTS)
    ends = [file.memory(value, first, part) for first in (0, count - part)] if count else []
    return value.dtype, value.shape, value.strides, ends


def _distinct(content: Mapping[Any, Any], names: Mapping[Any, str]) -> list[tuple[str, Ints]]:
    """Return the name and shape of each DTensor of a state dict, in order. Of tied DTensors, only the first is listed."""
    first: dict[tuple[Any, ...], tuple[str, Ints]] = {}
    for key, value in content.items():
        if isinstance(value, PickledDTensor) and isinstance(value.local, PickledTensor):
            first.setdefault((value.local.storage.key, value.local.offset, value.shape), (names[key], value.shape))
    return list(first.values())


def _layout(value: PickledDTensor, where: str) -> Layout:
    """Find which part of its global tensor a DTensor's local tensor is.

    Raise `UnsupportedError` if a placement is unknown, or this release of torch pickles meshes in an unknown way.
    """
    spec = attributes_of(value.spec) or {}
    mesh, placements = attributes_of(spec.get("mesh")) or {}, spec.get("placements")
    sizes, at = _sizes(mesh), mesh.get("_coordinate_on_dim", ())
    # The pickle may come from anywhere, so every field is checked before torch's and this library's functions get it.
    known = [_placement(placement) for placement in placements] if isinstance(placements, tuple | list) else [None]
    if None in known or sizes is None or len(sizes) != len(known) or not isinstance(value.local, PickledTensor):
        shown = [class_of(p) for p in placements] if isinstance(placements, tuple | list) else class_of(placements)
        raise UnsupportedError(
            f"{where}: a DTensor with placements {shown} on a mesh of {sizes} is unknown here; load it with torch"
        )
    if at is not None and (  # None: the rank is not in the mesh
        len(at) != len(sizes) or not all(type(i) is int and 0 <= i < n for i, n in zip(at, sizes, strict=True))
    ):
        raise CorruptError(f"{where}: is at {at} of a mesh of {sizes}; use another copy")
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    try:
        found = recognize(known, value.shape, names, sizes, None if at is None else tuple(at))
        return layout_of(value.shape, value.local.shape, found)
    except CheckpointError as error:
        raise UnsupportedError(f"{where}: {error}") from None


def _sizes(mesh: Mapping[str, Any]) -> Ints | None:
    """Return the sizes of a pickled mesh's axes; None if they are not valid.

    The sizes are in the mesh's layout (torch 2.9 and later), or in the shape of the tensor that holds the mesh's ranks.
    """
    layout = attributes_of(mesh.get("_layout")) or {}
    shapes: list[Any]
    if "axes" in layout:
        shapes = [(attributes_of(axis) or {}).get("shape") for axis in layout["axes"]]
    elif isinstance(mesh.get("mesh"), PickledTensor):
        shapes = list(mesh["mesh"].shape)
    else:
        shapes = list(layout.get("shape") or layout.get("sizes") or [None])
    sizes: list[Any] = [prod(map(int, shape)) if isinstance(shape, tuple) else shape for shape in shapes]
    valid = [size for size in sizes if type(size) is int and 0 < size < 1 << 24]
    return tuple(valid) if len(valid) == len(sizes) else None


def _placement(made: Any) -> Any:
    """Return torch's placement, such as ``Shard(0)``, for a stand-in from a pickle; None for any other class."""
    state = attributes_of(made) or {}
    return placement_of(str(class_of(made)).removeprefix(_PLACEMENTS), state.get("dim"), state.get("split_factor"))


FORMAT = Format(
    NAME, "a folder with the torch.save files of each rank, such as model_world_size_4_rank_0.pt", open_rank_files, order=65
)
