"""Rules that say how Megatron's tensor parallelism cuts tensors, by name: for its GPT, BERT, T5 and MoE models, and a user's own.

The file of one rank does not say how its tensors were cut, so the name must. `rank_tensors` checks each rule against the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...plugins.errors import UsageError

MAX_SECTIONS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks divide a tensor.

    Attributes
    ----------
    dim
        The dim that is cut, in the order of ranks; None if every rank has the whole tensor.
    sections
        The number of equal sections that the rows consist of, each cut by itself. None means: 2 if the tensor has twice as many
        rows as the ``linear_fc2`` beside it has columns, as with SwiGLU, else 1.
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
"""Names of modules that models of Megatron have, and those of Hugging Face's libraries and of torch do not."""
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
        The number of equal sections that the rows consist of, each cut by itself: 2 for a gate and its projection. Only for rows.
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
