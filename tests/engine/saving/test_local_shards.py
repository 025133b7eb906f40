"""What is kept of one save for the next is never a reason for another checkpoint than a first save would have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.core.planning.local_metadata import Memo
from reshard_ckpt.engine.saving import agreement, local_shards, write
from reshard_ckpt.state import describe, dtensor, kept, layouts
from reshard_ckpt.storage import open_storage
from tests.tries import examples

NAMES = ("a", "b", "c")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


@st.composite
def values(draw: st.DrawFn) -> Any:
    """A tensor of the same few names, in ever other shapes, dtypes and memory."""
    shape = draw(st.sampled_from([(4, 6), (6, 4), (24,), (2, 3, 4), (), (0, 3)]))
    dtype = draw(st.sampled_from(DTYPES))
    numel = 1
    for size in shape:
        numel *= size
    tensor = torch.randint(-50, 50, (numel,)).to(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "parameter", "transposed", "strided", "local", "flat", "view"]))
    if kind == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(tensor)
    if kind == "transposed" and len(shape) == 2:
        return tensor.t().contiguous().t()
    if kind == "strided" and shape:
        return torch.stack([tensor, tensor + 1], dim=-1)[..., 0]
    if kind == "local" and len(shape) == 2 and numel:
        return LocalShard(
            tensor,
            shape,
            pieces=[
                ((0, 0), (shape[0] // 2, 0), (shape[0] // 2, shape[1])),
                ((shape[0] // 2, 0), (0, 0), (shape[0] // 2, shape[1])),
            ],
        )
    if kind == "flat" and numel:
        return FlatShard(tensor.reshape(-1), (2, numel // 2) if numel % 2 == 0 else (numel,), 0)
    return torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].reshape(shape) if kind == "view" and numel else tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    state = {name: draw(values()) for name in draw(st.permutations(NAMES))[: draw(st.integers(1, 3))]}
    if draw(st.booleans()):
        state["tied"] = next(iter(state.values()))
    if draw(st.booleans()):
        state["text"] = "x" * draw(st.sampled_from([1, 5000, 6000]))
    return state


def forget() -> None:
    dtensor._KNOWN.clear()
    describe._KNOWN.clear()
    kept.KNOWN.forget()
    layouts.whole.cache_clear()
    agreement.PLANS.__init__()  # type: ignore[misc]
    local_shards._LOCAL_METADATA = Memo(2)
    write._FILES = Memo(2)


def written(url: str) -> tuple[list[bytes], dict[str, Any]]:
    """The files that a save made, and all that can be read back."""
    with open_storage(url) as storage:
        files = [storage.read(key, 1 << 20) for key, _ in storage.list() if key.endswith(".safetensors")]
    return files, checkpoint.read(url)


@pytest.mark.slow
@examples(50, usual=25)
@given(sequence=st.lists(states(), min_size=2, max_size=5), name=st.uuids())
def test_every_save_writes_what_it_would_have_written_first(sequence: list[dict[str, Any]], name: UUID) -> None:
    again = [0, *range(len(sequence)), 0]
    for step, i in enumerate(again):
        checkpoint.save(f"memory://{name}/after-{step}", {"t": sequence[i]}, timeline=False)
    first = []
    for state in sequence:
        forget()
        checkpoint.save(f"memory://{name}/first", {"t": state}, timeline=False)
        first.append(written(f"memory://{name}/first"))
    for step, i in enumerate(again):
        files, read = written(f"memory://{name}/after-{step}")
        wanted_files, wanted = first[i]
        assert files == wanted_files
        assert read.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == read[key].dtype
                assert torch.equal(value, read[key])


def test_memory_that_was_swapped_under_a_parameter_is_what_is_saved(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    for value in range(1, 5):
        if value % 2:
            weight.data = torch.full((8, 8), float(value))
        else:
            with torch.no_grad():
                weight.set_(torch.full((16, 8), float(value))[8:])
        checkpoint.save(tmp_path, {"w": weight})
        assert (checkpoint.read(tmp_path)["w"] == value).all()


def test_what_is_untied_between_saves_is_saved_apart(tmp_path: Path) -> None:
    one = torch.ones(5)
    checkpoint.save(tmp_path, {"a": one, "b": one})
    checkpoint.save(tmp_path, {"a": one, "b": torch.zeros(5)})
    read = checkpoint.read(tmp_path)
    assert read["a"].all()
    assert not read["b"].any()


def test_recent_keeps_the_last_ones_alone() -> None:
    recent: Memo[int, int] = Memo(2)
    made: list[int] = []

    def get(key: int) -> int:
        return recent.get(key, lambda: made.append(key) or key)

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]


def test_what_is_kept_is_found_until_newer_ones_take_its_place() -> None:
    memo: Memo[bytes, str] = Memo(2)
    assert memo.find(b"a") is None
    memo.keep(b"a", "first")
    memo.keep(b"a", "second")
    memo.keep(b"b", "other")
    assert (memo.find(b"a"), memo.find(b"b")) == ("second", "other")
    memo.find(b"a")
    memo.keep(b"c", "new")
    assert (memo.find(b"a"), memo.find(b"b"), memo.find(b"c")) == ("second", None, "new")
