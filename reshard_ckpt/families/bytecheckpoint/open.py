"""Reading a folder of ByteCheckpoint (package ``bytecheckpoint``) as a checkpoint of this library: a catalog over its files.

1. ``model/`` and ``optimizer/`` are like folders of DCP, with two differences: their metadata name the package's own copies of
   DCP's classes, and the files hold only the bytes of tensors, whose descriptions are in the metadata.
2. FSDP1's flat parameters are replaced by the parameters in them (`flat`).
3. ``extra_state/`` has a torch file of each rank (`extra`).

The path is the folder of a step, or the root above it with ``latest_checkpointed_iteration.txt``; the root opens its latest step.
"""

from __future__ import annotations

import re
from functools import partial

from ...core.catalog.model import Catalog
from ...core.catalog.wrappers import unwrapped, unwrapped_keys
from ...core.trees import name_of
from ...formats.dcp.folder import FolderMetadata
from ...formats.dcp.metadata import Metadata
from ...formats.dcp.names import MODEL, OPTIMIZER, KeyPath
from ...formats.dcp.read import MoreContents, advice_on_numbers, catalog_of
from ...formats.protocol import Format, Source, open_located
from ...formats.rooted import PathOf, classes_of, is_written_by, read_part, renamed, together
from ...formats.strided import StridedStorage
from ...storage.protocol import Storage
from .extra import read_extra_state
from .flat import flat_params, unflattened

NAME = "bytecheckpoint"
LATEST = "latest_checkpointed_iteration.txt"

_MODULE = "bytecheckpoint.checkpointer.meta_type"
_CLASSES = classes_of(_MODULE, ("Metadata", "_StorageInfo"))


def open_path(path: str) -> Source | None:
    """Open a path for reading; return None if ByteCheckpoint did not write it; see `Format.open`."""

    def look(storage: Storage, key: str | None) -> Source | None:
        if key is not None:
            return None
        if not is_written_by(storage, (MODEL, OPTIMIZER), _MODULE, format=NAME):
            step = _latest(storage)
            return None if step is None else open_path(f"{path.rstrip('/')}/{step}")
        extra, strided, advice = read_extra_state(storage, NAME)
        catalog = _open(storage, extra)
        served = StridedStorage(storage.url, strided) if strided else storage
        return Source(served, catalog, NAME, {**advice_on_numbers(catalog), **advice})

    return open_located(path, look)


def _latest(storage: Storage) -> str | None:
    """Return the folder of the latest step below a root; None if this is not a root of ByteCheckpoint."""
    if storage.size(LATEST) is None:
        return None
    text = bytes(storage.read(LATEST, limit=64)).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,18}", text) or storage.size(f"global_step_{text}/{MODEL}/.metadata") is None:
        return None  # the root of another library, such as Megatron
    return f"global_step_{text}"


def _open(storage: Storage, extra: MoreContents) -> Catalog:
    model, optimizer = (read_part(storage, folder, _CLASSES) for folder in (MODEL, OPTIMIZER))
    flats = flat_params(None if model is None else model.notes, storage.url)
    parts: list[Metadata] = []
    for part, path_of in ((model, _model_path(model)), (optimizer, _optimizer_path)):
        if part is not None:
            parts.append(renamed(unflattened(part, flats, storage.url), path_of, storage.url))
    in_vectors = [part.fqn for held in flats.values() for part in held]
    return catalog_of(storage, FolderMetadata(together(parts)), format=NAME, more=extra, parameters=in_vectors)


def _model_path(model: Metadata | None) -> PathOf:
    names = [name_of(model.paths.get(fqn, (fqn,))) for fqn in (*model.tensors, *model.values)] if model is not None else []
    return partial(_path_in_model, dict(zip(names, unwrapped_keys(names), strict=True)))


def _path_in_model(clean: dict[str, str], path: KeyPath) -> KeyPath:
    return MODEL, clean.get(name_of(path)) or unwrapped(name_of(path))


def _optimizer_path(path: KeyPath) -> KeyPath:
    return OPTIMIZER, *(unwrapped(key) if isinstance(key, str) else key for key in path)


FORMAT = Format(
    NAME, "a folder of ByteCheckpoint, which has model/.metadata of its own classes", open_path, order=10, root_marks=(LATEST,)
)
