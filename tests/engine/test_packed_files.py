"""Files with packed rows, written in any chunks and read in any ranges, against the plain file as one string of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.model import FileEntry
from reshard_ckpt.core.catalog.packed import PackedRows, pack
from reshard_ckpt.engine.common.packed_files import Packer, UnpackedStorage, as_stored
from reshard_ckpt.storage import open_storage

parts = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 5), st.integers(9, 12), st.sampled_from(["F32", "BF16"]), st.sampled_from([8, 4])
    ),
    max_size=4,
)


@given(parts, st.integers(0, 9), st.lists(st.integers(1, 60), min_size=1), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1))))
def test_any_range_is_that_of_the_plain_file(made, tail, chunks, wanted):
    random, packed, plain, given_, stored = np.random.default_rng(len(made)), [], b"", b"", b""
    for gap, count, width, dtype, bits in made:
        between = random.bytes(gap)
        rows = PackedRows(len(plain) + gap, count, width, dtype, bits)
        values = random.normal(size=(count, width)).astype(np.float32)
        raw = values.tobytes() if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        coded, decoded = pack(rows, raw)
        packed.append(rows)
        plain, given_, stored = plain + between + decoded, given_ + between + raw, stored + between + coded
    end = random.bytes(tail)
    plain, given_, stored = plain + end, given_ + end, stored + end

    packer, at, turn, out, meant = Packer(len(plain), packed), 0, 0, b"", b""
    while at < len(given_):
        size = chunks[turn % len(chunks)]
        for written, stands_for in packer.add(memoryview(given_)[at : at + size]):
            out, meant = out + bytes(written), meant + bytes(stands_for)
        at, turn = at + size, turn + 1
    assert (out, meant) == (stored, plain)

    file = FileEntry("f.packed", len(plain), "f.digests", bytes(16), "s", 0, packed=tuple(packed))
    assert file.stored_bytes == len(stored)
    with open_storage("memory://packed") as below:
        below.publish("f.packed", stored)
        storage = UnpackedStorage(below, {"f.packed": file})
        assert storage.size("f.packed") == len(plain)
        assert as_stored(storage).size("f.packed") == len(stored)
        for a, b in wanted:
            low, high = sorted((round(a * len(plain)), round(b * len(plain))))
            first, rest = memoryview(bytearray((high - low) // 2)), memoryview(bytearray(high - low - (high - low) // 2))
            storage.read_into("f.packed", low, [first, rest])
            assert bytes(first) + bytes(rest) == plain[low:high]


def test_a_store_copies_plain_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy the packed bytes of the others, where the plain ones are wanted."""
    copied: list[str] = []
    with open_storage("memory://copies") as stored:
        monkeypatch.setattr(type(stored), "copy", lambda self, source, key, to: copied.append(key) or True)
        rows = PackedRows(0, 8, 16, "F32", 8)
        storage = UnpackedStorage(stored, {"a.packed": FileEntry("a.packed", 512, "a.digests", b"", "a", 0, packed=(rows,))})
        assert not storage.copy(storage, "a.packed", "b")
        assert storage.copy(storage, "a.safetensors", "b")
    assert copied == ["a.safetensors"]
