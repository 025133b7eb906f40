"""Renaming the tensors and values of a checkpoint: a catalog with the same rows and files under other names.

1. Each name is passed through the user's mapping or function.
2. The *link* of a saved tensor of optimizer state names its optimizer, its parameter and its key. State that is not renamed
   itself follows its parameter: renaming ``model.old.w`` to ``model.new.w`` also renames ``optimizer.state.old.w.exp_avg``.
3. Links get the new names, and parameter groups list the new FQNs (names of parameters without wrappers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.catalog.model import Catalog, TensorKind, ValueEntry
from ...core.catalog.names import (
    find_parameters,
    groups_name,
    link_columns,
    links_from_names,
    num_parts,
    optimizer_of,
    state_name,
)
from ...core.catalog.param_groups import are_groups
from ...core.catalog.specs import StateLink, ValueKind
from ...core.planning.match import matches
from ...core.report import check_text
from ...errors import NameCollisionError, UsageError
from ...format.values import decode_steps, decode_value, encode_path, encode_value, is_wrapped, keys_of

Rename = Mapping[str, str] | Callable[[str], str]


def by_mapping(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that renames a name if the mapping has it, or else its longest dotted prefix that the mapping has.

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


def check_rename(rename: Rename) -> None:
    """Raise `UsageError` unless the option ``rename=`` is a function, or a dict of text to text."""
    if not (callable(rename) or isinstance(rename, Mapping)):
        raise UsageError(f"rename={rename!r}: pass a dict of saved names to new ones, or a function of a saved name")
    for old, new in rename.items() if isinstance(rename, Mapping) else ():
        if not (isinstance(old, str) and isinstance(new, str)):
            raise UsageError(f"rename={{{old!r:.100}: {new!r:.100}}}: pass both names as text")


def renamed(catalog: Catalog, rename: Rename, *, read: Callable[[ValueEntry], bytes] | None = None) -> Catalog:
    """Return a catalog with every saved name passed through `rename`. Optimizer state follows its parameter.

    Parameters
    ----------
    read
        Returns the bytes of a value that lies in a file; needed for large parameter groups, which name parameters.

    Raises
    ------
    NameCollisionError
        `rename` gives two saved names one new name.
    """
    check_rename(rename)
    if callable(rename) and all(rename(name) == name for name in (*catalog.names, *catalog.value_names)):
        return catalog
    names = _NewNames(catalog, rename)
    # groups: the saved parameter groups of each optimizer. listed: the new FQNs in each group. The links come after them, because
    # state that is keyed by number gets its parameter from its group.
    groups = {value.name: found for value in catalog.values_table if (found := _groups_of(value, read)) is not None}
    listed = {value: names.listed(optimizer_of(value) or "", found) for value, found in groups.items()}
    links = names.links({names[value]: [fqn for each in found for fqn in each] for value, found in listed.items()})
    table, is_tensor = catalog.tensors_table, catalog.tensors_table.kind == TensorKind.TENSOR
    new = tuple(names[name] if own else name for name, own in zip(table.names, is_tensor.tolist(), strict=True))
    values = tuple(_renamed_value(value, names[value.name], groups, listed, links) for value in catalog.values_table)
    # Checked before the new tables are built: they find tensors by name.
    owner: dict[str, str] = {}
    old_names = [*table.names, *(value.name for value in catalog.values_table)]
    for old, name in zip(old_names, [*new, *(value.name for value in values)], strict=True):
        if owner.setdefault(name, old) != old:
            raise NameCollisionError(f"rename= gives {owner[name]} and {old} the same name {name}; map them to different names")
    tensors = {name: i for i, name in enumerate(new) if is_tensor[i]}
    columns = link_columns(new, [links.get(name) if own else None for name, own in zip(new, is_tensor, strict=True)], tensors)
    unreadable = {names[name]: why for name, why in catalog.unreadable.items()}
    tensors_table = replace(table, names=new, **columns)
    lossy = {names[name]: what for name, what in catalog.lossy.items()}
    return replace(catalog, tensors_table=tensors_table, values_table=values, unreadable=unreadable, lossy=lossy)


class _NewNames:
    """The new names of all tensors and values, and the new links from optimizer state to parameters."""

    def __init__(self, catalog: Catalog, rename: Rename) -> None:
        self.catalog, self._is_mapping = catalog, isinstance(rename, Mapping)
        self._rename = by_mapping(rename) if isinstance(rename, Mapping) else rename
        self._old, self._links = catalog.links(), dict[str, StateLink]()
        self._new = {name: self._given_name(name) for name in (*catalog.names, *catalog.value_names)}
        # _fqns: the new FQN of each parameter of each optimizer, under the old names of both.
        self._fqns: dict[tuple[str, str], str] = {}
        for name, link in self._old.items():
            new = self._link_of_renamed(name, link) if self._new[name] != name else self._link_after_parameter(link)
            if new is not None:
                self._new[name], self._links[new.name] = new.name, new
                self._fqns.setdefault((link.optimizer, link.fqn), new.fqn)

    def __getitem__(self, name: str) -> str:
        return self._new[name] if name in self._new else self._given_name(name)

    def _given_name(self, name: str) -> str:
        """Return the name that the user's mapping or function gives to a name."""
        new = self._rename(name)
        if not isinstance(new, str):
            raise UsageError(f"rename= gives {name} the new name {new!r:.200}; give each name as text, and a name that stays too")
        check_text(new, "a name")
        return new

    def _optimizer(self, optimizer: str) -> str:
        """Return the new name of an optimizer: the prefix of the new name of its parameter groups."""
        old = groups_name(optimizer)
        new = optimizer_of(self[old])
        return optimizer if new is None else new

    def _link_of_renamed(self, name: str, link: StateLink) -> StateLink | None:
        """Return the new link of a tensor of optimizer state that `rename` has renamed.

        Return None if its new name is not that of optimizer state. Otherwise the new name is divided into optimizer, FQN and key:
        by the optimizer's new name and the old key if both fit, else by the new name of the entry ``<optimizer>.state.<fqn>``.
        """
        optimizer, new = self._optimizer(link.optimizer), self._new[name]
        head, tail = state_name(optimizer), f".{link.key}"
        parameter = None if link.parameter is None else self._new[link.parameter]
        if new.startswith(head) and new.endswith(tail) and len(new) > len(head) + len(tail):
            return StateLink(optimizer, new[len(head) : -len(tail)], link.key, parameter)
        entry = self._given_name(state_name(link.optimizer, link.fqn))
        if entry.startswith(head) and new.startswith(f"{entry}."):
            return StateLink(optimizer, entry[len(head) :], new[len(entry) + 1 :], parameter)
        return None

    def _link_after_parameter(self, link: StateLink) -> StateLink:
        """Return the new link of a tensor of optimizer state that `rename` has not renamed: it gets its parameter's new name."""
        if link.parameter is None:
            return link
        parameter = self._new[link.parameter]
        return link._replace(fqn=self._fqn(link.parameter, parameter, link.fqn), parameter=parameter)

    def _fqn(self, old: str, new: str, fqn: str) -> str:
        """Return the new FQN of a parameter that was named `old` and is now named `new`; `fqn`, its old FQN, is the end of `old`.

        The names above the model may be renamed too: they are not part of the FQN.
        """
        if old == new or not f".{old}".endswith(f".{fqn}"):
            return fqn
        root = old.removesuffix(fqn).removesuffix(".")
        # A new name below the old root lies deeper in it, also if the mapping names just the root: {"model": "model.inner"}.
        is_deeper = new.startswith(f"{root}.")
        moved = self._given_name(root) if self._is_mapping and root and not is_deeper else root
        if moved and new.startswith(f"{moved}."):
            return new[len(moved) + 1 :]
        if f".{new}".endswith(f".{fqn}"):  # the same FQN below another root
            return fqn
        if not moved:
            return new
        parts = new.split(".")
        return ".".join(parts[num_parts(root) :]) or new

    def listed(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the new FQNs of the parameters in each parameter group.

        A parameter with state has the FQN that its state has got; one without state is found by its name.
        """
        stateless = {str(p) for group in groups for p in group["params"]} - {fqn for o, fqn in self._fqns if o == optimizer}
        parameters = find_parameters(stateless, (name for name in self.catalog.names if name not in self._old))
        head = state_name(self._optimizer(optimizer))

        def new_fqn(fqn: str) -> str:
            if (optimizer, fqn) in self._fqns:
                return self._fqns[optimizer, fqn]
            old = state_name(optimizer, fqn)
            new = self._given_name(old)
            if new == old and fqn in parameters:
                return self._fqn(parameters[fqn], self._new[parameters[fqn]], fqn)
            return new.removeprefix(head)

        return [[new_fqn(str(param)) for param in group["params"]] for group in groups]

    def links(self, groups: Mapping[str, Sequence[str]]) -> dict[str, StateLink]:
        """Return all links of optimizer state, by the state's new name. Tensors that only now have such a name get a link too.

        Parameters
        ----------
        groups
            For each optimizer's new name of its parameter groups, the new FQNs of all groups.
        """
        links = dict(self._links)
        changed = {new for name, new in self._new.items() if new != name}
        if not changed.issubset(links):
            fqns_of = {optimizer: fqns for name, fqns in groups.items() if (optimizer := optimizer_of(name)) is not None}
            links |= {n: link for n, link in links_from_names(self._new.values(), fqns_of).items() if n in changed - links.keys()}
        # State that was keyed by number gets its parameter by its new name.
        unknown = {link.fqn for name, link in links.items() if link.parameter is None and name in changed}
        found = find_parameters(unknown, (name for name in self._new.values() if name not in links))
        return {name: link._replace(parameter=link.parameter or found.get(link.fqn)) for name, link in links.items()}


def _groups_of(value: ValueEntry, read: Callable[[ValueEntry], bytes] | None) -> list[Any] | None:
    """Return the parameter groups that a value of the catalog holds; None if it holds something else.

    Values of the kind `PARAM_GROUPS` hold groups. Those of a state dict keyed by number are a plain value, recognized by its name
    and form. `read` returns the bytes of a value that are not in the catalog; without it, such a value counts as something else.
    """
    may_be = value.kind is ValueKind.PARAM_GROUPS or (value.kind is ValueKind.PLAIN and optimizer_of(value.name) is not None)
    data = value.data if value.data is not None or read is None or not may_be else read(value)
    groups = decode_value(data, name=value.name) if may_be and data is not None else None
    return groups if are_groups(groups) else None


def _renamed_value(
    value: ValueEntry,
    name: str,
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    listed: Mapping[str, Sequence[Sequence[str]]],
    links: Mapping[str, StateLink],
) -> ValueEntry:
    link = links.get(name)
    if value.name in groups:
        old, new = groups[value.name], listed[value.name]
        if new != [[str(param) for param in group["params"]] for group in old]:  # unchanged groups keep numbers as numbers
            kept = [{key: item for key, item in group.items() if key != "param_names"} for group in old]
            data = encode_value([{**group, "params": own} for group, own in zip(kept, new, strict=True)], name)
            value = replace(value, kind=ValueKind.PARAM_GROUPS, data=data, blobs=())
    if name == value.name:
        return value if link == value.link else replace(value, link=link)
    return replace(value, name=name, path=_renamed_path(value, name), link=link)


def _renamed_path(value: ValueEntry, name: str) -> bytes:
    """Encode the path of a value under a new name.

    As far as the new name ends like the old one, the last steps of the path stay, with the types of their keys. The rest of the
    new name is divided at its dots.
    """
    steps = decode_steps(value.path)
    keys = keys_of(steps)
    texts = [str(key[0] if is_wrapped(key) else key) for key in keys]
    for i in range(len(steps) if ".".join(texts) == value.name else 0):
        tail = ".".join(texts[i:])
        is_index = is_wrapped(keys[i]) and type(keys[i][0]) is int  # at the top, without a list, an index is a key like others
        if name.endswith(f".{tail}") or (name == tail and not is_index):
            return encode_path([*name.removesuffix(tail).split(".")[:-1], *steps[i:]])
    return encode_path(name.split("."))


def without(catalog: Catalog, patterns: Sequence[str]) -> Catalog:
    """Return a catalog without the tensors and values whose names match one of the patterns."""
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
    )
