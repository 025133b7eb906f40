from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.param_groups import Groups, comparable, differences, merge
from reshard_ckpt.errors import LayoutError


def group(lr, *fqns, **more):
    return {"lr": lr, **more, "params": list(fqns)}


@pytest.mark.parametrize(
    ("ranks", "merged"),
    [
        (
            [[group(0.1, "a.w"), group(0.1, "a.b", decay=0)], [group(0.1, "b.w"), group(0.1, "b.b", decay=0)]],
            [group(0.1, "a.w", "b.w"), group(0.1, "a.b", "b.b", decay=0)],
        ),
        ([[group(1, "a"), group(1, "b")], [group(1, "c"), group(1, "d")]], [group(1, "a", "c"), group(1, "b", "d")]),
        ([[group(1, "a"), group(2, "b")]] * 4, [group(1, "a"), group(2, "b")]),
        ([[group(1), group(2, "a", param_names=["x"])], [group(1, "b"), group(2)]], [group(1, "b"), group(2, "a")]),
        ([[group(1, "a"), group(3)]], [group(1, "a"), group(3)]),
    ],
    ids=["parts of stages", "equal groups of one rank stay apart", "held by many", "empty on a rank, param_names", "empty"],
)
def test_merge_unites_groups(ranks, merged):
    assert merge([(f"rank {rank}", groups) for rank, groups in enumerate(ranks)], name="g") == merged


def test_merge_refuses_a_parameter_with_two_learning_rates():
    with pytest.raises(LayoutError, match=r"optimizer.param_groups: parameter a has lr 1 on rank 0 and 2 on rank 7"):
        merge([("rank 0", [group(1, "a")]), ("rank 7", [group(2, "a", "b")])], name="optimizer.param_groups")


def test_merge_refuses_a_hyperparameter_that_only_one_rank_has():
    with pytest.raises(LayoutError, match="momentum nothing on rank 0 and 0.9 on rank 1"):
        merge([("rank 0", [group(1, "a")]), ("rank 1", [group(1, "a", momentum=0.9)])], name="g")


def test_select_draws_from_several_groups_that_agree():
    saved = [group(1, "a", betas=(0.9, 0.99)), group(1, "b", betas=(0.9, 0.99)), group(3, "c", betas=(0, 0))]
    assert Groups(saved).select(["b", "a"], name="g").hyperparameters == {"lr": 1, "betas": (0.9, 0.99)}
    assert Groups(saved).select(["b", "a"], name="g").problems == ()


def test_select_reports_every_hyperparameter_that_differs_and_gives_none():
    selection = Groups([group(1, "a", decay=0), group(2, "b", decay=0.1)]).select(["a", "b"], name="optimizer.param_groups[1]")
    assert selection.hyperparameters == {}
    assert len(selection.problems) == 2
    assert selection.problems[0].startswith(
        "optimizer.param_groups[1]: draws from saved groups 0 (a) and 1 (b), whose lr differs: 1"
    )


def test_select_does_not_mind_how_the_optimizer_computes():
    saved = [group(1, "a", foreach=None, fused=True), group(1, "b", foreach=False, fused=None)]
    assert Groups(saved).select(["a", "b"], name="g").problems == ()


def test_select_reports_a_parameter_that_no_saved_group_holds_and_uses_the_others():
    selection = Groups([group(1, "a")]).select(["a", "new"], name="g")
    assert selection.hyperparameters == {"lr": 1}
    assert [p.split(";")[0] for p in selection.problems] == ["g: no saved group holds parameter new"]


@pytest.mark.parametrize(
    ("saved", "members", "lrs"),
    [
        ([group(1, "a"), group(2)], [["a"], []], [1, 2]),
        ([group(1, "a"), group(2, "b")], [[], ["b", "new"]], [1, 2]),
        ([group(1), group(2)], [[], []], [1, 2]),
        ([group(1, "a"), group(2)], [[], ["a"]], [None, 1]),
        ([group(1, "a")], [["a"], []], [1, None]),
        ([group(1, "a")], [[], []], [None, None]),
        ([group(1, "a"), group(2), group(3)], [["a"], []], [1, None]),
    ],
    ids=["in order", "held by other ranks", "none has parameters", "in another order", "more", "none, more", "fewer"],
)
def test_a_group_without_parameters_draws_from_the_saved_group_of_its_index_if_all_groups_do(saved, members, lrs):
    found = Groups(saved).select_all(members, name="g", targets=[group(9)] * 2)
    assert [selection.hyperparameters.get("lr") for selection in found] == lrs


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (float("nan"), float("nan")),
        ([1, (2, 3)], [1, (2, 3)]),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
        (torch.tensor(0.1), torch.tensor(0.1)),
        (np.array([1, 2]), np.array([1, 2])),
    ],
)
def test_equal_hyperparameters_compare_equal(one, other):
    assert comparable(one) == comparable(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        ([1], (1,)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.tensor([1.0]), torch.tensor(1.0)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (None, 0),
    ],
)
def test_different_hyperparameters_compare_different(one, other):
    assert comparable(one) != comparable(other)
    assert differences({"x": one}, {"x": other})


@given(
    assignment=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3), min_size=1),
    held=st.lists(st.sets(st.sampled_from("abcdefgh")), min_size=1, max_size=4),
)
def test_every_parameter_keeps_its_hyperparameters_whoever_holds_it(assignment, held):
    ranks = []
    for i, fqns in enumerate(held):
        groups = [group(lr, *sorted(f for f in fqns if assignment.get(f) == lr)) for lr in range(4)]
        ranks.append((f"rank {i}", groups))
    merged = merge(ranks, name="g")
    union = sorted(f for fqns in held for f in fqns if f in assignment)
    assert sorted(f for g in merged for f in g["params"]) == sorted(set(union))
    saved = Groups(merged)
    for fqn in union:
        assert saved.select([fqn], name="g").hyperparameters == {"lr": assignment[fqn]}


def test_a_group_of_another_kind_of_optimizer_is_named_and_newer_hyperparameters_are_not():
    saved = [{"lr": 1.0, "betas": (0.9, 0.99), "params": ["a"]}]
    (line,) = Groups(saved).select(["a"], name="g", target={"lr": 2.0, "momentum": 0.9, "params": []}).problems
    assert line.startswith("g: saved by another kind of optimizer, with betas, where this one has momentum;")
    for more in ({}, {"initial_lr": 3.0, "fused": None}):
        selection = Groups(saved).select(["a"], name="g", target={"lr": 2.0, "betas": (0, 0), **more})
        assert (selection.problems, selection.hyperparameters) == ((), {"lr": 1.0, "betas": (0.9, 0.99)})
