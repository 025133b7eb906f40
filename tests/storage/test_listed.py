"""A store that keeps the heads of its files keeps no more of them than its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard_ckpt.errors import CorruptError
from reshard_ckpt.storage import listed
from reshard_ckpt.storage.listed import ListedStorage
from reshard_ckpt.storage.local import LocalStorage
from reshard_ckpt.storage.protocol import MissingKey, read_range


def test_heads_are_kept_up_to_the_limit_and_every_file_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:02}.bin" for number in range(20)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(range(number, number + 10)))
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
            assert found == bytes(range(number + 2, number + 5))
    assert read == names[:4]


@pytest.mark.parametrize(("key", "error"), [("none", MissingKey), ("../file", CorruptError)])
@pytest.mark.parametrize("num_bytes", [0, 1])
def test_what_is_not_there_is_the_same_error_as_in_the_store_itself(
    tmp_path: Path, key: str, error: type[Exception], num_bytes: int
) -> None:
    with pytest.raises(error):
        read_range(ListedStorage(LocalStorage(str(tmp_path))), key, 0, num_bytes)
