"""Where elements lie: Megatron's shards as `LocalShard` and `FlatShard`, and rules that say how tensors of its files were cut.

1. A `ShardedTensor` is one box. Axes that the local tensor lacks are put in front, with length 1. If it has a flattened range, it
   is that run of the box.
2. A factory builds several `ShardedTensor` objects from one parameter. A distributed optimizer holds a run of the flattened
   parameter, so each element needs its place in them. Call `build_fn` on the parameter: if the results are views, their memory
   tells where they begin. If they are copies, call `build_fn` on a tensor of positions. Results that are boxes of the parameter
   are supported; a factory that rearranges elements is a named error.
3. The file of one rank does not say how its tensors were cut, so the name must: `cut_of` has rules for Megatron's GPT, BERT, T5
   and MoE models, and a user's own (`add_rule`). `rank_tensors` checks each rule against the files.

Only attributes are read; no class of Megatron is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch

from ...plugins import FlatShard, Ints, LocalShard
from ...plugins.errors import LayoutError, UnsupportedError, UsageError
from ...plugins.placements import row_major_strides
from ...plugins.trees import leaves
from .names import checkpoint_key


@dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard of a tensor, under its name in the checkpoint.

    Attributes
    ----------
    main
        Whether this is the replica that Megatron writes.
    resizable
        Whether the saved tensor may have another global shape, as a padded vocabulary does.
    """

    name: str
    shard: LocalShard | FlatShard
    main: bool
    resizable: bool


def is_sharded_tensor(value: object) -> bool:
    return hasattr(value, "local_shape") and hasattr(value, "global_offset")


def is_sharded_object(value: object) -> bool:
    return hasattr(value, "global_offset") and hasattr(value, "replica_id") and not hasattr(value, "local_shape")


def is_factory(value: object) -> bool:
    return hasattr(value, "build_fn") and hasattr(value, "merge_fn")


def is_main(replica_id: int | tuple[int, ...]) -> bool:
    """Tell whether a replica is the main one, which Megatron writes.

    >>> is_main(0), is_main((0, 1, 0))
    (True, False)
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


def entry_of(sharded: Any, data: torch.Tensor) -> NamedShard:
    """Describe a `ShardedTensor` over the memory of `data`.

    Raise `LayoutError` if its shape, offsets and range contradict each other.
    """
    lacking = (None,) * sharded.prepend_axis_num
    run = getattr(sharded, "flattened_range", None)
    try:
        if run is None:
            shard: LocalShard | FlatShard = LocalShard(data[lacking] if lacking else data, *_place(sharded))
        else:
            shape, offsets = _place(sharded)
            shard = FlatShard(data, shape, run.start, pieces=[(offsets, _lengths(sharded))])
    except UsageError as error:
        raise type(error)(f"{sharded.key}: {error}") from None
    resizable = bool(getattr(sharded, "allow_shape_mismatch", False))
    return NamedShard(checkpoint_key(sharded.key), shard, is_main(sharded.replica_id), resizable)


def plain(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor without autograd. Quantized tensors are dequantized, as Megatron saves and loads them."""
    return data.detach() if type(data).dequantize is torch.Tensor.dequantize else data.dequantize()


def _place(sharded: Any) -> tuple[Ints, Ints]:
    return tuple(sharded.global_shape), tuple(sharded.global_offset)


def _lengths(sharded: Any) -> Ints:
    return (*(1,) * sharded.prepend_axis_num, *sharded.local_shape)


