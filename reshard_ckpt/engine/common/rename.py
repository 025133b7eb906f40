"""How does a catalog look under other names? The same rows and files; only the names that a load goes by change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...core.catalog.model import Catalog, TensorKind, ValueEntry
from ...core.catalog.param_groups import are_groups
from ...core.catalog.specs import ValueKind
from ...core.planning.match import matches
from ...core.words import check_text
from ...errors import NameCollisionError
from ...format.values import decode_value, encode_path, encode_value

GROUPS_SUFFIX = ".param_groups"


def by_mapping(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that renames a name, or the longest dotted prefix of it, that the mapping has.

    >>> by_mapping({"model.old": "model.new"})("model.old.weight")
    'model.new.weight'
    """

    def rename(name: str) -> str:
        head, tail = name, ""
        while head:
            if head in names:
                return names[head] + tail
            head, dot, last = head.rpartition(".")
            tail = dot + last + tail
        return name

    return rename


def renamed(
    catalog: Catalog, rename: Mapping[str, str] | Callable[[str], str], *, read: Callable[[ValueEntry], bytes] | None = None
) -> Catalog:
    """The catalog with every saved name passed through `rename`.

    Parameters
    ----------
    read
        Gives the bytes of a large value, which lie in a file: the groups of an optimizer name its parameters.

    Raises
    ------
    NameCollisionError
        Two saved names become one.
    """
    any_name = by_mapping(rename) if isinstance(rename, Mapping) else rename

    def new_name(name: str) -> str:
        new = any_name(name)
        check_text(new, "a name")
        return new

    table = catalog.tensors_table
    names = tuple(
        new_name(name) if kind == TensorKind.TENSOR else name for name, kind in zip(table.names, table.kind.tolist(), strict=True)
    )
    values = tuple(_renamed_value(value, new_name, read) for value in catalog.values_table)
    owner: dict[str, str] = {}
    old_names = [*table.names, *(value.name for value in catalog.values_table)]
    for old, new in zip(old_names, [*names, *(value.name for value in values)], strict=True):
        if owner.setdefault(new, old) != old:
            raise NameCollisionError(f"rename= gives {owner[new]} and {old} the same name {new}; map them to different names")
    unreadable = {new_name(name): why for name, why in catalog.unreadable.items()}
    return replace(catalog, tensors_table=replace(table, names=names), values_table=values, unreadable=unreadable, _index={})


def without(catalog: Catalog, patterns: Sequence[str]) -> Catalog:
    """The catalog as if it had nothing of the names that fit any of the patterns."""
    table = catalog.tensors_table
    kind = table.kind.copy()
    kind[[i for i, name in enumerate(table.names) if matches(name, patterns) and kind[i] == TensorKind.TENSOR]] = (
        TensorKind.IGNORED
    )
    return replace(
        catalog,
        tensors_table=replace(table, kind=kind),
        values_table=tuple(value for value in catalog.values_table if not matches(value.name, patterns)),
        unreadable={name: why for name, why in catalog.unreadable.items() if not matches(name, patterns)},
        _index={},
    )


def _renamed_value(value: ValueEntry, rename: Callable[[str], str], read: Callable[[ValueEntry], bytes] | None) -> ValueEntry:
    name = rename(value.name)
    may_be_groups = value.kind is ValueKind.PARAM_GROUPS or (
        value.kind is ValueKind.PLAIN and value.name.endswith(GROUPS_SUFFIX)  # those of a state dict by number
    )
    data = value.data if value.data is not None or read is None or not may_be_groups else read(value)
    if may_be_groups and data is not None and are_groups(groups := decode_value(data, name=value.name)):
        # The groups name parameters without the optimizer's prefix; they follow the names of its state.
        old, new = (n.removesuffix(GROUPS_SUFFIX) + ".state." for n in (value.name, name))
        names = [[rename(f"{old}{param}").removeprefix(new) for param in group["params"]] for group in groups]
        if names != [[str(param) for param in group["params"]] for group in groups]:  # else numbers stay numbers
            kept = [{key: item for key, item in group.items() if key != "param_names"} for group in groups]
            groups = [{**group, "params": own} for group, own in zip(kept, names, strict=True)]
            value = replace(value, kind=ValueKind.PARAM_GROUPS, data=encode_value(groups, name), blobs=())
    return value if name == value.name else replace(value, name=name, path=encode_path(name.split(".")))
