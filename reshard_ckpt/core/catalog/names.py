"""Names of tensors: parts that torch's wrapper modules add, and links from optimizer state to its parameters.

Wrappers:

1. ``torch.compile``, activation checkpointing and FSDP1 store the wrapped module under attribute names that nobody else uses.
   These parts of a name are dropped wherever they stand.
2. DDP, ``DataParallel`` and ``AveragedModel`` store it as ``module``, a name that users choose too. In a dict of tensors, the
   only evidence of such a wrapper is that *every* key begins with it, except ``n_averaged``, the counter of an ``AveragedModel``.
   Then the first part of each key is dropped, once. If a tensor was saved with this part and is wanted without it, or the other
   way round, a load finds it, provided that only one saved name fits (`core.planning.match`).

Links: state is named ``<optimizer>.state.<FQN>.<key>``. Each of the three may have dots in it, and a parameter may be called
``state.x.exp_avg``, so the way to divide such a name is recorded when it is saved: as the number of dotted parts that are the
optimizer, and the number that are the key. Files that have only names are linked once, when they are opened (`links_from_names`).
No other module divides such a name by looking at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .specs import StateLink

STATE, GROUPS = "state", "param_groups"
MAX_PARTS = 256
"""The most dotted parts of a name that is searched for links: a hostile name with more could be divided in too many ways."""

_ROUNDS = 8
"""The most passes over links whose optimizer has no saved groups. Hostile names could need more; they stay without a link."""

_BETWEEN = f".{STATE}."


def is_below(name: str, prefixes: Collection[str]) -> bool:
    """Tell whether a dotted name equals one of the prefixes, or lies below one.

    >>> is_below("model.w", ["model"]), is_below("models.w", ["model"])
    (True, False)
    """
    return name in prefixes or any(name.startswith(f"{prefix}.") for prefix in prefixes)


def groups_name(optimizer: str) -> str:
    """Return the name under which the parameter groups of an optimizer are saved.

    >>> groups_name("optimizer"), groups_name("")
    ('optimizer.param_groups', 'param_groups')
    """
    return f"{optimizer}.{GROUPS}" if optimizer else GROUPS


def state_name(optimizer: str, fqn: str = "") -> str:
    """Return the prefix of the names of one parameter's optimizer state; without an FQN, of all state of the optimizer.

    >>> state_name("optimizer", "w"), state_name("optimizer")
    ('optimizer.state.w', 'optimizer.state.')
    """
    return StateLink(optimizer, fqn, "").name[:-1]


def optimizer_of(groups: str) -> str | None:
    """Return the optimizer whose parameter groups are saved under this name; None if the name does not end in ``param_groups``.

    >>> optimizer_of("optimizer.param_groups"), optimizer_of("param_groups"), optimizer_of("extra.lr")
    ('optimizer', '', None)
    """
    optimizer, _, last = groups.rpartition(".")
    return optimizer if last == GROUPS else None


def num_parts(text: str) -> int:
    """Count the parts of a dotted name; an empty name has 0."""
    return text.count(".") + 1 if text else 0


def divided(name: str, optimizer: int, key: int, parameter: str | None) -> StateLink:
    """Divide the name of optimizer state into optimizer, FQN and key, given how many dotted parts the first and the last have.

    >>> divided("optimizer.state.state.x.exp_avg.exp_avg", 1, 1, None).fqn
    'state.x.exp_avg'
    """
    *above, rest = name.split(".", optimizer + 1)  # the last of `above` is "state"
    fqn, *keys = rest.rsplit(".", key)
    return StateLink(".".join(above[:-1]), fqn, ".".join(keys), parameter)


def link_columns(names: Sequence[str], links: Sequence[StateLink | None], tensors: Mapping[str, int]) -> dict[str, Any]:
    """Encode the links of tensors to parameters as the columns `optimizer`, `key` and `parameter` of `TensorDescriptions`.

    A link says that a tensor is the state of a parameter in an optimizer, under a key. It is left out if the name that follows
    from it (`StateLink.name`) is not the tensor's name.

    Parameters
    ----------
    names, links
        The name of each tensor, and its link, or None.
    tensors
        The index of each tensor by name. A parameter that was not saved is missing here, and gets -1.
    """
    columns = np.zeros((len(names), 3), np.int64)
    columns[:, 2] = -1
    for i, (name, link) in enumerate(zip(names, links, strict=True)):
        if link is not None and link.name == name:
            parameter = -1 if link.parameter is None else tensors.get(link.parameter, -1)
            columns[i] = num_parts(link.optimizer), num_parts(link.key), parameter
    return dict(zip(("optimizer", "key", "parameter"), columns.T, strict=True))


def links_from_names(names: Iterable[str], groups: Mapping[str, Iterable[str]]) -> dict[str, StateLink]:
    """Find the names that are optimizer state, and the parameter of each; leave out a name that can be divided in several ways.

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
    """Yield the two parts of a text around each occurrence of `at`."""
    place = text.find(at)
    while place >= 0:
        yield text[:place], text[place + len(at) :]
        place = text.find(at, place + 1)


def _only(ways: Sequence[StateLink]) -> StateLink | None:
    """Return the only link in `ways`; None if there are none or several."""
    return ways[0] if len(ways) == 1 else None


def _without_groups(
    names: Sequence[str],
    found: Mapping[str, StateLink],
    others: Mapping[str, Sequence[StateLink]],
    listed: Mapping[str, frozenset[str]],
) -> dict[str, StateLink]:
    """Find the links of names of optimizer state, for optimizers whose parameter groups were not saved."""
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
    """Map each FQN to the full name of its parameter: the name with the fewest parts before the FQN.

    So ``norm.weight`` is ``model.norm.weight``, not the norm of a layer. If several names are equally close, ``model.<FQN>`` is
    taken, or none. An FQN that is a number is ignored: optimizers made without names number their parameters.

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
"""The attribute names under which torch's wrappers (compile, checkpointing, FSDP1) store the wrapped module; nobody else uses
them."""

MODULE = "module"
COUNT = "n_averaged"


def unwrapped(name: str) -> str:
    """Return a name without the parts that only wrappers use, such as ``_orig_mod``.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED) if "._" in f".{name}" else name


def unwrapped_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys of one state dict without the parts that wrappers added.

    A first part ``module`` is dropped, once, if all keys but ``n_averaged`` begin with it.

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
    """Return a name without any part that a wrapper may have added, including every ``module``.

    >>> bare("ema.module.layers.0._orig_mod.weight")
    'ema.layers.0.weight'
    """
    return ".".join(part for part in unwrapped(name).split(".") if part != MODULE)