def run_entries(
    sharded: Any, parameter: torch.Tensor, prefix: str, state: torch.Tensor, start: int, instance: int
) -> list[NamedShard]:
    """Describe a run of a flattened parameter's state: one shard for each tensor that the parameter is saved as.

    Raise `UnsupportedError` if the factory rearranges elements, or names its results by another key. Raise `LayoutError` if the
    parameter has another shape than its entry in the tree.

    Parameters
    ----------
    sharded
        The parameter's entry in the tree: a `ShardedTensor`, or a factory.
    prefix
        The name of the state, such as ``optimizer.state.exp_avg``; it goes before the key of the parameter.
    state
        The elements of the run, 1-D.
    start
        The first element of the run in the flattened parameter.
    instance
        The number of the distributed optimizer's instance. Other instances hold replicas.
    """
    shape = tuple(parameter.shape)
    key = f"{prefix}.{sharded.key}"
    if is_factory(sharded):
        cuts = _factory_cuts(sharded, prefix, parameter)
    elif getattr(sharded, "flattened_range", None) is not None or tuple(sharded.local_shape) != shape:
        raise LayoutError(
            f"{sharded.key}: the tree says that the local parameter is {tuple(sharded.local_shape)}, flattened range "
            f"{getattr(sharded, 'flattened_range', None)}, but the optimizer's is {shape}; pass what "
            "model.sharded_state_dict() returned"
        )
    else:
        cuts = [(sharded, (0,) * len(shape))]
    return [
        NamedShard(
            checkpoint_key(key if part is sharded else part.key),
            _run(part, at, state, shape, start),
            is_main(_replica_of_instance(part.replica_id, instance)),
            bool(getattr(part, "allow_shape_mismatch", False)),
        )
        for part, at in cuts
    ]


def _replica_of_instance(replica_id: int | tuple[int, ...], instance: int) -> int | tuple[int, ...]:
    """Return a parameter's replica id for its optimizer state: the index of the optimizer's instance replaces the last number.

    The last number counts data-parallel ranks. They hold replicas of the parameter, but different parts of the state.
    """
    return (*replica_id[:-1], instance) if isinstance(replica_id, tuple) and len(replica_id) == 3 else replica_id


def _run(part: Any, at: Ints, state: torch.Tensor, shape: Ints, start: int) -> FlatShard:
    """Return the elements of a run that belong to one `ShardedTensor` of a parameter, as a `FlatShard`.

    Parameters
    ----------
    part, at
        The `ShardedTensor`, and where it begins in the parameter.
    shape
        The shape of the parameter.
    """
    before = (0,) * part.prepend_axis_num, (1,) * part.prepend_axis_num
    global_shape, offsets = _place(part)
    piece = ((*before[0], *at), offsets, _lengths(part))
    try:
        return FlatShard(plain(state), global_shape, start, pieces=[piece], local_shape=(*before[1], *shape))
    except UsageError as error:
        raise type(error)(f"{part.key}: {error}") from None


def _factory_cuts(factory: Any, prefix: str, parameter: torch.Tensor) -> list[tuple[Any, Ints]]:
    """Have a factory build the `ShardedTensor` objects of a parameter's state; return each with its corner in the parameter."""
    key, shape = f"{prefix}.{factory.key}", tuple(parameter.shape)
    built = _sharded_tensors(built_by(factory, key, parameter.detach()))
    if odd := next((part.key for part in built if not part.key.startswith(f"{prefix}.")), None):
        raise UnsupportedError(
            f"{key}: the factory of this parameter names its state {odd}, whatever key it is given, as if it were that; "
            "have it use the key, or leave the optimizer out"
        )
    cuts = _view_cuts(built, parameter) or _copied_cuts(factory, key, shape)
    if cuts is None:
        raise UnsupportedError(
            f"{key}: the factory of this parameter rearranges its {shape} elements, where a run of them has no place; pass "
            "optimizer.sharded_state_dict(...) in the optimizer's place, with the sharding type fully_reshardable"
        )
    return cuts


def built_by(factory: Any, key: str, data: torch.Tensor) -> Any:
    """Call a factory's ``build_fn`` on `data`; return the tree of `ShardedTensor` objects that it builds under this key."""
    return factory.build_fn(key, data, factory.replica_id, getattr(factory, "flattened_range", None))


def _sharded_tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in leaves(tree) if is_sharded_tensor(leaf)]


