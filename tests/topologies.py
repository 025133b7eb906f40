"""Whole jobs on any mesh, by the plainest means: what each rank of a small transformer's training holds, made from index lists.

They say what a reshard must come to: the same files as if that job itself had saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

import torch

from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import (
    AxisPlacement,
    Ints,
    Mesh,
    Piece,
    Replication,
    TensorSpec,
    ValueKind,
    ValueSpec,
    row_major_strides,
)
from reshard_ckpt.format.values import encode_path, encode_value
from reshard_ckpt.storage import Storage, open_storage
from tests.jobs import Tensors, save_job
from tests.layouts import chunk, pack_boxes, values_of

Box = tuple[Ints, Ints]


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, the dim that tp cuts, the sections of that dim that are cut alone, and where it is."""

    name: str
    shape: Ints
    tp: int | None = None
    sections: Ints = ()
    layer: int | None = None
    last: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Job:
    """A training job. `zero`: None (state like parameters), "vector" (flat over dp as one vector), "each" (each flat)."""

    mesh: Mapping[str, int]
    weights: Sequence[Weight]
    layers: int
    fsdp: bool = False
    zero: str | None = None
    boundaries: Ints | None = None
    experts: int = 1
    own_values: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def core_mesh(self) -> Mesh:
        return Mesh(tuple(self.mesh), tuple(self.mesh.values()))

    @property
    def size(self) -> int:
        return prod(self.mesh.values())


def transformer(layers: int, hidden: int, vocab: int, *, fused: bool = False, experts: int = 0) -> list[Weight]:
    """Parameters in the order of their definition."""
    out = [Weight("emb.weight", (vocab, hidden), 0)]
    for i in range(layers):
        sections = (2 * hidden, hidden, hidden) if fused else ()
        out += [
            Weight(f"layers.{i}.qkv.weight", (4 * hidden, hidden), 0, sections, layer=i),
            Weight(f"layers.{i}.out.weight", (hidden, 2 * hidden), 1, layer=i),
            Weight(f"layers.{i}.norm.weight", (hidden,), layer=i),
        ]
        out += [Weight(f"layers.{i}.experts.{e}.w", (hidden, 3), layer=i, expert=e) for e in range(experts)]
    return [*out, Weight("norm.weight", (hidden,), last=True), Weight("head.weight", (vocab, hidden), 0, last=True)]


