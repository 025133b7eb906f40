"""Converting Megatron's keys to the names that this library gives to the same tensors and values, and back.

A key of Megatron's does not say to which object of the training state a tensor belongs. A name does, as follows:

1. *Model*: ``decoder.final_layernorm.weight`` becomes ``model.decoder.final_layernorm.weight``. Stacked layers keep their
   leading dim, and so do stacked experts.
2. *Optimizer*: ``optimizer.state.exp_avg.<key>`` becomes ``optimizer.state.<key>.exp_avg``, with a link to the parameter. The
   master weight is called ``param``, even if Megatron calls it ``fp32_param``. The number of a chained optimizer is dropped.
3. *Buckets* of ``dp_reshardable`` keep their keys.
4. *Objects*: ``<key>/shard_<offset>_<shape>`` becomes ``<key>.shard_<offset>_<shape>``: a value below its own key.
5. *Common state* keeps its paths. Only the groups of an optimizer move up one level, to ``optimizer.param_groups``.

The calls that replace Megatron's own use its keys as names instead (`checkpoint_key`), in this library's checkpoints too. There,
an object is named by its key and its place among the objects of that key, as in Megatron's own folders (`object_name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from ...plugins import Catalog
from ...plugins.errors import LayoutError, summarize
from ...plugins.names import StateLink

NAME = "megatron"
"""The name of Megatron's format. In a catalog's metadata, this key says that names are Megatron's keys, and lists Namespaces."""
MODEL, OPTIMIZER, GROUPS = "model", "optimizer", "param_groups"
MASTER, OLD_MASTER = "param", "fp32_param"
COMMON = "common_state"
COMMON_OBJECT = f"{COMMON}/shard_0_1"
"""The key of the object in which Megatron saves the common state from 0.19 on."""
COMMON_FILE, CONFIG_FILE = "common.pt", "metadata.json"
"""Files of Megatron: ``common.pt`` has the common state; by ``metadata.json`` Megatron recognizes a checkpoint."""
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The content of ``metadata.json`` that every version reads; newer versions leave out keys that they no longer need."""
CONTENT_METADATA, FORM = "content_metadata", "distrib_optim_sharding_type"
"""Keys of the common state: ``content_metadata``, and in that dict the key that tells the form of the optimizer's state."""
NAMESPACE_TAG, NAMESPACE = "__class__", "argparse:Namespace"
"""The key and the value that mark a saved dict as an ``argparse.Namespace``."""
SHARDING, FULLY_RESHARDABLE = "param_state_sharding_type", "fully_reshardable"
"""The key, in a distributed optimizer's common state, that tells the form of its state; and its value for whole tensors."""
Path = tuple[Any, ...]
_STATE_NAME = f"{OPTIMIZER}.state."
_SPELLED = re.compile(r"^(?:chained_\d+\.)?(optimizer\.state\.)(?:fp32_(param\.))?")
_OBJECT = re.compile(r"(.+)[/.](shard_\d*(?:\.\d+)*_-?\d*(?:\.-?\d+)*)", re.DOTALL)
_MODEL = re.compile(r"^model\d*\.")
_CLAIM = re.compile(r"(.+)/replica_([\d.]*)", re.DOTALL)
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+", re.DOTALL)


def link_of(key: str) -> StateLink | None:
    """Return the link that a key of an optimizer's state has to its parameter; None for any other key.

    >>> link_of("optimizer.state.fp32_param.output_layer.weight").name
    'optimizer.state.output_layer.weight.param'
    """
    match = _STATE.fullmatch(key)
    if match is None:
        return None
    state, fqn = match.groups()
    return StateLink(OPTIMIZER, fqn, MASTER if state == OLD_MASTER else state, f"{MODEL}.{fqn}")


def is_bucket(key: str) -> bool:
    """Return whether a key is that of a tensor or object in the buckets of a distributed optimizer (``dp_reshardable``)."""
    return _BUCKET.fullmatch(key) is not None


def tensor_name(key: str) -> str:
    """Convert the key of a tensor to a name.

    >>> tensor_name("output_layer.weight"), tensor_name("optimizer.distributed.dp_group_idx_0.x")
    ('model.output_layer.weight', 'optimizer.distributed.dp_group_idx_0.x')
    """
    link = link_of(key)
    if link is not None:
        return link.name
    return key if is_bucket(key) else f"{MODEL}.{key}"


def object_path(key: str) -> tuple[str, ...]:
    """Return the path of an object: its key, then its place among the parts of that object.

    >>> object_path("rng_state/shard_0.1_2.2")
    ('rng_state', 'shard_0.1_2.2')
    """
    above, _, place = key.rpartition("/")
    return (above, place) if object_key(key) == key else (key,)


