"""The names that this library gives to what Megatron's checkpoints hold, and back.

A key of Megatron's is the name of a tensor or object without the place of the state that it stands in. Here:

1. *Model*: ``decoder.final_layernorm.weight`` is ``model.decoder.final_layernorm.weight``. Layers that are stacked keep their
   leading dim, and experts theirs.
2. *Optimizer*: ``optimizer.state.exp_avg.<key>`` is ``optimizer.state.<key>.exp_avg``, with a link to the parameter. The master
   weight is ``param``, also where Megatron calls it ``fp32_param``. Of optimizers in a chain, the number is left out.
3. *Buckets* of ``dp_reshardable`` keep their keys.
4. *Objects*: ``<key>/shard_<offset>_<shape>`` is ``<key>.shard_<offset>_<shape>``, a value below its own key.
5. *Common state* has the paths in the state that was saved. Only the groups of an optimizer stand one level higher, as
   ``optimizer.param_groups``.

The calls that stand in for Megatron's own keep its keys as names instead (`checkpoint_key`), also in checkpoints of this library.
"""

from __future__ import annotations

import re
from typing import Any

from ...core.catalog.model import Catalog
from ...core.catalog.specs import StateLink
from .sharded_names import object_key

NAME = "megatron"
"""Also the key of a catalog's metadata that says that names are Megatron's keys, and which dicts were Namespaces."""

MODEL, OPTIMIZER, GROUPS = "model", "optimizer", "param_groups"
MASTER, OLD_MASTER = "param", "fp32_param"
COMMON_STATE = "common_state/shard_0_1"
SHARDING, FULLY_RESHARDABLE = "param_state_sharding_type", "fully_reshardable"
"""What the common state of a distributed optimizer says of the state of its parameters, and what that is of whole tensors."""

Path = tuple[Any, ...]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+", re.DOTALL)


def link_of(key: str) -> StateLink | None:
    """Return the link of a key of an optimizer's state; None for any other.

    >>> link_of("optimizer.state.fp32_param.output_layer.weight").name
    'optimizer.state.output_layer.weight.param'
    """
    match = _STATE.fullmatch(key)
    if match is None:
        return None
    state, fqn = match.groups()
    return StateLink(OPTIMIZER, fqn, MASTER if state == OLD_MASTER else state, f"{MODEL}.{fqn}")


def is_bucket(key: str) -> bool:
    """Return whether a key is one of a buffer of the distributed optimizer, or of what belongs to it."""
    return _BUCKET.fullmatch(key) is not None


def tensor_name(key: str) -> str:
    """Return the name of a tensor.

    >>> tensor_name("output_layer.weight"), tensor_name("optimizer.distributed.dp_group_idx_0.x")
    ('model.output_layer.weight', 'optimizer.distributed.dp_group_idx_0.x')
    """
    link = link_of(key)
    if link is not None:
        return link.name
    return key if is_bucket(key) else f"{MODEL}.{key}"


def tensor_key(name: str, link: StateLink | None, master: str = MASTER) -> str:
    """Return Megatron's key of a tensor of this name; what no rule fits, such as a key, is its own key.

    >>> tensor_key("model.output_layer.weight", None)
    'output_layer.weight'
    """
    link = link or link_of(name)
    if link is not None:
        return f"optimizer.state.{master if link.key in (MASTER, OLD_MASTER) else link.key}.{link.fqn}"
    return re.sub(rf"^{MODEL}\d*\.", "", name)


def object_path(key: str) -> tuple[str, ...]:
    """Return the path of an object: its key, and which part of it this is.

    >>> object_path("rng_state/shard_0.1_2.2")
    ('rng_state', 'shard_0.1_2.2')
    """
    above, _, place = key.rpartition("/")
    return (above, place) if object_key(key) == key else (key,)


def common_path(path: Path) -> Path:
    """Return the path here of a value of the common state; an optimizer's groups stand below itself.

    >>> common_path(("optimizer", 0, "optimizer", "param_groups")), common_path(("iteration",))
    (('optimizer', 0, 'param_groups'), ('iteration',))
    """
    if len(path) > 2 and path[0] == OPTIMIZER and path[-2:] == (OPTIMIZER, GROUPS):
        return (*path[:-2], GROUPS)
    return path


def lacks_masters(catalog: Catalog) -> bool:
    """Tell whether a catalog has state of an optimizer, and no master weight."""
    links = (*catalog.links().values(), *map(link_of, catalog.names))
    keys = {link.key for link in links if link is not None}
    return bool(keys) and MASTER not in keys
