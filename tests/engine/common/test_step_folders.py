"""The order in which the files of a step are removed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.step_folders import remove_step
from reshard_ckpt.format.files import CATALOG_KEY
from reshard_ckpt.storage import LocalStorage


def test_a_step_is_durably_without_its_catalog_before_another_file_goes(tmp_path: Path):
    save_id = checkpoint.save(tmp_path / "step_1", {"x": 1, "blob": bytes(10_000)}).save_id
    calls: list[tuple[str, set[str]]] = []

    class Watched(LocalStorage):
        def delete(self, keys: Iterable[str]) -> None:
            calls.append(("delete", set(keys)))
            super().delete(calls[-1][1])

        def sync(self, keys: Iterable[str]) -> None:
            calls.append(("sync", set(keys)))
            super().sync(calls[-1][1])

    with Watched(tmp_path) as root:
        catalog = {f"step_1/{CATALOG_KEY}"}
        files = {key for key, _ in root.list()} - catalog
        assert f"step_1/{save_id}/rank00000-0.safetensors" in files
        assert remove_step(root, "step_1", frozenset)
    assert calls == [("delete", catalog), ("sync", catalog), ("delete", files)]
