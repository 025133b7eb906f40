"""The placement of each saved tensor on a new mesh: from the user's rules, the tensor's name, and its saved placement.

For each tensor and each axis of the new mesh, the first of these sources that has an answer decides:

1. A rule for the tensor; or, for optimizer state of the shape of its parameter, a rule for the parameter.
2. The name. On ``pp`` it gives the stage (`stages`). On ``ep``, experts named ``experts.3.…`` are divided evenly. If layers or
   experts are stacked in one tensor (`pipeline_stages`), the axis cuts that dim evenly.
3. The catalog. A tensor that was sharded along a dim, replicated or flat on an axis stays so, on the new size of the axis. Whole
   tensors that were divided over an axis (as ZeRO does) are divided anew: as one vector if any of them was cut, else by size.
4. Otherwise the tensor is replicated, as on an axis that the checkpoint does not have. Along an axis that only the checkpoint
   has, tensors become whole again.

Axes that shard one dim cut it in the order, and in the sections, that a rule gives or that the catalog recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ...errors import UsageError
from ..catalog.model import Catalog
from ..catalog.names import optimizer_of
from ..catalog.placements import KINDS
from ..catalog.specs import AxisPlacement, Ints, Mesh
from .pipeline_stages import expert_dim, experts_of, layer_dim, spread_by_size, stages_of
from .placement_rules import Rule, rules_for, unmatched
from .saved_placements import GIVEN_BY_NAMES, PIPELINE, SavedPlacements, Unit


@dataclass(frozen=True, slots=True)
class TargetPlacement:
    """The placement of one tensor on a mesh, alone or in a vector of several tensors.

    ``axes`` has a placement for each axis of the mesh; a placement that shards also has the position of its axis in the order in
    which axes cut the dim. A flat axis cuts the flattened tensor into equal runs. If the tensor has a ``vector`` (number of the
    vector, position in it), all tensors of that vector are laid end to end and cut as if they were one. If it ``follows`` another
    tensor, it lies on the ranks that hold a part of that tensor.
    """

    axes: tuple[AxisPlacement, ...]
    vector: tuple[int, int] | None = None
    follows: str | None = None

    @property
    def flat_axis(self) -> int | None:
        """The index of the mesh axis along which the tensor is flat, or None."""
        return next((i for i, p in enumerate(self.axes) if p.kind == "flat"), None)

    def on_axis(self, axis: str) -> AxisPlacement:
        """Return the placement of the tensor on the mesh axis with this name."""
        return next(p for p in self.axes if p.axis == axis)

    def with_axis(self, placement: AxisPlacement) -> TargetPlacement:
        """Return a copy of this placement with `placement` in place of the one on the same mesh axis."""
        return replace(self, axes=tuple(placement if p.axis == placement.axis else p for p in self.axes))

    def without_flat(self) -> TargetPlacement:
        """Return a copy in which the tensor is replicated on each axis that cuts it flat."""
        return replace(self, axes=tuple(AxisPlacement(p.axis, "replicate") if KINDS[p.kind].flattens else p for p in self.axes))


class TargetTopology(NamedTuple):
    """The topology to reshard to, as the user describes it: the mesh, rules for placements, and pipeline stages."""

    mesh: Mesh
    rules: tuple[Rule, ...] = ()
    boundaries: Ints | None = None
    """The first layer of each pipeline stage except stage 0; None to divide the layers evenly."""
    groups: Mapping[str, Sequence[str]] | None = None
    """The FQNs of each optimizer's parameters, in the order of its groups."""


def place(catalog: Catalog, names: Sequence[str], topology: TargetTopology) -> dict[str, TargetPlacement]:
    """Return the placement of each of these tensors on the new mesh, by name.

    Raise `UsageError` if a rule matches nothing or does not fit a tensor, or nothing tells the pipeline stages.
    """
    return _Placer(catalog, names, topology).run()


