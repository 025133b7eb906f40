"""A few bytes that stand for terabytes, by strides, views of one storage or references, are refused by every reader."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CorruptError, UnsupportedError

MiB = 1 << 20


def repeated(make: Callable[[Any], Any], depth: int = 48) -> Any:
    """A value whose parts double with each level, of a pickle with a few bytes for each."""
    value = make(1)
    for _ in range(depth):
        value = make(value)
    return value


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def conjugated() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(1, dtype=torch.complex64).expand(MiB, MiB).conj()}


def views() -> dict[str, torch.Tensor]:
    whole = torch.zeros(MiB // 4)
    return {f"w{i}": whole[i:] for i in range(200)}


HUGE = torch.zeros(1).expand(MiB, MiB)
PAIR: dict[str, Callable[[Any], Any]] = {
    "lists": lambda value: [value, value],
    "tuples": lambda value: (value, value),
    "dicts": lambda value: {"a": value, "b": value},
}
STATES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an expanded view": (lambda: {"w": HUGE}, UnsupportedError, r"4,398,046,511,104 bytes, .*\(1048576, "),
    "one that is conjugated": (conjugated, UnsupportedError, "show the same bytes"),
    "views of one storage": (views, UnsupportedError, "show the same bytes"),
    "a value that contains itself": (lambda: {"x": in_itself()}, CorruptError, "contains itself"),
    **{kind: (lambda make=make: {"x": repeated(make)}, CorruptError, "repeat each other") for kind, make in PAIR.items()},
}


def as_torch_file(state: Any, folder: Path) -> Path:
    torch.save({"model": state}, folder / "state.pt")
    return folder / "state.pt"


def as_weights(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("save", [as_torch_file, as_weights])
def test_a_torch_file_holds_no_more_than_its_bytes_can_spell(save: Callable[[Any, Path], Path], state: str, tmp_path: Path):
    make, error, match = STATES[state]
    path = save(make(), tmp_path)
    with pytest.raises(error, match=match):
        checkpoint.catalog(path)


@pytest.mark.parametrize("state", [state for state in STATES if state != "one that is conjugated"])
def test_a_folder_of_deepspeed_holds_no_more_than_its_files(state: str, tmp_path: Path):
    make, error, match = STATES[state]
    said = make()
    weights = {name: value for name, value in said.items() if isinstance(value, torch.Tensor)}
    known = {"dp_world_size": 1, "mp_world_size": 1, "ds_version": "0.15", "buffer_names": [], "param_shapes": None}
    content = {"module": weights, "mine": said.get("x"), "optimizer": None, **known}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CorruptError, match="is said to hold" if error is UnsupportedError else match):
        checkpoint.catalog(tmp_path)


def dcp_folder(folder: Path, data: Any, entries: dict[str, Any], places: list[MetadataIndex]) -> Path:
    """A folder in which all chunks and values are said to lie in the same bytes of one file."""
    file = io.BytesIO()
    torch.save(data, file)
    where = _StorageInfo("__0_0.distcp", 0, len(file.getvalue()))
    (folder / "__0_0.distcp").write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=dict.fromkeys(places, where))))
    return folder


def tensor_of(shape: tuple[int, ...], chunks: list[tuple[int, ...]], lengths: tuple[int, ...]) -> TensorStorageMetadata:
    described = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), described)


def one_chunk_many_times(folder: Path) -> Path:
    offsets = [(i, 0) for i in range(100)]
    places = [MetadataIndex("w", torch.Size(at), i) for i, at in enumerate(offsets)]
    return dcp_folder(folder, torch.zeros(1, 1000), {"w": tensor_of((100, 1000), offsets, (1, 1000))}, places)


def an_expanded_chunk(folder: Path) -> Path:
    entries = {"w": tensor_of((1000, 1000), [(0, 0)], (1000, 1000))}
    return dcp_folder(folder, torch.zeros(1000).expand(1000, 1000), entries, [MetadataIndex("w", torch.Size((0, 0)), 0)])


def a_value_of_repeated_lists(folder: Path) -> Path:
    return dcp_folder(folder, repeated(PAIR["lists"]), {"w": BytesStorageMetadata()}, [MetadataIndex("w")])


def a_value_with_an_expanded_view(folder: Path) -> Path:
    return dcp_folder(folder, [HUGE], {"w": BytesStorageMetadata()}, [MetadataIndex("w")])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (one_chunk_many_times, "is said to hold"),
        (an_expanded_chunk, "is said to hold"),
        (a_value_of_repeated_lists, "repeat each other"),
        (a_value_with_an_expanded_view, "show the same bytes"),
    ],
)
def test_a_folder_of_dcp_holds_no_more_than_its_files(make: Callable[[Path], Path], match: str, tmp_path: Path):
    (why,) = checkpoint.catalog(make(tmp_path)).unreadable.values()
    with pytest.raises(type(why), match=match):
        checkpoint.read(tmp_path)


def test_what_shares_bytes_as_programs_share_them_is_read(tmp_path: Path):
    flat = torch.arange(3000.0)
    group = {"betas": (0.9, 0.95), "names": ["a", "b"]}
    state = {
        "flat": flat,
        "a": flat[:1000].view(10, 100),
        "b": flat[1000:].view(20, 100).T,
        "mask": torch.ones(1).expand(500, 1000),
    }
    torch.save({"model": state, "extra": {"groups": [group] * 2000}}, tmp_path / "x.pt")
    found = checkpoint.read(tmp_path / "x.pt")
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in state.items())
    assert found["extra.groups"] == [group] * 2000
