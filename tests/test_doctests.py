"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard_ckpt.core.catalog.placements import KINDS

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "reshard_ckpt").rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.fixture(autouse=True)
def kinds_of_placement() -> Iterator[None]:
    """An example may register one, which other tests must not meet."""
    known = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(known)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
