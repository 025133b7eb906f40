"""Writing a checkpoint as a folder that Megatron-Core loads, as a stream, in bounded memory.

1. Convert the names of all tensors and objects to Megatron's keys (`names`), and rebuild the common state as nested dicts.
2. Mark the optimizer's state as ``fully_reshardable``: whole tensors in the shapes of their parameters, which any layout loads.
3. Write tensors and objects as DCP does, then ``common.pt``, which all versions read, and last ``metadata.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...plugins import BytesOf, Catalog, Storage, ValueKind
from ...plugins.dcp import FolderLayout, write_folder
from ...plugins.errors import NameCollisionError, UnsupportedError
from ...plugins.names import Index, paths_of_values
from ...plugins.states import Comm
from ...plugins.torchfile import object_bytes
from ...plugins.trees import put
from .names import (
    COMMON_FILE,
    CONFIG,
    CONFIG_FILE,
    CONTENT_METADATA,
    FORM,
    FULLY_RESHARDABLE,
    MASTER,
    NAME,
    OLD_MASTER,
    OPTIMIZER,
    SHARDING,
    has_keys,
    is_bucket,
    keys_of_catalog,
    link_of,
    object_key,
)
from .places import is_of_megatron
from .values import inner_paths, mark_namespaces

_WITHOUT_CHAIN = "chained_optim_avoid_prefix"
_ADVICE = "leave one of them out with exclude="


def write_megatron(
    storage: Storage, catalog: Catalog, values: Mapping[str, Any], bytes_of: BytesOf, *, comm: Comm, notes: Storage | None
) -> int:
    """Write a folder for Megatron-Core.

    Raise `NameCollisionError` if two names convert to the same key, and `UnsupportedError` if a value is neither plain nor
    tagged; or Megatron looks for none of the names.

    Parameters
    ----------
    storage
        The store to write to; it must be empty.
    catalog, values
        All tensors, and all values by name. Objects whose classes this program lacks are `Named`.
    bytes_of
        Streams the bytes of tensors.
    comm, notes
        The ranks that share the work, and the store of notes; see `write_folder`.

    Returns
    -------
    int
        Bytes of files that an earlier attempt had finished.
    """
    _refuse_other_models(catalog)
    common = _common_state(catalog, values)
    layout = _lay_out(catalog, values, master=MASTER if any(_distributed(common.get(OPTIMIZER, {}))) else OLD_MASTER)
    data = object_bytes(common, f"{storage.url}: {COMMON_FILE}")

    def encoded(value: Any) -> bytes:
        return object_bytes([value], storage.url)

    kept = write_folder(storage, catalog, layout, bytes_of, encoded, comm=comm, notes=notes)
    if comm.rank == 0:
        storage.publish(COMMON_FILE, data)
        storage.publish(CONFIG_FILE, json.dumps(CONFIG).encode())
    return kept


def _refuse_other_models(catalog: Catalog) -> None:
    """Refuse a catalog if Megatron looks for none of its names, because Megatron would load nothing of the folder.

    Catalogs of Megatron's own folders, and of checkpoints that its replaced calls saved, are never refused.
    """
    names = catalog.names
    is_own = catalog.save_id == NAME or has_keys(catalog)
    if is_own or not names or any(is_of_megatron(name) or is_bucket(name) for name in names):
        return
    raise UnsupportedError(
        f"{names[0]}: is of no model of Megatron, and nor is any other of the {len(names)} tensors, so that no job of Megatron "
        "would load them: pass to='dcp', to='torch' or to='safetensors' for other programs, or name them as a model of Megatron "
        "does with rename=; where modules of a model of Megatron's are your own, say so with reshard_ckpt.megatron.add_rule"
    )


def _lay_out(catalog: Catalog, values: Mapping[str, Any], *, master: str) -> FolderLayout:
    key_of = keys_of_catalog(catalog)
    tensors: dict[str, int] = {}
    for name in catalog.names:
        key = re.sub(rf"^optimizer\.state\.{MASTER}\.", f"optimizer.state.{master}.", key_of(name))
        if key in tensors:
            other = catalog.tensors_table.names[tensors[key]]
            raise NameCollisionError(
                f"{name} and {other} are both {key} in a checkpoint of Megatron; leave one out with exclude="
            )
        tensors[key] = catalog.index(name)
    objects = {of: value for name, value in values.items() if (of := object_key(name)) is not None}
    for key in tensors.keys() & objects.keys():
        raise NameCollisionError(f"{key}: a tensor and an object have this key in a checkpoint of Megatron; leave one out")
    return FolderLayout(tensors, objects, {})


def _common_state(catalog: Catalog, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Build Megatron's common state as nested dicts, with the marks that tell how the optimizer's state is saved."""
    entries = [entry for entry in catalog.values_table if object_key(entry.name) is None]
    listed = paths_of_values(catalog)
    # A list whose elements have names of their own becomes a dict of its indices.
    paths = {entry.name: tuple(int(key) if isinstance(key, Index) else key for key in listed[entry.name]) for entry in entries}
    inner = inner_paths(catalog, paths)
    common: dict[Any, Any] = {}
    for entry in entries:
        value, path = values[entry.name], paths[entry.name]
        if entry.kind is ValueKind.PARAM_GROUPS:  # groups of an optimizer object: Megatron's groups have no "params"
            value = [{key: item for key, item in group.items() if key != "params"} for group in value]
            put(common, (*path[:-1], SHARDING), FULLY_RESHARDABLE, _ADVICE)
        put(common, inner[entry.name], value, _ADVICE)
    mark_namespaces(common, catalog)
    if (catalog.links() or any(map(link_of, catalog.names))) and not any(is_bucket(name) for name in catalog.names):
        _mark_reshardable(common)
    return common


def _mark_reshardable(common: dict[Any, Any]) -> None:
    """Mark in the common state that the optimizer is saved in whole tensors, under keys without the number of a chain.

    Megatron's training program reads these marks.
    """
    optimizer = common.get(OPTIMIZER, {})
    about = common.get(CONTENT_METADATA)
    content = dict(about) if isinstance(about, dict) else {}
    distributed = list(_distributed(optimizer))
    # Megatron's training program reads these keys to make its tree for loading.
    if distributed and content.get(FORM) != FULLY_RESHARDABLE:
        content |= {FORM: FULLY_RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False, _WITHOUT_CHAIN: True}
    if isinstance(optimizer, dict) and any(isinstance(key, int) for key in optimizer):
        content[_WITHOUT_CHAIN] = True
    for part in distributed:
        part[SHARDING] = FULLY_RESHARDABLE
    if content:
        common[CONTENT_METADATA] = content


def _distributed(optimizer: Any) -> Iterator[dict[Any, Any]]:
    """Yield the common state of each distributed optimizer: of the optimizer itself, or of each such member of a chain.

    Such a state says how the optimizer is sharded. Those of other optimizers do not say it, and have another key for master
    weights. If the optimizer has tensors but no common state, it was a distributed one.
    """
    if not isinstance(optimizer, dict):
        return
    chain = [part for key, part in optimizer.items() if isinstance(key, int) and isinstance(part, dict)] or [optimizer]
    yield from (part for part in chain if SHARDING in part or not part)
