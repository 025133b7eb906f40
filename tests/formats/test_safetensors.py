"""Safetensors files and folders are checkpoints: wherever bytes lie, they land; what is damaged or hostile is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import CODES
from reshard_ckpt.engine.loading.load import LoadOptions, fetch, resolve
from reshard_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptError,
    MismatchError,
    NameCollisionError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.formats.source import known_formats
from reshard_ckpt.storage import LocalStorage, open_storage
from tests.checkpoint.test_convert import Tied
from tests.layouts import filled, layouts, shapes, spec_of, values_of

STORES = count()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def file_bytes(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def plain_file(tensors: dict[str, torch.Tensor], pad: int = 0, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file by the plainest means; `pad` spaces put the data at any alignment."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        raw = as_bytes(tensor)
        code = next(code for code, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return file_bytes(json.dumps(header).encode() + b" " * pad, data)


def in_memory(files: dict[str, bytes]) -> str:
    """A store of its own that holds these files."""
    path = f"memory://foreign{next(STORES)}"
    storage = open_storage(path)
    for key, data in files.items():
        storage.publish(key, data)
    return path


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text("abw.@[0:]%é ", max_size=8), unique=True, max_size=6))
    return {n: values_of(draw(shapes()), draw(st.sampled_from(CODES)), i) for i, n in enumerate(names)}


@given(tensor_dicts(), st.integers(0, 70), st.integers(1, 3), st.booleans())
def test_what_lies_anywhere_is_read_as_it_is(tensors: dict[str, torch.Tensor], pad: int, num: int, indexed: bool):
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num)]
    for i, (name, tensor) in enumerate(tensors.items()):
        parts[i % num][name] = tensor
    keys = [f"model-{i + 1:05d}-of-{num:05d}.safetensors" for i in range(num)]
    files = {key: plain_file(part, pad + i) for i, (key, part) in enumerate(zip(keys, parts, strict=True))}
    if indexed:
        weight_map = {name: keys[i % num] for i, name in enumerate(tensors)}
        files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    found = checkpoint.read(in_memory(files))
    assert set(found) == {f"model.{name}" for name in tensors}
    for name, tensor in tensors.items():
        got = found[f"model.{name}"]
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        assert as_bytes(got) == as_bytes(tensor)


@given(st.data(), shapes(), st.sampled_from(CODES), st.integers(1, 4))
def test_any_layout_loads_from_a_file(data: st.DataObject, shape: tuple[int, ...], dtype: str, ranks: int):
    layout, whole = data.draw(layouts(shape, ranks)), values_of(shape, dtype, 3)
    path = in_memory(
        {"w.safetensors": plain_file({"before": values_of((3,), "U8", 1), "w": whole}, data.draw(st.integers(0, 9)))}
    )
    saved, storage = checkpoint.catalog(path), open_storage(path)
    for rank in range(ranks):
        memory = torch.zeros(layout.memory[rank], dtype=TORCH_DTYPES[dtype])
        resolved = resolve(saved, [(spec_of(layout, rank, "model.w", dtype), memory)], LoadOptions())
        assert not any(resolved.problems.values())
        fetch(storage, saved, resolved, LoadOptions())
        assert as_bytes(memory) == as_bytes(filled(layout, rank, whole))


def save_some(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: values_of((40, 30), "F32", i) for i, name in enumerate("abc")}
    folder.mkdir(exist_ok=True)
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = {name: f"model-0000{1 if name == 'a' else 2}-of-00002.safetensors" for name in "abc"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_a_model_loads_from_a_folder_and_from_a_file(tmp_path: Path):
    source = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.BatchNorm1d(5))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", f"file://{tmp_path}/model.safetensors"):
        target = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.BatchNorm1d(5))
        report = checkpoint.load(path, {"model": target})
        assert report.num_tensors == 7
        assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())


def test_a_relative_file_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    assert checkpoint.catalog("w.safetensors").names == ("model.w",)
    assert checkpoint.catalog(".").names == ("model.w",)


def test_the_catalog_says_what_is_there(tmp_path: Path):
    save_some(tmp_path)
    catalog = checkpoint.catalog(tmp_path)
    assert catalog.names == ("model.a", "model.b", "model.c")
    assert catalog.metadata == {"format": "pt"}
    view = catalog.tensor("model.b")
    assert (view.dtype, view.shape, view.placement) == ("F32", (40, 30), None)
    assert [shard.file.key for shard in view.shards] == ["model-00002-of-00002.safetensors"]


def test_verify_finds_what_is_cut_and_claims_no_more(tmp_path: Path):
    save_some(tmp_path)
    report = checkpoint.verify(tmp_path)
    assert report.ok
    assert report.num_files == 2


@pytest.mark.parametrize("flag", [True, False])
def test_names_that_do_not_fit_are_told_as_ever(tmp_path: Path, flag: bool):
    save_some(tmp_path)
    state = {"model": {"a": torch.zeros(40, 30), "z": torch.zeros(2)}}
    if flag:
        with pytest.raises(MismatchError, match=r"model\.z: not in the checkpoint"):
            checkpoint.load(tmp_path, state)
        assert not state["model"]["a"].any()
    else:
        report = checkpoint.load(tmp_path, state, strict=False)
        assert report.missing == ("model.z: not in the checkpoint",)
        assert as_bytes(state["model"]["a"]) == as_bytes(values_of((40, 30), "F32", 0))


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weights_may_be_stored_under_one_name(tmp_path: Path, kept: str):
    weight = torch.arange(24.0).reshape(6, 4)
    save_file({kept: weight}, tmp_path / "model.safetensors")
    model = Tied()
    report = checkpoint.load(tmp_path, {"model": model})
    assert report.problems == ()
    assert torch.equal(model.embed.weight, weight)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("max_shard_size", ["1KB", "5GB"], ids=["index", "one file"])
def test_tied_names_of_huggingface_hub_load_into_untied_weights(tmp_path: Path, max_shard_size: str):
    model = Tied()
    values = torch.arange(24.0).reshape(6, 4)
    tensors = {"embed.weight": values, "head.weight": values, "other": torch.arange(1000.0)}
    pytest.importorskip("huggingface_hub").save_torch_state_dict(tensors, tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "1KB")
    model.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    model.other = torch.nn.Parameter(torch.zeros(1000))
    report = checkpoint.load(tmp_path, {"model": model})
    assert report.problems == ()
    assert torch.equal(model.embed.weight, values)
    assert torch.equal(model.head.weight, values)
    assert [line.alias_of is not None for line in checkpoint.inspect(tmp_path).lines].count(True) == 1


def test_a_tied_name_in_the_metadata_yields_to_a_tensor_of_that_name_in_another_file(tmp_path: Path):
    a, b = torch.arange(4.0), torch.arange(4.0, 8.0)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(plain_file({"a": a}, metadata={"b": "a"}))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(plain_file({"b": b}))
    assert torch.equal(checkpoint.read(tmp_path)["model.b"], b)


@pytest.mark.parametrize("metadata", [["w"], {"total_size": 5}])
def test_other_metadata_name_no_tied_tensors(tmp_path: Path, metadata: Any):
    tensors = {"pt": torch.arange(4.0), "5": torch.arange(4.0, 8.0)}
    (tmp_path / "w.safetensors").write_bytes(plain_file(tensors, metadata={"format": "pt", "license": "mit"}))
    index = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, "w.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(checkpoint.catalog(tmp_path).names) == {"model.pt", "model.5"}


@pytest.mark.parametrize("names", [["model.safetensors"], ["a.safetensors", "b.safetensors"]], ids=["all", "one of two"])
@pytest.mark.parametrize("index", [True, False])
def test_a_link_of_a_snapshot_whose_blob_is_gone_is_named(tmp_path: Path, names: list[str], index: bool):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for i, name in enumerate(names):
        save_file({f"w{i}": torch.arange(3.0) + i}, blobs / f"blob{i}")
        (snapshot / name).symlink_to(f"../../blobs/blob{i}")
    if index or len(names) > 1:  # with no weight file left, the first broken link is named, whatever its name
        (snapshot / "README.md").symlink_to("../../blobs/none")
    if index:
        written = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}})
        (snapshot / "model.safetensors.index.json").write_text(written)
    (blobs / f"blob{len(names) - 1}").unlink()
    last = snapshot / names[-1]
    for path in (snapshot, last):
        with pytest.raises(CheckpointError, match=rf"{last} is a link to {blobs}/blob\d, which is missing; download or copy"):
            checkpoint.read(path)


@pytest.mark.parametrize("link", ["consolidated.safetensors", ".#model.safetensors"])
def test_a_broken_link_that_is_no_file_of_the_model_is_passed_over(tmp_path: Path, link: str):
    save_file({"w": torch.arange(3.0)}, tmp_path / "a.safetensors")
    if not link.startswith("."):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (tmp_path / link).symlink_to("gone")
    assert checkpoint.read(tmp_path)["model.w"].tolist() == [0, 1, 2]


def test_a_broken_link_to_safetensors_leaves_the_torch_file_beside_it(tmp_path: Path):
    torch.save({"w": torch.arange(3.0)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert checkpoint.read(tmp_path)["model.w"].tolist() == [0, 1, 2]


def test_untied_weights_must_both_be_there(tmp_path: Path):
    save_file({"embed.weight": torch.ones(6, 4)}, tmp_path / "model.safetensors")
    model = Tied()
    model.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(MismatchError, match=r"head\.weight: not in the checkpoint"):
        checkpoint.load(tmp_path, {"model": model})


def test_our_own_checkpoints_still_need_both_names(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": {"embed.weight": torch.ones(6, 4)}})
    with pytest.raises(MismatchError, match=r"head\.weight: not in the checkpoint"):
        checkpoint.load(tmp_path, {"model": Tied()})


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "cut in the length": b"\0\0\0",
    "endless header": struct.pack("<Q", 2**63) + b"{}",
    "header of 99 MB in a small file": struct.pack("<Q", 99_000_000) + b"{}",
    "negative offsets": file_bytes({"w": GOOD | {"data_offsets": [-8, 0]}}, bytes(8)),
    "float shape": file_bytes({"w": GOOD | {"shape": [2.0]}}, bytes(8)),
    "huge shape": file_bytes({"w": GOOD | {"shape": [2**62, 2**62]}}, bytes(8)),
    "offsets that wrap": file_bytes({"w": GOOD | {"data_offsets": [2**64 - 8, 2**64]}}, bytes(8)),
    "data beyond the file": file_bytes({"w": GOOD | {"shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(8)),
    "hole": file_bytes({"w": GOOD | {"data_offsets": [4, 12]}}, bytes(12)),
    "overlap": file_bytes({"w": GOOD, "v": GOOD}, bytes(16)),
    "bytes too many": file_bytes({"w": GOOD}, bytes(9)),
    "bytes too few": file_bytes({"w": GOOD}, bytes(7)),
    "name twice": file_bytes(b"{%s,%s}" % ((b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2)),
    "deep": file_bytes(b"[" * 100_000),
    "no object": file_bytes(b"[1]"),
    "no json": file_bytes(b"{\xff}"),
    "unknown dtype": file_bytes({"w": GOOD | {"dtype": "F31"}}, bytes(8)),
    "missing field": file_bytes({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "40 dims": file_bytes({"w": {"dtype": "U8", "shape": [1] * 40, "data_offsets": [0, 1]}}, bytes(1)),
    "metadata of numbers": file_bytes({"__metadata__": {"a": 1}, "w": GOOD}, bytes(8)),
    "metadata of a list": file_bytes({"__metadata__": [], "w": GOOD}, bytes(8)),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_named_and_cost_nothing(data: bytes):
    path = in_memory({"w.safetensors": data})
    for where in (path, f"{path}/w.safetensors"):
        with pytest.raises(CorruptError, match=r"w\.safetensors|foreign\d+: "):
            checkpoint.catalog(where)


def index(weight_map: Any) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


INDICES: dict[str, tuple[bytes, str]] = {
    "above": (index({"w": "../w.safetensors"}), "not the key of a checkpoint file"),
    "absolute": (index({"w": "/etc/passwd"}), "not the key of a checkpoint file"),
    "backslash": (index({"w": "..\\w.safetensors"}), "not the key of a checkpoint file"),
    "empty name": (index({"w": ""}), "not the key of a checkpoint file"),
    "nul": (index({"w": "w\0.safetensors"}), "not the key of a checkpoint file"),
    "a number": (index({"w": 3}), "no weight_map"),
    "a list": (index(["w"]), "no weight_map"),
    "none": (b"{}", "no weight_map"),
    "no object": (b"[]", "no weight_map"),
    "no json": (b"{", "is not JSON"),
    "no text": (b"\xff\xfe", "is not JSON"),
    "a name twice": (b'{"weight_map": {"w": "v.safetensors", "w": "w.safetensors"}}', "a key occurs twice"),
    "deep": (b"[" * 200_000, "is not JSON"),
    "lost file": (index({"w": "model-2.safetensors"}), "is missing"),
    "lost tensor": (index({"v": "w.safetensors"}), "has no tensor 'v'"),
}


@pytest.mark.parametrize(("data", "match"), INDICES.values(), ids=INDICES.keys())
def test_hostile_indices_are_named(data: bytes, match: str):
    files = {"w.safetensors": plain_file({"w": torch.ones(2)}), "model.safetensors.index.json": data}
    with pytest.raises(CorruptError, match=match):
        checkpoint.catalog(in_memory(files))


def test_an_index_counts_and_what_it_does_not_name_does_not():
    files = {
        "w.safetensors": plain_file({"w": torch.ones(2), "other": torch.ones(3)}),
        "consolidated.safetensors": plain_file({"w": torch.zeros(2)}),
        "model.safetensors.index.json": index({"w": "w.safetensors"}),
    }
    assert checkpoint.read(in_memory(files))["model.w"].tolist() == [1, 1]


def test_hidden_files_do_not_count():
    """As macOS leaves them on the disks of others."""
    files = {
        "model.safetensors": plain_file({"w": torch.ones(2)}),
        "._model.safetensors": b"\0\5\x16\7" + bytes(200),
        "._model.safetensors.index.json": b"\0\5\x16\7" + bytes(200),
    }
    assert checkpoint.read(in_memory(files))["model.w"].tolist() == [1, 1]


def test_a_load_from_a_file_without_tensors_says_that_nothing_is_there():
    path = in_memory({"model.safetensors": plain_file({})})
    with pytest.raises(MismatchError, match=r"nothing under 'model', and nothing else; load with allow_missing="):
        checkpoint.load(path, {"model": {"w": torch.zeros(2)}})


def test_a_part_that_is_missing_is_named_without_an_index_too():
    path = in_memory({"model-00002-of-00003.safetensors": plain_file({"w": torch.ones(2)})})
    with pytest.raises(CorruptError, match="neither model-00001-of-00003.safetensors nor an index"):
        checkpoint.catalog(path)
    assert checkpoint.catalog(f"{path}/model-00002-of-00003.safetensors").names == ("model.w",)


def test_a_name_in_two_files_is_a_collision():
    files = {f"{name}.safetensors": plain_file({"w": torch.ones(2)}) for name in "ab"}
    with pytest.raises(NameCollisionError, match=r"model\.w occurs twice"):
        checkpoint.catalog(in_memory(files))


def test_several_models_in_one_folder_are_told_apart():
    files = {f"{n}.safetensors.index.json": index({"w": f"{n}.safetensors"}) for n in ("a", "b")}
    with pytest.raises(UsageError, match="several indices"):
        checkpoint.catalog(in_memory(files | {f"{n}.safetensors": plain_file({"w": torch.ones(2)}) for n in ("a", "b")}))


@pytest.mark.parametrize("part", ["model-00001-of-00001.safetensors", "parts/1.safetensors"])
def test_a_single_file_beside_an_index_that_does_not_name_it_is_ambiguous(part: str):
    """As a second save into the folder leaves it; transformers loads the single file, and the index names the old ones."""
    files = {
        "model.safetensors": plain_file({"w": torch.ones(2)}),
        part: plain_file({"w": torch.zeros(2)}),
        "model.safetensors.index.json": index({"w": part}),
    }
    path = in_memory(files)
    with pytest.raises(UsageError, match="has model.safetensors and model.safetensors.index.json, which does not name it"):
        checkpoint.catalog(path)
    assert checkpoint.read(f"{path}/model.safetensors")["model.w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_a_single_file_counts_if_a_later_save_has_replaced_all_files_of_the_index(name: str):
    """transformers and diffusers delete the files of an earlier save into the folder, but not their index."""
    files = {name: plain_file({"w": torch.ones(2)}), f"{name}.index.json": index({"w": "model-00001-of-00001.safetensors"})}
    assert checkpoint.read(in_memory(files))["model.w"].tolist() == [1, 1]


def test_a_dtype_that_torch_lacks_is_named():
    data = file_bytes({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1))
    with pytest.raises(UnsupportedError, match="F4"):
        checkpoint.catalog(in_memory({"w.safetensors": data}))


def test_a_dtype_that_an_older_torch_lacks_is_named_when_it_is_read(monkeypatch: pytest.MonkeyPatch):
    data = file_bytes({"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}, b"\x7f\x80")
    path = in_memory({"w.safetensors": data})
    monkeypatch.delitem(TORCH_DTYPES, "F8_E8M0", raising=False)
    assert checkpoint.catalog(path).dtype(0) == "F8_E8M0"
    with pytest.raises(UnsupportedError, match=r"F8_E8M0 is torch.float8_e8m0fnu, which torch .* lacks; upgrade torch"):
        checkpoint.read(path)


def test_a_shard_file_of_our_own_is_no_checkpoint(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": {"w": torch.ones(2)}})
    (file,) = tmp_path.glob("*/*.safetensors")
    for path in (file, file.parent):
        with pytest.raises(UsageError, match="one shard file of a checkpoint"):
            checkpoint.catalog(path)


def test_what_nobody_knows_says_what_was_looked_for(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "absent"):
        with pytest.raises(CheckpointNotFound) as caught:
            checkpoint.catalog(path)
        said = " ".join(caught.value.looked_for)
        assert all(one.marks in said for one in known_formats())
        assert "catalog.msgpack" in said


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path):
    save_file({"w": values_of((4000,), "F32", 1)}, tmp_path / "w.safetensors")
    saved = checkpoint.catalog(tmp_path)
    with open(tmp_path / "w.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CorruptError, match="w.safetensors"):
        checkpoint.catalog(tmp_path)
    target = torch.zeros(4000)
    from reshard_ckpt.checkpoint.reading import _whole

    resolved = resolve(saved, [(_whole(saved, "model.w")[0], target)], LoadOptions())
    with pytest.raises(CorruptError, match="has 1000 bytes"):
        fetch(open_storage(tmp_path), saved, resolved, LoadOptions())


def test_a_file_that_is_written_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without checksums, bytes of the old file and of the new one would be mixed without a word."""
    path = tmp_path / "src" / "w.safetensors"
    path.parent.mkdir()
    save_file({"w": torch.zeros(4000)}, path)
    other = shutil.copytree(path.parent, tmp_path / "other")
    read_into, times = LocalStorage.read_into, count(1)

    def read(self: LocalStorage, key: str, offset: int, buffers: Any) -> None:
        read_into(self, key, offset, buffers)
        os.utime(path, ns=(0, next(times)))  # as a writer's next write

    monkeypatch.setattr(LocalStorage, "read_into", read)
    for call in (
        lambda: checkpoint.read(path.parent),
        lambda: checkpoint.load(path.parent, {"model": {"w": torch.ones(4000)}}),
        lambda: checkpoint.diff(path.parent, other, values=True),
        lambda: checkpoint.convert(path.parent, tmp_path / "dst"),
        lambda: checkpoint.reshard(path.parent, tmp_path / "dst", mesh={"dp": 2}),
    ):
        with pytest.raises(StorageError, match=r"src: w.safetensors was changed while it was read"):
            call()
    assert not (tmp_path / "dst" / "catalog.msgpack").exists()
    assert not list(tmp_path.glob("dst/*.safetensors"))


