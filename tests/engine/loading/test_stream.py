"""The bytes of any runs of any checkpoint, one after the other, against slices of the whole tensor."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import CODES, TensorSpec
from reshard_ckpt.engine.common import files
from reshard_ckpt.engine.common.files import FileDigests
from reshard_ckpt.engine.loading import stream as streams
from reshard_ckpt.engine.loading.stream import Run, RunReader, cut_windows, read_ahead, stream, whole_run
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.storage.memory import MemoryStorage
from reshard_ckpt.storage.protocol import Storage
from tests.jobs import save_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of, whole_piece
from tests.storage.faulty import FaultyStorage
from tests.tries import examples


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


def expected(whole: torch.Tensor, run: Run) -> bytes:
    box = whole[tuple(slice(o, o + n) for o, n in zip(run.offsets, run.lengths, strict=True))]
    # Copied whole first: a slice of a strided box, above all an empty one, cannot be viewed as bytes.
    flat = box.clone(memory_format=torch.contiguous_format).view(-1)
    return flat[run.start : run.start + run.count].view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@given(st.data(), st.sampled_from([1, 7, 64, 1000, 1 << 20]))
@examples(120)
def test_stream_gives_the_bytes_of_runs_in_order(data: st.DataObject, window: int) -> None:
    ranks = data.draw(st.integers(1, 5))
    named = []
    for i in range(data.draw(st.integers(1, 3))):
        shape = data.draw(shapes(max_size=7))
        dtype = data.draw(st.sampled_from(CODES))
        named.append((data.draw(layouts(shape, ranks)), dtype, values_of(shape, dtype, i)))
    storage = MemoryStorage("stream")
    held = [
        [(spec_of(lay, r, f"t{i}", code), filled(lay, r, whole)) for i, (lay, code, whole) in enumerate(named)]
        for r in range(ranks)
    ]
    catalog = save_job(storage, held)
    runs = []
    for _ in range(data.draw(st.integers(0, 6))):
        i = data.draw(st.integers(0, len(named) - 1))
        offsets, lengths = data.draw(boxes_of(named[i][2].shape))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(lengths))] * 2)))
        runs.append(Run(catalog.index(f"t{i}"), offsets, lengths, start, stop - start))
    with patch.object(files, "DIGESTS_BYTES", data.draw(st.sampled_from([0, 1 << 20]))):
        got = [bytes(view) for view in stream(storage, catalog, runs, window_bytes=window)]
    index = {catalog.index(f"t{i}"): whole for i, (_, _, whole) in enumerate(named)}
    assert b"".join(got) == b"".join(expected(index[run.tensor], run) for run in runs)
    assert all(got)


def one_tensor(storage: Storage, shape: tuple[int, ...], dtype: str = "F32") -> tuple[Catalog, torch.Tensor]:
    whole = values_of(shape, dtype, 1)
    return save_job(storage, [[(TensorSpec("w", dtype, shape, (whole_piece(shape),)), whole)]]), whole


def test_runs_may_be_cast() -> None:
    storage = MemoryStorage("cast")
    whole = torch.linspace(-3, 3, 5 * 8).reshape(5, 8)
    catalog = save_job(storage, [[(TensorSpec("w", "F32", (5, 8), (whole_piece((5, 8)),)), whole)]])
    run = Run(0, (1, 2), (4, 5), 3, 15, dtype="BF16")
    got = b"".join(bytes(view) for view in stream(storage, catalog, [run], window_bytes=8))
    assert got == bytes(whole[1:, 2:7].reshape(-1)[3:18].to(torch.bfloat16).view(torch.uint8).tolist())


def test_an_alias_streams_the_bytes_that_it_shares() -> None:
    whole = values_of((6, 4), "I32", 2)
    pieces = (whole_piece((6, 4)),)
    specs = [TensorSpec("a", "I32", (6, 4), pieces), TensorSpec("b", "I32", (6, 4), pieces, alias_of="a")]
    storage = MemoryStorage("alias")
    catalog = save_job(storage, [[(spec, whole) for spec in specs]])
    both = b"".join(bytes(v) for v in stream(storage, catalog, [whole_run(catalog, catalog.index(n)) for n in "ab"]))
    assert both == 2 * bytes(whole.view(torch.uint8).reshape(-1).tolist())


@pytest.mark.parametrize("batch", [1, 10_000, 1 << 20])
def test_memory_is_a_few_windows_whatever_the_size(batch: int) -> None:
    """No more than one batch is planned before it is needed, and only a few buffers are filled."""
    storage = MemoryStorage("bounded")
    catalog, whole = one_tensor(storage, (1024, 64))
    reader = RunReader(storage, catalog, FileDigests(storage, catalog, verify=True))
    asked: list[int] = []
    buffers: set[int] = set()

    def windows():  # type: ignore[no-untyped-def]
        for i, window in enumerate(cut_windows(reader, [whole_run(catalog, 0)], 4096)):
            asked.append(i)
            yield window

    with patch.object(streams, "BATCH_BYTES", batch):
        for used, filled in enumerate(read_ahead(reader, windows())):
            assert len(asked) <= used + streams.AHEAD + -(-batch // 4096)
            assert len(filled.data) == 4096
            buffers.add(np.frombuffer(filled.data, np.uint8).ctypes.data)
    assert len(asked) == whole.nbytes // 4096
    assert len(buffers) == streams.AHEAD


@given(st.integers(0, 40), st.sampled_from([1, 100, 1 << 20]), st.integers(2, 4))
@examples(60)
def test_windows_come_in_order_whichever_thread_reads_them(rows: int, batch: int, ahead: int) -> None:
    storage = MemoryStorage("ordered")
    catalog, whole = one_tensor(storage, (max(rows, 1), 5))
    run = replace(whole_run(catalog, 0), count=rows * 5)
    with patch.object(streams, "BATCH_BYTES", batch), patch.object(streams, "AHEAD", ahead):
        reader = RunReader(storage, catalog, FileDigests(storage, catalog, verify=True))
        got = [b"".join(map(bytes, window.parts())) for window in read_ahead(reader, cut_windows(reader, [run], 48))]
    assert b"".join(got) == expected(whole, run)


@pytest.mark.parametrize("stage", ["read", "plan", "use"])
def test_a_failure_ends_all_threads(stage: str) -> None:
    inner = MemoryStorage("fails")
    catalog, _ = one_tensor(inner, (64, 64))
    done: list[int] = []

    def fail_at(what: str) -> None:
        if what == stage and len(done) >= 2:
            raise ZeroDivisionError(what)

    storage = FaultyStorage(inner, lambda operation, _: fail_at("read") if operation == "read_into" else None)
    reader = RunReader(storage, catalog, FileDigests(storage, catalog, verify=True))

    def windows():  # type: ignore[no-untyped-def]
        for window in cut_windows(reader, [whole_run(catalog, 0)], 1024):
            fail_at("plan")
            yield window

    def use_all() -> None:
        with closing(read_ahead(reader, windows())) as filled:
            for window in filled:
                fail_at("use")
                done.append(len(window.data))

    before = {*threading.enumerate()}
    with patch.object(streams, "BATCH_BYTES", 1), pytest.raises(ZeroDivisionError, match=stage):
        use_all()
    assert 2 <= len(done) <= 2 + streams.AHEAD
    assert {*threading.enumerate()} <= before


def test_the_next_window_is_read_while_one_is_used() -> None:
    inner = MemoryStorage("ahead")
    catalog, _ = one_tensor(inner, (64, 64))
    file = catalog.files[0].key
    reads: list[str] = []
    second = threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "read_into" and key == file:
            reads.append(key)
            if len(reads) == 2:
                second.set()

    views = stream(FaultyStorage(inner, before), catalog, [whole_run(catalog, 0)], window_bytes=4096)
    next(views)
    assert second.wait(600), "nobody reads ahead"
    views.close()


def test_leaving_early_reads_no_further() -> None:
    inner = MemoryStorage("early")
    catalog, _ = one_tensor(inner, (64, 64))
    reads: list[str] = []
    storage = FaultyStorage(inner, lambda operation, key: reads.append(key) if operation == "read_into" else None)
    views = stream(storage, catalog, [whole_run(catalog, 0)], window_bytes=1024)
    next(views)
    views.close()
    assert len(reads) <= streams.AHEAD


@pytest.mark.parametrize("at", [0, 200_000, -1])
def test_a_damaged_block_is_named(at: int) -> None:
    storage = MemoryStorage("damaged")
    catalog, whole = one_tensor(storage, (256, 256))
    key, size = catalog.files[0].key, catalog.files[0].size
    data = bytearray(storage.read(key, size))
    data[at] ^= 1
    storage.publish(key, bytes(data))
    with pytest.raises(CorruptError, match=rf"{key} is damaged in bytes .* hold w; use another checkpoint$") as error:
        list(stream(storage, catalog, [whole_run(catalog, 0)], window_bytes=4096))
    assert "overwritten" not in str(error.value)
    unproved = list(stream(storage, catalog, [whole_run(catalog, 0)], verify=False))
    assert sum(map(len, unproved)) == whole.nbytes


def test_missing_and_truncated_files_are_named() -> None:
    storage = MemoryStorage("short")
    catalog, _ = one_tensor(storage, (8, 8))
    entry = catalog.files[0]
    data = storage.read(entry.key, entry.size)
    storage.publish(entry.key, data[:-1])
    with pytest.raises(CorruptError, match=rf"{entry.key} has {entry.size - 1} bytes, the catalog says {entry.size}"):
        list(stream(storage, catalog, [whole_run(catalog, 0)]))
    storage.delete([entry.key])
    with pytest.raises(CorruptError, match=f"{entry.key} is missing"):
        list(stream(storage, catalog, [whole_run(catalog, 0)]))


def test_a_catalog_with_a_hole_is_refused() -> None:
    storage = MemoryStorage("hole")
    catalog, _ = one_tensor(storage, (8, 8))
    rows = replace(catalog.rows, count=catalog.rows.count - 8)
    with pytest.raises(CorruptError, match=r"w: no saved shard holds \[7:8, 0:8\]"):
        list(stream(storage, replace(catalog, rows=rows), [whole_run(catalog, 0)]))
