"""Reading a checkpoint of Megatron-Core as one of this library: a catalog over its files.

1. Find the folder of the iteration: the path itself, or the folder that ``latest_checkpointed_iteration.txt`` names at the root
   of a run. A folder with a file for each rank is read by `ranks`.
2. Decode ``.metadata``: DCP's metadata, the plans of all ranks, and the true shapes of flat tensors. The plans are parsed,
   because the pickle must be read to its end, and dropped.
3. Locate the chunks of all tensors. Tensors that were saved flat become runs of their true shapes (`unflattened`).
4. Decode the common state and the objects as plain and tagged values (`torchfile.objects`).
5. Convert all keys to names (`names`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ...plugins import Catalog, CatalogBuilder, Format, Ints, RawValue, Source, Storage, open_below
from ...plugins.dcp import (
    METADATA_KEY,
    Chunk,
    ChunkRun,
    Extent,
    FileSizes,
    Metadata,
    SavedTensor,
    add_tensors,
    open_dcp,
    read_part,
)
from ...plugins.errors import CheckpointNotFound, CorruptError, UnsupportedError
from ...plugins.torchfile import TorchFile, read_object
from .buckets import groups_path, name_buckets
from .names import (
    COMMON_FILE,
    COMMON_OBJECT,
    CONFIG_FILE,
    FULLY_RESHARDABLE,
    NAME,
    OPTIMIZER,
    is_bucket,
    link_of,
    object_path,
    tensor_name,
)
from .ranks import is_per_rank, read_ranks
from .values import add_common, add_value, read_integrity
from .write import write_megatron

LATEST_KEY = "latest_checkpointed_iteration.txt"
MAX_SMALL_BYTES, MAX_OBJECT_BYTES = 1 << 20, 1 << 30


def open_megatron(storage: Storage, key: str | None, *, named: bool = False) -> Source | None:
    """Open an iteration or a run of Megatron; return None for anything else; see `Format.open`.

    Parameters
    ----------
    named
        Name the state that lies in buckets, where the weights prove it (`buckets`). This reads all weights.
    """
    if key is not None:
        return None
    latest = _latest(storage)
    of_run = latest is not None
    if latest is not None:
        storage = open_below(storage, latest)
    has_config, has_metadata = storage.size(CONFIG_FILE) is not None, storage.size(METADATA_KEY) is not None
    if of_run and has_metadata and not has_config and storage.size(COMMON_FILE) is None:
        return open_dcp(storage, otherwise=read_object)  # torch_dcp and fsdp_dtensor: DCP saved these DTensors
    # The three kinds of folders differ in their small files: .metadata alone is DCP's, neither of the two is an old folder
    # with a file for each rank, and metadata.json marks a torch_dist folder.
    if not has_config and not has_metadata and is_per_rank(storage):
        catalog = read_ranks(storage, named=named)
        return Source(storage, catalog, NAME, _advice(catalog))
    if not is_checkpoint(storage, of_run=of_run):
        return None
    catalog, raw = read_folder(storage, named=named)
    return Source(storage, catalog, NAME, _advice(catalog), raw, read_integrity(storage))


def _advice(catalog: Catalog) -> dict[str, str]:
    """Map the optimizer's name to advice on how to load an optimizer saved as buckets; empty if there are no buckets."""
    bucket = next((name for name in catalog.names if is_bucket(name)), None)
    if bucket is None:
        return {}
    return {
        OPTIMIZER: f"its optimizer is saved as flat buffers (dp_reshardable) such as {bucket}, which do not say "
        "which parameter lies where; name them with convert(..., to='megatron', optimizer='fully_reshardable')"
    }


