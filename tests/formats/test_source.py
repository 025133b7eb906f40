"""This package's own formats are found by name, the ones of other packages by entry points; a broken one is a warning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common import entry_points
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, StorageError, UnsupportedError
from reshard_ckpt.format.files import CATALOG_KEY
from reshard_ckpt.formats.catalog_builder import CatalogBuilder
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


class _Late(Storage):
    """A store that fails once bytes are read."""

    def __init__(self, own: Storage, error: Exception) -> None:
        self._own, self._error = own, error

    @property
    def url(self) -> str:
        return self._own.url

    def size(self, key: str) -> int | None:
        return self._own.size(key)

    def read_into(self, key: str, offset: int, buffers: object) -> None:
        raise self._error

    def close(self) -> None:
        self._own.close()


def _raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


def _late(error: Exception) -> Callable[..., Any]:
    def opens(storage: Storage, key: str | None) -> Source:
        builder = CatalogBuilder("theirs", storage.url)
        builder.tensor("w", "F32", (2,))
        builder.piece("w", file=builder.file("w.bin", 8), offset=0)
        return Source(_Late(storage, error), builder.finish(), "theirs")

    return opens


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"open": _raising(KeyError("lost"))}, CorruptError, r"failed \(KeyError: 'lost'\); if other copies fail too, repair"),
        ({"open": _raising(PermissionError("no"))}, StorageError, r"failed \(no\)"),
        ({"open": lambda *_: True}, CorruptError, r"failed \(TypeError: open returned a bool, not a Source\)"),
        ({"open": lambda *_: Source(None, None)}, CorruptError, r"failed \(\w+Error: "),  # type: ignore[arg-type]
        ({"open": lambda *_: None, "latest": _raising(ValueError("odd"))}, CorruptError, r"failed \(ValueError: odd\)"),
        ({"open": lambda *_: None, "latest": lambda _: "."}, CorruptError, r"failed \(\w+Error: .*'\.'"),
        ({"open": _late(LookupError("too late"))}, CorruptError, r"w.bin: the format .* failed \(LookupError: too late\)"),
        ({"open": _late(TimeoutError("slow"))}, StorageError, r"w.bin: the format .* failed \(slow\)"),
    ],
)
def test_an_error_of_a_format_of_another_package_names_that(
    install, fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8))
    install("theirs", Format("theirs", "anything", **fields))
    for call in (checkpoint.read, lambda path: checkpoint.load(path, {"w": torch.zeros(2)})):
        with pytest.raises(error, match=message) as caught:
            call(tmp_path)
        assert "the format 'theirs' of tests.formats.test_source" in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (TypeError("odd"), UnsupportedError, r"could not write it \(TypeError: odd\); convert to another format, or repair"),
        (PermissionError("no"), StorageError, r"failed \(no\); look at the file system"),
    ],
)
def test_an_error_of_a_writer_of_another_package_names_that(
    install, tmp_path: Path, raised: Exception, error: type[Exception], message: str
) -> None:
    checkpoint.save(tmp_path / "n", {"w": torch.arange(6.0)})
    install("theirs", Format("theirs", "anything", lambda *_: None, write=_raising(raised)))
    with pytest.raises(error, match=rf"out: the format 'theirs' of tests.formats.test_source {message}"):
        checkpoint.convert(tmp_path / "n", tmp_path / "out", to="theirs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda path, out: checkpoint.verify(path, timeout_s=0.2),
        lambda path, out: checkpoint.diff(path, path, timeout_s=0.2),
        lambda path, out: checkpoint.convert(path, out, to="dcp", timeout_s=0.2),
        lambda path, out: checkpoint.compact(path, timeout_s=0.2),
        lambda path, out: checkpoint.load(path, {"w": torch.zeros(2)}, timeout_s=0.2),
    ],
    ids=["verify", "diff", "convert", "compact", "load"],
)
def test_waiting_for_the_lock_of_a_checkpoint_ends_after_timeout_s(call: Callable[[Path, Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    checkpoint.save(path, {"w": torch.ones(2)})
    with open_storage(path) as storage:
        lock = storage.lock(CATALOG_KEY)
        assert lock is not None
        with lock, pytest.raises(StorageError, match=r"another process has had its lock for 0\.2 s"):
            call(path, tmp_path / "out")


def test_a_file_that_goes_while_it_is_opened_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.setattr("reshard_ckpt.formats.torch_file.load_archive", _raising(FileNotFoundError("gone")))
    with pytest.raises(StorageError, match=r"m.pt: the format 'torch' of .* failed \(gone\); look at the file system"):
        checkpoint.read(tmp_path / "m.pt")
