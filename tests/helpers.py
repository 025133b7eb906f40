"""A checkpoint in memory, by the plainest means: whole tensors and a catalog without files, to test the adapters against.

`save` assembles what all ranks captured, element by element, and refuses holes and contradictions; `load` judges and fills a
target as the engine would, without any planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from reshard_ckpt.core.catalog.model import BoxTable, Catalog, RowTable, TensorKind, TensorTable, ValueEntry
from reshard_ckpt.core.catalog.names import link_columns
from reshard_ckpt.core.catalog.param_groups import merge
from reshard_ckpt.core.catalog.problems import ELSEWHERE, Problem
from reshard_ckpt.core.catalog.specs import CODES, Piece, StateLink, ValueKind
from reshard_ckpt.errors import MismatchError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.format.values import decode_value
from reshard_ckpt.state import Captured, LocalTensor, PerRankValues, prepare_load

NEWER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)
"""Torch 2.6 refuses to shard sizes that do not divide over FSDP2 and tensor parallelism at once, and runs no forward of FSDP2 on
the CPU. Its DCP mistakes some uneven shards when it saves, takes no group without rank 0 and no ``no_dist``, and has no state for
the second name of a tied weight in the flat form."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its catalog, whole tensors (None where an alias has none of its own) and decoded values, by name."""

    catalog: Catalog
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    aliases: dict[str, str]


def position_values(shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """A tensor whose every element tells its global position."""
    return (torch.arange(prod(shape), dtype=torch.float64) * 2 + 1 + 1000 * salt).to(dtype).reshape(tuple(shape))


def places(piece: Piece) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Where each element of a piece is in memory, and its global coordinates."""
    inner = np.indices(piece.lengths).reshape(len(piece.lengths), prod(piece.lengths))[:, piece.start : piece.start + piece.count]
    strides = np.array(piece.strides, dtype=np.int64).reshape(-1, 1)
    coordinates = inner + np.array(piece.offsets, dtype=np.int64).reshape(-1, 1)
    return piece.base + (inner * strides).sum(axis=0), tuple(coordinates)


def elements(memory: torch.Tensor, at: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The storage that a tensor lies in, as bytes by element, and the places in it."""
    flat = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage())
    where = torch.from_numpy(at) + memory.storage_offset()
    assert len(where) == 0 or 0 <= int(where.min()) <= int(where.max()) < flat.numel()
    return flat.view(torch.uint8).view(-1, memory.dtype.itemsize), where


def as_bytes(whole: torch.Tensor) -> torch.Tensor:
    return whole.reshape(-1).view(torch.uint8).view(-1, whole.dtype.itemsize)


def flat_index(coordinates: tuple[np.ndarray, ...], shape: Sequence[int]) -> torch.Tensor:
    if not shape:
        return torch.zeros(1, dtype=torch.int64)
    return torch.from_numpy(np.ravel_multi_index(coordinates, tuple(shape)).astype(np.int64))


def save(captures: Sequence[Captured]) -> Saved:
    """The checkpoint of what each rank captured."""
    entries = [entry for captured in captures for entry in captured.tensors]
    tensors: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    aliases = {e.spec.name: e.spec.alias_of for e in entries if e.spec.alias_of is not None}
    for entry in entries:
        name, shape, dtype = entry.spec.name, entry.spec.shape, TORCH_DTYPES[entry.spec.dtype]
        assert entry.memory.dtype == dtype
        whole = tensors.setdefault(name, torch.zeros(shape, dtype=dtype))
        seen = covered.setdefault(name, torch.zeros(prod(shape), dtype=torch.bool))
        assert (whole.shape, whole.dtype) == (torch.Size(shape), dtype), name
        for piece in entry.spec.pieces:
            at, coordinates = places(piece)
            source, where = elements(entry.memory, at)
            target, index = as_bytes(whole), flat_index(coordinates, shape)
            again = seen[index]
            assert torch.equal(target[index][again], source[where][again]), f"{name}: ranks contradict each other"
            target[index] = source[where]
            seen[index] = True
    holes = [name for name, seen in covered.items() if not bool(seen.all())]
    assert not holes, f"not covered: {holes}"
    values, table = _values(captures)
    links = {e.spec.name: e.spec.link for e in entries}
    return Saved(_catalog(tensors, aliases, links, table), tensors, values, aliases)