def _latest(storage: Storage) -> str | None:
    """Return the folder that ``latest_checkpointed_iteration.txt`` names in the root of a run; None for any other folder.

    The roots of verl and of ByteCheckpoint have a file of this name too, beside folders that Megatron does not make.
    """
    if storage.size(LATEST_KEY) is None or storage.size(METADATA_KEY) is not None:
        return None
    if any(folder.startswith("global_step_") for folder in storage.folders()):
        return None
    text = bytes(storage.read(LATEST_KEY, limit=MAX_SMALL_BYTES)).decode(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise CorruptError(f"{storage.url}: {LATEST_KEY} says {text!r:.80}, which is not an iteration; pass the folder of one")
    return "release" if text == "release" else f"iter_{int(text):07d}"


def is_checkpoint(storage: Storage, *, of_run: bool = False) -> bool:
    """Return whether a folder is a checkpoint of Megatron's ``torch_dist`` format.

    Raise `UnsupportedError` if it is a checkpoint of Megatron in another format, and `CorruptError` if the save that wrote it did
    not finish.
    """
    if storage.size(CONFIG_FILE) is None:
        if storage.size(METADATA_KEY) is not None and storage.size(COMMON_FILE) is None:
            return False  # a folder of DCP
        if of_run and not any(True for _ in storage.list()):
            raise CheckpointNotFound(f"{storage.url}: is named by {LATEST_KEY}, but is not there; pass another iteration")
        # Megatron writes ``metadata.json`` last, so it is missing if a save was cut off.
        if storage.size(COMMON_FILE) is not None and any(key.endswith(".distcp") for key, _ in storage.list()):
            raise CorruptError(
                f"{storage.url}: has {COMMON_FILE}, but no {CONFIG_FILE}, which is written last: the save did not end, so use "
                "another checkpoint"
            )
        return False
    try:
        config = json.loads(bytes(storage.read(CONFIG_FILE, limit=MAX_SMALL_BYTES)))
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
        raise CorruptError(f"{storage.url}: has {CONFIG_FILE}, but no {METADATA_KEY}; copy it, or use another checkpoint")
    return True


def read_folder(storage: Storage, *, named: bool = False) -> tuple[Catalog, dict[str, RawValue]]:
    """Build the catalog of a folder of ``torch_dist``, and list its values as they lie in the files."""
    builder = CatalogBuilder(NAME, storage.url)
    folder = _Folder(storage, read_metadata(storage), builder)
    folder.add_tensors()
    if named and any(map(is_bucket, builder.tensors)):
        name_buckets(builder, storage)
        folder.groups = {}
    folder.add_values()
    return builder.finish(links_from_names=False), folder.raw


@dataclass
class _Folder:
    """Builds the catalog over one folder of Megatron."""

    storage: Storage
    saved: Metadata
    builder: CatalogBuilder
    groups: dict[tuple[Any, ...], list[Any]] | None = None
    """The groups, by path, of optimizers whose state in buckets is to be named by parameter; None if buckets keep their keys."""
    raw: dict[str, RawValue] = field(default_factory=dict)

    def add_tensors(self) -> None:
        """Add all tensors of the folder to the catalog, in their true shapes."""
        tensors = {}
        true_shapes = _true_shapes(self.saved, f"{self.storage.url}: {METADATA_KEY}")
        for key, saved in self.saved.tensors.items():
            with self.builder.reading(tensor_name(key)):
                shape = true_shapes.get(key)
                found = saved if shape is None else unflattened(saved, shape, f"{self.storage.url}: {key}")
                self._check_shape(key, found.shape)
                tensors[key] = found
        add_tensors(self.builder, self.storage, tensors, name_of=tensor_name, link_of=link_of)

    def _check_shape(self, key: str, shape: Ints) -> None:
        """Refuse optimizer state that has another shape than its parameter: it was saved flat, without its true shape."""
        link = link_of(key)
        parameter = self.saved.tensors.get(link.fqn) if link is not None else None
        if parameter is not None and shape != parameter.shape:
            raise UnsupportedError(
                f"{self.storage.url}: {key} has shape {shape}, and its parameter {parameter.shape}: it is saved flat, without "
                "its true shape; load it with the version of Megatron that saved it, and save it again with a newer one"
            )

    def add_values(self) -> None:
        """Add the common state and the objects of the folder to the catalog."""
        if self.storage.size(COMMON_FILE) is not None:
            extent = Extent(COMMON_FILE, 0, self.storage.size(COMMON_FILE) or 0)
            self._add_common(COMMON_FILE, extent)
        # The common state is in ``common.pt``, or an object; with both, the file counts. Other objects are values of their own.
        sizes = FileSizes(self.storage)
        for key, extent in self.saved.values.items():
            problem = sizes.problem(key, extent)
            if problem is not None:
                self.builder.unreadable(".".join(object_path(key)), problem)
            elif key == COMMON_OBJECT and COMMON_FILE not in self.raw:
                self._add_common(key, extent)
            elif self.groups is not None and is_bucket(key):
                self._keep_groups(key, extent)
            elif key != COMMON_OBJECT:
                self._add_object(key, extent)
        for path, groups in (self.groups or {}).items():
            self.builder.value(path, groups)

    def _keep_groups(self, key: str, extent: Extent) -> None:
        """Add the optimizer's groups that the object of a bucket holds; each rank saved only the groups of its own parameters."""
        path = groups_path(key)
        if path is None or self.groups is None:
            return
        with self.builder.reading(".".join(map(str, path))):
            kept = self.groups.setdefault(path, [])
            try:
                file = self._open(key, extent)
                (found,) = file.plain(file.content)
                kept.extend(group for group in found["param_groups"] if group not in kept)
            except (ValueError, TypeError, KeyError):
                raise CorruptError(f"{self.storage.url}: {key} holds no groups of an optimizer; use another checkpoint") from None

    def _open(self, key: str, extent: Extent) -> TorchFile:
        self.raw[key] = RawValue((key,), extent.file, extent.offset, extent.length)
        if extent.length > MAX_OBJECT_BYTES:
            raise UnsupportedError(
                f"{self.storage.url}: {key} has {extent.length:,} bytes, and objects of up to {MAX_OBJECT_BYTES:,} are read; "
                "load it with Megatron"
            )
        return TorchFile(key, io.BytesIO(self.raw[key].read(self.storage)), f"{self.storage.url}: {key}", tagged="")

    def _add_common(self, key: str, extent: Extent) -> None:
        with self.builder.reading(key):
            file = self._open(key, extent)
            state = file.content
            if key == COMMON_OBJECT:
                (state,) = state if isinstance(state, list) and len(state) == 1 else (None,)
            if not isinstance(state, dict):
                raise CorruptError(f"{self.storage.url}: {key} holds no state; use another checkpoint")
            optimizer = state.get(OPTIMIZER)
            common = {**state, OPTIMIZER: _without_step(optimizer)} if isinstance(optimizer, dict) else state
            add_common(self.builder, common, file)

    def _add_object(self, key: str, extent: Extent) -> None:
        path = object_path(key)
        with self.builder.reading(".".join(path)):
            file = self._open(key, extent)
            if not isinstance(file.content, list) or len(file.content) != 1:
                raise UnsupportedError(f"{self.storage.url}: {key} is not one object; load it with Megatron")
            add_value(self.builder, path, file.content[0], file)


def _without_step(optimizer: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's common state without the steps of single parameters; the groups have the step too.

    Megatron up to 0.15 keeps those steps in ``param_state``.
    """
    kept = {}
    for key, value in optimizer.items():
        of_parameters = list(value.values()) if key == "param_state" and isinstance(value, dict) else [None]
        if all(isinstance(state, dict) and state.keys() <= {"step"} for state in of_parameters):
            continue
        kept[key] = _without_step(value) if isinstance(key, int) and isinstance(value, dict) else value
    return kept


FORMAT = Format(
    NAME,
    "a run or an iteration of Megatron-Core, which has latest_checkpointed_iteration.txt, a metadata.json, or mp_rank_00",
    open_megatron,
    order=30,
    takes=("named",),
    root_marks=(LATEST_KEY,),
    write=write_megatron,
    shares=True,
    forms={FULLY_RESHARDABLE: {"named": True}},
)
_PLANNER = "torch.distributed.checkpoint.planner"
_TORCH_DIST = "megatron.core.dist_checkpointing.strategies.torch"
_SHAPE = "nd_reformulated_orig_global_shape"
_CLASSES = {
    **{(_PLANNER, name): name for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    (_PLANNER, "WriteItemType"): None,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): "_StoragePrefix",
    (_TORCH_DIST, "MCoreSavePlan"): "MCoreSavePlan",
    (_TORCH_DIST, "MCoreMetadata"): "Metadata",
}
"""The classes in Megatron's metadata. Those of plans are parsed and dropped."""


def read_metadata(storage: Storage) -> Metadata:
    """Read the ``.metadata`` of a folder of Megatron; see `plugins.dcp.read_part` for the errors."""
    saved = read_part(storage, "", _CLASSES)
    assert saved is not None, "the caller has seen the file"
    return saved


def _true_shapes(saved: Metadata, name: str) -> dict[str, Ints]:
    """Map the keys of the tensors that were saved flat to the tensors' true shapes."""
    found = saved.notes.get("mcore_data") or {}
    shapes: dict[str, Ints] = {}
    for key, about in found.items() if isinstance(found, dict) else ():
        shape = about.get(_SHAPE) if isinstance(about, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptError(f"{name}: mcore_data has {shape!r:.80} as the shape of {key!r:.200}; use another checkpoint")
        shapes[key] = tuple(shape)
    return shapes


def unflattened(saved: SavedTensor, shape: Ints, name: str) -> SavedTensor:
    """Convert a flat tensor to its true shape: each chunk becomes a run of a box.

    Megatron up to 0.15 saves a tensor of the distributed optimizer flat. Say a tensor of shape X is cut into f parts along its
    dims. Then the saved shape is ``[f…, elements of one part]``. A chunk of n elements at ``(c…, start)`` holds the run ``[start,
    start + n)`` of the box with the offsets ``c · (X/f)`` and the lengths ``X/f``. X is stored in ``mcore_data``. Raise
    `CorruptError` if the shapes do not fit each other, or a chunk spans several parts.
    """
    fragments, numel = saved.shape[:-1], saved.shape[-1]
    # fragments: into how many parts each dim is cut. lengths: the box of one part.
    fits = len(fragments) == len(shape) and all(f > 0 and size % f == 0 for size, f in zip(shape, fragments, strict=True))
    lengths = tuple(size // f for size, f in zip(shape, fragments, strict=True)) if fits else ()
    if not fits or prod(lengths) != numel or any(n != 1 for chunk in saved.chunks for n in chunk.lengths[:-1]):
        raise CorruptError(
            f"{name}: is saved flat, in shape {saved.shape}, which is not a way to cut its true shape {shape}; use another "
            "checkpoint"
        )

    def run(chunk: Chunk) -> Chunk:
        offsets = tuple(c * size for c, size in zip(chunk.offsets[:-1], lengths, strict=True))
        return replace(chunk, run=ChunkRun(offsets, lengths, chunk.offsets[-1], 0, chunk.lengths[-1]))

    return SavedTensor(saved.dtype, shape, tuple(map(run, saved.chunks)))