def stage_of(job: Job, weight: Weight) -> int:
    pp = job.mesh.get("pp", 1)
    if weight.layer is None:
        return pp - 1 if weight.last else 0
    if job.boundaries is not None:
        return sum(weight.layer >= b for b in job.boundaries)
    return next(s for s in range(pp) if weight.layer < job.layers * (s + 1) // pp)


def is_on(job: Job, weight: Weight, where: Mapping[str, int]) -> bool:
    ep = job.mesh.get("ep", 1)
    stages = {stage_of(job, weight)}
    tied = {**job.aliases, **{b: a for a, b in job.aliases.items()}}
    if weight.name in tied:
        stages.add(stage_of(job, next(w for w in job.weights if w.name == tied[weight.name])))
    if where.get("pp", 0) not in stages:
        return False
    return weight.expert is None or where.get("ep", 0) == weight.expert * ep // job.experts


def ranges_of(job: Job, weight: Weight, dim: int, where: Mapping[str, int]) -> list[tuple[int, int]]:
    """Index lists, cut by tp first and then by dp, put together to ranges again."""
    size = weight.shape[dim]
    parts = [list(range(size))]
    if weight.tp == dim:
        sections = weight.sections or (size,)
        ends = [sum(sections[: i + 1]) for i in range(len(sections))]
        parts = []
        for end, length in zip(ends, sections, strict=True):
            begin, num = chunk(length, job.mesh.get("tp", 1), where.get("tp", 0))
            parts.append(list(range(end - length + begin, end - length + begin + num)))
    indices = [i for part in parts for i in part]
    if job.fsdp and dim == 0:
        begin, num = chunk(len(indices), job.mesh.get("dp", 1), where.get("dp", 0))
        indices = indices[begin : begin + num]
    return joined(indices)


def joined(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Put indices together to ranges: the begin and the length of each."""
    out: list[tuple[int, int]] = []
    for i in indices:
        if out and sum(out[-1]) == i:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((i, 1))
    return out


def cleared(url: str) -> Storage:
    """Open a storage in memory with nothing in it."""
    storage = open_storage(url)
    storage.delete([key for key, _ in storage.list()])
    return storage


def boxes_of(job: Job, weight: Weight, where: Mapping[str, int]) -> list[Box]:
    ranges = [ranges_of(job, weight, dim, where) for dim in range(len(weight.shape))]
    return [(tuple(r[0] for r in chosen), tuple(r[1] for r in chosen)) for chosen in product(*ranges)]


def memory_of(whole: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    return torch.cat(parts) if parts else whole.new_empty(0)


def placement_of(job: Job, weight: Weight) -> tuple[AxisPlacement, ...]:
    """What the DTensor of a weight would declare."""
    out = []
    for axis in job.mesh:
        dim = weight.tp if axis == "tp" else 0 if axis == "dp" and job.fsdp else None
        if axis in ("tp", "dp"):
            out.append(AxisPlacement(axis, "replicate" if dim is None else "shard", dim))
    return tuple(out)


def flat_runs(job: Job, held: Sequence[tuple[Weight, list[Box]]], dp: int) -> dict[str, list[Piece]]:
    """The runs of each weight that a dp rank has state for, when the boxes of all are one vector, or each of its own."""
    num, out, at = job.mesh.get("dp", 1), {}, 0
    total = sum(prod(n) for _, boxes in held for _, n in boxes)
    for weight, boxes in held:
        size = sum(prod(n) for _, n in boxes)
        base, length = (0, size) if job.zero == "each" else (at, total)
        step = -(-length // num)
        low, high = max(dp * step - base, 0), min((dp + 1) * step - base, size)
        pieces, position = [], 0
        for offsets, lengths in boxes:
            start, stop = max(low - position, 0), min(high - position, prod(lengths))
            if start < stop:
                place = max(position - low, 0) - start
                pieces.append(Piece(offsets, lengths, start, stop - start, place, row_major_strides(lengths)))
            position += prod(lengths)
        out[weight.name] = pieces
        at += size
    return out


@lru_cache(maxsize=1024)
def whole_of(name: str, shape: Ints, dtype: str) -> torch.Tensor:
    return values_of(shape, dtype, sum(map(ord, name)))


def hold_rank(job: Job, rank: int) -> tuple[Tensors, list[ValueSpec]]:
    """All that one rank of the job holds."""
    where = dict(zip(job.mesh, job.core_mesh.coordinates(rank), strict=True))
    held = [(w, boxes_of(job, w, where)) for w in job.weights if is_on(job, w, where)]
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    present = {w.name for w, _ in held}
    for weight, boxes in held:
        pieces, _ = pack_boxes(boxes)
        main = job.aliases.get(weight.name)
        alias = f"model.{main}" if main in present else None
        whole = whole_of(main or weight.name, weight.shape, "BF16")
        spec = TensorSpec(
            f"model.{weight.name}", "BF16", weight.shape, pieces, Replication.DECLARED, placement_of(job, weight), alias
        )
        tensors.append((spec, memory_of(whole, boxes)))
    trained = [(w, boxes) for w, boxes in held if w.name not in job.aliases]
    runs = flat_runs(job, trained, where.get("dp", 0)) if job.zero else {}
    for weight, boxes in trained:
        if job.zero == "vector" and not runs[weight.name]:
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            name = f"optimizer.state.{weight.name}.{key}"
            whole = whole_of(name, weight.shape, "F32")
            if job.zero:
                mine = tuple(runs[weight.name])
                parts = [whole.new_empty(0)]
                parts += [memory_of(whole, [(p.offsets, p.lengths)])[p.start : p.start + p.count] for p in mine]
                tensors.append((TensorSpec(name, "F32", weight.shape, mine, Replication.DECLARED), torch.cat(parts)))
            else:
                spec = TensorSpec(
                    name, "F32", weight.shape, pack_boxes(boxes)[0], Replication.DECLARED, placement_of(job, weight)
                )
                tensors.append((spec, memory_of(whole, boxes)))
        scalar = Piece((), (), 0, 1, 0, ())
        spec = TensorSpec(f"optimizer.state.{weight.name}.step", "F32", (), (scalar,), Replication.DECLARED)
        tensors.append((spec, torch.tensor([7.0])))
    return tensors, _values(job, trained, rank)


def _values(job: Job, trained: Sequence[tuple[Weight, list[Box]]], rank: int) -> list[ValueSpec]:
    groups = [{"lr": 0.5, "params": [w.name for w, _ in trained]}]

    def value(name: str, kind: ValueKind, thing: object) -> ValueSpec:
        return ValueSpec(name, encode_path(name.split(".")), kind, encode_value(thing, name))

    out = [
        value("optimizer.param_groups", ValueKind.PARAM_GROUPS, groups),
        value("extra.step", ValueKind.PLAIN, 100),
        value("extra.large", ValueKind.PLAIN, "x" * 5000),
    ]
    return [*out, value("extra.rng", ValueKind.PER_RANK, rank)] if job.own_values else out


def save(job: Job, storage: Storage) -> Catalog:
    """What the job itself saves."""
    ranks = [hold_rank(job, rank) for rank in range(job.size)]
    return save_job(storage, [tensors for tensors, _ in ranks], [values for _, values in ranks], job.core_mesh)
