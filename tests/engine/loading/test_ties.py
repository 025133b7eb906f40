"""Targets that share memory load where the checkpoint has the same bytes for them; where not, nothing changes."""

from __future__ import annotations

from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from reshard_ckpt import FlatShard, LocalShard, checkpoint, dcp
from reshard_ckpt.core.catalog.specs import Piece, TensorSpec, piece_columns
from reshard_ckpt.engine.loading.ties import find_shared
from reshard_ckpt.errors import CorruptError, MismatchError
from tests.helpers import position_values
from tests.launch import on_ranks

BIG = 300_001  # 1.2 MB of float32: more than one window, and many blocks


def base(*shape: int) -> torch.Tensor:
    return position_values(shape)


def views(buffer: torch.Tensor, num: int) -> dict[str, dict[str, torch.Tensor]]:
    """Ways to look at one buffer of `num` elements that share some of its memory."""
    half, rows = num // 2, num // 10
    table = buffer[: rows * 10].view(rows, 10)
    return {
        "whole and reshaped": {"a": buffer[: half * 2], "b": buffer[: half * 2].view(half, 2)},
        "one behind the other": {"a": buffer[: num - 2], "b": buffer[half:]},
        "every second one": {"a": buffer[::2], "b": buffer[half:]},
        "transposed": {"a": table, "b": table.t()},
        "columns that meet": {"a": table[:, :6], "b": table[:, 4:]},
        "another dtype": {"a": buffer, "b": buffer[3:].view(torch.int16)},
        "in three": {"a": buffer[:half], "b": buffer[half:], "c": buffer[half - 3 : half + 3]},
        "diagonal": {"a": table, "b": torch.diagonal(table)},
    }


KINDS = tuple(views(torch.zeros(100), 100))


