"""Two names change places at once, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard_ckpt.storage.swap import swap


def make(path: Path, kind: str, text: str) -> None:
    if kind == "folder":
        path.mkdir()
        path = path / "file"
    path.write_text(text)


def text_of(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kinds", [("file", "file"), ("file", "folder"), ("folder", "folder")])
def test_files_and_folders_change_places(kinds: tuple[str, str], tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "\udcff other ×"
    make(one, kinds[0], "1")
    make(other, kinds[1], "2")
    if not swap(str(one), str(other)):
        pytest.skip("this file system cannot swap names")
    assert (text_of(one), text_of(other)) == ("2", "1")


def test_what_is_not_there_is_an_error_as_of_rename(tmp_path: Path):
    (tmp_path / "one").touch()
    with pytest.raises(FileNotFoundError):
        swap(str(tmp_path / "one"), str(tmp_path / "none"))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL])
def test_a_system_that_cannot_says_so(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    for library in (SimpleNamespace(), SimpleNamespace(renameat2=refuses)):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno, library=library: library)
        assert not swap(str(tmp_path / "one"), str(tmp_path / "other"))
    assert os.listdir(tmp_path) == []
