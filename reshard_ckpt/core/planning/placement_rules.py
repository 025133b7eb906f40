"""The user's rules for the placement of tensors on a new mesh.

A rule is a pattern of names with a placement on some axes, as in ::

    "model.layers.*.qkv.weight": {tp: shard(0), sections: {0: [4096, 1024, 1024]}}
    "model.layers.*.mlp.down.weight": {tp: shard(1)}
    "optimizer.state.*": {dp: flat}

On each axis, the first rule counts that matches the name and has a placement on that axis. If no rule has one, the catalog
decides. ``on(0, 1)`` is another spelling of ``resident(0, 1)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...errors import UsageError
from ..catalog.placements import KINDS
from ..catalog.specs import AxisPlacement, Ints, Mesh

SECTIONS = "sections"
ORDER = "order"

_CALL = re.compile(r"\s*(\w+)\s*(?:\(\s*(-?\d+(?:\s*,\s*-?\d+)*)\s*\))?\s*")
_OTHER_WORDS = {"on": "resident"}


class Rule(NamedTuple):
    """One rule: a pattern of names, and for matching tensors the placement by axis, the sections by dim, and the order of cuts.

    The dim of a ``shard`` may be negative, counted from the end, because a rule does not know the number of dims. `order` is None
    if the rule does not give it.
    """

    pattern: str
    axes: Mapping[str, AxisPlacement]
    sections: Mapping[int, Ints]
    order: tuple[str, ...] | None


def parse_rules(raw: Any, mesh: Mesh) -> tuple[Rule, ...]:
    """Parse the user's placement rules from plain data: a dict of patterns, or a list of such dicts, in order.

    Raise `UsageError` if an entry is not a rule, or names an axis that the mesh does not have.

    Examples
    --------
    >>> (rule,) = parse_rules({"model.*": {"tp": "shard(-1)"}}, Mesh(("tp",), (2,)))
    >>> rule.axes["tp"]
    AxisPlacement(axis='tp', kind='shard', dim=-1, coords=(), turn=None, sections=())
    """
    if raw is None:
        return ()
    parts = raw if isinstance(raw, list | tuple) else [raw]
    for part in parts:
        if not isinstance(part, Mapping):
            raise UsageError(f"rules: wanted a map of name patterns, or a list of them, got {part!r:.80}")
    return tuple(_rule(pattern, given, mesh) for part in parts for pattern, given in part.items())


def _rule(pattern: Any, given: Any, mesh: Mesh) -> Rule:
    if not isinstance(pattern, str) or not isinstance(given, Mapping) or not given:
        raise UsageError(f"rules: {pattern!r:.80}: {given!r:.80}: wanted a pattern and a map such as {{tp: shard(0)}}")
    where = f"rules: {pattern!r}"
    axes = {axis: _placement(where, axis, text, mesh) for axis, text in given.items() if axis not in (SECTIONS, ORDER)}
    order = given.get(ORDER)
    if order is not None:
        order = tuple(order) if isinstance(order, list | tuple) else (order,)
        for axis in order:
            _size(where, axis, mesh)
    return Rule(pattern, axes, _sections(where, given.get(SECTIONS)), order)


def _size(where: str, axis: Any, mesh: Mesh) -> int:
    if axis not in mesh.axes:
        raise UsageError(f"{where}: {axis!r} is not an axis of the mesh, which has {', '.join(mesh.axes)}")
    return mesh.sizes[mesh.axes.index(axis)]


def _placement(where: str, axis: Any, text: Any, mesh: Mesh) -> AxisPlacement:
    size = _size(where, axis, mesh)
    match = _CALL.fullmatch(str(text))
    kind = KINDS.get(_OTHER_WORDS.get(match[1], match[1])) if match is not None else None
    try:
        if match is None or kind is None:
            *forms, last = (known.form for known in KINDS.values())
            raise ValueError(f"write {', '.join(forms)} or {last}")
        return kind.parse(axis, tuple(int(n) for n in (match[2] or "").split(",") if n), size)
    except ValueError as error:
        raise UsageError(f"{where}: {axis}: {text!r} is not a placement: {error}") from None


def _sections(where: str, raw: Any) -> dict[int, Ints]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raw = {0: raw}
    out: dict[int, Ints] = {}
    for dim, sizes in raw.items():
        good = isinstance(sizes, list | tuple) and all(type(n) is int and n >= 0 for n in sizes)
        if type(dim) is not int or not good:
            raise UsageError(
                f"{where}: sections: {raw!r:.80}: wanted the sizes of a dim's sections, as in {{0: [4096, 1024, 1024]}}"
            )
        out[dim] = tuple(sizes)
    return out


def rules_for(rules: Sequence[Rule], name: str) -> Iterator[Rule]:
    """Yield the rules whose pattern matches a name, in order."""
    return (rule for rule in rules if fnmatchcase(name, rule.pattern))


def unmatched(rules: Sequence[Rule], names: Sequence[str]) -> list[str]:
    """List the patterns of rules that match none of the names; the caller refuses them as mistakes."""
    return [rule.pattern for rule in rules if not any(fnmatchcase(name, rule.pattern) for name in names)]
