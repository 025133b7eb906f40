"""Notes: what was written comes back, and anything else is a named error that says what to do."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.engine.common.lineage import LINEAGE, Lineage, Note
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format.files import digest128
from reshard_ckpt.manager.attempts import ATTEMPTS
from reshard_ckpt.storage import open_storage

DEEP = b"\x91" * 100_000 + b"\xc0"
VALUES = [
    3, [[1, 2]], [[float("inf"), 2, True]], [[1 << 63, float("nan"), 0]], [["x", 2, True]], ["r", "1", [], []],
    ["r", 1, [[1, float("inf")]], []], [3, 1, [], []], ["r", 1, [], [b"x"]],
]  # fmt: skip
BODIES = [
    b"",
    b"\xc0",
    b"\x92\x01",
    DEEP,
    b"\x92\x01" + DEEP,
    msgpack.packb([9, []]),
    *(msgpack.packb([1, one]) for one in VALUES),
]
"""Bodies that no writer has made."""


def forged(body: bytes) -> bytes:
    return b"RSHNOTE1" + digest128(body) + body


@pytest.mark.parametrize("note", [LINEAGE, ATTEMPTS], ids=["lineage", "attempts"])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_hostile_body_is_a_named_error(tmp_path: Path, note: Note, body: bytes):
    with open_storage(tmp_path) as storage:
        storage.publish(note.key, forged(body))
        with pytest.raises(CorruptError, match=f"{tmp_path}/{note.key}: this note cannot be read.*; .*{note.cure[-20:]}"):
            note.read(storage)


def test_each_flipped_bit_and_each_cut_is_found(tmp_path: Path):
    data = LINEAGE.encoded(["r", 2, [[2, 20]], ["s1"]])
    assert LINEAGE.decoded(data, where="") == Lineage("r", 2, ((2, 20),), ("s1",))
    wrong = [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)]
    for one in (*wrong, *(data[:at] for at in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptError, match="here: this note cannot be read"):
            LINEAGE.decoded(one, where="here")


def test_a_note_beyond_its_limit_is_not_read(tmp_path: Path):
    small = Note("small", 1, 100, list, "delete it")
    with open_storage(tmp_path) as storage:
        assert small.read(storage) is None
        small.keep(storage, [1, 2])
        assert small.read(storage) == [1, 2]
        small.keep(storage, [*range(100)])
        with pytest.raises(CorruptError, match="small: .*larger than 100 bytes.*; delete it"):
            small.read(storage)
        with pytest.raises(CorruptError, match=r"above the limit of 100\); delete it"):
            small.decoded(small.encoded([*range(100)]), where="small")


@given(st.lists(st.tuples(st.integers(0, 100), st.lists(st.text("ab", min_size=1, max_size=2)), st.text("ab", max_size=2))))
def test_a_lineage_comes_back(begun):
    line = Lineage("run")
    for step, newer, own in begun:
        line = line.begun(step, newer, own)
        assert own not in line.superseded
    assert LINEAGE.decoded(LINEAGE.encoded([line.run, line.attempt, line.starts, line.superseded]), where="") == line
    assert line.begun().is_newer(line)
    assert not line.is_newer(line)
    assert not Lineage("another run", line.attempt + 1).is_newer(line)
