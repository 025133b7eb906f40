"""A megatron-core that the calls have not been run with is told of once; those that they have been run with, never."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest

from reshard_ckpt import megatron
from reshard_ckpt.families.megatron import calls


def said(path: Path, version: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Save and load in a program that has imported a version; return the warnings."""
    core = types.ModuleType("megatron.core")
    core.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    calls._judge.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron.save({"iteration": 3}, str(path))
        assert megatron.load({}, str(path))["iteration"] == 3
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("version", ["0.12.1", "0.20.0rc1", "1.13.0", "core"])
def test_one_warning_names_a_version_that_is_not_tested(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = said(tmp_path / "it", version, monkeypatch)
    assert message.startswith(f"megatron-core {version}: ")
    assert "have been run with 0.13 to 0.19 only" in message


@pytest.mark.parametrize("version", ["0.13.0", "0.15.3", "0.16.1", "0.19.2", None])
def test_tested_versions_are_silent(version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(tmp_path / "it", version, monkeypatch) == []
