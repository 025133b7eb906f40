"""Naming what lies in the buckets of ``dp_reshardable``, where the weights prove it.

A bucket is the flat memory of one rank's parameters, and does not say which they are. But a master weight, rounded to the dtype
of the model, is the weight itself. So:

1. Round the master weights of each bucket, and look in them for each chunk of the model, byte by byte, the largest chunks first.
2. A chunk that fits in exactly one place that no larger one has taken is proved to lie there; the moments lie in the same places
   of their own buckets. A replica in another bucket must have the same master weights.
3. A chunk that fits nowhere, in several places, in one with another of its size, or where a larger one may lie that is not
   proved, is not named; and its parameter says so. Layers that are all ones are such.

All weights and master weights are read for it, a bucket at a time. Where it is known whose memory a bucket is, only what that
rank has is looked for in it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.catalog.model import FileEntry
from ...core.catalog.specs import StateLink
from ...errors import CorruptError, UnsupportedError
from ...format.torch_dtypes import TORCH_DTYPES
from ...formats.catalog_builder import FilePart, ForeignTensor
from ...storage.protocol import Storage
from .names import MASTER, MODEL, OPTIMIZER, is_bucket

MAX_PLACES = 256

MayHold = Callable[[str, FilePart], bool]
"""Whether a bucket, by what stands before its states in their names, can be the memory of a chunk of the model."""

Claim = tuple[int, int]
"""The parameter and its part that lies somewhere."""


@dataclass(slots=True)
class _Found:
    """For each part of each parameter the bucket and place where it is proved to lie, a digest of its master weights there, and
    the parts that are not proved to be where they fit.
    """

    places: dict[Claim, tuple[str, int]] = field(default_factory=dict)
    masters: dict[Claim, bytes] = field(default_factory=dict)
    unproved: set[Claim] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class NamedBuckets:
    """The state of parameters, and the errors of parameters whose state is not proved to be anywhere, by name."""

    tensors: Sequence[ForeignTensor]
    unreadable: Mapping[str, UnsupportedError]


def name_buckets(
    storage: Storage, tensors: Sequence[ForeignTensor], files: Sequence[FileEntry], may_hold: MayHold = lambda prefix, part: True
) -> NamedBuckets:
    """Find the state of every parameter in the buckets that may hold it."""
    buckets: dict[str, dict[str, ForeignTensor]] = {}
    for tensor in tensors:
        if is_bucket(tensor.name):
            prefix, _, key = tensor.name.rpartition(".")
            buckets.setdefault(prefix, {})[key] = tensor
    parameters = [tensor for tensor in tensors if tensor.name.startswith(f"{MODEL}.")]
    found = _Found()
    for prefix, states in buckets.items():
        if MASTER in states:
            _search(storage, files, prefix, states[MASTER], parameters, found, may_hold)
    made: list[ForeignTensor] = []
    unreadable: dict[str, UnsupportedError] = {}
    for i, parameter in enumerate(parameters):
        claims = [(i, j) for j in range(len(parameter.parts))]
        proved = claims and all(claim in found.places and claim not in found.unproved for claim in claims)
        homes = [found.places[claim] for claim in claims] if proved else []
        for key in next(iter(buckets.values()), {}):
            link = StateLink(OPTIMIZER, parameter.name.removeprefix(f"{MODEL}."), key, parameter.name)
            if proved:
                parts = tuple(_moved(parameter, buckets, homes, key))
                made.append(ForeignTensor(link.name, buckets[homes[0][0]][key].dtype, parameter.shape, parts, link=link))
            else:
                unreadable[link.name] = UnsupportedError(
                    f"{storage.url}: {link.name} is in a bucket of dp_reshardable, and the weights do not prove where: they "
                    "fit in no place, or in several; load it with Megatron on the same TP and PP, and save it with "
                    "--dist-ckpt-optim-fully-reshardable"
                )
    return NamedBuckets(made, unreadable)


def _search(
    storage: Storage,
    files: Sequence[FileEntry],
    prefix: str,
    master: ForeignTensor,
    parameters: Sequence[ForeignTensor],
    found: _Found,
    may_hold: MayHold,
) -> None:
    """Look for all chunks of the model that one bucket may hold in it."""
    if sum(part.num_elements for part in master.parts) != prod(master.shape):
        raise CorruptError(
            f"{storage.url}: {master.name} of shape {master.shape} has parts of another size; use another checkpoint"
        )
    weights = torch.zeros(prod(master.shape), dtype=TORCH_DTYPES[master.dtype], device="cpu")
    for part in master.parts:
        data = torch.frombuffer(_bytes(storage, files, part, master.dtype), dtype=weights.dtype)
        weights[part.offsets[0] : part.offsets[0] + part.num_elements] = data
    rounded: dict[str, bytes] = {}
    fits: dict[int, list[tuple[Claim, list[int]]]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.dtype not in rounded:
            rounded[parameter.dtype] = weights.to(TORCH_DTYPES[parameter.dtype]).view(torch.uint8).numpy().tobytes()
        each = TORCH_DTYPES[parameter.dtype].itemsize
        for j, part in ((j, part) for j, part in enumerate(parameter.parts) if may_hold(prefix, part)):
            places = list(_places(rounded[parameter.dtype], bytes(_bytes(storage, files, part, parameter.dtype)), each))
            if places:
                fits.setdefault(part.num_elements, []).append(((i, j), places))
    taken, doubtful = np.zeros(weights.numel(), bool), np.zeros(weights.numel(), bool)
    for size in sorted(fits, reverse=True):
        _settle(size, fits[size], taken, doubtful, found, prefix, weights)


def _settle(
    size: int,
    fits: Sequence[tuple[Claim, list[int]]],
    taken: NDArray[np.bool_],
    doubtful: NDArray[np.bool_],
    found: _Found,
    prefix: str,
    weights: torch.Tensor,
) -> None:
    """Decide where the chunks of one size lie, given where larger ones do, and may do."""
    free = [(claim, [at for at in places if not taken[at : at + size].any()]) for claim, places in fits]
    wanted = np.zeros(len(taken), np.int64)
    for _, places in free:
        for at in places:
            wanted[at : at + size] += 1
    for claim, places in free:
        at = places[0] if places else 0
        sure = len(places) == 1 and not doubtful[at : at + size].any() and (wanted[at : at + size] == 1).all()
        if sure:
            master = hashlib.sha256(weights[at : at + size].numpy().tobytes()).digest()
            if found.masters.setdefault(claim, master) != master:
                found.unproved.add(claim)
            found.places.setdefault(claim, (prefix, at))
        elif places:
            found.unproved.add(claim)
        for at in places:
            (taken if sure else doubtful)[at : at + size] = True


def _places(weights: bytes, chunk: bytes, each: int) -> Iterator[int]:
    """Yield the places of a chunk, as numbers of elements; no more than a few, as many prove nothing."""
    at, count = weights.find(chunk), 0
    while at >= 0 and count < MAX_PLACES:
        if at % each == 0:
            count += 1
            yield at // each
        at = weights.find(chunk, at + 1)


def _bytes(storage: Storage, files: Sequence[FileEntry], part: FilePart, dtype: str) -> bytearray:
    data = bytearray(part.num_elements * TORCH_DTYPES[dtype].itemsize)
    storage.read_into(files[part.file].key, part.offset, [memoryview(data)])
    return data


def _moved(
    parameter: ForeignTensor, buckets: Mapping[str, Mapping[str, ForeignTensor]], homes: Sequence[tuple[str, int]], key: str
) -> Iterator[FilePart]:
    """Yield the parts of a parameter's state: the runs of its own parts, where they lie in the bucket's files."""
    for part, (prefix, begin) in zip(parameter.parts, homes, strict=True):
        bucket = buckets[prefix][key]
        each = TORCH_DTYPES[bucket.dtype].itemsize
        for stored in bucket.parts:
            low = max(begin, stored.offsets[0])
            high = min(begin + part.num_elements, stored.offsets[0] + stored.num_elements)
            if low < high:
                offset = stored.offset + (low - stored.offsets[0]) * each
                yield replace(part, file=stored.file, offset=offset, start=part.start + low - begin, count=high - low)


_GROUPS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")


def groups_path(key: str) -> tuple[str | int, ...] | None:
    """Return the path of the groups that an object of a bucket's optimizer has; None for any other object.

    >>> groups_path("chained_1.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    ('optimizer', 1, 'param_groups')
    """
    match = _GROUPS.fullmatch(key)
    if match is None:
        return None
    return (OPTIMIZER, "param_groups") if match[1] is None else (OPTIMIZER, int(match[1]), "param_groups")
