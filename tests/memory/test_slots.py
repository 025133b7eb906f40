"""A slot that another process has shortened, filled anew or damaged is refused: a read beyond its end would end the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard_ckpt.errors import CorruptError
from reshard_ckpt.memory.node import run_path
from reshard_ckpt.memory.options import Memory
from reshard_ckpt.memory.pool import SlotPool, saved_in
from reshard_ckpt.memory.slots import HEADER_BYTES, ReadSlot, Slot, SlotRange, SlotTable, decode_table


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


def test_a_slot_is_read_only_as_long_as_it_is_that_of_the_save(shm: Path):
    slot = Slot(str(shm / "a.slot"), 100).reserve()
    table = SlotTable("one", 0, {"f": slot.put(HEADER_BYTES + 64, b"0123456789")})
    slot.seal(table)
    one = ReadSlot(slot.path)

    def read(offset: int, num_bytes: int, reader: ReadSlot = one) -> bytes:
        found = bytearray(num_bytes)
        reader.read_into(table.files["f"], offset, [memoryview(found)[:1], memoryview(found)[1:]])
        return bytes(found)

    assert read(3, 7) == b"3456789"
    for offset in (-1, 4):
        with pytest.raises(CorruptError, match="beyond the end of a file of 10 bytes"):
            read(offset, 7)
    slot.void()
    assert slot.table is None
    with pytest.raises(CorruptError, match="filled anew"):
        read(3, 7)
    slot.seal(SlotTable("two", 0, table.files))
    with pytest.raises(CorruptError, match="filled anew"):
        read(3, 7)
    two = ReadSlot(slot.path)
    assert read(3, 7, two) == b"3456789"
    for each in (one, two, slot):
        each.close()


@pytest.mark.parametrize(
    ("offset", "size"), [(HEADER_BYTES - 1, 1), (HEADER_BYTES, 101), (HEADER_BYTES + 101, 0), (HEADER_BYTES, -1)]
)
def test_a_table_of_bytes_outside_of_the_slot_is_refused(offset: int, size: int):
    head = SlotTable("one", 0, {"f": SlotRange(offset, size)}).encoded()
    with pytest.raises(CorruptError, match="outside of the slot"):
        decode_table(head, HEADER_BYTES + 100, where="slot")
    with pytest.raises(CorruptError, match="header is damaged"):
        decode_table(head[:-1] + bytes([head[-1] ^ 1]), HEADER_BYTES + 100, where="slot")


def test_a_slot_that_is_taken_again_holds_no_save_until_it_is_sealed(shm: Path):
    pool = SlotPool(Memory(folder=str(shm)), run_path(str(shm), "root"), timeout_s=60)
    pool.enter("root")
    slot = pool.take(0, 100, "old")
    slot.seal(SlotTable("old", 0, {}))
    assert saved_in(slot) == "old"
    assert pool.take(0, 100, "new") is slot
    assert saved_in(slot) == ""
    pool.close()
