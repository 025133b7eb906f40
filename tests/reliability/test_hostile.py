"""Files that somebody made to do harm load, or are refused by name: no crash, no hang, little memory, no path elsewhere."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import re
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import msgpack
import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import BoxTable, RowTable
from reshard_ckpt.core.catalog.names import link_columns
from reshard_ckpt.core.geometry.tiling import find_gap, find_overlap
from reshard_ckpt.dcp import torch_errors as dcp_errors
from reshard_ckpt.errors import CheckpointError, CorruptError, MismatchError, UnsupportedError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.storage import open_storage
from tests.reliability.hostile import mutated_catalog, seal, unseal

MIB = 1 << 20


def state() -> dict[str, object]:
    tensors = {"w": torch.arange(60.0).reshape(5, 12), "b": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    return {"t": tensors, "extra": {"step": 3, "long": list(range(3000)), "own": checkpoint.PerRank({"seed": 7})}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, state(), metadata={"run": (1, 2.5)})
    yield url
    with open_storage(url) as storage:
        storage.delete([key for key, _ in storage.list()])


@pytest.fixture(scope="module")
def good(url: str) -> bytes:
    with open_storage(url) as storage:
        return storage.read("catalog.msgpack", MIB)


def put(url: str, data: bytes) -> None:
    with open_storage(url) as storage:
        storage.publish("catalog.msgpack", data)


def uses(path: str | Path) -> list[Callable[[], object]]:
    """All that reads a checkpoint."""
    target = {"t": {"w": torch.zeros(4), "b": torch.zeros(3, dtype=torch.bfloat16)}}
    return [
        lambda: checkpoint.catalog(path),
        lambda: checkpoint.inspect(path),
        lambda: checkpoint.verify(path),
        lambda: checkpoint.read(path),
        lambda: checkpoint.load(path, target, strict=False, allow_resize=True, verify=False),
        lambda: checkpoint.load(path, target, strict=False, allow_resize=True),
    ]


def changed(good: bytes, **sections: dict[str, object]) -> bytes:
    envelope, bodies = unseal(good)
    for name, fields in sections.items():
        bodies[name] = msgpack.packb({**msgpack.unpackb(bodies[name]), **fields})
    return seal(envelope, bodies)


def with_tensor(
    good: bytes, shape: tuple[int, ...], boxes: np.ndarray, rows: np.ndarray, *, size: int, padding: int = 0
) -> bytes:
    """The catalog of one U8 tensor, of boxes (B, 2, D) and rows (R, box start count offset), in a file of this size."""
    catalog = decode_catalog(good)
    table, width = catalog.tensors_table, len(shape)
    one = slice(2, 3)  # the last tensor that is no blob
    kept = dataclasses.replace(
        table,
        names=("t.w",),
        dtype=np.zeros(1, np.uint8) + table.dtype[table.names.index("extra.long@[value]")],
        kind=table.kind[one] * 0,
        ndim=np.array([width]),
        shape=np.array([shape]),
        alias=table.alias[one] * 0 - 1,
        placement=table.placement[one] * 0 - 1,
        row_start=np.array([0, len(rows)]),
        **link_columns(("t.w",), (None,), {}),
    )
    columns = RowTable(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 0] * 0, rows[:, 3])
    files = (dataclasses.replace(catalog.files[0], size=size),)
    made = dataclasses.replace(
        catalog,
        tensors_table=kept,
        boxes=BoxTable(boxes[:, 0], boxes[:, 1]),
        rows=columns,
        files=files,
        values_table=(),
    )
    envelope, bodies = unseal(encode_catalog(made))
    return seal(envelope, {**bodies, "padding": bytes(padding)})


def box(*lengths: int) -> np.ndarray:
    return np.array([[(0,) * len(lengths), lengths]])


def many_rows(number: int, **columns: np.ndarray | int) -> np.ndarray:
    return np.stack([np.zeros(number, np.int64) + columns.get(name, 0) for name in ("box", "start", "count", "offset")], axis=1)


N = 100_000
NO_ROWS = np.zeros((0, 4), np.int64)
BOMBS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a huge tensor that nothing holds": (lambda good: with_tensor(good, (2**50,), box(1), NO_ROWS, size=4000), "no saved shard"),
    "a huge tensor in a file that is small": (
        lambda good: with_tensor(good, (2**50,), box(2**50), many_rows(1, count=2**50), size=2**51),
        r"catalog says 2251799813685248|are more than one rank can read",
    ),
    "many rows on the same bytes": (
        lambda good: with_tensor(good, (4 * N,), box(4 * N), many_rows(N, start=4 * np.arange(N), count=4), size=4000),
        "rows of 400000 bytes in all lie in",
    ),
    "many rows that are alike": (
        lambda good: with_tensor(good, (2**12,), box(2**12), many_rows(N, count=2**12), size=2**40, padding=4 * N),
        "overlap|catalog says",
    ),
    "runs that come apart into many boxes": (
        lambda good: with_tensor(
            good, (N, *(2,) * 18), box(N, *(2,) * 18), many_rows(N, start=2**18 * np.arange(N) + 1, count=2**18 - 2), size=2**60,
            padding=4 * N,
        ),
        "come apart into boxes",
    ),
    "more rows than bytes": (
        lambda good: changed(good, rows={name: ["u1", 10**6, b"\0"] for name in ("box", "start", "count", "file", "offset")}),
        "has 1000000 entries",
    ),
    "one name for many files": (lambda good: changed(good, files={"key": [900, ["u1", 1, b"\1"], b"a"]}), "holds 'a' twice"),
    "one name for many values": (lambda good: changed(good, values={"name": [900, ["u1", 1, b"\1"], b"a"]}), "holds 'a' twice"),
    "tensors of many dims": (
        lambda good: changed(good, boxes={"count": 9, "offsets": [["u1", 9, b"\0"]] * 33, "lengths": [["u1", 9, b"\1"]] * 33}),
        "has 33 dims",
    ),
    "own values in no blob": (
        lambda good: changed(good, values={"kind": ["u1", 3, b"\1"]}),
        "lies in no blobs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_small_catalog_takes_much_memory(url: str, good: bytes, bomb: str):
    make, message = BOMBS[bomb]
    data = make(good)
    put(url, data)
    found = []
    for use in uses(url):
        tracemalloc.start()
        try:
            report = use()
            found += list(getattr(report, "problems", ()))
        except CheckpointError as error:
            found.append(str(error))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 16 * MIB + 400 * len(data), f"{peak} bytes for {len(data)}"
    put(url, good)
    assert re.search(message, "\n".join(found)), found


def test_a_layout_made_to_keep_a_reader_busy_is_refused():
    """Needles along three dims: each two of a kind meet along theirs, and no two overlap."""
    count = 60_000
    kind, number = np.arange(count) % 3, np.arange(count) // 3
    one, other = 3 * (number % 300), 3 * (number // 300)
    size = 3 * 300
    free = np.stack([np.zeros(count, np.int64), one, other + 1], axis=1)
    offsets = np.where(
        kind[:, None] == 0, free, np.where(kind[:, None] == 1, free[:, [2, 0, 1]], np.stack([one, other + 1, 0 * one], 1))
    )
    lengths = np.ones_like(offsets)
    lengths[np.arange(count), kind] = size
    with (
        mock.patch("reshard_ckpt.core.geometry.tiling.MAX_SWEPT", 1 << 22),
        pytest.raises(UnsupportedError, match="60000 shards"),
    ):
        find_overlap(offsets, lengths)


def test_a_gap_among_many_shards_is_found_by_halving():
    """One that takes a step for each shard would be at it for minutes."""
    count = 200_000
    offsets = np.arange(count)[:, None]
    kept = np.delete(offsets, 123_456, axis=0)[::-1]
    assert find_gap(np.array([count]), kept, np.ones_like(kept)) == ((123_456,), (123_457,))


# --- paths and permissions ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "p", state())
    return tmp_path / "p"


def test_no_path_outside_is_opened_and_nothing_is_unpickled(saved: Path):
    good = (saved / "catalog.msgpack").read_bytes()
    opened: list[str] = []
    real = os.open

    def spy(path: str, *args: object, **kwargs: object) -> int:
        opened.append(os.fspath(path))
        return real(path, *args, **kwargs)

    for seed in range(150):
        (saved / "catalog.msgpack").write_bytes(mutated_catalog(good, random.Random(seed)))
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(os, "open", spy))
            for name in ("load", "loads", "Unpickler"):
                stack.enter_context(mock.patch.object(pickle, name, side_effect=AssertionError("unpickled")))
            for use in uses(saved):
                with suppress(CheckpointError):
                    use()
    absolute = [path for path in opened if os.path.isabs(path)]
    assert absolute
    assert all(os.path.normpath(path).startswith(str(saved)) for path in absolute)


@pytest.mark.parametrize("strange", ["pipe", "folder", "device", "link to nowhere", "loop"])
@pytest.mark.parametrize("kind", ["catalog.msgpack", "*/*.safetensors", "*/*.digests"])
def test_what_is_no_file_is_refused_and_not_waited_for(saved: Path, kind: str, strange: str):
    (path,) = saved.glob(kind)
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "link to nowhere": lambda: path.symlink_to("/nowhere/at/all"),
        "loop": lambda: path.symlink_to(path),
    }[strange]()
    for use in (checkpoint.read, checkpoint.verify):
        with suppress(CheckpointError):
            assert use(saved).problems  # type: ignore[union-attr]


def test_a_save_follows_no_link_that_somebody_planted(saved: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    (saved / "20200101T000000Z-00000000").symlink_to(outside)  # as if a dead save's folder, to be cleaned up
    (stale := saved / "20200101T000000Z-11111111").mkdir()
    (stale / "rank00000-0.safetensors").symlink_to(outside / "precious")
    (saved / "catalog.msgpack").unlink()
    (saved / "catalog.msgpack").symlink_to(outside / "precious")
    checkpoint.save(saved, state())
    assert [(p.name, p.read_bytes()) for p in outside.iterdir()] == [("precious", b"precious")]
    assert not (saved / "catalog.msgpack").is_symlink()
    assert not stale.exists()
    assert checkpoint.verify(saved).ok


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o027, 0o640, 0o750), (0, 0o664, 0o775)])
def test_files_of_a_save_follow_the_umask_and_are_never_world_writable(tmp_path: Path, umask: int, file: int, folder: int):
    before = os.umask(umask)
    try:
        for _ in range(2):
            checkpoint.save(tmp_path / "a" / "p", state())
        checkpoint.async_save(tmp_path / "a" / "q", state()).result()
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o7777 == (folder if path.is_dir() else file), path


def test_a_value_that_no_row_holds_is_refused(url: str, good: bytes):
    """Else what the memory happened to hold would be decoded."""
    catalog = decode_catalog(good)
    index = catalog.tensors_table.names.index("extra.long@[value]")
    starts = catalog.tensors_table.row_start.copy()
    lost = int(starts[index])
    starts[index + 1 :] -= 1
    rows = RowTable(*(np.delete(getattr(catalog.rows, name), lost) for name in ("box", "start", "count", "file", "offset")))
    table = dataclasses.replace(catalog.tensors_table, row_start=starts)
    put(url, encode_catalog(dataclasses.replace(catalog, tensors_table=table, rows=rows)))
    with pytest.raises(CorruptError, match="extra.long"):
        checkpoint.read(url)
    put(url, good)


def test_errors_show_no_control_codes_of_names(tmp_path: Path):
    checkpoint.save(tmp_path / "a", {"t": {"w\x1b[2J\x9b1m": torch.arange(3)}})
    with pytest.raises(MismatchError, match=r"t\.w\\x1b\[2J\\x9b1m: ") as caught:
        checkpoint.load(tmp_path / "a", {"t": {"w": torch.zeros(3)}})
    for text in (str(caught.value), *caught.value.problems, str(dcp_errors.as_torch_error(caught.value))):
        assert not {"\x1b", "\x9b"} & {*text}
