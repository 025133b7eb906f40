"""Folders that torch.distributed.checkpoint wrote load as they are. One process; other layouts are in tests/distributed."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, filesystem

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import loading
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, MismatchError, StorageError, UnsupportedError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.formats.dcp.folder import read_folder
from reshard_ckpt.formats.dcp.metadata import Chunk, Extent, SavedTensor
from reshard_ckpt.formats.dcp.metadata_writer import metadata_bytes
from reshard_ckpt.formats.parts import run_lengths, runs_of
from reshard_ckpt.storage import open_storage
from tests.layouts import values_of


def save(state: Any, path: Path, **options: Any) -> Path:
    dcp.save(state, storage_writer=FileSystemWriter(path, **options))
    return path


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether every byte is the same."""
    one, other = (torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and raw(one).equal(raw(other))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_folder_that_is_saved_over_between_opening_and_reading_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opening reads the values: with the tensors of the next save, they would be a state that never was."""
    save({"model": {"w": torch.arange(4000)}, "step": 1}, tmp_path)
    fetch = loading.fetch

    def late(*args: Any, **options: Any) -> Any:
        save({"model": {"w": torch.arange(4000) + 1}, "step": 2}, tmp_path)
        return fetch(*args, **options)

    monkeypatch.setattr(loading, "fetch", late)
    with pytest.raises(StorageError, match="__0_0.distcp was changed while it was read"):
        checkpoint.load(tmp_path, {"model": {"w": torch.zeros(4000, dtype=torch.int64)}, "step": 0})


SHAPES = [(), (1,), (5,), (3, 4), (0, 4), (2, 3, 4), (2, 0, 3), (2, 3, 4, 5)]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_dtype_and_shape(tmp_path, threads: int):
    model = {f"{code}.{i}": values_of(shape, code, i) for code in TORCH_DTYPES for i, shape in enumerate(SHAPES)}
    path = save({"model": model}, tmp_path / "ckpt", thread_count=threads)
    read = checkpoint.read(path)
    assert read.keys() == {f"model.{name}" for name in model}
    assert [name for name, tensor in model.items() if not equal(read[f"model.{name}"], tensor)] == []
    target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    checkpoint.load(path, {"model": target})
    assert [name for name in model if not equal(target[name], model[name])] == []
    assert checkpoint.verify(path).ok


def permuted(order: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    stored = values_of(tuple(shape[d] for d in order), "F32", 1)
    return stored.permute([order.index(d) for d in range(len(order))])


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (3, 1, 1), (4, 3, 1)])
def test_memory_in_another_order(tmp_path, order: tuple[int, ...], shape: tuple[int, ...]):
    state = {
        "t": permuted(order, shape),
        "cut": permuted(order, shape)[:, 1:] if shape[1] > 1 else torch.ones(2),
        "last": torch.arange(24.0).reshape(2, 3, 4).to(torch.bfloat16).transpose(0, 2),
        "image": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).expand(4, 3),
    }
    path = save({"extra": state}, tmp_path / "ckpt")
    read = checkpoint.read(path)
    assert [name for name, tensor in state.items() if not equal(read[f"extra.{name}"], tensor)] == []


def test_runs_of_any_strides_are_the_elements():
    rng = random.Random(1)
    for _ in range(300):
        shape = tuple(rng.choice([1, 1, 2, 3, 5]) for _ in range(rng.randrange(1, 5)))
        order = rng.sample(range(len(shape)), len(shape))
        strides, step = [0] * len(shape), rng.choice([1, 1, 2])
        for dim in order:
            strides[dim] = step
            step *= shape[dim] + rng.choice([0, 0, 1])
        memory = torch.arange(step + 1)
        wanted = torch.as_strided(memory, shape, strides)
        got = torch.full(shape, -1)
        lengths, corners, starts = runs_of(shape, tuple(strides))
        assert lengths == run_lengths(shape, tuple(strides))
        for corner, start in zip(corners.tolist(), starts.tolist(), strict=True):
            box = got[tuple(slice(c, c + n) for c, n in zip(corner, lengths, strict=True))]
            assert bool((box == -1).all())
            box.copy_(memory[start : start + box.numel()].reshape(box.shape))
        assert torch.equal(got, wanted)


def test_values_and_nested_dicts(tmp_path):
    extra = {"step": 5, "name": "ä", "t": (1, 2), "none": None, "deep": {"a": {"b": [1, 2]}}, "x": b"\0\1", "lr": 1e-3}
    extra |= {"list": [1, {"a": 2, "c": [{"d": 3}]}], "empty": [], "mixed": [torch.arange(3), {"k": torch.ones(2), "v": 4}]}
    path = save({"extra": extra}, tmp_path / "ckpt")
    found: dict[str, Any] = {**dict.fromkeys(extra), "deep": {"a": {"b": None}}}
    found["mixed"] = [torch.zeros(3, dtype=torch.int64), {"k": torch.zeros(2), "v": 0}]
    checkpoint.load(path, {"extra": found})
    mixed, wanted = found.pop("mixed"), extra.pop("mixed")
    assert found == extra
    assert torch.equal(mixed[0], wanted[0])
    assert torch.equal(mixed[1]["k"], wanted[1]["k"])
    assert mixed[1]["v"] == 4


def test_a_model_at_the_top_gets_a_key_unless_there_is_one(tmp_path):
    state = {"layers.0.weight": torch.ones(2), "layers.0._extra_state": 7, "step": 3, "train_state": {"step": torch.tensor(4)}}
    names = checkpoint.catalog(save(state, tmp_path / "top"))
    assert names.names == ("model.layers.0.weight", "train_state.step")
    assert set(names.value_names) == {"model.layers.0._extra_state", "step"}
    for i, other in enumerate([{"model": {"w": torch.ones(2)}}, {"model.w": torch.ones(2)}]):
        assert set(checkpoint.catalog(save({**state, **other}, tmp_path / f"both{i}")).names) == {
            "layers.0.weight",
            "model.w",
            "train_state.step",
        }


@pytest.mark.skipif(not hasattr(filesystem, "SerializationFormat"), reason="torch before 2.8 has no such mode")
def test_safetensors_mode(tmp_path):
    model = {"w": values_of((3, 4), "BF16", 1), "b": values_of((5,), "F32", 2), "s": torch.tensor(3)}
    state = {"model": model, "extra": {"step": 5}}
    path = save(state, tmp_path / "ckpt", serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    read = checkpoint.read(path)
    assert [name for name, tensor in model.items() if not equal(read[f"model.{name}"], tensor)] == []
    assert read["extra.step"] == 5


class Odd:
    """A value that only unpickling can make."""


def test_what_cannot_be_read_is_an_error_only_where_it_is_wanted(tmp_path):
    state = {"model": {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, "extra": {"odd": Odd(), "step": 5}}
    path = save(state, tmp_path / "ckpt")
    assert torch.equal(checkpoint.read(path, ["model.w"])["model.w"], torch.ones(2))
    assert checkpoint.read(path, ["extra.step"]) == {"extra.step": 5}
    with pytest.raises(UnsupportedError, match=r"extra\.odd.*without executing code"):
        checkpoint.read(path, ["extra"])
    with pytest.raises(UnsupportedError, match=r"model\.c: dtype torch\.complex128"):
        checkpoint.read(path)
    with pytest.raises(UnsupportedError, match=r"extra\.odd"):
        checkpoint.load(path, {"extra": {"step": 0}})
    extra = {"step": 0}
    report = checkpoint.load(path, {"extra": extra}, strict=False)
    assert extra == {"step": 5}
    assert "extra.odd" in report.values[0]
    with pytest.raises(UnsupportedError, match=r"extra\.odd"):
        checkpoint.load(path, {"rest": {"step": 0}}, rename={"extra": "rest"})
    assert checkpoint.verify(path).ok


class _Subclass(torch.Tensor):
    """A tensor that is pickled as more than its bytes."""


def test_a_tensor_subclass_is_named(tmp_path):
    path = save({"model": {"w": torch.ones(2), "s": torch.ones(2).as_subclass(_Subclass)}}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedError, match=r"model\.s: names the global torch\._tensor\._rebuild_from_type_v2"):
        checkpoint.read(path)
    assert "model.w" in checkpoint.catalog(path)


def test_a_save_that_did_not_end(tmp_path):
    path = save({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt")
    (path / ".metadata").unlink()
    with pytest.raises(CorruptError, match=r"__0_0\.distcp.*no \.metadata.*did not end"):
        checkpoint.read(path)


@pytest.mark.parametrize("left", [".metadata.tmp", "__0.metadata"])
def test_a_folder_into_which_two_saves_went_is_refused(tmp_path, left: str):
    """A save that was killed before it replaced the metadata, or that wrote its own metadata: it has replaced the tensors."""
    path = save({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt")
    later = save({"model": {"w": torch.zeros(2)}}, tmp_path / "later")
    shutil.copy(later / "__0_0.distcp", path)
    shutil.copy(later / ".metadata", path / left)
    with pytest.raises(CorruptError, match=rf"has {left}, so a later save|has .metadata of a save with .* and {left} of one"):
        checkpoint.read(path)


@pytest.mark.skipif(not hasattr(filesystem, "SerializationFormat"), reason="torch before 2.8 has no such mode")
def test_several_parts_of_a_tensor_in_one_safetensors_file_are_refused(tmp_path):
    """torch writes only the last of them, and metadata of all."""
    path = save(
        {"model": {"w": torch.arange(4.0), "b": torch.ones(2)}},
        tmp_path / "ckpt",
        serialization_format=filesystem.SerializationFormat.SAFETENSORS,
    )
    metadata = pickle.loads((path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model.w"]
    first = described.chunks[0]
    described.size = torch.Size([8])
    described.chunks.append(type(first)(torch.Size([4]), first.sizes))
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.w")
    metadata.storage_data[type(index)("model.w", torch.Size([4]), 1)] = metadata.storage_data[index]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"model.w: .metadata has a part of it in __0_0.distcp that the safetensors header"):
        checkpoint.read(path)
    assert checkpoint.read(path, ["model.b"])["model.b"].tolist() == [1, 1]


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointNotFound, match=r"1 file \(notes\.txt\)") as said:
        checkpoint.read(tmp_path)
    assert any("torch.distributed.checkpoint" in line for line in said.value.looked_for)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"a": values_of((40, 10), "F32", 1), "b": values_of((7,), "BF16", 2), "t": values_of((4, 5), "F64", 3).t()}
    return save({"model": state, "extra": {"step": 5}}, tmp_path_factory.mktemp("dcp") / "ckpt")


def test_a_missing_or_short_file_spoils_its_own_tensors(tmp_path):
    state = {"model": {"a": torch.ones(3), "b": torch.ones(3)}, "extra": {"step": 5}}
    path = save(state, tmp_path / "ckpt", single_file_per_rank=False)
    size = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    holds = {shard.file.key: view.name for view in checkpoint.catalog(path).tensors() for shard in view.shards}
    first, second = sorted(holds)
    (path / first).unlink()
    with open(path / second, "r+b") as file:
        file.truncate(size[second] - 1)
    assert checkpoint.read(path, ["extra"]) == {"extra.step": 5}
    with pytest.raises(CorruptError, match=rf"{holds[first]} should be in bytes .* of {first}, which is missing"):
        checkpoint.read(path, [holds[first]])
    with pytest.raises(CorruptError, match=rf"{holds[second]} should be in .* which has {size[second] - 1} bytes"):
        checkpoint.read(path, [holds[second]])
    report = checkpoint.verify(path)
    assert len(report.problems) == 2


def test_what_cannot_be_read_is_not_equal_to_itself(tmp_path, folder: Path):
    """Two damaged copies would count as equal, if a comparison passed over what it cannot read."""
    copies = [shutil.copytree(folder, tmp_path / name) for name in ("one", "two")]
    assert checkpoint.diff(*copies, values=True).equal
    for path in copies:
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-100])
        found = checkpoint.diff(*copies, values=True)
        assert not found.equal
        assert (found.removed, found.added) == ((), ())
    lost = checkpoint.catalog(copies[0]).unreadable.keys()
    assert lost
    assert [(change.name, change.a, change.b) for change in found.kind] == [(n, "unreadable", "unreadable") for n in sorted(lost)]


def test_metadata_that_name_other_bytes(tmp_path):
    """A chunk whose file has another size or dtype than .metadata say is refused, as its place is unknown."""
    path = save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, tmp_path / "ckpt")
    save({"model": {"w": torch.arange(6.0).reshape(3, 2)}}, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "__0_0.distcp", path / "__0_0.distcp")
    with pytest.raises(CorruptError, match=r"model\.w: .metadata has torch\.float32 of size \(2, 3\).*of size \(3, 2\)"):
        checkpoint.read(path)


def test_paths_out_of_the_folder_are_refused(tmp_path, folder: Path):
    path = tmp_path / "ckpt"
    shutil.copytree(folder, path)
    data = (path / ".metadata").read_bytes()
    evil = data.replace(b"__0_0.distcp", b"../o.distcp_")
    assert evil != data
    (path / ".metadata").write_bytes(evil)
    with pytest.raises(CorruptError, match="is not the key of a checkpoint file"):
        checkpoint.read(path)


def test_a_missing_tensor_says_what_there_is(tmp_path):
    path = save({"app": {"model": {"w": torch.ones(2)}}}, tmp_path / "ckpt")
    with pytest.raises(MismatchError, match=r"top-level keys are 'app', which rename= can map"):
        checkpoint.load(path, {"model": {"w": torch.zeros(2)}})
    target = {"w": torch.zeros(2)}
    checkpoint.load(path, {"model": target}, rename={"app.model": "model"})
    assert torch.equal(target["w"], torch.ones(2))


def test_chunks_of_ranks_that_overlap_are_of_no_use():
    """As the files of a save by two ranks over those of a save by three."""
    with open_storage("memory://ranks-that-overlap") as storage:
        for rank, (low, length) in enumerate([(0, 6), (6, 6), (8, 4)]):
            with_bytes = Chunk((low,), (length,), Extent(f"__{rank}_0.distcp", 0, 100))
            tensor = SavedTensor(torch.float32, (12,), (with_bytes,))
            tensors = {"t": tensor} if rank else {"t": tensor, "mixed": tensor, "other": tensor}
            values = {"mixed": Extent("__1_0.distcp", 0, 100)} if rank == 1 else {}
            if rank == 2:
                tensors["other"] = SavedTensor(torch.float64, (12,), (with_bytes,))
            storage.publish(f"__{rank}.metadata", metadata_bytes(tensors, values, {}))
        said = read_folder(storage)
    expected = {
        "t": "has chunks that overlap",
        "other": "has another shape or dtype on another rank",
        "mixed": "is a tensor on one rank and a value on another",
    }
    assert said.unreadable.keys() == expected.keys()
    assert all(f"{name} {what}" in str(said.unreadable[name]) for name, what in expected.items())


def test_a_shard_is_of_the_rank_whose_file_it_lies_in(tmp_path):
    """As the ranks of a job save it: each writes its own file, and there is one `.metadata`."""
    ranks = (0, 3, 11)
    chunks = []
    for row, rank in enumerate(ranks):
        file = f"__{rank}_0.distcp"
        save({"w": torch.full((1, 4), float(rank))}, tmp_path / "one")
        shutil.copy(tmp_path / "one" / "__0_0.distcp", tmp_path / file)
        (extent,) = (chunk.extent for chunk in read_folder(open_storage(tmp_path / "one")).tensors["w"].chunks)
        chunks.append(Chunk((row, 0), (1, 4), Extent(file, extent.offset, extent.length)))
        shutil.rmtree(tmp_path / "one")
    tensors = {"w": SavedTensor(torch.float32, (3, 4), tuple(chunks))}
    (tmp_path / ".metadata").write_bytes(metadata_bytes(tensors, {}, {}))
    shards = checkpoint.catalog(tmp_path).tensor("model.w").shards
    assert {shard.offsets[0]: shard.file.rank for shard in shards} == dict(enumerate(ranks))
    assert checkpoint.read(tmp_path)["model.w"][:, 0].tolist() == list(map(float, ranks))
