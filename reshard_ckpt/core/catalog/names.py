"""The meaning of names of tensors: the steps that wrappers of torch add, and links from optimizer state to its parameters.

Wrappers:

1. ``torch.compile``, activation checkpointing and FSDP1 store the wrapped module under attribute names that nobody else uses.
   These steps are dropped wherever they stand.
2. DDP, ``DataParallel`` and ``AveragedModel`` store it as ``module``, a name that users choose too. In a dict of tensors, the
   only evidence of such a wrapper is that *every* key begins with it, except ``n_averaged``, the counter of an ``AveragedModel``.
   Then the first step is dropped, once. If a tensor was saved under the other of the two names, a load finds it, provided that
   only one saved name fits (`core.planning.match`).

Links: state is named ``<optimizer>.state.<FQN>.<key>``. Each of the three may have dots in it, and a parameter may be called
``state.x.exp_avg``, so the way to divide such a name is recorded when it is saved: as the number of dotted parts that are the
optimizer, and the number that are the key. Files that have only names are linked once, when they are opened (`links_from_names`).
No other module divides such a name by looking at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .specs import StateLink

STATE, GROUPS = "state", "param_groups"
MAX_PARTS = 256
"""Names with more parts are not searched, because a hostile name would make a reader try too many ways to divide it."""

_ROUNDS = 8
"""How many times links without groups are checked again. Hostile names could need a round each; they stay unlinked."""

_BETWEEN = f".{STATE}."


def is_below(name: str, prefixes: Sequence[str]) -> bool:
    """Return whether a name is one of these, or that of something below one of these.

    >>> is_below("model.w", ["model"]), is_below("models.w", ["model"])
    (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def groups_name(optimizer: str) -> str:
    """Return the name of an optimizer's groups.

    >>> groups_name("optimizer"), groups_name("")
    ('optimizer.param_groups', 'param_groups')
    """
    return f"{optimizer}.{GROUPS}" if optimizer else GROUPS


def state_name(optimizer: str, fqn: str = "") -> str:
    """Return the prefix of the names of a parameter's state; without an FQN, the prefix of all state of the optimizer.

    >>> state_name("optimizer", "w"), state_name("optimizer")
    ('optimizer.state.w', 'optimizer.state.')
    """
    return StateLink(optimizer, fqn, "").name[:-1]


def optimizer_of(groups: str) -> str | None:
    """Return the optimizer whose groups have this name; None if it is not a name of groups.

    >>> optimizer_of("optimizer.param_groups"), optimizer_of("param_groups"), optimizer_of("extra.lr")
    ('optimizer', '', None)
    """
    optimizer, _, last = groups.rpartition(".")
    return optimizer if last == GROUPS else None


def num_parts(text: str) -> int:
    """Count the dotted parts of a name; an empty name has 0."""
    return text.count(".") + 1 if text else 0


def divided(name: str, optimizer: int, key: int, parameter: str | None) -> StateLink:
    """Divide a name into a link: its first `optimizer` parts are the optimizer, and its last `key` parts are the key.

    >>> divided("optimizer.state.state.x.exp_avg.exp_avg", 1, 1, None).fqn
    'state.x.exp_avg'
    """
    *above, rest = name.split(".", optimizer + 1)  # the last of `above` is "state"
    fqn, *keys = rest.rsplit(".", key)
    return StateLink(".".join(above[:-1]), fqn, ".".join(keys), parameter)


def link_columns(names: Sequence[str], links: Sequence[StateLink | None], tensors: Mapping[str, int]) -> dict[str, Any]:
    """Encode links as the columns `optimizer`, `key` and `parameter` of `TensorDescriptions`.

    A link says that a tensor is the state of a parameter in an optimizer, under a key. The name that follows from it
    (`StateLink.name`) must be the tensor's name; other links are left out.

    Parameters
    ----------
    names, links
        The name of each tensor, and its link, or None.
    tensors
        The index of each tensor by name; a parameter that is missing here was not saved too, and gets -1.
    """
    columns = np.zeros((len(names), 3), np.int64)
    columns[:, 2] = -1
    for i, (name, link) in enumerate(zip(names, links, strict=True)):
        if link is not None and link.name == name:
            parameter = -1 if link.parameter is None else tensors.get(link.parameter, -1)
            columns[i] = num_parts(link.optimizer), num_parts(link.key), parameter
    return dict(zip(("optimizer", "key", "parameter"), columns.T, strict=True))


def links_from_names(names: Iterable[str], groups: Mapping[str, Iterable[str]]) -> dict[str, StateLink]:
    """Find the names that are state of a parameter; a name that can be divided in several ways is left out.

    If an optimizer has groups, a name is state of it if some way to divide the name gives a parameter of these groups. Keys
    without dots win over others, because torch's optimizers use only such keys. If the groups do not list the parameter, the last
    part of the name is the key. If a prefix has no groups, a name below it is state if its parameter exists elsewhere, and if
    everything below the prefix is state.

    Parameters
    ----------
    names
        The names of all tensors, and of values, which may be state too.
    groups
        For each optimizer the parameters that its groups list.

    Examples
    --------
    >>> links_from_names(["model.w", "opt.state.w.exp_avg"], {"opt": ["w"]})
    {'opt.state.w.exp_avg': StateLink(optimizer='opt', fqn='w', key='exp_avg', parameter='model.w')}
    """
    names = [name for name in names if name.count(".") < MAX_PARTS]
    listed = {optimizer: frozenset(fqns) for optimizer, fqns in groups.items()}
    found: dict[str, StateLink] = {}
    others: dict[str, list[StateLink]] = {}
    for name in names:
        # ways: all ways to divide the name at ".state." into an optimizer and the rest; fitting: links whose FQN the groups list
        ways = [(before[1:], rest) for before, rest in _divisions(f".{name}", _BETWEEN)]
        of_listed = ((optimizer, rest) for optimizer, rest in ways if optimizer in listed)
        fitting = [StateLink(o, fqn, key) for o, rest in of_listed for fqn, key in _divisions(rest, ".") if fqn in listed[o]]
        link = _only([way for way in fitting if "." not in way.key]) or _only(fitting)
        if link is None and not fitting:
            # The groups do not list the parameter, so the last part is the key, and the FQN stands before its dot.
            plain = [StateLink(optimizer, *rest.rpartition(".")[::2]) for optimizer, rest in ways if "." in rest]
            link = _only([way for way in plain if way.optimizer in listed])
            if link is None and plain:
                # Nothing with groups fits; look again when the names of all parameters are known.
                others[name] = plain
        if link is not None:
            found[name] = link
    found |= _without_groups(names, found, others, listed)
    parameters = find_parameters({link.fqn for link in found.values()}, (name for name in names if name not in found))
    return {name: StateLink(way.optimizer, way.fqn, way.key, parameters.get(way.fqn)) for name, way in found.items()}


def _divisions(text: str, at: str) -> Iterator[tuple[str, str]]:
    """Yield each way to divide a text where `at` stands in it: the part before it, and the part behind it."""
    place = text.find(at)
    while place >= 0:
        yield text[:place], text[place + len(at) :]
        place = text.find(at, place + 1)


def _only(ways: Sequence[StateLink]) -> StateLink | None:
    """Return the link if `ways` has exactly one; None if it has none or several."""
    return ways[0] if len(ways) == 1 else None


def _without_groups(
    names: Sequence[str],
    found: Mapping[str, StateLink],
    others: Mapping[str, Sequence[StateLink]],
    listed: Mapping[str, frozenset[str]],
) -> dict[str, StateLink]:
    """Find the links of names whose optimizer has no groups in the checkpoint."""
    if not others:
        return {}
    # trained: names that the groups of some optimizer list are parameters, whatever they are called.
    trained = set(find_parameters(frozenset().union(*listed.values()), (name for name in names if name not in found)).values())
    others = {name: ways for name, ways in others.items() if name not in trained}
    # optimizers: prefixes below which everything is state or groups; any other name below one disproves it.
    optimizers = {way.optimizer for ways in others.values() for way in ways} - listed.keys()
    for name in names:
        optimizers.discard(name)
        parts = name.split(".")
        for i in range(len(parts)) if optimizers else ():
            if parts[i] not in (STATE, GROUPS) or name in trained:
                optimizers.discard(".".join(parts[:i]))
    state = {name: link for name, ways in others.items() if (link := _only([way for way in ways if way.optimizer in optimizers]))}
    # Keep links whose parameter exists. A name that loses its link may be a parameter itself, and change which others exist, so
    # repeat until nothing changes.
    for _ in range(_ROUNDS):
        parameters = find_parameters(
            {link.fqn for link in state.values()}, (n for n in names if n not in state and n not in found)
        )
        kept = {name: link for name, link in state.items() if link.fqn in parameters}
        if len(kept) == len(state):
            return kept
        state = kept  # a name that lost its link may now be the parameter of another name
    return {}


def find_parameters(fqns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Find the name of each parameter: the name closest to the root that ends in its FQN.

    So ``norm.weight`` is ``model.norm.weight``, not the norm of a layer. If several names are equally close, the one that is the
    FQN below ``model`` is taken, or none. A number is not an FQN here: optimizers made without names number their parameters.
    >>> find_parameters(["w", "v"], ["a.w", "model.w", "a.v", "b.v", "model.layer.w"])
    {'w': 'model.w'}
    """
    wanted = {fqn for fqn in fqns if not fqn.isdecimal()}
    # nearest: for each FQN the least number of steps before it, and all names at that depth.
    nearest: dict[str, tuple[int, list[str]]] = {}
    for name in names if wanted else ():
        suffix, depth = name, 0
        while suffix:
            if suffix in wanted:
                least, several = nearest.setdefault(suffix, (depth, []))
                if depth < least:
                    nearest[suffix] = depth, [name]
                elif depth == least:
                    several.append(name)
            suffix, depth = suffix.partition(".")[2] if depth < MAX_PARTS else "", depth + 1
    chosen = {fqn: [n for n in many if n == f"model.{fqn}"] if len(many) > 1 else many for fqn, (_, many) in nearest.items()}
    return {fqn: many[0] for fqn, many in chosen.items() if many}


WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attributes in which torch's wrappers store the wrapped module; nobody else uses these names."""

MODULE = "module"
COUNT = "n_averaged"


def unwrapped(name: str) -> str:
    """Return a name without the steps that only wrappers use.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED) if "._" in f".{name}" else name


def unwrapped_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys of one dict without the steps that wrappers added.

    >>> unwrapped_keys(["module._orig_mod.0.weight", "module._orig_mod.0.bias", "n_averaged"])
    ['0.weight', '0.bias', 'n_averaged']
    >>> unwrapped_keys(["module.weight", "head.weight"])
    ['module.weight', 'head.weight']
    """
    clean = [unwrapped(key) for key in keys]
    rest = [key for key in clean if key != COUNT]
    if rest and all(key.startswith(f"{MODULE}.") for key in rest):
        return [key.removeprefix(f"{MODULE}.") for key in clean]
    return clean


def bare(name: str) -> str:
    """Return a name without any step that a wrapper may have added.

    >>> bare("ema.module.layers.0._orig_mod.weight")
    'ema.layers.0.weight'
    """
    return ".".join(part for part in unwrapped(name).split(".") if part != MODULE)
