"""A rank that is killed between the writing of a checkpoint and its commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from reshard_ckpt.storage.local import LocalStorage


def die_at_commit(part: str) -> None:
    """Let the rank that would publish the catalog of a checkpoint whose path has `part` in it be killed in its place."""
    stock = LocalStorage.publish

    def publish(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if part in str(self.url) and key == "catalog.msgpack":
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(self, key, *args, **kwargs)

    LocalStorage.publish = publish  # type: ignore[method-assign]


def assert_died_at_commit(folder: Path) -> None:
    """All of the files were written, and nothing says that they are a checkpoint."""
    assert list(folder.rglob("*.safetensors"))
    assert not (folder / "catalog.msgpack").exists()