def common_path(path: Path) -> Path:
    """Convert the path of a value of the common state. The groups of an optimizer move up, out of the inner optimizer.

    >>> common_path(("optimizer", 0, "optimizer", "param_groups")), common_path(("iteration",))
    (('optimizer', 0, 'param_groups'), ('iteration',))
    """
    if len(path) > 2 and path[0] == OPTIMIZER and path[-2:] == (OPTIMIZER, GROUPS):
        return (*path[:-2], GROUPS)
    return path


def lacks_masters(catalog: Catalog) -> bool:
    """Tell whether a catalog has state of an optimizer, but no master weights."""
    links = (*catalog.links().values(), *map(link_of, catalog.names))
    keys = {link.key for link in links if link is not None}
    return bool(keys) and MASTER not in keys


def checkpoint_key(key: str) -> str:
    """Return the name that a tensor has in a checkpoint, given Megatron's key of it.

    >>> checkpoint_key("chained_1.optimizer.state.fp32_param.output_layer.weight")
    'optimizer.state.param.output_layer.weight'
    """
    return _SPELLED.sub(lambda found: found[1] + (found[2] or ""), key)


def has_keys(catalog: Catalog) -> bool:
    """Tell whether the names of a catalog are Megatron's keys."""
    return noted(catalog) is not None


def noted(catalog: Catalog) -> dict[str, Any] | None:
    """Return the notes that saves with Megatron's calls leave in the metadata; None for a checkpoint of other calls."""
    notes = catalog.metadata.get(NAME) if isinstance(catalog.metadata, dict) else None
    return notes if isinstance(notes, dict) else None


def keys_of_catalog(catalog: Catalog) -> Callable[[str], str]:
    """Return a function that converts the name of a tensor or object in this catalog to Megatron's key."""
    if has_keys(catalog):
        return checkpoint_key
    links, tensors = catalog.links(), frozenset(catalog.names)
    # Tensors that cannot be read have no links. A load that wants one by its key must find its error.
    unreadable = {name for name in catalog.unreadable if object_key(name) is None}
    for name in (name for name in unreadable if name.startswith(_STATE_NAME)):
        fqn, _, key = name.removeprefix(_STATE_NAME).rpartition(".")
        links[name] = StateLink(OPTIMIZER, fqn, key, f"{MODEL}.{fqn}")

    def key_of(name: str) -> str:
        if name not in tensors and name not in unreadable:
            return object_key(name) or name
        link = links.get(name)
        return checkpoint_key(_MODEL.sub("", name) if link is None else f"{_STATE_NAME}{link.key}.{link.fqn}")

    return key_of


def object_name(sharded: Any) -> str:
    """Return the name of a `ShardedObject`: its key, its place among the objects of that key, and the shape of their grid."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (sharded.global_offset, sharded.global_shape))
    return f"{sharded.key}/shard_{offset}_{shape}"


def object_key(name: str) -> str | None:
    """Convert the name of an object, with ``/`` or ``.`` before ``shard``, to its key and place; None for any other name.

    >>> object_key("rng_state.shard_0.1_2.2"), object_key("args.seed")
    ('rng_state/shard_0.1_2.2', None)
    """
    found = _OBJECT.fullmatch(name)
    return None if found is None else f"{found[1]}/{found[2]}"


def key_of_object(name: str) -> str | None:
    """Return the key of the `ShardedObject` that has this name in a checkpoint; None if no object has such a name.

    >>> key_of_object("rng_state/shard_0.1_2.2"), key_of_object("args.seed")
    ('rng_state', None)
    """
    found = _OBJECT.fullmatch(name)
    return None if found is None else found[1]


def replica_name(name: str) -> str:
    """Return the name by which a rank claims that an object exists. Ranks do so for replicas other than the main one."""
    key, _, place = name.rpartition("/shard_")
    return f"{key}/replica_{place.rpartition('_')[2]}"


def check_objects(names: Iterable[str], claims: Iterable[str]) -> None:
    """Check that every object has a main replica, which is the one that is saved.

    The name of an object has the shape of the grid of all objects with its key, and so their number; `names` must have as many.
    `claims` are the names of objects by other replicas (`replica_name`).

    Raises
    ------
    LayoutError
        Some objects have no main replica.
    """
    # found: by key and shape of its grid, the places of all objects that have a main replica
    found: dict[tuple[str, str], list[str]] = {(m[1], m[2]): [] for m in map(_CLAIM.fullmatch, claims) if m}
    for name in names:
        if (match := _OBJECT.fullmatch(name)) and name[match.end(1)] == "/":
            found.setdefault((match[1], match[2].rpartition("_")[2]), []).append(match[2])
    lines = [
        f"{key}: {len(parts) or 'none'} of its {num} objects have a main replica{f', {parts[0]} first' if parts else ''}"
        for (key, shape), parts in found.items()
        if len(parts) < (num := prod(int(size or 1) for size in shape.split(".")))
    ]
    if lines:
        raise LayoutError(summarize(lines, "have one rank declare each with replica_id 0, or leave them out"))
