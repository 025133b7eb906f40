"""Building the global tensors of a model from files of single ranks.

1. Number the layers. Stages have them in order; with virtual stages, the first chunks of all stages come before the second
   chunks. Experts are numbered by rank.
2. Name the tensors as Megatron's newer folders do. Layers are stacked, unless they differ or Megatron would not stack them.
   Experts are stacked in the next dim.
3. Join the shards of tensor-parallel ranks by rules (`places`). Each rule is checked against the files: tensors that all ranks
   hold whole must have the same bytes, and shards must not. Replicas on other stages and expert ranks must be the same, too.
   Tensors up to 1 MiB are compared whole, larger ones by 16 samples of 64 KiB.

A tensor without a rule, or one that contradicts its rule, is listed by name with its error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ...plugins import CatalogBuilder, Ints, Part, Storage, read_range
from ...plugins.errors import CheckpointError, CorruptError, UnsupportedError
from ...plugins.torchfile import PickledTensor, TorchFile
from .names import tensor_name
from .places import Cut, cut_of

WHOLE_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 20, 16, 64 << 10
_LAYER = re.compile(r"((?:.+\.)?(?:decoder|encoder)\.layers)\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED = re.compile(r"(.+\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})")
_PACKED = re.compile(r".+\.experts\.weight[12]")
EXTRA_STATE = "_extra_state"
_FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """The part of a model that one virtual stage of one rank saved.

    `tp`, `pp` and `ep` are the rank's coordinates, `index` is the virtual stage, `file` the file that holds the chunk, and
    `number` the number of that file.
    """

    tp: int
    pp: int
    ep: int
    index: int
    file: TorchFile
    number: int


Chunks = Sequence[tuple[ModelChunk, Mapping[str, Any]]]
"""All chunks of the model, each with its state dict."""


class Key(NamedTuple):
    """The name of a tensor in parts that mean the same on every rank.

    `layers` is the name of the tensor's stack of layers, or ``""`` outside of layers. `layer` and `expert` are the numbers of its
    layer and expert in the whole model; `expert` is -1 outside of experts. `rest` is the part of the name behind the layer.
    """

    layers: str
    layer: int
    expert: int
    rest: str


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor or value in one rank's file, and its name in that file."""

    chunk: ModelChunk
    name: str
    value: Any


