"""``LiveReshard(delta=True)``: only what changed crosses, and the result is that of a whole push, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import Exchange
from reshard_ckpt.engine.resharding.delta import DeltaMover, decode_changes, encode_changes
from reshard_ckpt.errors import PeerError, UsageError
from tests.launch import on_ranks
from tests.tries import is_long

ROWS, COLUMNS = 256, 512
STEPS = 50 if is_long() else 12
NAMES = ("a", "b", "c")


@given(
    st.lists(st.tuples(st.integers(0, 99_999), st.integers(1, 700)), max_size=8),
    st.lists(st.integers(0, 99_999), max_size=40),
    st.sampled_from([np.int8, np.int16, np.int64]),
)
def test_encoded_changes_read_back(runs: list[tuple[int, int]], places: list[int], dtype: Any):
    old = np.arange(100_000).astype(dtype)
    new = old.copy()
    for start, length in [*runs, *((place, 1) for place in places)]:
        new[start : start + length] += 1
    data = encode_changes(old, new)
    index, elements, size = decode_changes(data + encode_changes(old, old), dtype)
    assert size == len(data)
    assert np.array_equal(index, np.flatnonzero(old != new))
    assert np.array_equal(elements, new[index])
    assert len(data) - elements.nbytes < 40 + 14 * len(runs) + 4 * len(places)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_scattered_elements_cost_one_byte_each_besides_themselves(dtype: Any):
    old = np.zeros(100_000, dtype)
    new = old.copy()
    new[np.random.default_rng(0).choice(len(new), 2000, replace=False)] = 1  # 2 % of them
    # The information of a place alone is 0.9 bytes.
    assert len(encode_changes(old, new)) < 2000 * (old.itemsize + 1.05)


def sources(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for name in NAMES}


def rows_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Half of the rows of each tensor, as a trainer holds them."""
    half = ROWS // 2
    return {
        n: LocalShard(t[rank * half : (rank + 1) * half].clone(), (ROWS, COLUMNS), (rank * half, 0)) for n, t in whole.items()
    }


def columns_of(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    half = COLUMNS // 2
    return {name: LocalShard(torch.zeros(ROWS, half, dtype=dtype), (ROWS, COLUMNS), (0, rank * half)) for name in NAMES}


@pytest.mark.parametrize(
    ("dtype", "engine", "staged"),
    [(torch.bfloat16, torch.bfloat16, True), (torch.float32, torch.bfloat16, False)],
    ids=str,
)
@on_ranks(4)
def test_only_changed_runs_cross(dtype: torch.dtype, engine: torch.dtype, staged: bool):
    """Two ranks train, two generate: each step changes random runs of rows, and is pushed both as a delta and whole."""
    rank = dist.get_rank()
    trains, part = rank < 2, len(NAMES) * ROWS * COLUMNS // 2 * engine.itemsize
    src = rows_of(sources(dtype), rank) if trains else None
    into, whole_into = (None if trains else columns_of(rank - 2, engine) for _ in range(2))
    cast = True if dtype is not engine else None
    push = checkpoint.LiveReshard(src, into, delta=True, staged=staged, cast=cast, memory_bytes=1 << 20)
    whole = checkpoint.LiveReshard(src, whole_into, cast=cast)
    generator = torch.Generator().manual_seed(rank)

    def is_pushed() -> bool:
        return trains or all(torch.equal(into[n].tensor, whole_into[n].tensor) for n in NAMES)

    first = push.run().bytes_read
    assert first < 1000 if trains else part <= first < part * 1.01
    assert push.run().bytes_read < part * 0.01  # nothing has changed
    for step in range(STEPS):
        changed = torch.zeros((), dtype=torch.int64)
        for name in NAMES if trains else ():
            at = int(torch.randint(0, ROWS // 2 - 12, (), generator=generator))
            num = int(torch.randint(1, 12, (), generator=generator))
            local = src[name].tensor
            before = local.to(engine).clone()
            with torch.no_grad():
                local[at : at + num, : COLUMNS // (1 + step % 3)] += 1.0
            changed += int((local.to(engine) != before).sum()) * engine.itemsize
        sent = torch.tensor(push.run().bytes_read)
        whole.run()
        dist.all_reduce(changed)
        dist.all_reduce(sent)
        assert int(sent) <= 1.3 * int(changed)
        assert is_pushed()
    # A receiver whose tensors are not those of the last push gets them whole, the other one does not. Each has two senders: the
    # one whose rows it has no longer sends all that it has, half of the rows. Staged tensors keep the last push in spare memory,
    # which is copied into place as a whole.
    if rank == 2:
        into["a"].tensor[3, 3] = 99.0
    changed_by_hand = push.run().bytes_read
    assert trains or (changed_by_hand >= part // 2) == (rank == 2 and not staged)
    if rank == 3:
        into["b"] = LocalShard(torch.zeros_like(into["b"].tensor), (ROWS, COLUMNS), (0, COLUMNS // 2))
    replaced = push.run().bytes_read
    assert trains or (replaced >= part // 2) == (rank == 3)
    # A push that fails on one rank, in any of its steps, fails on all, and the next one mends what it left.
    for step_of_mover, failing in (("_claim", 2), ("_sizes_for", 1), ("unpack", 2)):
        for name in ("c",) if trains else ():
            src[name].tensor += 1
        fails = mock.patch.object(DeltaMover, step_of_mover, side_effect=OSError("no")) if rank == failing else nullcontext()
        with fails, pytest.raises(PeerError):
            push.run()
        push.run()
        whole.run()
        assert is_pushed()
    # If the process group itself fails, no rank can ask the others: each tells what it has overwritten.
    group_fails = mock.patch.object(Exchange, "swap", side_effect=PeerError("gone"))
    with group_fails, pytest.raises(PeerError, match="gone; on this rank no tensor was changed"):
        push.run()


@on_ranks(2)
def test_ranks_pass_the_same():
    rank = dist.get_rank()
    state, into = ({"x": torch.ones(3)}, None) if rank == 0 else (None, {"x": torch.zeros(3)})
    with pytest.raises(PeerError, match=r"reshard_live\(delta=True\)"):
        checkpoint.LiveReshard(state, into, delta=rank == 0)


def test_delta_is_true_or_false():
    with pytest.raises(UsageError, match="delta='yes': pass True or False"):
        checkpoint.LiveReshard({"x": torch.ones(1)}, {"x": torch.ones(1)}, delta="yes")  # type: ignore[arg-type]


def test_one_process_alone_copies():
    src, into = {"x": torch.arange(5.0)}, {"x": torch.zeros(5)}
    push = checkpoint.LiveReshard(src, into, delta=True)
    push.run()
    src["x"] += 1
    assert push.run().bytes_read == 0
    assert torch.equal(into["x"], src["x"])
