"""Dims along which layers or experts are stacked in one tensor, as in Megatron's ``decoder.layers.mlp.weight`` of shape (L, …).

In a name, a part ``layers`` that no number follows says that the first dim counts layers. ``experts.experts`` that no number
follows says that the next dim counts experts. Pipeline stages and expert parallelism then cut these dims evenly.
"""

from __future__ import annotations

import re

_LAYERS = re.compile(r"(^|\.)layers\.(?!\d+(\.|$))[^.]+")
_EXPERTS = re.compile(r"(^|\.)experts\.experts\.(?!\d+(\.|$))[^.]+")


def layer_dim(name: str) -> int | None:
    """Return the dim of a parameter that counts layers, or None.

    >>> layer_dim("model.decoder.layers.mlp.fc1.weight"), layer_dim("model.layers.3.mlp.fc1.weight")
    (0, None)
    """
    return 0 if _LAYERS.search(name) else None


def expert_dim(name: str) -> int | None:
    """Return the dim of a parameter that counts experts, or None.

    >>> expert_dim("decoder.layers.mlp.experts.experts.fc1.weight"), expert_dim("decoder.layers.0.mlp.experts.experts.fc1.weight")
    (1, 0)
    """
    if not _EXPERTS.search(name):
        return None
    return 0 if layer_dim(name) is None else 1