def rank_file(offsets: Any, tensor: torch.Tensor | None = None) -> bytes:
    """What torch's Hugging Face writer makes of what one rank has."""
    info = offsets if isinstance(offsets, str) else json.dumps({"w": {"saved_offsets": offsets}})
    return plain_file({"w": torch.ones(2, 3) if tensor is None else tensor}, metadata={"DCP_SHARDING_INFO": info})


def test_a_tensor_in_the_files_of_several_ranks_is_one():
    files = {f"shard-{i + 1:05d}-model-00001-of-00001.safetensors": rank_file([2 * i, 0]) for i in range(3)}
    path = in_memory({**files, "shard-00004-model-00001-of-00001.safetensors": rank_file([0, 0], torch.ones(2, 3))})
    assert checkpoint.read(path)["model.w"].tolist() == torch.ones(6, 3).tolist()
    assert "DCP_SHARDING_INFO" not in str(checkpoint.catalog(path).metadata)
    with pytest.raises(UsageError, match="what one rank saved; pass the folder"):
        checkpoint.catalog(f"{path}/shard-00002-model-00001-of-00001.safetensors")


BAD_OFFSETS: dict[str, tuple[Any, str]] = {
    "too few": ([0], "begins at"),
    "negative": ([0, -1], "begins at"),
    "no number": ([0, "x"], "begins at"),
    "huge": ([0, 1 << 62], "use another"),
    "beyond": ([0, 1 << 70], "use another"),
    "none": ('{"v": {"saved_offsets": [0, 0]}}', "begins at"),
    "no json": ("{", "is not what torch writes"),
    "a list": ("[]", "is not what torch writes"),
    "no offsets": ('{"w": {}}', "is not what torch writes"),
    "a number": ('{"w": {"saved_offsets": 3}}', "is not what torch writes"),
    "deep": ("[" * 100_000, "is not what torch writes"),
}