class _Placer:
    """Finds the placements of tensors on a new mesh; keeps the saved placements and the results of earlier steps."""

    def __init__(self, catalog: Catalog, names: Sequence[str], topology: TargetTopology) -> None:
        self.names, self.topology, self.mesh = names, topology, topology.mesh
        self.groups = topology.groups or {}
        self.saved = SavedPlacements(catalog, names, topology.mesh)
        self.by_name: dict[str, Mapping[str, Ints]] = {}
        self.placed: dict[str, TargetPlacement] = {}

    def run(self) -> dict[str, TargetPlacement]:
        slips = unmatched(self.topology.rules, self.names)
        if slips:
            raise UsageError(f"rules: {', '.join(map(repr, slips[:5]))}: no tensor has such a name; correct the pattern")
        self.by_name = {axis: self._given_by_names(axis) for axis in GIVEN_BY_NAMES if axis in self.mesh.axes}
        self.placed = {name: self._place(name) for name in self.names}
        for number, axis in enumerate(self.mesh.axes):
            self._divide_again(axis, number * len(self.names))
        for name, p in self.placed.items():
            flat = [a.axis for a in p.axes if KINDS[a.kind].flattens]
            if len(flat) > 1:
                one = f"{{{flat[-1]!r}: 'replicate'}}"
                raise UsageError(f"{name}: flat on {', '.join(flat)}; a rule must replicate it on all but one, as {one} does")
        return self.placed

    def _given_by_names(self, axis: str) -> dict[str, Ints]:
        """Map tensors to the coordinates along `axis` that hold them: pipeline stages (``pp``), or ranks of experts (``ep``).

        For ``pp``, tensors that a rule or a stacked dim places are left out. For ``ep``, tensors of no expert are left out; if
        the size of ``ep`` is unchanged, only tensors that were not resident on it.
        """
        size, saved_size = self.mesh.by_axis[axis], self.saved.sizes.get(axis, 1)
        if axis == PIPELINE:
            return self._stages(size, saved_size)
        if size == saved_size:
            # The size is unchanged, so experts stay where they were.
            saved = ((name, placement.get(axis)) for name, placement in self.saved.placements.items())
            return {name: p.coords for name, p in saved if p is not None and p.kind == "resident"}
        owner = {name: self.saved.parameter(name) for name in self.names}
        experts = experts_of(sorted(set(owner.values())), size)
        return {name: (experts[param],) for name, param in owner.items() if param in experts}

    def _stages(self, size: int, saved_size: int) -> dict[str, Ints]:
        """Map tensors to the pipeline stages that hold them.

        Optimizer state lies with its parameter. Tied tensors lie on every stage that holds one of them.
        """
        if size == 1:
            return {}
        # Tensors that are cut along stacked layers, or placed by a rule, need no stage of their own.
        stacked = {name for name in self.names if self._stacked_dim(name, PIPELINE) is not None}
        ruled = stacked | {name for name in self.names if self._ruled(name, PIPELINE) is not None}
        owner = {name: self.saved.parameter(name) for name in self.names if name not in ruled}
        # known: the saved stages of each parameter, from its own tensor if there is one, else from its state.
        known: dict[str, Ints] = {}
        for name in sorted(owner, key=lambda n: n != owner[n]):  # parameters first: they win over their state
            p = self.saved.placements[name].get(PIPELINE)
            if p is not None:
                known.setdefault(owner[name], p.coords if p.kind == "resident" else (*range(saved_size),))
        distinct = list(dict.fromkeys(owner.values()))
        if not distinct:
            return {}
        boundaries = self.topology.boundaries
        stages = stages_of(distinct, size, boundaries=boundaries, saved=known, saved_stages=saved_size, stacked=bool(stacked))
        # together: for each set of tied tensors the union of their stages.
        together: dict[object, set[int]] = {}
        for param in distinct:
            together.setdefault(self.saved.tie_key(param), set()).update(stages[param])
        return {name: tuple(sorted(together[self.saved.tie_key(param)])) for name, param in owner.items()}

    def _place(self, name: str) -> TargetPlacement:
        """Return the placement of a tensor: find it for each mesh axis alone, then the order in which axes cut the same dim."""
        axes = [self._on_axis(name, axis, size) for axis, size in self.mesh.by_axis.items()]
        recorded = self._recorded_cuts(name, axes)
        order, sections = self._order(name, axes, recorded), self._sections(name, axes, recorded)
        # cut: for each dim the number of axes that cut it so far.
        cut: dict[int, int] = {}
        for i in order:
            dim = axes[i].dim
            assert dim is not None
            turn = cut.get(dim, 0)
            cut[dim] = turn + 1
            axes[i] = replace(axes[i], turn=turn, sections=sections.get(dim, ()) if turn == 0 else ())
        return TargetPlacement(tuple(axes))

    def _recorded_cuts(self, name: str, axes: Sequence[AxisPlacement]) -> Mapping[str, AxisPlacement]:
        """Return the saved placements, by axis, that show the order and the sections of a tensor's cuts.

        For optimizer state it is the placement of its parameter, whose pieces show this best, unless more axes cut the state than
        the parameter.
        """
        parameter = self.saved.parameter_of_same_shape(name)
        if parameter is not None:
            known = {axis for axis, p in self.saved.placements[parameter].items() if p.kind == "shard"}
            if all(p.axis in known for p in axes if p.kind == "shard"):
                return self.saved.placements[parameter]
        return self.saved.placements[name]

    def _ruled(self, name: str, axis: str) -> AxisPlacement | None:
        """Return the placement on an axis that a rule gives a tensor, or for optimizer state gives its parameter; else None.

        State has the placement of its parameter only if it was not divided (flat or resident) on the axis, and if both have one
        shape; on ``pp`` and ``ep`` always.
        """
        own = next((rule.axes[axis] for rule in rules_for(self.topology.rules, name) if axis in rule.axes), None)
        told = axis in GIVEN_BY_NAMES  # on these axes all state lies with its parameter, whatever its shape
        parameter = self.saved.links[name].parameter if told else self.saved.parameter_of_same_shape(name)
        if own is not None or parameter is None:
            return own
        # State that was divided (as ZeRO does) stays divided although a rule shards its parameter.
        if not told and axis in self.saved.placements[name] and self.saved.placements[name][axis].kind in ("flat", "resident"):
            return None
        return next((rule.axes[axis] for rule in rules_for(self.topology.rules, parameter) if axis in rule.axes), None)

    def _on_axis(self, name: str, axis: str, size: int) -> AxisPlacement:
        """Return the placement of a tensor on one axis: from a rule, stacked layers or experts, its name, or as it was saved."""
        ndim = len(self.saved.shapes[name])
        ruled = self._ruled(name, axis)
        if ruled is not None:
            return self._checked(name, ruled, ndim)
        if size > 1 and (dim := self._stacked_dim(name, axis)) is not None:
            return self._cut_stack(name, axis, dim, size)
        if axis in self.by_name and name in self.by_name[axis]:
            return _resident(axis, self.by_name[axis][name], size)
        saved = self.saved.placement_on(name, axis)
        return AxisPlacement(axis, "replicate") if saved is None or axis == PIPELINE else saved

    def _stacked_dim(self, name: str, axis: str) -> int | None:
        """Return the dim of a tensor along which layers (on ``pp``) or experts (on ``ep``) are stacked, or None."""
        parameter = self.saved.parameter_of_same_shape(name)
        if axis not in GIVEN_BY_NAMES or (parameter is None and self.saved.links[name].optimizer):
            return None
        dim = (layer_dim if axis == PIPELINE else expert_dim)(parameter or name)
        return dim if dim is not None and dim < len(self.saved.shapes[name]) else None

    def _cut_stack(self, name: str, axis: str, dim: int, size: int) -> AxisPlacement:
        """Return a placement that shards the dim of stacked layers or experts.

        Raise UsageError if the axis does not cut it evenly.
        """
        num, noun = self.saved.shapes[name][dim], "layers" if axis == PIPELINE else "experts"
        boundaries = self.topology.boundaries if axis == PIPELINE else None
        if num % size or boundaries not in (None, tuple(num // size * stage for stage in range(1, size))):
            raise UsageError(
                f"{name}: has {num} {noun} stacked along dim {dim}, which {axis}={size} does not cut evenly"
                f"{'' if boundaries is None else f' at stages={list(boundaries)}'}; pass another size, or a rule that "
                f"replicates it: {{'{name}': {{'{axis}': 'replicate'}}}}"
            )
        return AxisPlacement(axis, "shard", dim)

    def _checked(self, name: str, ruled: AxisPlacement, ndim: int) -> AxisPlacement:
        """Return a rule's placement with its dim counted from the front. A scalar cannot be flat, so it is replicated instead."""
        if KINDS[ruled.kind].flattens and ndim == 0:
            return AxisPlacement(ruled.axis, "replicate")
        if ruled.dim is None:
            return ruled
        if not -ndim <= ruled.dim < ndim:
            spelled, shape = KINDS[ruled.kind].spell(ruled), self.saved.shapes[name]
            raise UsageError(
                f"rules: {name}: {ruled.axis}: {spelled}, but its shape is {shape}; correct it, or put a rule for {name} first"
            )
        return replace(ruled, dim=ruled.dim % ndim)

    def _sections(self, name: str, axes: Sequence[AxisPlacement], recorded: Mapping[str, AxisPlacement]) -> dict[int, Ints]:
        """Return the sections of each dim (parts that are cut separately), from a rule or from the checkpoint.

        Without a rule they are those in the saved placement of the axis that cuts the dim first. Raise `UsageError` if the
        sections of a rule do not add up to the size of the dim.
        """
        shape = self.saved.shapes[name]
        names = [name, self.saved.parameter_of_same_shape(name)]
        rules = [rule for n in names if n is not None for rule in rules_for(self.topology.rules, n) if rule.sections]
        if not rules:
            kept = [recorded[p.axis] for p in axes if p.kind == "shard" and p.axis in recorded]
            return {p.dim: p.sections for p in kept if p.dim is not None and p.turn == 0 and sum(p.sections) == shape[p.dim]}
        sections = {dim % len(shape) if shape else dim: sizes for dim, sizes in rules[0].sections.items()}
        for dim, sizes in sections.items():
            if dim >= len(shape) or sum(sizes) != shape[dim]:
                raise UsageError(f"rules: {name}: sections {list(sizes)} of dim {dim} do not add up to its shape {shape}")
        return sections

    def _order(self, name: str, axes: Sequence[AxisPlacement], recorded: Mapping[str, AxisPlacement]) -> list[int]:
        """Return the indices of the sharding axes in the order in which they cut: by a rule, else as saved, else inner first."""
        inner_first = sorted((i for i, p in enumerate(axes) if p.kind == "shard"), reverse=True)
        ruled = next((rule.order for rule in rules_for(self.topology.rules, name) if rule.order), None)
        if ruled is not None:
            place = {axis: i for i, axis in enumerate(ruled)}
            return sorted(inner_first, key=lambda i: place.get(axes[i].axis, len(place)))
        turns = {i: p.turn for i in inner_first if (p := recorded.get(axes[i].axis)) is not None and p.turn is not None}
        return sorted(inner_first, key=lambda i: turns[i]) if len(turns) == len(inner_first) else inner_first

    def _divide_again(self, axis: str, first_vector: int) -> None:
        """Divide anew, over an axis, tensors that are flat on it or that only some coordinates held whole (as ZeRO does).

        Vectors (tensors cut end to end) of this axis are numbered from `first_vector` on.
        """
        # divided: these tensors by optimizer and key of the state, so all "exp_avg" of an optimizer together.
        divided: dict[tuple[str, str], list[str]] = {}
        for name, p in self.placed.items():
            if p.on_axis(axis).kind == "flat" or self._was_divided(name, axis):
                link = self.saved.links[name]
                divided.setdefault((link.optimizer, link.key), []).append(name)
        # flat: the groups that are cut as elements; vectors: the ones among them that are cut end to end as one vector.
        flat = {key for key, members in divided.items() if self._is_vector(members, axis)}
        vectors = {key for key in flat if not self._each_alone(divided[key], axis)}
        for number, key in enumerate(sorted(vectors), first_vector):
            for i, name in enumerate(self._in_order(divided[key], axis)):
                self.placed[name] = replace(self.placed[name].with_axis(AxisPlacement(axis, "flat")), vector=(number, i))
        # Tensors of all other groups stay whole, and are spread over the coordinates by size.
        whole = [name for key, members in divided.items() if key not in flat for name in members]
        self._spread(axis, self._follow(axis, whole, {name for key in flat for name in divided[key]}))

    def _was_divided(self, name: str, axis: str) -> bool:
        """Tell whether only some coordinates of the axis held the tensor whole, so that it is divided anew.

        If a rule places the tensor on this axis, the rule decides: True if it says ``flat``. False if its name gives the
        coordinates (``pp``, ``ep``).
        """
        ruled = self._ruled(name, axis)
        if ruled is not None:
            return ruled.kind == "flat"
        saved = self.saved.placement_on(name, axis)
        return name not in self.by_name.get(axis, {}) and saved is not None and saved.kind == "resident"

    def _is_vector(self, members: Sequence[str], axis: str) -> bool:
        """Tell whether the saving job cut these tensors as flat memory (True), or placed each whole tensor on some rank (False).

        It cut them if some of the tensors are flat, or if the ranks that hold them ascend in the optimizer's order of parameters.
        """
        if any(self.placed[name].on_axis(axis).kind == "flat" for name in members):
            return True
        optimizer = self.saved.optimizer(members[0])
        if all(self.saved.shapes[name] == () for name in members) or optimizer is None:
            return False
        firsts = self.saved.first_coordinates(self._by_group(members), axis)
        several = any(len(set(coordinates)) > 1 for coordinates in firsts.values())
        return optimizer in self.groups and several and all(map(_ascending, firsts.values()))

    def _each_alone(self, members: Sequence[str], axis: str) -> bool:
        """Tell whether each tensor was cut flat on its own: then all are flat, and each begins on coordinate 0 of the axis."""
        if any(self._ruled(name, axis) is not None or self.placed[name].on_axis(axis).kind != "flat" for name in members):
            return False
        return not any(self.saved.first_coordinate(name, axis) for name in members)

    def _in_order(self, members: Sequence[str], axis: str) -> list[str]:
        """Order tensors as they lay in a flat vector: as the optimizer lists its parameters, forwards or backwards.

        The ranks that wrote them must ascend in this order. If neither direction fits, order them by the coordinates that held
        them.
        """
        ordered = self._by_group(members)
        for names in (ordered, ordered[::-1]):
            if all(map(_ascending, self.saved.first_coordinates(names, axis).values())):
                return names
        return sorted(ordered, key=lambda n: (self.saved.stages_and_experts(n), self.saved.first_coordinate(n, axis)))

    def _by_group(self, members: Sequence[str]) -> list[str]:
        """Sort tensors of optimizer state in the order in which the optimizer lists their parameters."""
        optimizer = self.saved.optimizer(members[0])
        place = {fqn: i for i, fqn in enumerate(() if optimizer is None else self.groups.get(optimizer, ()))}
        return sorted(members, key=lambda name: place.get(self.saved.links[name].fqn, len(place)))

    def _follow(self, axis: str, whole: Sequence[str], flat: set[str]) -> list[str]:
        """Let whole tensors of a parameter's state lie where its flat state lies.

        Return the whole tensors whose parameter has no flat state.
        """
        # leader: for each parameter a flat tensor of its state.
        leader = {self.saved.unit_key(name): name for name in sorted(flat)}
        # A step count was on all ranks that had a part of its parameter's state, perhaps on all ranks; so replicated ones follow
        # too, if another tensor of the same key was divided.
        kinds = {(self.saved.links[name].optimizer, self.saved.links[name].key) for name in whole}
        for name in self.names:
            link, leads = self.saved.links[name], leader.get(self.saved.unit_key(name))
            if leads is not None and name not in flat and (link.optimizer, link.key) in kinds:
                self.placed[name] = replace(self.placed[name].with_axis(AxisPlacement(axis, "replicate")), follows=leads)
        return [name for name in whole if self.placed[name].follows is None]

    def _spread(self, axis: str, whole: Sequence[str]) -> None:
        """Divide whole tensors over the coordinates of an axis by size. The state of one parameter stays together.

        If the size of the axis is unchanged, they stay where they were.
        """
        size = self.mesh.by_axis[axis]
        # The size is unchanged: tensors stay on the coordinates that held them.
        if size == self.saved.sizes.get(axis):
            return
        bytes_of: dict[Unit, int] = {}
        for name in whole:
            unit = self.saved.unit_key(name)
            bytes_of[unit] = bytes_of.get(unit, 0) + prod(self.saved.shapes[name])
        chosen = spread_by_size(bytes_of, size)
        for name in whole:
            self.placed[name] = self.placed[name].with_axis(_resident(axis, (chosen[self.saved.unit_key(name)],), size))


def _resident(axis: str, coords: Ints, size: int) -> AxisPlacement:
    """Return the placement of a tensor that only these coordinates of an axis hold; replicated if it is all of them."""
    return AxisPlacement(axis, "replicate") if len(coords) == size else AxisPlacement(axis, "resident", None, coords)


def _ascending(numbers: Sequence[int]) -> bool:
    """Tell whether numbers ascend, apart from at most one step down in five numbers.

    The numbers are the first mesh coordinates of tensors that lie one after the other in a vector. Where ranks share the writing
    of replicas, a tensor shows the rank that wrote it, which need not be the first that held it: so a few steps down are normal.
    """
    return 5 * sum(a > b for a, b in pairwise(numbers)) <= len(numbers)


def group_orders(values: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield each optimizer with the FQNs of its parameters, in order, from decoded values named ``….param_groups``."""
    for name, groups in values.items():
        optimizer = optimizer_of(name)
        if optimizer is not None and isinstance(groups, list | tuple):
            fqns = [fqn for group in groups if isinstance(group, Mapping) for fqn in group.get("params", ())]
            if all(isinstance(fqn, str) for fqn in fqns):
                yield optimizer, fqns
