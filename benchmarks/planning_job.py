"""A synthetic training job at the scale of Llama 3.1 405B, as the columns that its ranks would send, without tensors.

Ranks stand on pp × dp × tp. Weights are sharded over tp and replicated over dp. The three fp32 states of the optimizer are
flat-sharded over dp as Megatron's distributed optimizer does it: the tp-local parameters of a stage are laid end to end, in
buckets of whole parameters, and each bucket is cut into dp equal runs, wherever these begin and end. A rank names only the
optimizer states of which it holds something, so dp ranks have different lists of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from reshard_ckpt.core.catalog.specs import (
    Ints,
    Mesh,
    Piece,
    Replication,
    StateLink,
    TensorSpec,
    ValueKind,
    ValueSpec,
    box_piece,
    row_major_strides,
)
from reshard_ckpt.core.planning.local_metadata import LocalMetadata, build_local_metadata
from reshard_ckpt.engine.saving.local_shards import local_values
from reshard_ckpt.format.values import encode_value

LAYERS, HIDDEN, FFN, KV, VOCAB = 126, 16384, 53248, 1024, 128256
STATES = ("param", "exp_avg", "exp_avg_sq")
RNG_BYTES = 5000


@dataclass(frozen=True)
class Param:
    name: str
    shape: Ints
    tp_dim: int | None


def _layer(i: int) -> list[Param]:
    matrices = {
        "attention.wq": ((HIDDEN, HIDDEN), 0),
        "attention.wk": ((KV, HIDDEN), 0),
        "attention.wv": ((KV, HIDDEN), 0),
        "attention.wo": ((HIDDEN, HIDDEN), 1),
        "feed_forward.w1": ((FFN, HIDDEN), 0),
        "feed_forward.w3": ((FFN, HIDDEN), 0),
        "feed_forward.w2": ((HIDDEN, FFN), 1),
    }
    params = [Param(f"layers.{i}.{name}.weight", shape, dim) for name, (shape, dim) in matrices.items()]
    return [*params, *(Param(f"layers.{i}.{name}.weight", (HIDDEN,), None) for name in ("attention_norm", "ffn_norm"))]


@dataclass(frozen=True)
class Job:
    """One layout of the job; `bucket` is the fewest elements of a bucket of the optimizer."""

    pp: int
    dp: int
    tp: int
    bucket: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(("pp", "dp", "tp"), (self.pp, self.dp, self.tp))

    @cached_property
    def stages(self) -> list[list[Param]]:
        stages = [[p for i in part.tolist() for p in _layer(i)] for part in np.array_split(np.arange(LAYERS), self.pp)]
        stages[0].insert(0, Param("tok_embeddings.weight", (VOCAB, HIDDEN), 0))
        stages[-1] += [Param("norm.weight", (HIDDEN,), None), Param("output.weight", (VOCAB, HIDDEN), 0)]
        return stages

    def box(self, param: Param, tp: int) -> tuple[Ints, Ints]:
        """Return offsets and lengths of the tp-local shard."""
        lengths = tuple(n // self.tp if d == param.tp_dim else n for d, n in enumerate(param.shape))
        return tuple(tp * n if d == param.tp_dim else 0 for d, n in enumerate(lengths)), lengths

    def buckets(self, stage: int) -> list[tuple[int, int]]:
        """Return the parameters of each bucket: from, to."""
        out, begin, held = [], 0, 0
        for i, param in enumerate(self.stages[stage]):
            held += prod(self.box(param, 0)[1])
            if held >= self.bucket:
                out.append((begin, i + 1))
                begin, held = i + 1, 0
        return out if begin == len(self.stages[stage]) else [*out, (begin, len(self.stages[stage]))]

    def runs(self, stage: int, dp: int) -> list[tuple[int, int, int]]:
        """Return what a dp rank holds of each optimizer state: parameter, start and count in its tp-local shard."""
        out = []
        for begin, end in self.buckets(stage):
            sizes = [prod(self.box(param, 0)[1]) for param in self.stages[stage][begin:end]]
            share = -(-sum(sizes) // self.dp)
            low, high, at = dp * share, (dp + 1) * share, 0
            for i, size in enumerate(sizes):
                first, last = max(low - at, 0), min(high - at, size)
                if last > first:
                    out.append((begin + i, first, last - first))
                at += size
        return out

    def specs(self, rank: int) -> list[TensorSpec]:
        """Return the tensors of one rank."""
        stage, dp, tp = self.mesh.coordinates(rank)
        params, specs = self.stages[stage], []
        for param in params:
            offsets, lengths = self.box(param, tp)
            piece = box_piece(offsets, lengths, 0, row_major_strides(lengths))
            specs.append(TensorSpec(f"model.{param.name}", "BF16", param.shape, (piece,), Replication.DECLARED))
        for (i, start, count), state in product(self.runs(stage, dp), STATES):
            param = params[i]
            offsets, lengths = self.box(param, tp)
            piece = Piece(offsets, lengths, start, count, -start, row_major_strides(lengths))
            link = StateLink("optimizer", param.name, state, f"model.{param.name}")
            specs.append(TensorSpec(link.name, "F32", param.shape, (piece,), Replication.DECLARED, link=link))
        return specs

    def values(self, rank: int, step: int) -> list[ValueSpec]:
        """Return the step, the groups of the stage's parameters, and a state of random numbers of each rank's own."""
        params = self.stages[self.mesh.coordinates(rank)[0]]
        groups = [
            {"lr": 1e-4 / step, "weight_decay": decay, "params": [p.name for p in params if (len(p.shape) > 1) == (decay > 0)]}
            for decay in (0.1, 0.0)
        ]
        return [
            _value("extra.step", ValueKind.PLAIN, step),
            _value("optimizer.param_groups", ValueKind.PARAM_GROUPS, groups),
            _value("extra.rng", ValueKind.PER_RANK, bytes(RNG_BYTES)),
        ]

    def local_metadata(self, rank: int, step: int) -> LocalMetadata:
        """Make the local metadata that one rank sends."""
        values, blobs, own = local_values(self.values(rank, step), rank)
        specs = self.specs(rank)
        per_rank = {len(specs) + i: name for i, name in own.items()}
        metadata = build_local_metadata([*specs, *(blob.spec for blob in blobs)], len(blobs), self.mesh, per_rank)
        return replace(metadata, values=tuple(values))

    def num_rows(self) -> int:
        """Estimate how many rows its catalog has."""
        rows = 0
        for stage, params in enumerate(self.stages):
            runs = sum(end - begin + self.dp - 1 for begin, end in self.buckets(stage))
            rows += self.tp * (len(params) + self.dp + len(STATES) * runs)
        return rows


def _value(name: str, kind: ValueKind, value: object) -> ValueSpec:
    return ValueSpec(name, encode_value(name.split("."), name), kind, encode_value(value, name))


def sized_job(num_ranks: int, num_shards: int) -> Job:
    """Return a job of pp 16 × tp 8 whose buckets are such that its catalog has about this many rows, or somewhat more."""
    if num_ranks % 128:
        raise SystemExit(f"--ranks {num_ranks}: pp 16 × tp 8 needs a multiple of 128")
    jobs = [Job(16, num_ranks // 128, 8, bucket) for bucket in np.geomspace(1 << 20, 1 << 33, 200).astype(int).tolist()]
    return min(jobs, key=lambda job: (job.num_rows() < 0.99 * num_shards, abs(job.num_rows() - num_shards)))
