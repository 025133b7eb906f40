"""Reading a folder of ByteCheckpoint (package ``bytecheckpoint``) as a checkpoint of this library: a catalog over its files.

1. ``model/`` and ``optimizer/`` are like folders of DCP, with two differences: their metadata name the package's own copies of
   DCP's classes, and the files hold only the bytes of tensors, whose descriptions are in the metadata.
2. FSDP1's flat parameters are replaced by the parameters in them (`places`).
3. ``extra_state/`` has a torch file of each rank (`values`).

The path is the folder of a step, or the root above it with ``latest_checkpointed_iteration.txt``; the root opens its latest step.
"""

from __future__ import annotations

from collections.abc import Callable

from ...plugins import CatalogBuilder, Format, Source, Storage, open_below
from ...plugins.dcp import METADATA_KEY, KeyPath, Metadata, add_parts, advice_on_numbers, is_written_by, read_part, renamed
from ...plugins.errors import CorruptError, few
from ...plugins.names import name_of, unwrapped, unwrapped_keys
from .places import flat_params, unflattened
from .values import add_extra_state

NAME = "bytecheckpoint"
MODEL, OPTIMIZER = "model", "optimizer"
LATEST = "latest_checkpointed_iteration.txt"

_MODULE = "bytecheckpoint.checkpointer.meta_type"
_CLASSES = {(_MODULE, name): name for name in ("Metadata", "_StorageInfo")}


def open_bytecheckpoint(storage: Storage, key: str | None = None) -> Source | None:
    """Open a folder or root of ByteCheckpoint; return None for anything else; see `Format.open`."""
    if key is not None:
        return None
    if is_written_by(storage, (MODEL, OPTIMIZER), _MODULE, format=NAME):
        return _source(storage)
    step = _latest(storage)
    return None if step is None else open_bytecheckpoint(open_below(storage, step))


def _latest(storage: Storage) -> str | None:
    """Return the folder of the latest step below a root; None if this is not a root of ByteCheckpoint."""
    if storage.size(LATEST) is None:
        return None
    text = bytes(storage.read(LATEST, limit=64)).decode(errors="replace").strip()
    steps = [name for name in storage.folders() if storage.size(f"{name}/{MODEL}/{METADATA_KEY}") is not None]
    if not steps:
        return None  # the root of another library, such as Megatron
    if (latest := f"global_step_{text}") not in steps:
        raise CorruptError(
            f"{storage.url}: {LATEST} names {latest:.80}, where no model is; pass the path of a step below: {few(steps)}"
        )
    return latest


def _refuse_files_of_others(storage: Storage, saved: Metadata) -> None:
    """Raise a `CorruptError` if a file is longer than its metadata say, or if two parts of it overlap.

    ByteCheckpoint writes the first metadata of a process again for later steps (its plan cache), although values, which lie
    before the tensors in a file, may have grown. The bytes of tensors have no head that would show it.
    """
    ends: dict[str, int] = {}
    chunks = (chunk.extent for tensor in saved.tensors.values() for chunk in tensor.chunks)
    for extent in sorted((*chunks, *saved.values.values()), key=lambda extent: extent.offset):
        if extent.offset < ends.get(extent.file, 0):
            raise CorruptError(f"{storage.url}: byte {extent.offset} of {extent.file} is of two entries; use another checkpoint")
        ends[extent.file] = extent.offset + extent.length
    for file, end in ends.items():
        size = storage.size(file) or 0
        if size > end:
            raise CorruptError(
                f"{storage.url}: {file} has {size} bytes, and its metadata describe {end}: they are of another save; use another "
                "checkpoint"
            )


def _source(storage: Storage) -> Source:
    model, optimizer = (read_part(storage, folder, _CLASSES) for folder in (MODEL, OPTIMIZER))
    where, parts = storage.url, []
    for saved in (part for part in (model, optimizer) if part is not None):
        _refuse_files_of_others(storage, saved)
    flats = flat_params({} if model is None else model.notes.get("user_defined_dict"), where)
    if model is not None:
        parts.append(renamed(unflattened(model, flats, where), _model_paths(model), where))
    if optimizer is not None:
        parts.append(renamed(unflattened(optimizer, flats, where), _optimizer_path, where))
    builder = CatalogBuilder(NAME, where)
    add_parts(builder, storage, parts, parameters=[part.fqn for held in flats.values() for part in held])
    served, advice = add_extra_state(builder, storage)
    catalog = builder.finish()
    return Source(served, catalog, NAME, {**advice_on_numbers(catalog), **advice})


def _model_paths(model: Metadata) -> Callable[[KeyPath], KeyPath]:
    """Return a function from a path in the saved model's state to the path here, without the parts that wrappers such as DDP add.

    Parameters
    ----------
    model
        The model's metadata as saved; all of its names are needed to tell the added parts.
    """
    names = [name_of(path) for path in model.paths.values()]
    clean = dict(zip(names, unwrapped_keys(names), strict=True))
    return lambda path: (MODEL, clean.get(name_of(path)) or unwrapped(name_of(path)))


def _optimizer_path(path: KeyPath) -> KeyPath:
    """Convert a path in the saved optimizer's state to the path here: below ``optimizer``, without the parts of wrappers."""
    return OPTIMIZER, *(unwrapped(key) if isinstance(key, str) else key for key in path)


FORMAT = Format(
    NAME,
    "a folder of ByteCheckpoint, which has model/.metadata of its own classes",
    open_bytecheckpoint,
    order=10,
    root_marks=(LATEST,),
)
