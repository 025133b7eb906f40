"""The layout of a DeepSpeed optimizer's flat tensors: the runs of parameters in them, from names, shapes and rank.

DeepSpeed concatenates the parameters of a group and divides the result among the data-parallel ranks. A rank has several flat
tensors for one group (the fp32 master weights, each of Adam's moments). All have the same layout, a `Runs`:

*Packed* (ZeRO-1, ZeRO-2, BF16_Optimizer; with one rank also the fp16 and bf16 wrappers without ZeRO): parameters lie back to
back, each followed by a gap. The whole is cut into ranges of equal, even length, one for each rank; a cut may go through a
parameter.

*Striped* (ZeRO-3): each parameter is cut into stripes of equal length, one for each rank; the last stripe is padded. A rank's
stripes lie back to back.

Without a wrapper, or with the wrapper that does not flatten, each parameter is a tensor of its own (`without_zero`).

The same description serves to read files (where `FlatGroup.tensors` are views of a file), and to save and load (where they are
live).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...plugins import Ints
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.groups import named_group
from ...plugins.torchfile import PickledTensor, TorchFile
from .names import MASTER, global_name, num_local_experts

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Params:
    """The parameters of a group in flat order: FQN, shape, number of elements, and number of elements in the gap after each."""

    names: tuple[str, ...]
    shapes: tuple[Ints, ...]
    numel: I64
    gaps: I64

    @staticmethod
    def of(shapes: Mapping[str, Sequence[int]], gaps: Sequence[int] = ()) -> Params:
        """Describe a group of parameters by their names and shapes, such as one entry of ``param_shapes``."""
        sizes = tuple(tuple(shape) for shape in shapes.values())
        numel = np.array([prod(shape) for shape in sizes], np.int64)
        return Params(tuple(shapes), sizes, numel, np.zeros(len(sizes), np.int64)).with_gaps(gaps)

    def with_gaps(self, gaps: Sequence[int]) -> Params:
        """Return the same group of parameters with these gaps behind them; an empty `gaps` changes nothing."""
        if len(gaps) == 0:
            return self
        if len(gaps) != len(self.names) or not all(type(gap) is int and gap >= 0 for gap in gaps):
            raise CorruptError(f"{len(self.names)} parameters have the paddings {gaps!r:.80} between them; use another copy")
        return replace(self, gaps=np.array(gaps, np.int64))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of parameters in a flat tensor, as columns.

    Elements ``[start, start + count)`` of parameter number `param` lie in the flat tensor from element `at` on. `length` is the
    number of elements of the flat tensor with the padding at its end.
    """

    param: I64
    start: I64
    count: I64
    at: I64
    length: int

    @property
    def end(self) -> int:
        """The smallest number of elements that a flat tensor with these runs can have."""
        return int((self.at + self.count).max(initial=0))


def packed_length(params: Params, num_ranks: int) -> int:
    """Return the even number of elements of each rank's range, if a group is concatenated, padded and cut into equal ranges.

    >>> packed_length(Params.of({"a": (5,), "b": (2, 3)}), 2)
    6
    """
    total = int(params.numel.sum() + params.gaps.sum())
    return -(-total // (2 * num_ranks)) * 2


def packed_runs(params: Params, num_ranks: int, rank: int) -> Runs:
    """Return the runs of a rank if the group is concatenated and cut into equal ranges.

    >>> runs = packed_runs(Params.of({"a": (5,), "b": (2, 3)}), 2, 0)
    >>> [column.tolist() for column in (runs.param, runs.start, runs.count, runs.at)]
    [[0, 1], [0, 0], [5, 1], [0, 5]]
    """
    # first[p]: where parameter p begins in the concatenated group
    first = np.cumsum(params.numel + params.gaps) - params.numel - params.gaps
    length = packed_length(params, num_ranks)
    # low[p]: first element of parameter p in this rank's range, counted in the group; count[p] <= 0: it has no element there
    low = np.maximum(first, rank * length)
    count = np.minimum(first + params.numel, (rank + 1) * length) - low
    here = np.flatnonzero(count > 0)
    return Runs(here, (low - first)[here], count[here], low[here] - rank * length, length)


def striped_runs(params: Params, num_ranks: int, rank: int) -> Runs:
    """Return the runs of a rank if each parameter is cut into equal stripes.

    >>> runs = striped_runs(Params.of({"a": (5,), "b": (2, 3)}), 2, 1)
    >>> [column.tolist() for column in (runs.param, runs.start, runs.count, runs.at)]
    [[0, 1], [3, 3], [2, 3], [0, 3]]
    """
    # stripe[p]: elements in each stripe of parameter p; count[p]: elements that this rank's stripe has without padding
    stripe = -(-params.numel // num_ranks)
    count = np.minimum(params.numel - rank * stripe, stripe)
    here = np.flatnonzero(count > 0)
    return Runs(here, (rank * stripe)[here], count[here], (np.cumsum(stripe) - stripe)[here], int(stripe.sum()))


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat group on one rank: its flat tensors by key (`MASTER`, ``exp_avg``, …), and other state, such as ``step``."""

    params: Params
    runs: Runs
    tensors: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of an optimizer on one rank.

    Attributes
    ----------
    groups
        The flat groups: the groups of the optimizer, or the sub-groups of ZeRO-3.
    param_groups
        The hyperparameters of each optimizer group, with the names of its parameters under ``params``.
    values
        DeepSpeed's own values, such as the loss scaler.
    num_ranks
        The number of ranks that share each flat group.
    """

    groups: tuple[FlatGroup, ...]
    param_groups: list[dict[str, Any]]
    values: Mapping[str, Any]
    num_ranks: tuple[int, ...]


NOT_SHARED = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings", "param_alignment_paddings", "partition_count",
    "param_slice_mappings", "universal_checkpoint_info", "optimizer_state_dict", "fp32_flat_groups", "fp32_groups_flat",
    "fp32_groups", "ds_version", "base_optimizer_state_step", "param_groups",
})  # fmt: skip
"""Keys of an optimizer's state dict that describe its tensors. All others are DeepSpeed's own values, which are saved as such."""