@pytest.mark.parametrize(("offsets", "match"), BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_hostile_offsets_are_named(offsets: Any, match: str):
    with pytest.raises(CorruptError, match=match):
        checkpoint.read(in_memory({"shard-00001-model-00001-of-00001.safetensors": rank_file(offsets)}))


@pytest.mark.parametrize("other", [torch.ones(2, 3).half(), torch.ones(2), torch.ones(2, 3, 1)])
def test_files_of_ranks_that_do_not_fit_together_are_named(other: torch.Tensor):
    offsets = [2] + [0] * (other.ndim - 1)
    files = {"shard-00001-model-00001-of-00001.safetensors": rank_file([0, 0])}
    with pytest.raises(CorruptError, match=r"'w' is F32 of 2 dims in one file, and F(32|16) of \d in another"):
        checkpoint.read(in_memory({**files, "shard-00002-model-00001-of-00001.safetensors": rank_file(offsets, other)}))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ("shard-00001-model-00001-of-00002", r"of-00001.safetensors and shard-.*-of-00002.safetensors are of two saves"),
        (
            "shard-00003-model-00001-of-00001",
            r"'w' differs between shard-00001-.* and shard-00003-.*; keep the files of one save",
        ),
    ],
)
def test_files_of_ranks_of_two_saves_are_refused(later: str, message: str):
    """A save into other numbers of files, or by fewer ranks, leaves files of the save before."""
    files = {f"shard-{i + 1:05d}-model-00001-of-00001.safetensors": rank_file([2 * i, 0]) for i in range(2)}
    with pytest.raises(CorruptError, match=message):
        checkpoint.read(in_memory({**files, f"{later}.safetensors": rank_file([0, 0], torch.zeros(2, 3))}))