class RankTensors:
    """The tensors and the extra state of a model, joined from the files of all ranks.

    Parameters
    ----------
    chunks
        The state dicts of all chunks of the model.
    args
        The ``args`` of the job that saved the files.
    """

    def __init__(self, storage: Storage, chunks: Chunks, args: Mapping[str, Any]) -> None:
        self.storage, self.where = storage, storage.url
        self.num_tp, self.num_ep = (1 + max(getattr(chunk, axis) for chunk, _ in chunks) for axis in ("tp", "ep"))
        self.unreadable: dict[str, CheckpointError] = {}
        self.held: dict[Key, dict[int, list[Held]]] = defaultdict(lambda: defaultdict(list))
        self.extra: dict[Key, Held] = {}
        self.homes: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}
        """Maps a part of a tensor (its file number and offset) to the (file number, virtual stage) of all its replicas."""
        self._begins, self.num_layers = _number_layers(chunks)
        self._num_experts = _count_experts(chunks) * self.num_ep
        for chunk, state in chunks:
            for name, value in state.items():
                self._add(self._key(chunk, state, name), Held(chunk, name, value))
        copy, embedding = Key("", 0, -1, _OUTPUT), Key("", 0, -1, _EMBEDDING)
        if args.get("untie_embeddings_and_output_weights") is False and {copy, embedding} <= self.held.keys():
            # The last stage's copy of the embedding, its output layer, is a replica of it.
            for tp, held in self.held.pop(copy).items():
                self.held[embedding][tp] += held
        self._numbered = _numbered_layers(self.held, self.num_layers, args)

    def _add(self, key: Key, held: Held) -> None:
        chunk, name, value = held.chunk, held.name, held.value
        if name == f"output_layer.{EXTRA_STATE}" and value is None:
            return  # Megatron's newer folders leave it out, too
        if name.endswith(EXTRA_STATE) or value is None:
            if chunk.tp == 0:
                self.extra.setdefault(key, held)
        elif _PACKED.fullmatch(name) or not isinstance(value, PickledTensor):
            kind = f"an object of {type(value).__name__}"
            if _PACKED.fullmatch(name):
                kind = "the weights of several experts, in an order of its own"
            self.unreadable[name] = UnsupportedError(
                f"{self.where}: {name} holds {kind}, which is not read; load it with Megatron, and save it with --ckpt-format "
                "torch_dist"
            )
        else:
            self.held[key][chunk.tp].append(held)

    def _key(self, chunk: ModelChunk, state: Mapping[str, Any], name: str) -> Key:
        layers, layer, rest, expert = "", 0, name, -1
        if match := _LAYER.fullmatch(name):
            layers, number, rest = match.groups()
            layer = int(number) + self._begins[layers, chunk.index, chunk.pp]
            # The names here give a norm to the linear module behind it. Without Transformer Engine, files name norms apart.
            if {f"{layers}.{number}.{one}.weight" for one in ("input_layernorm", "self_attention.linear_qkv")} <= state.keys():
                rest = re.sub(r"^(?:input_layernorm|pre_mlp_layernorm)\.", lambda found: _FUSED[found[0]], rest)
        if match := _EXPERT.fullmatch(rest):
            expert, rest = int(match[2]), f"{match[1]}.experts.{match[3]}"
        elif match := _GROUPED.fullmatch(rest):
            expert, rest = int(match[3]), f"{match[1]}.experts.{match[2]}"
        return Key(layers, layer, expert if expert < 0 else expert + chunk.ep * (self._num_experts // self.num_ep), rest)

    def _name(self, key: Key) -> str:
        """Return the name of the global tensor that has the tensor with this key, perhaps as one layer of a stack."""
        if not key.layers:
            return key.rest
        return f"{key.layers}.{key.layer}.{key.rest}" if key.layers in self._numbered else f"{key.layers}.{key.rest}"

    def _place(self, key: Key) -> tuple[Ints, Ints]:
        """Return the coordinates of one layer and expert in its stacked tensor, and the lengths of the stacked dims."""
        stacked = bool(key.layers) and key.layers not in self._numbered
        place: tuple[tuple[int, int], ...] = ((key.layer, self.num_layers[key.layers]),) if stacked else ()
        place += ((key.expert, self._num_experts),) if key.expert >= 0 else ()
        return tuple(at for at, _ in place), tuple(count for _, count in place)

    def objects(self) -> Iterator[tuple[str, Ints, Ints, Held]]:
        """Yield each extra state: its name, its place in the stack of layers, the shape of the stack, and its `Held`."""
        for key, held in self.extra.items():
            yield self._name(key), *self._place(key), held

    def add_tensors(self, builder: CatalogBuilder) -> None:
        """Add all tensors of the model to a catalog, and the errors of tensors that cannot be read."""
        of_name: dict[str, list[Key]] = defaultdict(list)
        for key in self.held:
            of_name[self._name(key)].append(key)
        for name, keys in of_name.items():
            with builder.reading(tensor_name(name)):
                builder.tensor(tensor_name(name), *self._stacked(name, keys))
        for name, why in self.unreadable.items():
            builder.unreadable(tensor_name(name), why)

    def _stacked(self, name: str, keys: Sequence[Key]) -> tuple[torch.dtype, Ints, list[Part]]:
        """Join the layers, experts and tensor-parallel ranks of a tensor; return its dtype, global shape and parts in files."""
        parts: list[Part] = []
        shapes, dtypes = set(), set()
        for key in keys:
            # For each layer and expert: join the tensor-parallel ranks, then put the result at its place in the stack.
            place, counts = self._place(key)
            by_rank = self._of_all_ranks(key)
            cut = self._cut(by_rank[0][0]) if self.num_tp > 1 else Cut(None)
            # replicas: the holders of the same bytes: those of each shard, or all of them if every rank has the whole tensor
            replicas = by_rank if cut.dim is not None else [[held for ranks in by_rank for held in ranks]]
            self._prove(by_rank, replicas, cut)
            shape, found = _put_together([held[0] for held in by_rank], cut, self._sections(key, cut), self.where)
            shapes.add((*counts, *shape))
            dtypes |= {held.value.dtype for ranks in by_rank for held in ranks}
            parts += [Part((*place, *p.offsets), (1,) * len(place) + p.lengths, p.file, p.offset) for p in found]
            homes = {same[0].chunk.number: frozenset((held.chunk.number, held.chunk.index) for held in same) for same in replicas}
            self.homes |= {(part.file, part.offset): homes[part.file] for part in found}
        if len(shapes) > 1 or len(dtypes) > 1 or len(keys) != prod(self._place(keys[0])[1]):
            raise CorruptError(
                f"{self.where}: {name} has parts of the shapes {sorted(shapes)}, of {sorted(map(str, dtypes))}, on {len(keys)} "
                "layers and experts, which are not one tensor; files may be of several saves, so use another checkpoint"
            )
        return dtypes.pop(), shapes.pop(), parts

    def _of_all_ranks(self, key: Key) -> list[list[Held]]:
        """Return a list for each tensor-parallel rank: all replicas of the rank's shard of a tensor.

        Refuse a tensor that a rank lacks, or that is not row-major.
        """
        found = self.held[key]
        absent = set(range(self.num_tp)) - found.keys()
        example = next(iter(found.values()))[0]
        if absent:
            raise CorruptError(
                f"{self.where}: {example.name} is in {example.chunk.file.key}, but tensor-parallel rank {min(absent)} lacks it; "
                "use another checkpoint"
            )
        for held in (held for ranks in found.values() for held in ranks):
            if not held.value.is_row_major:
                raise UnsupportedError(
                    f"{self.where}: {held.name} lies in {held.chunk.file.key} with strides {held.value.strides}; load it with "
                    "Megatron, and save it with --ckpt-format torch_dist"
                )
        return [found[tp] for tp in range(self.num_tp)]

    def _cut(self, held: Held) -> Cut:
        cut = cut_of(_GROUPED.sub(r"\1.\2", held.name))
        if cut is None:
            raise UnsupportedError(
                f"{self.where}: no rule says how {self.num_tp} tensor-parallel ranks cut {held.name}, of which one has shape "
                f"{held.value.shape}; say it with reshard_ckpt.megatron.add_rule({held.name!r}, dim=…), where dim is None if "
                "each has all of it"
            )
        return cut

    def _sections(self, key: Key, cut: Cut) -> int:
        """Return the number of sections of a tensor: equal parts of dim 0; each part is divided among all ranks.

        If the rule `cut` gives no number, the tensor is a ``linear_fc1``. It has two sections (a gate and its projection) if its
        dim 0 is twice as long as dim 1 of the ``linear_fc2`` beside it.
        """
        if cut.sections is not None:
            return cut.sections
        rest = re.sub(r"linear_fc1\.(weight|bias)$", "linear_fc2.weight", key.rest)
        (held, *_), other = self.held[key][0], self.held.get(key._replace(rest=rest), {}).get(0)
        rows, columns = ((*held.value.shape, 0)[0], (0, *other[0].value.shape)[-1] if other else 0)
        if not columns or rows not in (columns, 2 * columns):
            raise UnsupportedError(
                f"{self.where}: {held.name} has {rows} rows, and the linear_fc2 beside it {columns} columns, so that nothing "
                f"tells whether it is gated; say it with reshard_ckpt.megatron.add_rule({held.name!r}, dim=0, sections=…)"
            )
        return 2 if rows == 2 * columns else 1

    def _prove(self, by_rank: Sequence[Sequence[Held]], replicas: Sequence[Sequence[Held]], cut: Cut) -> None:
        """Check a rule for a tensor by bytes: replicas must be equal, and the shards of a cut tensor must differ.

        Raise `UnsupportedError` if the bytes contradict the rule.
        """
        if not cut.prove:
            return
        for first, *others in replicas:
            for other in others:
                if other.value.shape != first.value.shape or self._samples(first) != self._samples(other):
                    raise UnsupportedError(
                        f"{self.where}: {first.name} in {first.chunk.file.key} and {other.name} in {other.chunk.file.key} should "
                        "be the same, and are not: they are cut, or replicas have come apart. Say how they are cut with "
                        f"reshard_ckpt.megatron.add_rule({first.name!r}, dim=…), or take the first with prove=False"
                    )
        if cut.dim is not None and len(by_rank) > 1 and by_rank[0][0].value.shape == by_rank[1][0].value.shape:
            of_first, of_second = self._samples(by_rank[0][0]), self._samples(by_rank[1][0])
            itemsize = by_rank[0][0].value.dtype.itemsize
            # Shards whose samples repeat one element, such as zeros or ones, prove nothing: they may be equal by chance.
            if of_first == of_second and any(sample != sample[:itemsize] * (len(sample) // itemsize) for sample in of_first):
                held = by_rank[0][0]
                raise UnsupportedError(
                    f"{self.where}: {held.name} should be cut along dim {cut.dim}, and tensor-parallel ranks 0 and 1 have the "
                    f"same bytes, as if each had all of it; say so with reshard_ckpt.megatron.add_rule({held.name!r}, dim=None), "
                    f"or, if they are cut, with dim={cut.dim} and prove=False"
                )

    def _samples(self, held: Held) -> list[bytes]:
        begin, num_bytes = held.chunk.file.at(held.value), prod(held.value.shape) * held.value.dtype.itemsize
        if num_bytes <= WHOLE_BYTES:
            return [bytes(read_range(self.storage, held.chunk.file.key, begin, num_bytes))]
        step = (num_bytes - SAMPLE_BYTES) // (SAMPLES - 1)
        return [bytes(read_range(self.storage, held.chunk.file.key, begin + i * step, SAMPLE_BYTES)) for i in range(SAMPLES)]


def _put_together(held: Sequence[Held], cut: Cut, sections: int, where: str) -> tuple[Ints, list[Part]]:
    """Return the global shape of a tensor and its parts in files, given the shard of each tensor-parallel rank in order."""
    first, dim = held[0].value.shape, cut.dim
    if dim is None:
        return first, [_part(held[0], 0, (0,) * len(first), first)]
    shapes = [shard.value.shape for shard in held]
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if any(len(shape) <= dim or shape[dim] % sections for shape in shapes) or len(others) > 1:
        raise CorruptError(
            f"{where}: {held[0].name} has the shapes {shapes} on tensor-parallel ranks, which do not fit along dim {dim}"
            + (f" in {sections} sections" if sections > 1 else "")
            + f"; if they are cut in another way, say it with reshard_ckpt.megatron.add_rule({held[0].name!r}, dim=…)"
        )
    total, parts = sum(shape[dim] for shape in shapes), []
    for rank, (shard, shape) in enumerate(zip(held, shapes, strict=True)):
        lengths = (*shape[:dim], shape[dim] // sections, *shape[dim + 1 :])
        # The global rows are ordered by section, then by rank; a shard is ordered by section.
        below = sum(other[dim] for other in shapes[:rank]) // sections
        for i in range(sections):
            offset = i * (total // sections) + below
            parts.append(_part(shard, i * prod(lengths), tuple(offset if d == dim else 0 for d in range(len(shape))), lengths))
    return (*first[:dim], total, *first[dim + 1 :]), parts


def _part(held: Held, begin: int, offsets: Ints, lengths: Ints) -> Part:
    at = held.chunk.file.at(held.value) + begin * held.value.dtype.itemsize
    return Part(offsets, lengths, held.chunk.number, at)


def _number_layers(chunks: Chunks) -> tuple[dict[tuple[str, int, int], int], dict[str, int]]:
    """Number the layers of the whole model by the layers that each chunk holds.

    Returns
    -------
    begins
        The number of a chunk's first layer, by name of the stack, virtual stage and pipeline stage.
    totals
        The number of layers, by name of the stack.
    """
    counts: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for chunk, state in chunks:
        place = chunk.index, chunk.pp
        for name in state:
            if match := _LAYER.fullmatch(name):
                counts[match[1]][place] = max(counts[match[1]].get(place, 0), int(match[2]) + 1)
    begins: dict[tuple[str, int, int], int] = {}
    totals: dict[str, int] = {}
    for layers, of_chunk in counts.items():
        total = 0
        for place in sorted(of_chunk):
            begins[layers, place[0], place[1]] = total
            total += of_chunk[place]
        totals[layers] = total
    return begins, totals


def _count_experts(chunks: Chunks) -> int:
    """Count the experts that one rank holds, by the numbers in the names of its tensors."""
    numbers = [
        int(match[2] if match.re is _EXPERT else match[3])
        for _, state in chunks
        for name in state
        if (match := _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name))
    ]
    return 1 + max(numbers, default=0)


def _numbered_layers(held: Mapping[Key, Any], totals: Mapping[str, int], args: Mapping[str, Any]) -> set[str]:
    """Return the stacks whose layers differ. Their layers stay separate tensors, with the layer's number in the name.

    With ``moe_layer_freq``, where only some layers have experts, these are all stacks: Megatron itself saves them so.
    """
    frequency = args.get("moe_layer_freq")
    if isinstance(frequency, list) or (isinstance(frequency, int) and frequency > 1):
        return set(totals)
    found: dict[str, dict[int, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for key, by_rank in held.items():
        shape = next(iter(by_rank.values()))[0].value.shape
        found[key.layers][key.layer].add((key.expert, key.rest, shape))
    return {
        layers
        for layers, total in totals.items()
        if len(found[layers]) < total or any(content != found[layers][0] for content in found[layers].values())
    }
