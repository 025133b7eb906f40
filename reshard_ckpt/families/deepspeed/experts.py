"""Experts that DeepSpeed's MoE divides among data-parallel ranks: which they are of the whole model, and who shares their state.

Consecutive data-parallel ranks divide the experts of a layer evenly. Each rank numbers its own from 0, in the names of their
parameters; the number in the whole model follows from the rank. A group of the optimizer that has experts is divided among those
ranks alone that have the same ones: its ``partition_count`` is smaller than that of other groups. So which experts a rank has,
and which part of their state, follows from ``partition_count`` and the rank:

>>> placed_groups([4, 2], 4, 3)
(GroupPlace(rank=3, expert_rank=0), GroupPlace(rank=1, expert_rank=1))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CorruptError, UnsupportedError
from .folder import TagFiles
from .layout import Params

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d{1,6})(?P<rest>\..*)")
_MODULE_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which part of a group of the optimizer a rank has: that of `rank`, of the experts that `expert_rank` has."""

    rank: int
    expert_rank: int = 0


def placed_groups(num_ranks: Sequence[int], num_dp: int, dp: int) -> tuple[GroupPlace, ...]:
    """Return the place of a data-parallel rank in each group, given how many ranks share each.

    Raises
    ------
    CorruptError
        They are no equal parts of the ranks.
    """
    wrong = next((num for num in num_ranks if type(num) is not int or num < 1 or num_dp % num), None)
    if wrong is not None:
        raise CorruptError(
            f"a group of the optimizer is divided among {wrong!r} of {num_dp} data-parallel ranks; use another copy"
        )
    return tuple(GroupPlace(dp // (num_dp // num), dp % (num_dp // num)) for num in num_ranks)


def is_expert(name: str) -> bool:
    """Tell whether this is the name of a parameter or buffer of an expert."""
    return _EXPERT.fullmatch(name) is not None


def num_local_experts(names: Iterable[str]) -> dict[str, int]:
    """Count the experts that a rank has of each layer, from the names of their parameters."""
    found: dict[str, int] = {}
    for name in names:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            found[expert["layer"]] = max(found.get(expert["layer"], 0), int(expert["number"]) + 1)
    return found


def global_name(name: str, num_local: Mapping[str, int], expert_rank: int) -> str:
    """Return the name that a parameter of a rank has in the whole model.

    >>> global_name("moe.deepspeed_moe.experts.deepspeed_experts.1.w", {"moe.deepspeed_moe.experts.deepspeed_experts.": 2}, 1)
    'moe.deepspeed_moe.experts.deepspeed_experts.3.w'
    """
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    return f"{expert['layer']}{int(expert['number']) + expert_rank * num_local[expert['layer']]}{expert['rest']}"


def named_globally(groups: Sequence[Params], places: Sequence[GroupPlace]) -> list[Params]:
    """Return the groups of a rank with the names that their parameters have in the whole model."""
    if not any(place.expert_rank for place in places):
        return list(groups)
    num_local = num_local_experts(name for group in groups for name in group.names)
    return [
        replace(group, names=tuple(global_name(name, num_local, place.expert_rank) for name in group.names))
        for group, place in zip(groups, places, strict=True)
    ]


def module_files(files: TagFiles, where: str, content: Mapping[str, Any]) -> list[str]:
    """List the files of experts that hold tensors of the module, under the names of the whole model.

    Parameters
    ----------
    content
        The values of the first file of model states.

    Raises
    ------
    UnsupportedError
        The experts are divided in a way that is not read.
    """
    if not files.experts:
        return []
    how = "save with reshard_ckpt.integrations.deepspeed attached to the engine, or the module's state dict"
    if content.get("ds_autoep_layers"):
        raise UnsupportedError(
            f"{where}: has experts that AutoEP divides among ranks, which are not read; save the module's state dict"
        )
    if files.num_models > 1 or files.layers or files.universal is not None:
        raise UnsupportedError(
            f"{where}: has {files.experts[0]} beside model parallelism or universal files: experts are read of data-parallel "
            f"jobs; {how}"
        )
    return [key for key in files.experts if _MODULE_FILE.fullmatch(key)]


def refuse_other_order(config: Any, where: str) -> None:
    """Refuse experts whose ranks are not consecutive, as the config of the job says."""
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism"):
        raise UnsupportedError(
            f"{where}: use_data_before_expert_parallelism numbers the ranks of experts otherwise, which is not read; save the "
            "module's state dict"
        )
