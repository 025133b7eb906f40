"""Finding the state of each parameter in the buckets of ``dp_reshardable``, where the weights prove it.

A bucket is the flat memory of one rank's parameters, and does not say which parameters lie where. But a master weight that is
rounded to the dtype of the model is the weight itself. So:

1. Round the master weights of each bucket. Search the result for the bytes of each part of a parameter, the largest parts
   first.
2. If a part fits in exactly one place, and no larger part has taken that place, the part is proved to lie there. The moments of
   the part lie at the same place in their own buckets. A replica in another bucket must have the same master weights.
3. A part is not proved if it fits nowhere or in several places, if another part of the same size fits in its place, or if a
   larger part that is not proved may lie there. Layers whose elements are all 1 are such parts. The state of their parameters
   becomes unreadable, with an error for each name.

This reads all weights and master weights, one bucket at a time. If the caller knows which rank a bucket belongs to (`MayHold`),
only the parts of that rank are searched for in it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch

from ...plugins import CatalogBuilder, ForeignTensor, Part, Storage
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.names import StateLink
from .names import MASTER, MODEL, OPTIMIZER, is_bucket

MAX_PLACES = 256
MayHold = Callable[[str, Part], bool]
"""A function of the prefix of a bucket's names and a part of a parameter: whether that part may lie in that bucket."""
Claim = tuple[int, int]
"""The index of a parameter, and the index of one of its parts (boxes in a file)."""


def name_buckets(builder: CatalogBuilder, storage: Storage, may_hold: MayHold = lambda prefix, part: True) -> None:
    """Replace the buckets of a catalog by the state that is proved to lie in them; all other state becomes unreadable.

    Parameters
    ----------
    builder
        Has all tensors of the checkpoint: the buckets, and the weights under ``model.``.
    may_hold
        Tells which buckets to search for a part of a parameter; by default, all of them.
    """
    buckets: dict[str, dict[str, ForeignTensor]] = {}
    for name in [name for name in builder.tensors if is_bucket(name)]:
        prefix, _, key = name.rpartition(".")
        buckets.setdefault(prefix, {})[key] = builder.tensors.pop(name)
    # buckets[prefix][key]: the tensor of one state, such as ``param`` or ``exp_avg``, in one bucket
    parameters = [tensor for name, tensor in builder.tensors.items() if name.startswith(f"{MODEL}.")]
    found = _Search(builder, storage, parameters, may_hold)
    for prefix, states in buckets.items():
        if MASTER in states:
            found.search(prefix, states[MASTER])
    for i, parameter in enumerate(parameters):
        # A parameter is named only if all of its parts are proved.
        claims = [(i, j) for j in range(len(parameter.parts))]
        proved = claims and all(claim in found.places and claim not in found.unproved for claim in claims)
        homes = [found.places[claim] for claim in claims] if proved else []
        for key in next(iter(buckets.values()), {}):
            link = StateLink(OPTIMIZER, parameter.name.removeprefix(f"{MODEL}."), key, parameter.name)
            if proved:
                parts = _moved(parameter, buckets, homes, key)
                builder.tensor(link.name, buckets[homes[0][0]][key].dtype, parameter.shape, parts, link=link)
            else:
                error = UnsupportedError(
                    f"{storage.url}: {link.name} is in a bucket of dp_reshardable, and the weights do not prove where: they "
                    "fit in no place, or in several; load it with Megatron on the same TP and PP, and save it with "
                    "--dist-ckpt-optim-fully-reshardable"
                )
                builder.unreadable(link.name, error)


