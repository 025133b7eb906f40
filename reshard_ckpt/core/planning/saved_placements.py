"""The placements that tensors had when they were saved, brought to the axes of a new mesh, and the tensors that stay together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..catalog.model import Catalog
from ..catalog.placements import KINDS
from ..catalog.specs import AxisPlacement, Ints, Mesh, StateLink

PIPELINE = "pp"
EXPERTS = "ep"
GIVEN_BY_NAMES = (PIPELINE, EXPERTS)
"""Mesh axes (pipeline, experts) on which the name of a tensor tells which coordinates hold it."""

Unit = tuple[str, str, bool]
"""The key of tensors that stay on the same coordinates: optimizer, FQN, and whether they are optimizer state."""


class SavedPlacements:
    """The saved placements of tensors, for the axes of a new mesh.

    Kinds of placement that depend on the size of an axis are resized to the new mesh.

    Attributes
    ----------
    sizes
        The size of each saved axis.
    placements
        For each tensor its saved placement by axis.
    links, shapes
        For each tensor its link to a parameter, and its global shape. A tensor that is not optimizer state links to itself, with
        an empty key.
    """

    def __init__(self, catalog: Catalog, names: Sequence[str], mesh: Mesh) -> None:
        self._catalog, self._mesh = catalog, mesh
        # _writers: the rank that wrote each file.
        self._writers = np.array([file.rank for file in catalog.files], np.int64)
        self._writers_are_known = catalog.mesh is not None and bool((self._writers < catalog.mesh.size).all())
        self.shapes = {name: catalog.shape(catalog.index(name)) for name in names}
        links = catalog.links()
        self.links = {name: links.get(name, StateLink("", name, "", name)) for name in names}
        for name, link in self.links.items():
            if link.parameter not in self.shapes:
                self.links[name] = link._replace(parameter=None)
        self.sizes = {} if catalog.mesh is None else catalog.mesh.by_axis
        self.placements = {name: self._known_placement(name) for name in names}
        self._divided = self._divided_on()

    def parameter(self, name: str) -> str:
        """Return the name of the parameter that a tensor is, or whose state it is; its FQN if the parameter was not saved."""
        return self.links[name].parameter or self.links[name].fqn

    def optimizer(self, name: str) -> str | None:
        """Return the optimizer whose state a tensor is, or None.

        An optimizer whose state dict lies at the root of the state has the name "".
        """
        link = self.links[name]
        return link.optimizer if link.key else None

    def _known_placement(self, name: str) -> dict[str, AxisPlacement]:
        """Return the saved placement of a tensor by axis, resized to the new mesh where it depends on the axis's size.

        An axis is left out if it has no equivalent placement on the new mesh, or if a newer version of this library wrote its
        placement.
        """
        sizes, out, ndim = self._mesh.by_axis, {}, len(self.shapes[name])
        for p in self._catalog.placement(self._catalog.index(name)) or ():
            if p.kind not in KINDS or (p.kind == "shard" if p.dim is None else p.dim >= ndim):
                continue
            resize = KINDS[p.kind].resize
            if resize is None or p.axis not in sizes:
                out[p.axis] = p
            elif (resized := resize(p, self.sizes.get(p.axis, 0), sizes[p.axis])) is not None:
                out[p.axis] = resized
        return out

    def parameter_of_same_shape(self, name: str) -> str | None:
        """Return the name of the parameter whose state a tensor is, if it is another tensor of the same shape; else None."""
        parameter = self.links[name].parameter
        if parameter is None or parameter == name or self.shapes[parameter] != self.shapes[name]:
            return None
        return parameter

    def placement_on(self, name: str, axis: str) -> AxisPlacement | None:
        """Return the saved placement of a tensor on an axis, or None.

        State without a placement of its own has that of its parameter, if both have one shape.
        """
        saved = self.placements[name].get(axis)
        divided_on = self._divided.get(self.optimizer(name))
        # by_chance: the optimizer divided its state along another axis, as one vector. The cut also goes through tensors that lie
        # on this axis, so they seem flat here, or on some coordinates only.
        # unsaid: nothing is recorded; an axis of one coordinate shows nothing.
        by_chance = saved is not None and saved.kind in ("flat", "resident") and divided_on not in (axis, None)
        unsaid = saved is None or (saved.kind == "replicate" and self.sizes[axis] == 1)
        parameter = self.parameter_of_same_shape(name)
        of_parameter = None if parameter is None else self.placements[parameter].get(axis)
        if by_chance or unsaid:
            return of_parameter
        # The state is divided along this axis, but its runs fell into different sections of a fused weight and look like shards.
        sections = saved is not None and saved.kind == "shard" and divided_on == axis
        if sections and of_parameter is not None and of_parameter.kind == "replicate":
            return AxisPlacement(axis, "flat")
        return saved

    def _divided_on(self) -> dict[str | None, str]:
        """Map each optimizer to the axis on which its state is flat or resident most often. A flat tensor counts twice."""
        counts: dict[str | None, Counter[str]] = {}
        for name in self.placements:
            optimizer = self.optimizer(name)
            for axis, p in self.placements[name].items():
                if optimizer is not None and p.kind in ("flat", "resident") and axis not in GIVEN_BY_NAMES:
                    # A flat tensor is the stronger sign.
                    counts.setdefault(optimizer, Counter())[axis] += 2 if p.kind == "flat" else 1
        return {optimizer: count.most_common(1)[0][0] for optimizer, count in counts.items()}

    def first_coordinate(self, name: str, axis: str) -> int:
        """Return the lowest coordinate on an axis among the ranks that wrote a tensor; 0 if the writers are unknown."""
        mesh, source = self._catalog.mesh, self._catalog.source(self._catalog.index(name))
        if mesh is None or axis not in mesh.axes or not self._writers_are_known:
            return 0
        # ranks: the rank that wrote each row of the tensor.
        ranks = self._writers[self._catalog.rows.file[self._catalog.rows_of(source)]]
        return int(np.unravel_index(ranks, mesh.sizes)[mesh.axes.index(axis)].min()) if len(ranks) else 0

    def first_coordinates(self, names: Sequence[str], axis: str) -> dict[tuple[Ints, ...], list[int]]:
        """Return the first coordinate of each tensor on an axis, in the given order, grouped by pipeline stage and experts.

        The tensors of each pipeline stage and experts' rank formed a flat vector of their own.
        """
        out: dict[tuple[Ints, ...], list[int]] = {}
        for name in names:
            out.setdefault(self.stages_and_experts(name), []).append(self.first_coordinate(name, axis))
        return out

    def stages_and_experts(self, name: str) -> tuple[Ints, ...]:
        """Return the coordinates on the axes ``pp`` (pipeline) and ``ep`` (experts) that held a tensor; () if not recorded."""
        saved = self.placements[name]
        return tuple(saved[axis].coords if axis in saved else () for axis in GIVEN_BY_NAMES)

    def tie_key(self, param: str) -> object:
        """Return a key that is equal for tied parameters. The key of a parameter that is not among the tensors is its name."""
        return self._catalog.source(self._catalog.index(param)) if param in self.shapes else param

    def unit_key(self, name: str) -> Unit:
        """Return a key shared by all state of one parameter, which stays on the same coordinates.

        A parameter itself has another key.
        """
        return self.optimizer(name) or "", self.links[name].fqn, bool(self.links[name].key)
