"""Objects of other frameworks are found by name or by entry points of other packages; broken ones are a warning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.common import entry_points
from reshard_ckpt.state.dtensor import GROUP, OWN, Objects, known_objects
from tests.launch import project_table


class Rows(torch.Tensor):
    """The upper rows of a global tensor of 4 rows."""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Install an entry point of another package, as pip would; the test sets ``OBJECTS`` of its module."""
    module = ModuleType("their_objects")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = EntryPoint("theirs", "their_objects:OBJECTS", GROUP)
    monkeypatch.setattr(entry_points, "entry_points", lambda group: [point] if group == GROUP else [])
    known_objects.cache_clear()
    yield module
    known_objects.cache_clear()


def test_own_objects_are_the_entry_points_of_pyproject() -> None:
    assert project_table()["entry-points"][GROUP] == OWN
    assert sorted(one.name for one in known_objects()) == sorted(OWN)


def test_a_tensor_of_another_framework_is_saved_and_loaded_as_the_shards_that_it_is(theirs: ModuleType, tmp_path: Path) -> None:
    def lower(tensor: object) -> tuple[LocalShard, ...]:
        return (LocalShard(tensor.as_subclass(torch.Tensor), (4, 2), (0, 0)),) if isinstance(tensor, Rows) else ()

    theirs.OBJECTS = Objects("theirs", lower)  # type: ignore[attr-defined]
    whole = torch.arange(8.0).reshape(4, 2)
    checkpoint.save(tmp_path, {"w": whole})
    held = torch.zeros(2, 2).as_subclass(Rows)
    checkpoint.load(tmp_path, {"w": held})
    assert torch.equal(held.as_subclass(torch.Tensor), whole[:2])


@pytest.mark.parametrize("objects", [None, "no objects"])
def test_broken_objects_are_a_warning_that_names_them(theirs: ModuleType, objects: object, tmp_path: Path) -> None:
    if objects is not None:
        theirs.OBJECTS = objects  # type: ignore[attr-defined]
    state = {"w": torch.ones(2, 2).as_subclass(Rows)}
    with pytest.warns(UserWarning, match=r"the objects 'theirs' \(their_objects:OBJECTS\) cannot be used"):
        checkpoint.save(tmp_path, state)  # as the plain tensor that it also is
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.ones(2, 2))
