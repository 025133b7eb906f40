"""The state that one save of a DeepSpeed engine takes from this rank.

1. Tensors in the layout of the engine (`engine_state`), live.
2. Buffers, copied: from the first of the ranks that have the same layers; buffers of experts from every rank.
3. DeepSpeed's and the user's values, from rank 0. The user's tensors are copied when DeepSpeed hands them over (`copied`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import is_plain
from ...plugins.trees import map_tree
from .engine_state import EngineState
from .values import Path


def copied(value: Any) -> Any:
    """Copy the tensors in a value of the user, who may change them during the save."""

    def change(path: Path, node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node.detach().clone()
        return copy.copy(node) if isinstance(node, Mapping) and type(node) is not dict else node  # such as a Counter

    return map_tree(change, value)


def state_of(engine: Any, values: Mapping[str, Any], kept: frozenset[str] | None) -> dict[str, Any]:
    """Return the state to save: this rank's tensors, the buffers if this rank is the first with them, values on rank 0.

    Parameters
    ----------
    kept
        The names in the module that DeepSpeed would save: not all of them with ``exclude_frozen_parameters``. None means all.
    """
    held = EngineState(engine)
    model, state = held.tensors(with_state=True)
    buffers = held.buffers(of_experts_alone=not _is_first(engine))
    model |= {name: buffer.detach().clone() for name, buffer in buffers.items()}
    if kept is not None:
        kept = frozenset(map(held.name, kept))
        model = {name: part for name, part in model.items() if name in kept}
    tree: dict[str, Any] = {"model": model} if model else {}
    if engine.optimizer is not None:
        tree["optimizer"] = {"state": state, "param_groups": held.groups()}
    if dist.get_rank() == 0:
        tree["deepspeed"] = _plain_values(values, engine.optimizer)
    return tree


def _is_first(engine: Any) -> bool:
    """Tell whether this rank is the first of the ranks that have the same layers."""
    from deepspeed.utils import groups

    if groups._get_sequence_data_parallel_rank() != 0:
        return False
    size = engine.autotp_size() if hasattr(engine, "autotp_size") else 0
    return not size or size < 2 or dist.get_rank(group=groups.get_tensor_model_parallel_group()) == 0


_OF_OPTIMIZER = ("dynamic_loss_scale", "overflow", "clip_grad", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
                 "scale_window")  # fmt: skip


def _plain_values(values: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return DeepSpeed's values and the user's, without a config that cannot be encoded, and with the optimizer's own values.

    Raises
    ------
    UnsupportedError
        A value is not plain; the message has its key.
    """
    found = dict(values)
    if not is_plain(found.get("ds_config")):  # it may hold objects, and a job that resumes has its own config
        found.pop("ds_config", None)
    own: dict[str, Any] = {}
    if optimizer is not None:
        state = optimizer.state_dict()
        own = {key: state[key] for key in _OF_OPTIMIZER if key in state}
        if "loss_scaler" in state:
            own["loss_scaler"] = dict(vars(state["loss_scaler"]))
        if "zero_stage" in state:
            own["zero_stage"] = int(state["zero_stage"])
    return {**found, "optimizer": own} if own else found