@dataclass(slots=True)
class _Search:
    """Searches the master weights of buckets for the parts of parameters, and keeps the places found so far.

    The module's docstring says when a part is proved to lie at a place.

    Attributes
    ----------
    places
        Maps each proved part to the prefix of its bucket's names, and to its first element in the bucket.
    masters
        Maps each proved part to the SHA-256 of its master weights.
    unproved
        The parts that fit somewhere, but are not proved to lie there.
    """

    builder: CatalogBuilder
    storage: Storage
    parameters: Sequence[ForeignTensor]
    may_hold: MayHold
    places: dict[Claim, tuple[str, int]] = field(default_factory=dict)
    masters: dict[Claim, bytes] = field(default_factory=dict)
    unproved: set[Claim] = field(default_factory=set)

    def search(self, prefix: str, master: ForeignTensor) -> None:
        """Search the master weights of one bucket for every part of a parameter that may lie in it; add proved places."""
        if sum(part.num_elements for part in master.parts) != prod(master.shape):
            raise CorruptError(
                f"{self.storage.url}: {master.name} of shape {master.shape} has parts of another size; use another checkpoint"
            )
        weights = torch.zeros(prod(master.shape), dtype=master.torch_dtype, device="cpu")
        for part in master.parts:
            data = torch.frombuffer(self._bytes(part, master), dtype=weights.dtype)
            weights[part.offsets[0] : part.offsets[0] + part.num_elements] = data
        # weights: the bucket's master weights as one vector. rounded: their bytes in each dtype of the model.
        # fits: by number of elements, the parts that fit somewhere in the bucket, with the first elements of their places.
        rounded: dict[str, bytes] = {}
        fits: dict[int, list[tuple[Claim, list[int]]]] = {}
        for i, parameter in enumerate(self.parameters):
            if parameter.dtype not in rounded:
                rounded[parameter.dtype] = weights.to(parameter.torch_dtype).view(torch.uint8).numpy().tobytes()
            each = parameter.torch_dtype.itemsize
            for j, part in ((j, part) for j, part in enumerate(parameter.parts) if self.may_hold(prefix, part)):
                places = list(_places(rounded[parameter.dtype], bytes(self._bytes(part, parameter)), each))
                if places:
                    fits.setdefault(part.num_elements, []).append(((i, j), places))
        # taken: elements where a part is proved to lie. doubtful: elements where a part may lie that is not proved.
        # Larger parts go first, because a small one can also fit by chance inside of a larger one.
        taken, doubtful = np.zeros(weights.numel(), bool), np.zeros(weights.numel(), bool)
        for size in sorted(fits, reverse=True):
            free = [(claim, [at for at in places if not taken[at : at + size].any()]) for claim, places in fits[size]]
            # wanted[e]: how many candidate places, of all parts of this size, cover element e
            wanted = np.zeros(len(taken), np.int64)
            for _, places in free:
                for at in places:
                    wanted[at : at + size] += 1
            for claim, places in free:
                at = places[0] if places else 0
                sure = len(places) == 1 and not doubtful[at : at + size].any() and (wanted[at : at + size] == 1).all()
                if sure:
                    self._prove(claim, prefix, at, weights[at : at + size])
                elif places:
                    self.unproved.add(claim)
                for at in places:
                    (taken if sure else doubtful)[at : at + size] = True

    def _prove(self, claim: Claim, prefix: str, at: int, weights: torch.Tensor) -> None:
        """Note that a part is proved to lie in a bucket; a replica in another bucket must have the same master weights."""
        master = hashlib.sha256(weights.numpy().tobytes()).digest()
        if self.masters.setdefault(claim, master) != master:
            self.unproved.add(claim)
        self.places.setdefault(claim, (prefix, at))

    def _bytes(self, part: Part, tensor: ForeignTensor) -> bytearray:
        data = bytearray(part.num_elements * tensor.torch_dtype.itemsize)
        self.storage.read_into(self.builder.files[part.file].key, part.offset, [memoryview(data)])
        return data


def _places(weights: bytes, part: bytes, each: int) -> Iterator[int]:
    """Yield the places of a part's bytes in a bucket's weights, in elements of `each` bytes.

    At most `MAX_PLACES` are yielded, because several places prove nothing.
    """
    at, count = weights.find(part), 0
    while at >= 0 and count < MAX_PLACES:
        if at % each == 0:
            count += 1
            yield at // each
        at = weights.find(part, at + 1)


def _moved(
    parameter: ForeignTensor, buckets: Mapping[str, Mapping[str, ForeignTensor]], homes: Sequence[tuple[str, int]], key: str
) -> Iterator[Part]:
    """Yield the parts of one key of a parameter's state: the boxes of the parameter, at their places in the bucket's files.

    Parameters
    ----------
    homes
        For each part of the parameter: the prefix of its bucket, and its first element there.
    """
    for part, (prefix, begin) in zip(parameter.parts, homes, strict=True):
        bucket = buckets[prefix][key]
        each = bucket.torch_dtype.itemsize
        # A bucket may be stored in several files: take from each stored part the elements that this part needs.
        for stored in bucket.parts:
            low = max(begin, stored.offsets[0])
            high = min(begin + part.num_elements, stored.offsets[0] + stored.num_elements)
            if low < high:
                offset = stored.offset + (low - stored.offsets[0]) * each
                yield replace(part, file=stored.file, offset=offset, start=part.start + low - begin, count=high - low)


_GROUPS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")


def groups_path(key: str) -> tuple[str | int, ...] | None:
    """Return the path of the optimizer's groups that an object of a bucket holds; None if the object holds no groups.

    >>> groups_path("chained_1.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    ('optimizer', 1, 'param_groups')
    """
    match = _GROUPS.fullmatch(key)
    if match is None:
        return None
    return (OPTIMIZER, "param_groups") if match[1] is None else (OPTIMIZER, int(match[1]), "param_groups")
