"""The modes of Megatron's `StrictHandling`: how a load treats keys that only the tree or only the checkpoint has.

An *unexpected* key is in the tree but not in the checkpoint; a *missing* key is in the checkpoint but in no tree. In the default
mode, an unexpected key makes the load itself fail. In all other modes, the ranks compare their keys before the load, in two
collectives:

1. `gather`: every rank sends the keys of its tree to rank 0.
2. `broadcast`: rank 0 sends the union to all, so that each rank knows the missing and the unexpected keys.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...plugins import Catalog
from ...plugins.errors import MismatchError, UnsupportedError, UsageError, summarize
from ...plugins.states import Comm, merge_of_all
from .names import COMMON_OBJECT, checkpoint_key, key_of_object
from .tree import Node, entries_of, objects_of

_log = logging.getLogger(__name__)

MODES = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)


def parse_mode(strict: Any) -> str:
    """Return the value of a `StrictHandling`, or of its spelling."""
    mode = getattr(strict, "value", strict)
    if mode not in MODES:
        raise UsageError(f"strict={strict!r}: pass a StrictHandling, or one of {', '.join(map(repr, MODES))}")
    return str(mode)


def check_strategy(name: str, strategy: Any) -> None:
    """Refuse a strategy other than those of Megatron that this library replaces.

    Raises
    ------
    UnsupportedError
        The strategy would write or read other files.
    """
    if strategy is None or (isinstance(strategy, tuple) and strategy[:1] in (("torch_dist",), ("torch",))):
        return
    known = ("TorchDist", "TorchCommon", "FullyParallel")
    if any(kind.__name__.startswith(known) and kind.__module__.startswith("megatron.") for kind in type(strategy).__mro__):
        return
    raise UnsupportedError(
        f"{name}={strategy!r}: only Megatron's strategies for torch_dist are replaced; leave it out, or call "
        "megatron.core.dist_checkpointing"
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """The missing keys, which no rank's tree has, and the unexpected keys of this rank's tree."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    absent: frozenset[str]
    """The names of this rank's tensors and objects whose keys are unexpected."""


def saved_keys(catalog: Catalog) -> frozenset[str]:
    """Return the keys of a checkpoint's tensors and objects, without the common state."""
    objects = (key_of_object(name) for name in catalog.value_names if name != COMMON_OBJECT)
    return frozenset((*map(checkpoint_key, catalog.names), *(key for key in objects if key is not None)))


def compare_keys(comm: Comm, catalog: Catalog, node: Node, mode: str) -> Keys:
    """Compare the keys of all ranks' trees with those of the checkpoint. Collective.

    Raises
    ------
    MismatchError
        They differ, and the mode asks for an error; all ranks raise the same one.
    """
    names = {entry.name: entry.name for entry in entries_of(node)}
    names |= {part.name: key_of_object(part.name) or part.name for part in objects_of(node)}
    own, saved = frozenset(names.values()), saved_keys(catalog)
    # Two collectives, on every rank: gather the keys on rank 0, and broadcast their union.
    wanted = frozenset(merge_of_all(comm, sorted(own), lambda keys: sorted({key for of_rank in keys for key in of_rank})))
    missing = saved - wanted if mode.endswith("_all") else frozenset()
    # From here on, all ranks have the same `wanted` and `missing`, so all raise the same error.
    lines = [f"{key}: not in the checkpoint" for key in sorted(wanted - saved)]
    lines += [f"{key}: in the checkpoint, but in no rank's tree" for key in sorted(missing)]
    if lines and mode.startswith("raise"):
        raise MismatchError(summarize(lines, "load with strict='return_all' to load what is in both"), lines)
    if lines and mode.startswith("log") and comm.rank == 0:
        _log.warning("%s", summarize(lines, "they are left out"))
    absent = frozenset(name for name, key in names.items() if key not in saved)
    return Keys(missing, own - saved, absent)