def a_changed_copy(state: dict[str, torch.Tensor], name: str, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in memory of their own, but for one element that another tensor of the state has too."""
    out = {key: value.clone() for key, value in state.items()}
    others = torch.zeros_like(buffer)
    own = torch.zeros_like(buffer)
    for key in state:
        where = views_of(others if key != name else own, state[key], buffer)
        where.view(torch.uint8 if where.element_size() == 1 else where.dtype).fill_(1)
    shared = ((others != 0) & (own != 0)).nonzero()[-1].item()
    changed = buffer.clone()
    changed[shared] = -7
    out[name] = views_of(changed, state[name], buffer).clone()
    return out


def views_of(other: torch.Tensor, view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The same view of another buffer."""
    first = (view.data_ptr() - buffer.data_ptr()) // view.element_size()
    return torch.as_strided(other.view(view.dtype), view.shape, view.stride(), first)


@pytest.mark.parametrize("num", [100, BIG])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_with_overlapping_views_saved_loads_into_it_again(kind: str, num: int, tmp_path: Path):
    source = base(num)
    checkpoint.save(tmp_path, {"t": views(source, num)[kind]})
    target = torch.zeros(num)
    into = views(target, num)[kind]
    for _ in range(3):  # threads read in another order each time
        target.zero_()
        with patch("reshard_ckpt.engine.loading.ties.TIE_BYTES", 64 if num == 100 else 1 << 18):
            checkpoint.load(tmp_path, {"t": into})
        for name, tensor in views(source, num)[kind].items():
            assert torch.equal(into[name], tensor), name


@pytest.mark.parametrize("num", [100, BIG])
@pytest.mark.parametrize("kind", KINDS)
def test_different_bytes_for_one_place_are_refused_by_both_names_and_nothing_changes(kind: str, num: int, tmp_path: Path):
    source = base(num)
    state = views(source, num)[kind]
    last = list(state)[-1]
    checkpoint.save(tmp_path, {"t": a_changed_copy(state, last, source)})
    target = torch.zeros(num)
    with (
        patch("reshard_ckpt.engine.loading.ties.TIE_BYTES", 64 if num == 100 else 1 << 18),
        pytest.raises(
            MismatchError, match=rf"t\.{last}: shares memory with t\.[ab] in the state passed, but the checkpoint"
        ) as said,
    ):
        checkpoint.load(tmp_path, {"t": views(target, num)[kind]})
    assert "untie them, or rename= one away; if a scheduler holds them, save and load it as checkpoint.Value(scheduler)" in str(
        said.value
    )
    assert not target.any()


def test_views_that_share_no_element_are_read_once(tmp_path: Path):
    source = base(1000, 30)
    parts = {"q": source[:, :10], "k": source[:, 10:20], "v": source[:, 20:]}
    checkpoint.save(tmp_path, {"t": parts})
    target = torch.zeros(1000, 30)
    with patch("reshard_ckpt.engine.loading.ties.execute", side_effect=AssertionError):
        checkpoint.load(tmp_path, {"t": dict(zip("qkv", target.split(10, dim=1), strict=True))})
    assert torch.equal(target, source)


def test_a_load_of_one_of_two_views_needs_no_proof(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": torch.ones(6), "b": torch.zeros(6)})
    memory = torch.full((8,), 5.0)
    checkpoint.load(tmp_path, {"a": memory[:6]})
    assert memory.tolist() == [1.0] * 6 + [5.0] * 2


def test_resized_and_converted_targets_are_proved_by_what_they_get(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": base(4), "b": base(6)[2:], "c": base(4).double()})
    memory = torch.full((6,), -1.0)
    # a reaches memory[:4] alone, and b memory[2:]: what they share is the same; what is not saved is compared with nothing.
    checkpoint.load(tmp_path, {"a": memory[:5], "b": memory[2:6]}, allow_resize=["a"])
    assert torch.equal(memory, base(6))
    tied = torch.full((8,), -1.0)
    checkpoint.load(tmp_path, {"a": tied, "c": tied}, allow_resize=True, cast=["c"])
    assert tied.tolist() == [*base(4).tolist(), -1, -1, -1, -1]
    checkpoint.save(tmp_path, {"a": base(4), "c": base(6)})
    checkpoint.load(tmp_path, {"a": tied, "c": tied}, allow_resize=True)
    assert tied.tolist() == [*base(6).tolist(), -1, -1]


@pytest.mark.parametrize(("saved", "into"), [("float16", "float32"), ("float32", "bfloat16"), ("int8", "float64")])
@pytest.mark.parametrize("num", [100, BIG])
def test_tied_targets_of_another_dtype_are_proved_element_by_element(saved: str, into: str, num: int, tmp_path: Path):
    source = (base(num) % 100).to(getattr(torch, saved))
    odd = source.clone()
    odd[-1] += 1
    checkpoint.save(tmp_path, {"a": source, "b": source.clone(), "odd": odd})
    memory = torch.full((num,), -1.0, dtype=getattr(torch, into))
    checkpoint.load(tmp_path, {"a": memory, "b": memory[:]}, cast=True, ignore=["odd"])
    assert torch.equal(memory, source.to(memory.dtype))
    memory.fill_(-1)
    with pytest.raises(MismatchError, match="odd: tied to a in the state passed"):
        checkpoint.load(tmp_path, {"a": memory, "odd": memory[:]}, cast=True, ignore=["b"])
    assert (memory == -1).all()


def test_the_calls_of_dcp_prove_ties_of_another_dtype_too(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": base(64).half(), "b": -base(64).half()})
    memory = torch.zeros(64)
    with pytest.raises(MismatchError, match="b: tied to a"):
        dcp.load({"a": memory, "b": memory[:]}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="b: shares memory with a in the state passed, but"):
        torch_dcp.load({"a": memory, "b": memory[:]}, storage_reader=dcp.ReshardReader(tmp_path), no_dist=True)
    assert not memory.any()


def test_declared_shards_of_one_buffer_are_proved_too(tmp_path: Path):
    whole = base(6, 4)
    checkpoint.save(tmp_path, {"w": whole, "flat": whole.reshape(-1)})
    memory = torch.zeros(24)
    state = {"w": LocalShard(memory.view(6, 4)[2:5], (6, 4), (2, 0)), "flat": FlatShard(memory[7:22], (24,), 7)}
    checkpoint.load(tmp_path, state)
    assert memory[7:22].tolist() == whole.reshape(-1)[7:22].tolist()
    state["flat"] = FlatShard(memory[6:21], (24,), 7)
    memory.zero_()
    with pytest.raises(MismatchError, match="flat: shares memory with w"):
        checkpoint.load(tmp_path, state)
    assert not memory.any()


def test_with_strict_false_what_is_not_loaded_is_in_no_tie(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": torch.ones(6), "b": torch.zeros(7)})
    memory = torch.zeros(6)
    report = checkpoint.load(tmp_path, {"a": memory, "b": memory.view(3, 2)}, strict=False)
    assert memory.all()
    assert len(report.shape) == 1


def test_damage_is_found_by_the_proof_and_nothing_changes(tmp_path: Path):
    checkpoint.save(tmp_path, {"a": base(BIG), "b": base(BIG)})
    file = next(tmp_path.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    memory = torch.zeros(BIG)
    with pytest.raises(CorruptError, match="is damaged in bytes .*, which hold [ab]"):
        checkpoint.load(tmp_path, {"a": memory, "b": memory[:]})
    assert not memory.any()


@on_ranks(2)
def test_all_ranks_refuse_what_one_of_them_cannot_have(tmp_path: Path):
    """Only rank 1 has targets that overlap, and the checkpoint has other values for them."""
    checkpoint.save(tmp_path, {"a": base(BIG), "b": base(BIG)})
    memory = torch.zeros(BIG + 2)
    state: dict[str, Any] = {"a": memory[:BIG], "b": memory[2:] if dist.get_rank() else torch.zeros(BIG)}
    with pytest.raises(MismatchError, match="^b: shares memory with a in the state passed"):
        checkpoint.load(tmp_path, state)
    assert not memory.any()
    assert not state["b"].any()


@st.composite
def some_views(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Views of one buffer: shape, strides, first element; no view has two elements in one place."""
    out = []
    for _ in range(draw(st.integers(2, 4))):
        shape, strides, reach = [], [], 1
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(1, 4))
            stride = reach + draw(st.integers(0, 2))
            shape.append(length)
            strides.append(stride)
            reach += (length - 1) * stride
        order = draw(st.permutations(range(len(shape))))
        out.append((tuple(shape[i] for i in order), tuple(strides[i] for i in order), draw(st.integers(0, 40))))
    return out


def places(shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> list[int]:
    inner = np.indices(shape).reshape(len(shape), prod(shape))
    return (first + (inner * np.array(strides, np.int64).reshape(-1, 1)).sum(axis=0)).tolist()


@given(some_views(), st.data())
def test_whatever_shares_an_element_is_found(found: list[tuple[tuple[int, ...], tuple[int, ...], int]], data: st.DataObject):
    """Of each view, some consecutive elements are wanted, as a flat shard wants them: a piece that is cut into several boxes."""
    specs, held = [], []
    for i, (shape, strides, first) in enumerate(found):
        start = data.draw(st.integers(0, prod(shape) - 1))
        count = data.draw(st.integers(1, prod(shape) - start))
        specs.append(TensorSpec(str(i), "F32", shape, (Piece((0,) * len(shape), shape, start, count, first, strides),)))
        held.append({*places(shape, strides, first)[start : start + count]})
    size = data.draw(st.sampled_from([1, 4]))
    device, address, each = (np.full(len(found), number) for number in (0, 0, size))
    groups = find_shared(piece_columns(specs), device, address, each)
    for a, b in combinations(range(len(found)), 2):
        for place in held[a] & held[b]:
            assert any({a, b} <= set(g.targets) and g.low <= place * size < g.high for g in groups)


@given(some_views(), st.data())
def test_a_load_into_any_views_is_refused_just_where_their_values_differ(
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]], data: st.DataObject
):
    path = "memory://ties"
    source = torch.arange(256.0) + 1
    saved = {str(i): torch.as_strided(source, *view).clone(memory_format=torch.contiguous_format) for i, view in enumerate(found)}
    if data.draw(st.booleans()):
        odd = data.draw(st.sampled_from(sorted(saved)))
        saved[odd].view(-1)[data.draw(st.integers(0, saved[odd].numel() - 1))] = -1
    checkpoint.save(path, saved)
    wanted: dict[int, set[float]] = {}
    for view, tensor in zip(found, saved.values(), strict=True):
        for place, value in zip(places(*view), tensor.reshape(-1).tolist(), strict=True):
            wanted.setdefault(place, set()).add(value)
    memory = torch.zeros(256, dtype=data.draw(st.sampled_from([torch.float32, torch.float64, torch.int16])))
    state = {str(i): torch.as_strided(memory, *view) for i, view in enumerate(found)}
    with patch("reshard_ckpt.engine.loading.ties.TIE_BYTES", data.draw(st.sampled_from([16, 32, 1 << 20]))):
        if all(len(values) == 1 for values in wanted.values()):
            checkpoint.load(path, state, cast=True)
            assert {place: {memory[place].item()} for place in wanted} == wanted
            assert int((memory != 0).sum()) == len(wanted)
        else:
            with pytest.raises(MismatchError, match="the checkpoint holds different values"):
                checkpoint.load(path, state, cast=True)
            assert not memory.any()
