"""Pipeline stages and expert-parallel coordinates of tensors, found from their names.

1. The first part of a dotted name that is a number is its *layer*; the parts before it name the *stack*. A stack has at least
   as many layers as there are stages; in a smaller group the numbers are ignored.
2. Each stack is divided evenly, in order, or at the given boundaries.
3. A tensor without a layer is on the first stage if it embeds, on the last if it is a final norm or a head, and otherwise on all.
   If the checkpoint itself comes from a pipeline, tensors of its first or last stage stay there.
4. Tied tensors are on every stage that holds one of them (`target_placement`).
5. The number after ``experts`` is an *expert*; the experts of each group are divided evenly, in order. Other whole tensors are
   spread over coordinates by size.
6. Layers or experts may be stacked in one tensor, as in Megatron's ``decoder.layers.mlp.weight`` of shape (L, …): ``layers`` that
   no number follows says that the first dim counts layers, and ``experts.experts`` that no number follows says that the next dim
   counts experts. Pipeline stages and expert parallelism then cut these dims evenly.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from ...errors import UsageError
from ..catalog.specs import Ints

_LAST = re.compile(r"embed_out|lm_head|unembed|(^|[._])(head|output|out_proj|classifier|score|pooler|final)|_head($|[._])")
_FIRST = re.compile(r"emb|(^|[._])(wte|wpe|tok|patch|stem|conv1)")
_NORM = re.compile(r"norm|(^|[._])ln")


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the stack (such as ``model.layers``) and the number of the layer in a tensor's name; None if no part is a number.

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
    """Map each tensor's name to the pipeline stages that hold the tensor.

    Raise `UsageError` if there are no layers to divide, or the boundaries do not divide them.

    Parameters
    ----------
    boundaries
        The first layer of each stage except stage 0.
    saved
        The stages that held each tensor, out of `saved_stages`, if the checkpoint says so.
    stacked
        Whether other tensors have the layers stacked along a dim. Then it is fine if these tensors have no layers.

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
    """Yield each layer of a stack with its pipeline stage: by the boundaries, or evenly if there are no boundaries."""
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
    """Return the stages of one tensor: those of its layer if it has one, else as it was saved, else by words in its name.

    A layer counts only if its stack is divided (`stage_of`). The saved stages count only if they were not all stages.
    """
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
    """Return the stages of a tensor outside the layers, by its name: embeddings first, heads and final norms last, else all."""
    # Heads first: names such as "unembed" also match the pattern of embeddings.
    if _LAST.search(name):
        return (num - 1,)
    if _FIRST.search(name):
        return (0,)
    return (num - 1,) if _NORM.search(name) else (*range(num),)


Key = TypeVar("Key", bound=Hashable)


def expert_of(name: str) -> tuple[str, int] | None:
    """Return the group of experts and the number of the expert in a tensor's name; None if the name has no expert.

    >>> expert_of("model.layers.1.experts.5.w1"), expert_of("model.layers.1.w")
    (('model.layers.1.experts', 5), None)
    """
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if parts[i].endswith("experts") and parts[i + 1].isdecimal():
            return ".".join(parts[: i + 1]), int(parts[i + 1])
    return None


def experts_of(names: Sequence[str], num: int) -> dict[str, int]:
    """Map names of experts' tensors to expert-parallel coordinates below `num`. Each group is divided evenly, in order."""
    found = {name: of for name in names if (of := expert_of(name)) is not None}
    groups: dict[str, set[int]] = {}
    for group, expert in found.values():
        groups.setdefault(group, set()).add(expert)
    order = {group: sorted(experts) for group, experts in groups.items()}
    return {name: bisect_left(order[group], expert) * num // len(order[group]) for name, (group, expert) in found.items()}


def spread_by_size(sizes: Mapping[Key, int], num: int) -> dict[Key, int]:
    """Divide keys over `num` places by size: the largest first, each to the place with the smallest total so far."""
    loads = [0] * num
    out = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        place = min(range(num), key=lambda i: (loads[i], i))
        loads[place] += sizes[name]
        out[name] = place
    return out


_LAYERS = re.compile(r"(^|\.)layers\.(?!\d+(\.|$))[^.]+")
_EXPERTS = re.compile(r"(^|\.)experts\.experts\.(?!\d+(\.|$))[^.]+")


def layer_dim(name: str) -> int | None:
    """Return the dim of a parameter along which layers are stacked, from its name; None if they are not stacked.

    >>> layer_dim("model.decoder.layers.mlp.fc1.weight"), layer_dim("model.layers.3.mlp.fc1.weight")
    (0, None)
    """
    return 0 if _LAYERS.search(name) else None


def expert_dim(name: str) -> int | None:
    """Return the dim of a parameter along which experts are stacked, from its name; None if they are not stacked.

    >>> expert_dim("decoder.layers.mlp.experts.experts.fc1.weight"), expert_dim("decoder.layers.0.mlp.experts.experts.fc1.weight")
    (1, 0)
    """
    if not _EXPERTS.search(name):
        return None
    return 0 if layer_dim(name) is None else 1