def _view_cuts(built: list[Any], parameter: torch.Tensor) -> list[tuple[Any, Ints]] | None:
    """Find the corner at which each tensor that a factory built begins in its parameter, by the memory that they share.

    Return None unless the parameter is contiguous, and all built tensors are views of boxes of it, with as many elements in all.
    """
    shape, strides = tuple(parameter.shape), row_major_strides(tuple(parameter.shape))
    cuts = []
    for part in built:
        data = part.data
        shared = data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() != 0
        # The same storage; strides like those of the parameter in each dim that has more than one element; inside of its shape.
        if not shared or not parameter.is_contiguous() or data.ndim != len(shape):
            return None
        if any(size > 1 and stride != own for size, stride, own in zip(data.shape, data.stride(), strides, strict=True)):
            return None
        at = _coordinates(data.storage_offset() - parameter.storage_offset(), shape)
        if at is None or any(low + size > whole for low, size, whole in zip(at, data.shape, shape, strict=True)):
            return None
        cuts.append((part, at))
    return cuts if sum(prod(part.data.shape) for part in built) == prod(shape) else None


def _copied_cuts(factory: Any, key: str, shape: Ints) -> list[tuple[Any, Ints]] | None:
    """Find the corner at which each tensor that a factory copies begins in its parameter.

    For this, the factory builds its tensors from the positions of the elements. Return None unless all of them are boxes of the
    parameter, with as many elements in all.
    """
    positions = torch.arange(prod(shape), device="cpu").view(shape)
    cuts = []
    # The first position of a built tensor is its corner. The others must be those of a box at that corner.
    for part in _sharded_tensors(built_by(factory, key, positions)):
        if part.data.ndim != len(shape) or not part.data.numel():
            return None
        at = _coordinates(int(part.data.reshape(-1)[0]), shape)
        box = None if at is None else positions[tuple(slice(low, low + n) for low, n in zip(at, part.data.shape, strict=True))]
        if at is None or box is None or not torch.equal(part.data, box):
            return None
        cuts.append((part, at))
    return cuts if sum(part.data.numel() for part, _ in cuts) == prod(shape) else None


def _coordinates(index: int, shape: Ints) -> Ints | None:
    """Return the coordinates of an element by its row-major index; None if the shape has no such element."""
    if not 0 <= index < max(prod(shape), 1):
        return None
    out = []
    for stride in row_major_strides(shape):
        at, index = divmod(index, max(stride, 1))
        out.append(at)
    return tuple(out)


