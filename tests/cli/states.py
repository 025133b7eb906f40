"""Checkpoints of several ranks, made in one process, for the commands to look at: every byte depends on its global position."""

from __future__ import annotations

from pathlib import Path

import torch

from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import (
    Mesh,
    Piece,
    Replication,
    TensorSpec,
    ValueKind,
    ValueSpec,
    box_piece,
    row_major_strides,
)
from reshard_ckpt.format.values import encode_path, encode_value
from reshard_ckpt.storage import open_storage
from tests.jobs import save_job

LAYERS, HIDDEN, VOCAB = 4, 8, 24


def number(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 1000 * salt).reshape(shape)


def weights(step: int = 0) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Every weight, whole, and the dim that tensor parallelism cuts."""
    out: dict[str, tuple[torch.Tensor, int | None]] = {"model.emb": (number((VOCAB, HIDDEN), step), 0)}
    for i in range(LAYERS):
        out[f"model.layers.{i}.up"] = number((2 * HIDDEN, HIDDEN), step + i + 1), 0
        out[f"model.layers.{i}.down"] = number((HIDDEN, 2 * HIDDEN), step + i + 11), 1
        out[f"model.layers.{i}.norm"] = number((HIDDEN,), step + i + 21), None
    return out


def stage_of(name: str, pp: int) -> int:
    return int(name.split(".")[2]) * pp // LAYERS if "layers" in name else 0


def held(name: str, whole: torch.Tensor, dim: int | None, tp: int, at: int) -> tuple[TensorSpec, torch.Tensor]:
    """The shard of a tensor-parallel rank."""
    size = whole.shape[dim] // tp if dim is not None else 0
    part = whole if dim is None else whole.narrow(dim, at * size, size).contiguous()
    offsets = tuple(at * size if d == dim else 0 for d in range(whole.ndim))
    lengths = tuple(part.shape)
    piece = box_piece(offsets, lengths, 0, row_major_strides(lengths))
    return TensorSpec(name, "F32", tuple(whole.shape), (piece,), Replication.DECLARED), part


def flat(
    name: str, whole: torch.Tensor, dim: int | None, tp: int, at: int, dp: int, which: int
) -> tuple[TensorSpec, torch.Tensor]:
    """The flat range of a data-parallel rank, of the tensor-parallel shard."""
    spec, part = held(name, whole, dim, tp, at)
    (box,) = spec.pieces
    # Not where a row ends, so that ranges are no boxes.
    begin, end = (0 if at == 0 else box.count if at == dp else box.count * at // dp + 1 for at in (which, which + 1))
    run = Piece(box.offsets, box.lengths, begin, end - begin, -begin, box.strides)
    return TensorSpec(name, "F32", spec.shape, (run,), Replication.DECLARED), part.reshape(-1)[begin:end].clone()


def save_trained(folder: Path, *, pp: int = 1, dp: int = 1, tp: int = 1, step: int = 0, **changed: torch.Tensor) -> Catalog:
    """Save weights and the flat-sharded state of their optimizer from pp × dp × tp ranks."""
    mesh = Mesh(("pp", "dp", "tp"), (pp, dp, tp))
    whole = {**weights(step), **{name: (tensor, None) for name, tensor in changed.items()}}
    ranks, values = [], []
    for rank in range(mesh.size):
        stage, d, t = mesh.coordinates(rank)
        mine = {name: of for name, of in whole.items() if stage_of(name, pp) == stage}
        moments = {f"optimizer.state.{name.removeprefix('model.')}.exp_avg": of for name, of in mine.items()}
        ranks.append(
            [held(name, w, dim, tp, t) for name, (w, dim) in mine.items()]
            + [flat(name, w + 0.5, dim, tp, t, dp, d) for name, (w, dim) in moments.items()]
        )
        groups = [{"lr": 0.1, "params": [name.removeprefix("model.") for name in mine]}]
        values.append(
            [
                ValueSpec(name, encode_path(name.split(".")), kind, encode_value(value, name))
                for name, kind, value in (
                    ("extra.step", ValueKind.PLAIN, step),
                    ("extra.rng", ValueKind.PER_RANK, bytes([rank])),
                    ("optimizer.param_groups", ValueKind.PARAM_GROUPS, groups),
                )
            ]
        )
    with open_storage(folder) as storage:
        return save_job(storage, ranks, values, mesh)
