"""A store that keeps the heads of its files keeps no more of them than its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard_ckpt.storage import listed
from reshard_ckpt.storage.listed import ListedStorage
from reshard_ckpt.storage.local import LocalStorage


def test_heads_are_kept_up_to_the_limit_and_every_file_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:02}.bin" for number in range(20)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([number]) * 10)
    read: list[str] = []

    class Counted(LocalStorage):
        def read_ranges(self, ranges: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
            read.extend(key for key, _, _ in ranges)
            super().read_ranges(ranges)

    monkeypatch.setattr(listed, "MAX_HEADS", 4)
    storage = ListedStorage(Counted(str(tmp_path)))
    for _ in range(2):
        for number, name in enumerate(names):
            found = bytearray(3)
            storage.read_into(name, 2, [memoryview(found)])
            assert found == bytes([number]) * 3
    assert read == names[:4]
