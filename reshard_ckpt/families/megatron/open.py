"""Reading a checkpoint of Megatron-Core as one of this library: a catalog over its files.

1. Find the folder of the iteration: the path itself, or the folder that ``latest_checkpointed_iteration.txt`` names at the root
   of a run. A folder with a file for each rank is read by `ranks`.
2. Decode ``.metadata`` and locate the chunks of all tensors. Tensors that were saved flat become runs of their true shapes.
3. Decode the common state and the objects as plain and tagged values (`torchfile.objects`).
4. Convert all keys to names (`names`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.catalog.model import Catalog, FileEntry
from ...core.catalog.specs import Ints
from ...errors import CheckpointError, CheckpointNotFound, CorruptError, UnsupportedError
from ...format.torch_dtypes import dtype_code
from ...formats.catalog_builder import FilePart, ForeignTensor, foreign_catalog
from ...formats.dcp.chunks import FileSizes
from ...formats.dcp.chunks import locate as locate_chunks
from ...formats.dcp.metadata import MAX_METADATA_BYTES, METADATA_KEY, Extent, SavedTensor
from ...formats.dcp.read import open_path as open_dcp
from ...formats.protocol import Format, RawValue, Source, locate
from ...storage import open_storage
from ...storage.protocol import Storage
from ...torchfile.objects import read_object
from .buckets import groups_path, name_buckets
from .integrity import read_integrity
from .metadata import MegatronMetadata, read_metadata, unflattened
from .names import COMMON_STATE, FULLY_RESHARDABLE, NAME, OPTIMIZER, is_bucket, link_of, object_path, tensor_name
from .ranks import is_per_rank, read_ranks
from .sharded_names import checkpoint_key
from .values import MegatronValues
from .write import write_megatron

CONFIG_KEY, COMMON_KEY, LATEST_KEY = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"
MAX_SMALL_BYTES, MAX_OBJECT_BYTES = 1 << 20, 1 << 30


def open_path(path: str, *, as_saved: bool = False, named: bool = False) -> Source | None:
    """Open a path for reading; return None if it is not a checkpoint of Megatron; see `Format.open`.

    Parameters
    ----------
    as_saved
        Keep Megatron's keys as names, and the paths of its own state. The metadata of the catalog list the dicts that were
        Namespaces.
    named
        Name the state that lies in buckets, where the weights prove it (`buckets`). This reads all weights.
    """
    with ExitStack() as stack:
        storage, key = locate(path)
        stack.enter_context(storage)
        if key is not None:
            return None
        latest = _latest(storage)
        if latest is not None:
            path = f"{path.rstrip('/')}/{latest}"
            storage = stack.enter_context(open_storage(path))
            if storage.size(METADATA_KEY) is not None and storage.size(CONFIG_KEY) is None and storage.size(COMMON_KEY) is None:
                return open_dcp(path, otherwise=read_object)  # torch_dcp and fsdp_dtensor: DCP saved these DTensors
        # The three kinds of folders differ in their small files: .metadata alone is DCP's, neither of the two is an old folder
        # with a file for each rank, and metadata.json marks a torch_dist folder.
        if storage.size(CONFIG_KEY) is None and storage.size(METADATA_KEY) is None and is_per_rank(storage):
            catalog = read_ranks(storage, as_saved=as_saved, named=named)
            stack.pop_all()
            return Source(storage, catalog, NAME, _advice(catalog))
        if not is_checkpoint(storage, of_run=latest is not None):
            return None
        catalog, raw = read_folder(storage, as_saved=as_saved, named=named)
        digests = read_integrity(storage)
        stack.pop_all()
        return Source(storage, catalog, NAME, _advice(catalog), raw, digests)


def _advice(catalog: Catalog) -> dict[str, str]:
    """Tell users how to load an optimizer that was saved as buckets; empty for any other."""
    bucket = next((name for name in catalog.names if is_bucket(name)), None)
    if bucket is None:
        return {}
    return {
        OPTIMIZER: f"its optimizer is saved as flat buffers (dp_reshardable) such as {bucket}, which do not say "
        "which parameter lies where; name them with convert(..., to='megatron', optimizer='fully_reshardable')"
    }


def _latest(storage: Storage) -> str | None:
    """Return the folder that the root of a run names as its newest; None if the folder is not the root of a run."""
    if storage.size(LATEST_KEY) is None or storage.size(METADATA_KEY) is not None:
        return None
    text = bytes(storage.read(LATEST_KEY, limit=MAX_SMALL_BYTES)).decode(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise CorruptError(f"{storage.url}: {LATEST_KEY} says {text!r:.80}, which is no iteration; pass the folder of one")
    return "release" if text == "release" else f"iter_{int(text):07d}"


def is_checkpoint(storage: Storage, *, of_run: bool = False) -> bool:
    """Return whether a folder is a checkpoint of Megatron's ``torch_dist`` format.

    Raises
    ------
    UnsupportedError
        It is a checkpoint of Megatron in another format.
    CorruptError
        The save that wrote it did not finish.
    """
    if storage.size(CONFIG_KEY) is None:
        if storage.size(METADATA_KEY) is not None and storage.size(COMMON_KEY) is None:
            return False  # a folder of DCP
        if of_run and not any(True for _ in storage.list()):
            raise CheckpointNotFound(f"{storage.url}: is named by {LATEST_KEY}, but is not there; pass another iteration")
        return storage.size(COMMON_KEY) is not None and _refuse_unfinished(storage)
    try:
        config = json.loads(bytes(storage.read(CONFIG_KEY, limit=MAX_SMALL_BYTES)))
    except (ValueError, RecursionError):
        return False
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend is None:
        return False
    if backend not in ("torch_dist", "fsdp_dtensor"):
        raise UnsupportedError(
            f"{storage.url}: is saved with Megatron's backend {backend!r:.40}, which stores tensors in other files; load it with "
            "a version of Megatron that has it, and save it with ckpt_format torch_dist"
        )
    if storage.size(METADATA_KEY) is None:
        raise CorruptError(f"{storage.url}: has {CONFIG_KEY}, but no {METADATA_KEY}; copy it, or use another checkpoint")
    return True


def _refuse_unfinished(storage: Storage) -> bool:
    """Refuse a folder whose save was cut off. Megatron writes ``metadata.json`` last, so it is missing then."""
    if any(key.endswith(".distcp") for key, _ in storage.list()):
        raise CorruptError(f"{storage.url}: has {COMMON_KEY}, but no {CONFIG_KEY}, which is written last: the save did not end")
    return False


def read_folder(storage: Storage, *, as_saved: bool = False, named: bool = False) -> tuple[Catalog, dict[str, RawValue]]:
    """Build the catalog of a folder, and list its values with their places in the files."""
    name = f"{storage.url}: {METADATA_KEY}"
    metadata = read_metadata(bytes(storage.read(METADATA_KEY, limit=MAX_METADATA_BYTES)), name=name)
    located = locate_chunks(storage, metadata.saved.tensors)
    folder = _Folder(storage, metadata, dict(located.unreadable), as_saved, MegatronValues(storage.url, as_saved=as_saved))
    tensors = [found for key, saved in metadata.saved.tensors.items() if (found := folder.tensor(key, saved, located.parts[key]))]
    if named and any(is_bucket(tensor.name) for tensor in tensors):
        tensors = folder.with_names(tensors, located.files)
    folder.add_values()
    about = {NAME: {"namespaces": folder.values.namespaces}} if as_saved else None
    catalog = foreign_catalog(tensors, located.files, folder.values.entries, format=NAME, metadata=about, where=storage.url)
    return replace(catalog, unreadable=folder.unreadable | folder.values.unreadable), folder.raw


@dataclass
class _Folder:
    """A folder on its way to a catalog; `errors` are by Megatron's key, `unreadable` by this library's name."""

    storage: Storage
    metadata: MegatronMetadata
    errors: dict[str, CheckpointError]
    as_saved: bool
    values: MegatronValues
    groups: dict[tuple[Any, ...], list[Any]] | None = None
    """The groups of optimizers whose buckets are named, by path; None if buckets are not named."""
    unreadable: dict[str, CheckpointError] = field(default_factory=dict)
    raw: dict[str, RawValue] = field(default_factory=dict)

    def tensor(self, key: str, saved: SavedTensor, parts: Sequence[FilePart]) -> ForeignTensor | None:
        """Describe a tensor in its true shape. Return None, and note the error, if it cannot be read."""
        name, link = (checkpoint_key(key), None) if self.as_saved else (tensor_name(key), link_of(key))
        try:
            if key in self.errors:
                raise self.errors[key]
            shape = self.metadata.true_shapes.get(key, saved.shape)
            if key in self.metadata.true_shapes:
                parts = [unflattened(part, saved.shape, shape, f"{self.storage.url}: {key}") for part in parts]
            self._check_shape(key, shape)
            return ForeignTensor(name, dtype_code(saved.dtype, name), shape, tuple(parts), link=link)
        except CheckpointError as error:
            self.unreadable[name] = error
            return None

    def _check_shape(self, key: str, shape: Ints) -> None:
        """Refuse optimizer state that has another shape than its parameter: it was saved flat, without its true shape."""
        link = link_of(key)
        parameter = self.metadata.saved.tensors.get(link.fqn) if link is not None else None
        if parameter is not None and shape != parameter.shape:
            raise UnsupportedError(
                f"{self.storage.url}: {key} has shape {shape}, and its parameter {parameter.shape}: it is saved flat, without "
                "its true shape; load it with the version of Megatron that saved it, and save it again with a newer one"
            )

    def with_names(self, tensors: Sequence[ForeignTensor], files: Sequence[FileEntry]) -> list[ForeignTensor]:
        """Replace the buckets by the tensors that they hold, under the names of parameters."""
        found = name_buckets(self.storage, tensors, files)
        self.unreadable.update(found.unreadable)
        self.groups = {}
        return [*(tensor for tensor in tensors if not is_bucket(tensor.name)), *found.tensors]

    def add_values(self) -> None:
        """Add the common state and the objects."""
        if self.storage.size(COMMON_KEY) is not None:
            extent = Extent(COMMON_KEY, 0, self.storage.size(COMMON_KEY) or 0)
            self._add_common(COMMON_KEY, extent)
        # The common state is in ``common.pt``, or an object; with both, the file counts. Other objects are values of their own.
        sizes = FileSizes(self.storage)
        for key, extent in self.metadata.saved.values.items():
            problem = sizes.problem(key, extent)
            if problem is not None:
                self.unreadable[".".join(self._object_path(key))] = problem
            elif key == COMMON_STATE and COMMON_KEY not in self.raw:
                self._add_common(key, extent)
            elif self.groups is not None and is_bucket(key):
                self._keep_groups(key, extent)
            elif key != COMMON_STATE:
                self._add_object(key, extent)
        for path, groups in (self.groups or {}).items():
            self.values.add(path, groups)

    def _keep_groups(self, key: str, extent: Extent) -> None:
        """Add the groups that an object of a bucket holds. Each rank saved only the groups of its own parameters."""
        path = groups_path(key)
        if path is None or self.groups is None:
            return
        try:
            kept = self.groups.setdefault(path, [])
            (found,) = self._read(key, extent)
            kept.extend(group for group in found["param_groups"] if group not in kept)
        except CheckpointError as error:
            self.unreadable[".".join(map(str, path))] = error
        except (ValueError, TypeError, KeyError):
            self.unreadable[".".join(map(str, path))] = CorruptError(f"{self.storage.url}: {key} holds no groups of an optimizer")

    def _read(self, key: str, extent: Extent) -> Any:
        self.raw[key] = RawValue((key,), extent.file, extent.offset, extent.length)
        if extent.length > MAX_OBJECT_BYTES:
            raise UnsupportedError(f"{self.storage.url}: {key} has {extent.length} bytes, more than an object may have")
        return read_object(bytes(self.raw[key].read(self.storage)), f"{self.storage.url}: {key}")

    def _add_common(self, key: str, extent: Extent) -> None:
        try:
            state = self._read(key, extent)
            if key == COMMON_STATE:
                (state,) = state if isinstance(state, list) and len(state) == 1 else (None,)
            if not isinstance(state, dict):
                raise CorruptError(f"{self.storage.url}: {key} holds no state; use another checkpoint")
        except CheckpointError as error:
            self.unreadable[key] = error
            return
        self.values.add_common(_without_steps(state))

    def _object_path(self, key: str) -> tuple[str, ...]:
        return (key,) if self.as_saved else object_path(key)

    def _add_object(self, key: str, extent: Extent) -> None:
        path = self._object_path(key)
        try:
            found = self._read(key, extent)
            if not isinstance(found, list) or len(found) != 1:
                raise UnsupportedError(f"{self.storage.url}: {key} is not one object; load it with Megatron")
            self.values.add(path, found[0])
        except CheckpointError as error:
            self.unreadable[".".join(path)] = error


def _without_steps(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Drop the steps of single parameters: Megatron up to 0.15 keeps them in ``param_state`` as well as in the groups."""
    kept = dict(state)
    optimizer = kept.get(OPTIMIZER)
    if isinstance(optimizer, dict):
        kept[OPTIMIZER] = _without_step(optimizer)
    return kept


def _without_step(optimizer: Mapping[Any, Any]) -> dict[Any, Any]:
    # Tell whether `param_state` holds only the steps of parameters.
    def is_step(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(one, dict) and one.keys() <= {"step"} for one in value.values())

    kept = {}
    for key, value in optimizer.items():
        if key == "param_state" and is_step(value):
            continue
        kept[key] = _without_step(value) if isinstance(key, int) and isinstance(value, dict) else value
    return kept


FORMAT = Format(
    NAME,
    "a run or an iteration of Megatron-Core, which has latest_checkpointed_iteration.txt, a metadata.json, or mp_rank_00",
    open_path,
    order=30,
    takes=("as_saved", "named"),
    root_marks=(LATEST_KEY,),
    write=write_megatron,
    forms={FULLY_RESHARDABLE: {"named": True}},
)
