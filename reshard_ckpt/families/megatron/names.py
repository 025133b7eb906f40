"""Converting Megatron's keys to the names that this library gives to the same tensors and values, and back.

A key of Megatron's does not say to which object of the training state a tensor belongs. A name does, as follows:

1. *Model*: ``decoder.final_layernorm.weight`` becomes ``model.decoder.final_layernorm.weight``. Stacked layers keep their
   leading dim, and so do stacked experts.
2. *Optimizer*: ``optimizer.state.exp_avg.<key>`` becomes ``optimizer.state.<key>.exp_avg``, with a link to the parameter. The
   master weight is called ``param``, even if Megatron calls it ``fp32_param``. The number of a chained optimizer is dropped.
3. *Buckets* of ``dp_reshardable`` keep their keys.
4. *Objects*: ``<key>/shard_<offset>_<shape>`` becomes ``<key>.shard_<offset>_<shape>``: a value below its own key.
5. *Common state* keeps its paths. Only the groups of an optimizer move up one level, to ``optimizer.param_groups``.

The calls that replace Megatron's own use its keys as names instead (`checkpoint_key`), in this library's checkpoints too.
"""

from __future__ import annotations

import re
from typing import Any

from ...plugins import Catalog
from ...plugins.names import StateLink
from .sharded_names import object_key

NAME = "megatron"
"""The name of the format. It is also the key in a catalog's metadata that marks names as Megatron's keys and lists Namespaces."""

MODEL, OPTIMIZER, GROUPS = "model", "optimizer", "param_groups"
MASTER, OLD_MASTER = "param", "fp32_param"
COMMON_STATE = "common_state/shard_0_1"
SHARDING, FULLY_RESHARDABLE = "param_state_sharding_type", "fully_reshardable"
"""The key in a distributed optimizer's common state for the form of its state, and that key's value for whole tensors."""

Path = tuple[Any, ...]

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
    """Return whether a key belongs to the distributed optimizer's buckets: one of their tensors or objects."""
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


def tensor_key(name: str, link: StateLink | None, master: str = MASTER) -> str:
    """Convert the name of a tensor to Megatron's key. A name that fits no rule, such as one that is a key already, stays.

    >>> tensor_key("model.output_layer.weight", None)
    'output_layer.weight'
    """
    link = link or link_of(name)
    if link is not None:
        return f"optimizer.state.{master if link.key in (MASTER, OLD_MASTER) else link.key}.{link.fqn}"
    return re.sub(rf"^{MODEL}\d*\.", "", name)


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
