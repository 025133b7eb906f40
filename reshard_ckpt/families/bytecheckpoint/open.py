"""Reading a folder of ByteCheckpoint (package ``bytecheckpoint``) as a checkpoint of this library: a catalog over its files.

1. ``model/`` and ``optimizer/`` are like folders of DCP, with two differences: their metadata name the package's own copies of
   DCP's classes, and the files hold only the bytes of tensors, whose descriptions are in the metadata.
2. FSDP1's flat parameters are replaced by the parameters in them (`places`).
3. ``extra_state/`` has a torch file of each rank (`values`).

The path is the folder of a step, or the root above it with ``latest_checkpointed_iteration.txt``; the root opens its latest step.
"""

from __future__ import annotations

import re

from ...plugins import CatalogBuilder, Format, Source, Storage, open_below
from ...plugins.dcp import add_parts, advice_on_numbers, is_written_by, read_part, renamed
from .names import MODEL, NAME, OPTIMIZER, model_paths, optimizer_path
from .places import flat_params, unflattened
from .values import add_extra_state

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
    if not re.fullmatch(r"\d{1,18}", text) or storage.size(f"global_step_{text}/{MODEL}/.metadata") is None:
        return None  # the root of another library, such as Megatron
    return f"global_step_{text}"


def _source(storage: Storage) -> Source:
    model, optimizer = (read_part(storage, folder, _CLASSES) for folder in (MODEL, OPTIMIZER))
    where, parts = storage.url, []
    flats = flat_params({} if model is None else model.notes.get("user_defined_dict"), where)
    if model is not None:
        parts.append(renamed(unflattened(model, flats, where), model_paths(model), where))
    if optimizer is not None:
        parts.append(renamed(unflattened(optimizer, flats, where), optimizer_path, where))
    builder = CatalogBuilder(NAME, where)
    add_parts(builder, storage, parts, parameters=[part.fqn for held in flats.values() for part in held])
    served, advice = add_extra_state(builder, storage)
    catalog = builder.finish()
    return Source(served, catalog, NAME, {**advice_on_numbers(catalog), **advice})


FORMAT = Format(
    NAME,
    "a folder of ByteCheckpoint, which has model/.metadata of its own classes",
    open_bytecheckpoint,
    order=10,
    root_marks=(LATEST,),
)
