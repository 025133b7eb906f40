"""Names that divide into optimizer, FQN and key: every way that there is, by an oracle that tries all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.names import divided, find_parameters, link_columns, links_from_names, state_name
from reshard_ckpt.core.catalog.specs import StateLink

PARTS = st.sampled_from(["state", "w", "x", "exp_avg", "param_groups", "opt", "model", "0"])
NAMES = st.lists(PARTS, min_size=1, max_size=7).map(".".join)
FQNS = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
OPTIMIZERS = st.sampled_from(["", "opt", "opt.state.x", "model.state"])


def all_ways(name: str) -> list[StateLink]:
    parts = name.split(".")
    cuts = [(i, j) for i in range(len(parts)) for j in range(i + 2, len(parts)) if parts[i] == "state"]
    return [StateLink(".".join(parts[:i]), ".".join(parts[i + 1 : j]), ".".join(parts[j:])) for i, j in cuts]


def with_groups(name: str, groups: Mapping[str, Sequence[str]]) -> StateLink | None:
    """What the groups say of a name alone."""
    ways = [way for way in all_ways(name) if way.optimizer in groups]
    listed = [way for way in ways if way.fqn in groups[way.optimizer]]
    plain = [way for way in ways if "." not in way.key]
    for found in ([way for way in listed if way in plain], listed, [] if listed else plain):
        if len(found) == 1:
            return found[0]
    return None


def nearest(fqn: str, names: Sequence[str]) -> str | None:
    ending = [name for name in names if f".{name}".endswith(f".{fqn}")]
    depth = min((name.count(".") for name in ending), default=0)
    close = [name for name in ending if name.count(".") == depth]
    several = [name for name in close if name == f"model.{fqn}"]
    found = close if len(close) == 1 else several
    return found[0] if found and not fqn.isdecimal() else None


@given(st.lists(NAMES, unique=True, max_size=8), st.dictionaries(OPTIMIZERS, st.lists(FQNS, max_size=4), max_size=3))
def test_names_divide_as_trying_every_way_says(names: list[str], groups: dict[str, list[str]]):
    found = links_from_names(names, groups)
    wanted = {name: link for name in names if (link := with_groups(name, groups)) is not None}
    assert {name: (link.optimizer, link.fqn, link.key) for name, link in found.items() if link.optimizer in groups} == {
        name: (link.optimizer, link.fqn, link.key) for name, link in wanted.items()
    }
    others = [name for name in names if name not in found]
    for name, link in found.items():
        assert link.name == name
        assert link.parameter == nearest(link.fqn, others)
        if link.optimizer not in groups:  # then all below it is state, and the parameter is there
            below = [n for n in names if f"{link.optimizer}." == f"{n}."[: len(link.optimizer) + 1] or not link.optimizer]
            rest = [n.removeprefix(link.optimizer).removeprefix(".").partition(".")[0] for n in below]
            assert set(rest) <= {"state", "param_groups"}
            assert link.parameter is not None


def test_a_name_that_turns_out_to_be_no_state_may_be_a_second_parameter_of_that_name():
    names = ["state.state", "state.state.state", "w.state.w.state", "state.state.state.state.state.x.w"]
    assert links_from_names([*names, "state.w.state.state.state.state.w"], {}) == {}


@given(st.lists(st.tuples(OPTIMIZERS, FQNS, st.sampled_from(["m", "v"])), unique=True, max_size=8))
def test_what_a_torch_optimizer_saves_is_found_again_whatever_its_parameters_are_called(entries: list[tuple[str, str, str]]):
    links = [StateLink(*entry) for entry in entries]
    groups: dict[str, list[str]] = {}
    for link in links:
        groups.setdefault(link.optimizer, []).append(link.fqn)
    found = links_from_names(dict.fromkeys(link.name for link in links), groups)
    for link in links:
        twins = [way for way in all_ways(link.name) if way.optimizer in groups and way.fqn in groups[way.optimizer]]
        plain = [way for way in twins if "." not in way.key]
        if plain == [link]:
            assert (found[link.name].optimizer, found[link.name].fqn, found[link.name].key) == (
                link.optimizer,
                link.fqn,
                link.key,
            )
        else:
            assert link.name not in found


@given(st.tuples(OPTIMIZERS, FQNS, FQNS))
def test_a_recorded_name_divides_as_it_was_put_together(entry: tuple[str, str, str]):
    link = StateLink(*entry, parameter="p")
    columns = link_columns([link.name, "p"], [link, None], {link.name: 0, "p": 1})
    assert divided(link.name, int(columns["optimizer"][0]), int(columns["key"][0]), "p") == link
    assert [column.tolist()[1] for column in columns.values()] == [0, 0, -1]
    assert columns["parameter"][0] == 1
    assert link.name.startswith(state_name(link.optimizer, link.fqn))


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["model.x", "model.state.x.exp_avg"], {}),  # a model that has more than state
        (["a.w", "b.state.v.m"], {}),  # no parameter of that name
        (["opt", "model.w", "opt.state.w.m"], {}),  # what would be the optimizer is a tensor
        (["o.state.w.a.b.c"], {"o": ["w", "w.a"]}),  # two parameters, and keys with dots either way
        (["o.state.o.state.w.m"], {"o": ["o.state.w"], "o.state.o": ["w"]}),
    ],
)
def test_ambiguous_names_stay_unlinked(names: list[str], groups: dict[str, list[str]]):
    assert links_from_names(names, groups) == {}


def test_state_without_groups_is_linked_where_nothing_else_is_below_it():
    names = ["model.norm.weight", "model.layer.norm.weight", "optimizer.state.norm.weight.exp_avg"]
    assert links_from_names(names, {}) == {
        "optimizer.state.norm.weight.exp_avg": StateLink("optimizer", "norm.weight", "exp_avg", "model.norm.weight")
    }


def test_a_number_is_no_name_of_a_parameter():
    assert find_parameters(["0"], ["model.0"]) == {}
