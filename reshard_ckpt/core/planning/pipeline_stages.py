"""The pipeline stage that holds a tensor, by the layer numbers in the names.

1. The first part of a dotted name that is a number is its *layer*; the parts before it name the *stack*. A stack has at least
   as many layers as there are stages; in a smaller group the numbers are ignored.
2. Each stack is divided evenly, in order, or at the given boundaries.
3. A tensor without a layer is on the first stage if it embeds, on the last if it is a final norm or a head, and otherwise on all.
   If the checkpoint itself comes from a pipeline, tensors of its first or last stage stay there.
4. Tied tensors are on every stage that holds one of them (`target_placement`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ...errors import UsageError
from ..catalog.specs import Ints

_LAST = re.compile(r"embed_out|lm_head|unembed|(^|[._])(head|output|out_proj|classifier|score|pooler|final)|_head($|[._])")
_FIRST = re.compile(r"emb|(^|[._])(wte|wpe|tok|patch|stem|conv1)")
_NORM = re.compile(r"norm|(^|[._])ln")


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the stack and the layer that a name tells; None if no part of it is a number.

    >>> layer_of("model.layers.3.attn.weight"), layer_of("model.norm.weight")
    (('model.layers', 3), None)
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part)
    return None


def stages_of(
    names: Sequence[str],
    num_stages: int,
    *,
    boundaries: Sequence[int] | None = None,
    saved: Mapping[str, Ints],
    saved_stages: int,
    stacked: bool = False,
) -> dict[str, Ints]:
    """Find the stages that hold each tensor.

    Parameters
    ----------
    boundaries
        The first layer of each stage except stage 0.
    saved
        The saved stages of tensors, if the checkpoint knows them, out of `saved_stages` stages.
    stacked
        Whether other tensors have the layers stacked along a dim. Then it is fine if these tensors have no layers.

    Raises
    ------
    UsageError
        There are no layers to divide, or the boundaries do not divide them.

    Examples
    --------
    >>> names = ["emb.weight", "layers.0.w", "layers.1.w", "layers.2.w", "norm.weight"]
    >>> list(stages_of(names, 2, saved={}, saved_stages=1).values())
    [(0,), (0,), (1,), (1,), (1,)]
    """
    # The number of stages is unchanged: tensors stay where they were.
    if boundaries is None and saved_stages == num_stages:
        return {name: saved[name] if name in saved else (*range(num_stages),) for name in names}
    stacks: dict[str, set[int]] = {}
    for name in names:
        if (found := layer_of(name)) is not None:
            stacks.setdefault(found[0], set()).add(found[1])
    # stage_of: the stage of each layer, only of stacks that have enough layers.
    stage_of = {
        (stack, layer): stage
        for stack, layers in stacks.items()
        if len(layers) >= num_stages
        for layer, stage in _divide(stack, sorted(layers), num_stages, boundaries)
    }
    if num_stages > 1 and not stage_of and not stacked:
        raise UsageError(
            f"no stack of at least {num_stages} numbered layers is found in the names, so nothing tells what {num_stages} "
            "pipeline stages hold; place tensors with rules, as in {'model.block0.*': {'pp': 'resident(0)'}}"
        )
    return {name: _stages(name, stage_of, num_stages, saved.get(name), saved_stages) for name in names}


def _divide(stack: str, layers: Sequence[int], num_stages: int, boundaries: Sequence[int] | None) -> Iterable[tuple[int, int]]:
    """Pair each layer of a stack with its stage."""
    num = len(layers)
    if boundaries is None:
        # Without boundaries, layer number i of the stack is on the stage whose range of positions contains i.
        ends = [num * (stage + 1) // num_stages for stage in range(num_stages)]
        return [(layer, bisect_right(ends, i)) for i, layer in enumerate(layers)]
    if len(boundaries) != num_stages - 1 or sorted(set(boundaries)) != list(boundaries):
        raise UsageError(
            f"stages={list(boundaries)}: {num_stages} pipeline stages have {num_stages - 1} boundaries, ascending: "
            "the first layer of each stage but the first"
        )
    stages = [bisect_right(boundaries, layer) for layer in layers]
    empty = sorted(set(range(num_stages)) - set(stages))
    if empty:
        raise UsageError(
            f"stages={list(boundaries)}: stage {empty[0]} would hold no layer of {stack}, which has {layers[0]} to {layers[-1]}"
        )
    return zip(layers, stages, strict=True)


def _stages(name: str, stage_of: Mapping[tuple[str, int], int], num: int, saved: Ints | None, saved_num: int) -> Ints:
    """Return the stages of one tensor: by its layer, else as saved, else by its role."""
    found = layer_of(name)
    if found is not None and found in stage_of:
        return (stage_of[found],)
    if saved is not None and saved_num > 1:
        if len(saved) == saved_num:  # saved on all stages: if there were two, perhaps only because it is tied
            return _by_role(name, num)
        # The last stage stays the last; others scale with the number of stages.
        return tuple(sorted({num - 1 if stage == saved_num - 1 else stage * num // saved_num for stage in saved}))
    return _by_role(name, num)


def _by_role(name: str, num: int) -> Ints:
    """Return the stages of a tensor without a layer, by the role that its name tells."""
    # Heads first: names such as "unembed" also match the pattern of embeddings.
    if _LAST.search(name):
        return (num - 1,)
    if _FIRST.search(name):
        return (0,)
    return (num - 1,) if _NORM.search(name) else (*range(num),)