CURE_OF_FOLDERS = "convert the folder with DeepSpeed's ds_to_universal, or load it with DeepSpeed"
CURE_OF_ENGINES = "detach(engine): DeepSpeed itself saves and loads it"
"""The next step in errors about unsupported features, of a folder and of a live engine."""


@contextmanager
def advised(cure: str) -> Iterator[None]:
    """Add the next step to an error of the ``with`` block about something that is not supported, in a folder or an engine."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; {cure}") from None


def open_state(shapes: Sequence[Params], state: Mapping[str, Any], rank: int | Sequence[int], where: str) -> RankState:
    """Convert the state dict of a rank's optimizer to its flat groups, hyperparameters and values.

    Raise `CorruptError` if the flat tensors have other lengths than follow from the shapes, and `UnsupportedError` if the state
    dict is of an unknown kind.

    Parameters
    ----------
    shapes
        The parameters of each flat group, as in ``param_shapes``.
    state
        ``optimizer.state_dict()`` of DeepSpeed's ZeRO or mixed-precision optimizer; its tensors may be anything with a shape.
    rank
        The data-parallel rank; or one for each group, if the groups are divided among different ranks.
    where
        The name of the state in messages.
    """
    is_striped = "fp32_flat_groups" in state
    counts = state.get("partition_count", 1)
    if is_striped:
        masters, base = state["fp32_flat_groups"], state["optimizer_state_dict"]
        if not isinstance(rank, int):
            raise UnsupportedError(f"{where}: ZeRO-3 divides its groups among different ranks, which is not supported")
        if state.get("ds_zero_partition_groups"):
            raise UnsupportedError(f"{where}: AutoEP divides its groups among different ranks, which is not supported")
    elif "single_partition_of_fp32_groups" in state:
        masters, base = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]
    elif "fp32_groups_flat" in state:  # a wrapper without ZeRO: each rank has all
        masters, base, counts, rank = state["fp32_groups_flat"], state["optimizer_state_dict"], 1, 0
    else:
        raise UnsupportedError(
            f"{where}: its optimizer state has {', '.join(map(str, state))}, which no optimizer that is known saves"
        )
    num = len(masters)
    num_ranks = tuple(counts) if isinstance(counts, list | tuple) else (counts,) * num
    places = (rank,) * num if isinstance(rank, int) else rank
    gaps = state.get("param_alignment_paddings") or [()] * num
    _check_lengths(where, num, param_shapes=shapes, partition_count=num_ranks, param_alignment_paddings=gaps)
    # An elastic checkpoint has a list of states, one for each group, and no hyperparameters.
    is_elastic = isinstance(base, list)
    groups = []
    for i, (shape, gap, master, ranks, place) in enumerate(zip(shapes, gaps, masters, num_ranks, places, strict=True)):
        if type(ranks) is not int or not place < ranks:
            raise CorruptError(f"{where}: its partition_count is {ranks!r}, but it is the file of rank {place}; use another copy")
        params = shape.with_gaps(gap)
        runs = (striped_runs if is_striped else packed_runs)(params, ranks, place)
        own = base[i] if is_elastic else base["state"].get(i, {})  # its number in torch's optimizer is its position
        groups.append(_flat_group(params, runs, master, own, f"{where}: group {i}"))
    # With ZeRO-3, a group of the optimizer has several flat groups, and lists their numbers. Otherwise it has one.
    found = [{}] * num if is_elastic else base["param_groups"]
    listed = [group["params"] for group in found] if is_striped else [[i] for i in range(num)]
    if [number for numbers in listed for number in numbers] != list(range(num)):
        raise CorruptError(f"{where}: its param_groups list the flat groups {listed}, of {num}; use another copy")
    _check_lengths(where, len(listed), param_groups=found)
    param_groups = [
        named_group(group, (name for i in numbers for name in groups[i].params.names))
        for group, numbers in zip(found, listed, strict=True)
    ]
    values = {key: value for key, value in state.items() if key not in NOT_SHARED}
    return RankState(tuple(groups), param_groups, values, num_ranks)


def _flat_group(params: Params, runs: Runs, master: Any, state: Mapping[str, Any], where: str) -> FlatGroup:
    """Make the `FlatGroup` of a parameter group: divide its state into flat tensors and other values."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in {MASTER: master, **state}.items():
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) == 0:
            values[key] = value
        elif len(shape) == 1 and runs.end <= shape[0] <= runs.length:
            tensors[key] = value
        else:
            needed = f"{runs.end} to {runs.length} elements"
            if key == MASTER:
                raise CorruptError(
                    f"{where}: its master weights have shape {tuple(shape)}, but {needed} follow from the shapes of its "
                    f"{len(params.names)} parameters; files of several saves may be mixed, so use another checkpoint"
                )
            raise UnsupportedError(
                f"{where}: its state {key} has shape {tuple(shape)} and not {needed}, so that its elements belong to no parameter"
            )
    return FlatGroup(params, runs, tensors, values)