MAX_SECTIONS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks divide a tensor.

    Attributes
    ----------
    dim
        The dim that is cut, in the order of ranks; None if every rank has the whole tensor.
    sections
        The number of equal parts of dim 0, one after the other; each part is divided among all ranks. None means: 2 if dim 0 is
        twice as long as dim 1 of the ``linear_fc2`` beside the tensor, as with SwiGLU; 1 if both are equally long.
    prove
        Whether to compare the bytes of ranks with this rule.
    """

    dim: int | None
    sections: int | None = 1
    prove: bool = True


_ROWS, _COLUMNS, _WHOLE = Cut(0), Cut(1), Cut(None)
_SHIPPED: Mapping[str, Cut] = {
    **dict.fromkeys(("*linear_fc1.weight", "*linear_fc1.bias"), Cut(0, None)),
    **dict.fromkeys(("*embedding.word_embeddings.weight", "*output_layer.weight", "*output_layer.bias"), _ROWS),
    **dict.fromkeys(("*.linear_qkv.weight", "*.linear_qkv.bias"), _ROWS),
    **dict.fromkeys(("*.linear_q.weight", "*.linear_q.bias", "*.linear_kv.weight", "*.linear_kv.bias"), _ROWS),
    **dict.fromkeys(("*.linear_q_proj.weight", "*.linear_q_up_proj.weight", "*.linear_kv_up_proj.weight"), _ROWS),
    **dict.fromkeys(("*.eh_proj.weight", "*.softmax_offset"), _ROWS),
    **dict.fromkeys(("*.linear_proj.weight", "*linear_fc2.weight"), _COLUMNS),
    **dict.fromkeys(("*.linear_proj.bias", "*linear_fc2.bias"), _WHOLE),
    **dict.fromkeys(("*norm.weight", "*norm.bias", "*.layer_norm_weight", "*.layer_norm_bias"), _WHOLE),
    **dict.fromkeys(("*embedding.position_embeddings.weight", "*embedding.tokentype_embeddings.weight"), _WHOLE),
    **dict.fromkeys(("*_relative_pos_emb.relative_attention_bias.weight",), _WHOLE),
    **dict.fromkeys(("*.router.weight", "*.router.bias", "*.router.expert_bias", "*.shared_experts.gate_weight"), _WHOLE),
    **dict.fromkeys(("*.linear_q_down_proj.weight", "*.linear_kv_down_proj.weight"), _WHOLE),
    **dict.fromkeys(("lm_head.dense.*", "pooler.dense.*", "binary_head.*"), _WHOLE),
}
_OWN_MODULES = re.compile(
    r"\b(linear_(qkv|proj|fc1|fc2|q|kv|[qkv]+_(up|down)_proj|q_proj)|embedding\.\w+_embeddings|output_layer|eh_proj"
    r"|(decoder|encoder)\.(final_(layer)?norm|layers\.(\d+\.)?(self_attention|cross_attention|input_layernorm|pre_mlp_layernorm|mixer)"
    r"|layers\.(\d+\.)?mlp\.(experts|router|shared_experts)))\b"
)
"""Matches names of modules in Megatron's models; models of Hugging Face's libraries and of torch have no such modules."""
_added: dict[str, Cut] = {}


def add_rule(pattern: str, dim: int | None, *, sections: int = 1, prove: bool = True) -> None:
    """Add a rule that says how tensor parallelism cut tensors, for Megatron's folders with one file for each rank.

    Parameters
    ----------
    pattern
        A pattern of names as in the model, such as ``"decoder.layers.*.adapter.weight"``; ``*`` matches anything. The rule added
        last is tried first, and the rules of this library last.
    dim
        The dim that is cut, in the order of ranks; None if every rank has the whole tensor.
    sections
        The number of equal parts of dim 0, one after the other; each part is divided among all ranks. 2 is for a gate and its
        projection. Above 1 only with ``dim=0``.
    prove
        False skips the comparison of bytes. If ranks should have the same tensor, the first one's is taken.

    Raises
    ------
    UsageError
        `dim` or `sections` is out of range.

    Examples
    --------
    >>> from reshard_ckpt import megatron
    >>> megatron.add_rule("decoder.layers.*.adapter.weight", dim=1)
    """
    if dim is not None and not 0 <= dim < MAX_SECTIONS:
        raise UsageError(f"add_rule: {pattern!r}: dim is {dim}; pass the number of a dim, or None where each rank has all")
    if not 1 <= sections <= MAX_SECTIONS or (sections > 1 and dim != 0):
        raise UsageError(f"add_rule: {pattern!r}: {sections} sections along dim {dim}; only rows, dim 0, can have sections")
    _added.pop(pattern, None)
    _added[pattern] = Cut(dim, sections, prove)


def is_of_megatron(name: str) -> bool:
    """Return whether a tensor of this name, or its state, is of a model of Megatron's, or one that a rule was added for.

    >>> is_of_megatron("model.decoder.layers.0.mlp.linear_fc2.weight"), is_of_megatron("model.layers.0.mlp.up_proj.weight")
    (True, False)
    """
    return _OWN_MODULES.search(name) is not None or any(fnmatchcase(name, f"*{pattern}") for pattern in _added)


def cut_of(name: str) -> Cut | None:
    """Return the cut of a tensor by its name; None if no rule matches.

    >>> cut_of("decoder.layers.0.mlp.linear_fc2.weight").dim
    1
    """
    for pattern in reversed(_added):
        if fnmatchcase(name, pattern):
            return _added[pattern]
    return next((cut for pattern, cut in _SHIPPED.items() if fnmatchcase(name, pattern)), None)
