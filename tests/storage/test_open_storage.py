"""Which path names which storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_ckpt.errors import UsageError
from reshard_ckpt.storage import LocalStorage, MemoryStorage, open_storage


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("FILE:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a%20b/%C3%9F", "/a b/ß"),
        ("/odd://name", "/odd:/name"),
    ],
)
def test_paths_and_file_urls_are_folders(path: str | Path, url: str):
    storage = open_storage(path)
    assert isinstance(storage, LocalStorage)
    assert storage.url == url


def test_a_relative_path_is_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for path in ("run/step_1", "./run/step_1", Path("run") / "step_1"):
        assert open_storage(path).url == str(tmp_path / "run" / "step_1")
    assert open_storage("./s3://bucket").url == str(tmp_path / "s3:" / "bucket")
    assert open_storage("step: 1/x").url == str(tmp_path / "step: 1" / "x")


@pytest.mark.parametrize("path", ["memory://run/step_1", "memory://run/step_1/", "MEMORY://run/step_1"])
def test_memory_urls_are_memory(path: str):
    storage = open_storage(path)
    assert isinstance(storage, MemoryStorage)
    assert storage.url == "memory://run/step_1"


@pytest.mark.parametrize(
    "path",
    ["s3://", "gs://b", "hdfs://h/x", "http://h/x", "s3+x.y-z://b", "memory://", "memory:///", "memory:///x",
     "file://host/x", "file://", "file://relative", "s3:/bucket", "", "a\0b", b"/bytes"],
)  # fmt: skip
def test_what_no_store_serves_is_an_error_and_no_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        open_storage(path)
    assert list(tmp_path.iterdir()) == []


def test_a_url_that_became_a_path_says_so():
    with pytest.raises(UsageError, match=r"'s3:/bucket/x': pass s3://bucket/prefix as a str, as a Path drops a slash"):
        open_storage(Path("s3://bucket/x"))


def test_an_unknown_scheme_says_what_there_is():
    with pytest.raises(
        UsageError,
        match=r"'hdfs://host/x': no store serves this scheme; there are a folder, file:///folder, "
        r"s3://bucket/prefix, gs://bucket/prefix, az://bucket/prefix and memory://name",
    ):
        open_storage("hdfs://host/x")