def _check_lengths(where: str, num: int, **found: Sequence[Any]) -> None:
    """Refuse lists in an optimizer's state dict that do not have one entry for each flat group."""
    for key, value in found.items():
        if len(value) != num:
            raise CorruptError(f"{where}: its optimizer has {num} flat groups, and {key} {len(value)}; use another copy")


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The part of an optimizer group that one rank holds.

    `rank` is the number of the part among the ranks that share the group. Ranks with other experts have another `expert_rank`.
    """

    rank: int
    expert_rank: int = 0


def placed_groups(num_ranks: Sequence[int], num_dp: int, dp: int) -> tuple[GroupPlace, ...]:
    """Return the place of data-parallel rank `dp` in each group; `num_ranks` is the number of ranks that share each group.

    An optimizer group with experts is divided only among the ranks that have the same experts, so its ``partition_count`` is
    smaller than that of other groups. Therefore ``partition_count`` and the rank tell which experts a rank has, and which part of
    their state:

    >>> placed_groups([4, 2], 4, 3)
    (GroupPlace(rank=3, expert_rank=0), GroupPlace(rank=1, expert_rank=1))

    Raise `CorruptError` if the ranks cannot be divided into groups of equal size.
    """
    wrong = next((num for num in num_ranks if type(num) is not int or num < 1 or num_dp % num), None)
    if wrong is not None:
        raise CorruptError(
            f"a group of the optimizer is divided among {wrong!r} of {num_dp} data-parallel ranks; use another copy"
        )
    return tuple(GroupPlace(dp // (num_dp // num), dp % (num_dp // num)) for num in num_ranks)


def named_globally(groups: Sequence[Params], places: Sequence[GroupPlace]) -> list[Params]:
    """Return a rank's parameter groups with the names that the parameters have in the whole model."""
    if not any(place.expert_rank for place in places):
        return list(groups)
    num_local = num_local_experts(name for group in groups for name in group.names)
    return [
        replace(group, names=tuple(global_name(name, num_local, place.expert_rank) for name in group.names))
        for group, place in zip(groups, places, strict=True)
    ]


def shapes_in(model: TorchFile) -> list[dict[str, Ints]]:
    """Return the names and shapes of the parameters in each flat group, from a file of model states."""
    found = model.content.get("param_shapes")
    if not isinstance(found, list | tuple | None):
        raise CorruptError(f"{model.key}: its param_shapes are not a list; use another copy")
    return [shapes_of(shapes, model.key) for shapes in found or ()]


def local_shapes(model: TorchFile) -> dict[str, Ints]:
    """Map the names of all tensors in a tensor-parallel rank's file of model states to their shapes."""
    module = model.content["module"]
    found = {fqn: view.shape for fqn, view in (module or {}).items() if isinstance(view, PickledTensor)}
    found |= shapes_of(model.content.get("frozen_param_shapes"), model.key)
    for shapes in shapes_in(model):
        found |= shapes
    return found


def shapes_of(shapes: Any, where: str) -> dict[str, Ints]:
    """Check that an object of a file maps names to shapes, and return it as a dict; None becomes an empty dict."""
    if shapes is None:
        return {}
    if not isinstance(shapes, dict) or not all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    ):
        raise CorruptError(f"{where}: holds something else than shapes where the shapes of parameters belong; use another copy")
    return {name: tuple(shape) for name, shape in shapes.items()}
