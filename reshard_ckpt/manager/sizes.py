"""A calculator of the disk and host memory that the checkpoints of a job take.

1. A checkpoint holds each element once in any layout: parameters, fp32 masters, and the optimizer's tensors, and 8 bytes of
   digests for each block.
2. Ranks share the writing. Each stages its part in a ring of host memory, or in slots of the memory tier.
3. An old checkpoint is removed after the commit of a new one, so for a moment a run has one checkpoint more than it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from ..core.catalog.specs import ITEM_BYTES
from ..core.report import check_count
from ..engine.saving.staging import MIN_RING_BYTES, STEP_BYTES
from ..errors import UsageError
from ..format.columns import TORCH_NAMES
from ..format.dtypes import code_named
from ..format.files import digests_file_bytes
from ..memory.options import Memory
from ..memory.slots import slot_bytes
from .retention import Retention

OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0, "none": 0}
"""Number of tensors of a parameter's size that each optimizer keeps for it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that the checkpoints of a job take.

    Attributes
    ----------
    tensor_bytes
        Tensors of one checkpoint.
    checkpoint_bytes
        One checkpoint on disk: tensors and digests. Catalog and file headers add some 100 to 300 bytes a shard.
    num_kept
        Number of checkpoints that the run keeps, at the end of `steps`.
    run_bytes, peak_bytes
        Bytes of all kept checkpoints on disk; the peak has one more, because a new checkpoint is complete before an older one is
        removed.
    rank_bytes
        Bytes that one rank writes for a checkpoint.
    staging_rank_bytes, staging_node_bytes
        Host memory of `async_save`, kept from one save to the next. 0 with the memory tier, which stages in its slots.
    memory_node_bytes
        Bytes of the memory tier on a node; 0 without it.
    """

    tensor_bytes: int
    checkpoint_bytes: int
    num_kept: int
    run_bytes: int
    peak_bytes: int
    rank_bytes: int
    staging_rank_bytes: int
    staging_node_bytes: int
    memory_node_bytes: int


def sizes(
    parameters: float,
    *,
    dtype: str | torch.dtype = "float32",
    optimizer: str = "adamw",
    optimizer_dtype: str | torch.dtype | None = None,
    masters: bool = False,
    ranks: int = 1,
    nodes: int = 1,
    keep_last: int = 1,
    keep_every: int | None = None,
    keep_best: int = 0,
    steps: int = 0,
    save_every: int = 1,
    host_buffer_bytes: int | None = None,
    memory: Memory | None = None,
) -> Sizes:
    """Compute the bytes that the checkpoints of a job take on disk and in host memory. Nothing is read or measured.

    It assumes that all ranks write equally many bytes, as under FSDP, DDP or a sharded optimizer. They do not with pipeline
    stages of unequal size, or with large replicas and ``replicas="sample"``.

    Parameters
    ----------
    parameters
        Number of parameters of the whole model.
    dtype
        Dtype of the saved parameters: ``"bfloat16"``, ``"float32"``, …
    optimizer, optimizer_dtype
        ``"adamw"``, ``"adam"``, ``"lion"``, ``"momentum"``, ``"sgd"`` or ``"none"``, and the dtype of its tensors: by default
        the dtype of the parameters, or float32 with masters.
    masters
        Whether the optimizer holds float32 copies of the parameters, as Megatron and DeepSpeed do.
    ranks, nodes
        Number of processes, and of machines.
    keep_last, keep_every, keep_best
        As for `Manager`. `keep_every` needs `steps` and `save_every`.
    steps, save_every
        Steps of the run, and steps between saves.
    host_buffer_bytes
        As for `async_save`.
    memory
        As for `Manager`.

    Raises
    ------
    UsageError
        A count, a dtype or the optimizer is not valid.

    Examples
    --------
    >>> found = sizes(7e9, ranks=64, nodes=8, keep_last=3)
    >>> found.tensor_bytes, found.num_kept
    (84000000000, 3)
    """
    if isinstance(parameters, bool) or not isinstance(parameters, int | float) or not 1 <= parameters < 1e18:
        raise UsageError(f"parameters={parameters!r}: pass a number, 1 or more and below 1e18")
    for option, count in {"ranks": ranks, "nodes": nodes, "keep_last": keep_last, "save_every": save_every}.items():
        check_count(option, count, 1)
    check_count("steps", steps, 0)
    check_count("host_buffer_bytes", host_buffer_bytes, 1, or_none=True)
    Retention(keep_last, keep_every, keep_best)  # checks them
    if memory is not None and not isinstance(memory, Memory):
        raise UsageError(f"memory={memory!r}: pass checkpoint.Memory(), or None")
    if ranks % nodes:
        raise UsageError(f"ranks={ranks}, nodes={nodes}: pass a number of ranks that the nodes divide evenly")
    if keep_every is not None and steps < save_every:
        raise UsageError(f"keep_every={keep_every}: pass steps= and save_every= too, which say how many are kept")
    if not isinstance(masters, bool):
        raise UsageError(f"masters={masters!r}: pass True or False")
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer={optimizer!r}: pass one of {', '.join(OPTIMIZERS)}; 'none' is for no state")
    item_bytes = _item_bytes("dtype", dtype)
    if optimizer_dtype is None:
        optimizer_dtype = "float32" if masters else dtype
    state_bytes = _item_bytes("optimizer_dtype", optimizer_dtype)
    tensor_bytes = round(parameters) * (item_bytes + 4 * masters + OPTIMIZERS[optimizer] * state_bytes)
    part = -(-tensor_bytes // ranks)  # of one rank
    checkpoint_bytes = tensor_bytes + ranks * digests_file_bytes(part)

    num_saves = steps // save_every
    newest = min(keep_last, num_saves)
    before = (num_saves - newest) * save_every  # the last save that is not among the newest
    every = 0 if keep_every is None else before // lcm(keep_every, save_every)
    num_kept = min(newest + every + keep_best, num_saves) if num_saves else keep_last + keep_best

    whole = -(-part // STEP_BYTES) * STEP_BYTES
    ring = whole if host_buffer_bytes is None else min(whole, max(host_buffer_bytes, MIN_RING_BYTES))
    slots = 0
    if memory is not None:
        if memory.copies >= nodes:
            raise UsageError(f"copies={memory.copies}, nodes={nodes}: copies lie on other nodes; pass fewer")
        ring, slots = 0, (memory.generations + 1) * (memory.copies + 1)
    return Sizes(
        tensor_bytes=tensor_bytes,
        checkpoint_bytes=checkpoint_bytes,
        num_kept=num_kept,
        run_bytes=num_kept * checkpoint_bytes,
        peak_bytes=(num_kept + 1) * checkpoint_bytes,
        rank_bytes=part,
        staging_rank_bytes=ring,
        staging_node_bytes=ring * (ranks // nodes),
        memory_node_bytes=slots * slot_bytes(whole + digests_file_bytes(part)) * (ranks // nodes),
    )


def _item_bytes(option: str, wanted: str | torch.dtype) -> int:
    """Return the size of an element of a dtype in bytes; `option` names the caller's option in the error."""
    code = code_named(wanted)
    if code is None:
        names = ", ".join(sorted(TORCH_NAMES.values()))
        raise UsageError(f"{option}={wanted!r}: not a dtype that can be saved; pass one of {names}")
    return ITEM_BYTES[code]
