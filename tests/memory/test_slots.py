"""A slot that another process shortened is refused: a read of its mapping beyond the end would end the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard_ckpt.errors import CorruptError
from reshard_ckpt.memory.slots import HEADER_BYTES, ReadSlot, Slot, SlotTable


def test_a_slot_that_was_shortened_is_refused(shm: Path):
    slot = Slot(str(shm / "slot"), 100_000).reserve()
    extent = slot.put(HEADER_BYTES, bytes(range(250)) * 400)
    slot.seal(SlotTable("id", 0, {"file": extent}))
    reader, read = ReadSlot(slot.path), bytearray(1000)
    reader.read_into(extent, 500, [memoryview(read)[:10], memoryview(read)[10:]])
    assert read == bytes(range(250)) * 4
    os.truncate(slot.path, HEADER_BYTES)
    with pytest.raises(CorruptError, match="something has shortened the slot"):
        reader.read_into(extent, 500, [memoryview(read)])
    with pytest.raises(CorruptError, match="something has shortened the slot"), reader.lend(extent, 0, 10):
        pass
    reader.close()
    with pytest.raises(CorruptError, match="bytes outside of the slot"):
        ReadSlot(slot.path)
    slot.close()
