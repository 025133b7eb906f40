"""Formats are found by entry points, whoever brings them; a broken one is a warning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common import entry_points
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.formats.source import GROUP, OWN, Format, Source, known_formats
from reshard_ckpt.storage import Storage, open_storage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install entry points of another package, as pip would."""
    theirs: list[EntryPoint] = []
    monkeypatch.setattr(entry_points, "entry_points", lambda group: theirs if group == GROUP else [])
    known_formats.cache_clear()

    def add(name: str, format: object) -> None:
        module = ModuleType(f"their_{name}")
        module.FORMAT = format  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        theirs.append(EntryPoint(name, f"{module.__name__}:FORMAT", GROUP))

    add.points = theirs  # type: ignore[attr-defined]
    yield add
    known_formats.cache_clear()


def test_own_formats_are_the_entry_points_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == OWN


def test_own_formats_load_and_are_tried_in_this_order() -> None:
    assert [one.name for one in known_formats()] == list(OWN)


def test_a_format_of_another_package_opens_a_path_and_is_named_where_nothing_does(install, tmp_path: Path) -> None:
    """Its marker says where a folder of this library's own tensors lies, so it needs no reader of its own here."""
    checkpoint.save(tmp_path / "real", {"w": torch.arange(6.0)})
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "points_to").write_text("real")

    def open_pointer(storage: Storage, key: str | None) -> Source | None:
        mark = Path(storage.url) / "points_to"
        if not mark.is_file():
            return None
        at = str(mark.parent.parent / mark.read_text())
        return Source(open_storage(at), checkpoint.catalog(at), "pointer")

    install("pointer", Format("pointer", "a folder with points_to", open_pointer))
    assert torch.equal(checkpoint.read(tmp_path / "theirs")["w"], torch.arange(6.0))
    with pytest.raises(CheckpointNotFound) as caught:
        checkpoint.read(tmp_path / "nothing")
    assert any("points_to" in line for line in caught.value.looked_for)


def test_a_format_that_cannot_be_imported_is_a_warning_and_others_still_open(install, tmp_path: Path) -> None:
    install.points.append(EntryPoint("broken", "no_such_module_at_all:FORMAT", GROUP))
    install("odd", "no format")
    torch.save({"w": torch.arange(4)}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="cannot be used") as seen:
        found = checkpoint.read(tmp_path / "model.pt")
    assert found["model.w"].tolist() == [0, 1, 2, 3]
    said = [str(one.message) for one in seen]
    assert any("'broken'" in text and "no_such_module_at_all" in text and "uninstall" in text for text in said)
    assert any("'odd'" in text and "is a str" in text for text in said)


def test_a_package_cannot_take_the_place_of_an_own_format(install) -> None:
    install("dcp", Format("dcp", "anything", lambda storage, key: None))
    assert [one.marks for one in known_formats() if one.name == "dcp"] != ["anything"]