def _values(captures: Sequence[Captured]) -> tuple[dict[str, Any], list[ValueEntry]]:
    specs = {spec.name: spec for captured in captures for spec in captured.values}
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        by_rank = [[decode_value(s.data) for s in captured.values if s.name == name] for captured in captures]
        assert all(s.kind == spec.kind and s.path == spec.path for c in captures for s in c.values if s.name == name)
        if spec.kind == ValueKind.PER_RANK:
            values[name] = PerRankValues(tuple(v[0] for v in by_rank))
        elif spec.kind == ValueKind.PARAM_GROUPS:
            values[name] = merge([(f"rank {r}", v[0]) for r, v in enumerate(by_rank) if v], name=name)
        else:
            assert len({s.data for c in captures for s in c.values if s.name == name}) == 1, name
            values[name] = next(v[0] for v in by_rank if v)
    return values, [ValueEntry(spec.name, spec.path, spec.kind, spec.data, link=spec.link) for spec in specs.values()]


def _catalog(
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    links: Mapping[str, StateLink | None],
    values: Sequence[ValueEntry],
) -> Catalog:
    names = sorted(tensors)
    codes = {dtype: code for code, dtype in TORCH_DTYPES.items()}
    width = max([tensors[name].ndim for name in names], default=0)
    shape = [[1] * (width - tensors[name].ndim) + list(tensors[name].shape) for name in names]
    none = np.zeros(0, dtype=np.int64)
    return Catalog(
        save_id="test",
        created_s=0.0,
        mesh=None,
        metadata=None,
        tensors_table=TensorTable(
            names=tuple(names),
            dtype=np.array([CODES.index(codes[tensors[name].dtype]) for name in names], dtype=np.uint8),
            kind=np.full(len(names), TensorKind.TENSOR, dtype=np.uint8),
            ndim=np.array([tensors[name].ndim for name in names], dtype=np.int64),
            shape=np.array(shape, dtype=np.int64).reshape(len(names), width),
            alias=np.array([names.index(aliases[n]) if n in aliases else -1 for n in names], dtype=np.int64),
            placement=np.full(len(names), -1, dtype=np.int64),
            row_start=np.zeros(len(names) + 1, dtype=np.int64),
            **link_columns(names, [links[name] for name in names], {name: i for i, name in enumerate(names)}),
        ),
        placements=(),
        boxes=BoxTable(none.reshape(0, width), none.reshape(0, width)),
        rows=RowTable(none, none, none, none, none),
        files=(),
        values_table=tuple(values),
    )


def load(
    saved: Saved, state: Any, *, rank: int = 0, size: int = 1, strict: bool = True, wanted: set[str] | None = None
) -> list[str]:
    """Fill a state; the problems, which with `strict` raise before anything changes.

    `wanted` are the tensors that other ranks want; without it, unexpected tensors are not looked for.
    """
    target = prepare_load(state, saved.catalog, rank=rank, size=size)
    below = [n for n in (*saved.tensors, *saved.values) if any(n == p or n.startswith(f"{p}.") for p in target.prefixes)]
    mine = {name: value for name, value in saved.values.items() if name in below}
    bad = {e.spec.name: why for e in target.tensors if (why := _mismatch(saved, e))}
    problems = [*bad.values(), *(f"{name}: missing value" for name in target.values if name not in saved.values)]
    if wanted is not None:
        known = wanted | {e.spec.name for e in target.tensors}
        problems += [f"{name}: unexpected" for name in below if name in saved.tensors and name not in known]
    # With several ranks, only the vote knows whether any of them takes a value.
    problems += [line for line in target.check(mine) if size == 1 or Problem.of(line).cure != ELSEWHERE]
    if strict and problems:
        raise MismatchError("\n".join(problems), problems)
    for entry in target.tensors:
        if entry.spec.name not in bad:
            fill(entry, saved.tensors[entry.spec.name])
    target.finish(mine, frozenset(bad))
    return problems


def _mismatch(saved: Saved, entry: LocalTensor) -> str | None:
    spec, whole = entry.spec, saved.tensors.get(entry.spec.name)
    if whole is None:
        return f"{spec.name}: missing"
    if tuple(whole.shape) != spec.shape:
        return f"{spec.name}: shape {tuple(whole.shape)}, wanted {spec.shape}"
    return None if whole.dtype == entry.memory.dtype else f"{spec.name}: dtype {whole.dtype}, wanted {entry.memory.dtype}"


def fill(entry: LocalTensor, whole: torch.Tensor) -> None:
    for piece in entry.spec.pieces:
        at, coordinates = places(piece)
        memory, where = elements(entry.memory, at)
        memory[where] = as_bytes(whole)[flat_index(coordinates, entry.spec.shape)]