@pytest.mark.parametrize("end", ["_scale", ".SCB"])
def test_a_cast_does_not_leave_out_the_scale_of_a_quantized_tensor(tmp_path: Path, end: str):
    code = torch.int8 if end == ".SCB" else torch.float8_e4m3fn
    scale = f"w{end}"
    quantized = {"w": torch.arange(16).reshape(4, 4).to(code), "plain": torch.arange(4).to(code), scale: torch.full((1,), 100.0)}
    save_file(quantized, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(4, 4), "plain": torch.zeros(4)}
    left_out = [f"model.{scale}"]
    with pytest.raises(
        MismatchError, match=f"model.w: wanted F32, saved as .* with the scale model.w{end}, .*dequantize it before"
    ):
        checkpoint.load(tmp_path, {"model": state}, cast=True, ignore=left_out)
    assert not state["w"].any()
    report = checkpoint.load(tmp_path, {"model": state}, cast=True, ignore=left_out, strict=False)
    assert len(report.dtype) == 1
    assert not state["w"].any()
    assert torch.equal(state["plain"], quantized["plain"].float())
    same = {name: torch.empty_like(tensor) for name, tensor in quantized.items()}
    checkpoint.load(tmp_path, {"model": same}, cast=True)
    assert all(torch.equal(same[name].float(), tensor.float()) for name, tensor in quantized.items())
    if end != ".SCB":
        for call in (checkpoint.convert, partial(checkpoint.reshard, mesh={"tp": 2})):
            with pytest.raises(UnsupportedError, match=f"model.w is saved as F8_E4M3 with the scale model.w{end}"):
                call(tmp_path, tmp_path / "out", cast={"*": "bfloat16"})
