"""Experts that DeepSpeed's MoE divides among data-parallel ranks: their numbers in the whole model, and who shares their state.

Consecutive data-parallel ranks divide the experts of a layer evenly. In the names of parameters, each rank numbers its experts
from 0; the number in the whole model follows from the rank. An optimizer group with experts is divided only among the ranks that
have the same experts, so its ``partition_count`` is smaller than that of other groups. Therefore ``partition_count`` and the rank
tell which experts a rank has, and which part of their state:

>>> placed_groups([4, 2], 4, 3)
(GroupPlace(rank=3, expert_rank=0), GroupPlace(rank=1, expert_rank=1))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...plugins.errors import CorruptError, UnsupportedError
from .folder import TagFiles
from .places import Params

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d{1,6})(?P<rest>\..*)")
_MODULE_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The part of an optimizer group that a rank has: part number `rank`, of the experts with the number `expert_rank`."""

    rank: int
    expert_rank: int = 0


def placed_groups(num_ranks: Sequence[int], num_dp: int, dp: int) -> tuple[GroupPlace, ...]:
    """Return the place of data-parallel rank `dp` in each group; `num_ranks` is the number of ranks that share each group.

    Raises
    ------
    CorruptError
        The ranks cannot be divided into groups of equal size.
    """
    wrong = next((num for num in num_ranks if type(num) is not int or num < 1 or num_dp % num), None)
    if wrong is not None:
        raise CorruptError(
            f"a group of the optimizer is divided among {wrong!r} of {num_dp} data-parallel ranks; use another copy"
        )
    return tuple(GroupPlace(dp // (num_dp // num), dp % (num_dp // num)) for num in num_ranks)


def is_expert(name: str) -> bool:
    """Tell whether a name is that of an expert's parameter or buffer."""
    return _EXPERT.fullmatch(name) is not None


def num_local_experts(names: Iterable[str]) -> dict[str, int]:
    """Count the experts of each layer on a rank, from the names of their parameters."""
    found: dict[str, int] = {}
    for name in names:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            found[expert["layer"]] = max(found.get(expert["layer"], 0), int(expert["number"]) + 1)
    return found


def global_name(name: str, num_local: Mapping[str, int], expert_rank: int) -> str:
    """Convert the name of a parameter on one rank to its name in the whole model.

    >>> global_name("moe.deepspeed_moe.experts.deepspeed_experts.1.w", {"moe.deepspeed_moe.experts.deepspeed_experts.": 2}, 1)
    'moe.deepspeed_moe.experts.deepspeed_experts.3.w'
    """
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    return f"{expert['layer']}{int(expert['number']) + expert_rank * num_local[expert['layer']]}{expert['rest']}"


def named_globally(groups: Sequence[Params], places: Sequence[GroupPlace]) -> list[Params]:
    """Return the groups of a rank under the names that their parameters have in the whole model."""
    if not any(place.expert_rank for place in places):
        return list(groups)
    num_local = num_local_experts(name for group in groups for name in group.names)
    return [
        replace(group, names=tuple(global_name(name, num_local, place.expert_rank) for name in group.names))
        for group, place in zip(groups, places, strict=True)
    ]


def module_files(files: TagFiles, where: str, content: Mapping[str, Any]) -> list[str]:
    """List the files of experts that hold tensors of the module, under their names in the whole model.

    Parameters
    ----------
    content
        The content of the first file of model states.

    Raises
    ------
    UnsupportedError
        The experts are divided in a way that cannot be read.
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
    """Refuse experts whose ranks are not consecutive; the config of the job tells."""
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism"):
        raise UnsupportedError(
            f"{where}: use_data_before_expert_parallelism numbers the ranks of experts otherwise, which is not read; save the "
            "module's state dict"
        )
