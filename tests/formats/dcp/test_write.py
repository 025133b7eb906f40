"""torch.distributed.checkpoint loads what is written for it. One process; jobs of several ranks are in tests/distributed."""

from __future__ import annotations

import subprocess
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CorruptError, NameCollisionError, UsageError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.storage.local import LocalWriter
from reshard_ckpt.torchfile.object_writer import around_tensor
from tests.layouts import values_of
from tests.warm_python import warm_python

SHAPES = [(), (1,), (5,), (3, 4), (0, 4), (2, 3, 4)]


def write(saved: Path, folder: Path, **options: Any) -> Path:
    checkpoint.convert(saved, folder, to="dcp", **options)
    return folder


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("code", TORCH_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_archive_is_one_of_torch_save(code: str, shape: tuple[int, ...]):
    tensor, out = values_of(shape, code, 3), BytesIO()
    data = raw(tensor).numpy().data if tensor.numel() else memoryview(b"")
    before, behind = around_tensor(tensor.dtype, shape)
    out.write(before + data + behind(zlib.crc32(data)))
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        begin = archive.getinfo("archive/data/0").header_offset
        assert (begin + 30 + len("archive/data/0") + int.from_bytes(out.getvalue()[begin + 28 : begin + 30], "little")) % 64 == 0
    for weights_only in (True, False):
        out.seek(0)
        back = torch.load(out, weights_only=weights_only)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(back), raw(tensor))


@pytest.mark.parametrize(("chunk_bytes", "file_bytes"), [(1, 1), (7, 5000), (64, 20_000), (1 << 20, 1 << 30)])
def test_every_dtype_and_chunk_size(tmp_path, monkeypatch, chunk_bytes: int, file_bytes: int):
    monkeypatch.setattr("reshard_ckpt.formats.dcp.write.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("reshard_ckpt.formats.dcp.write.FILE_BYTES", file_bytes)
    model = {f"{code}.{i}": values_of(shape, code, i) for code in ("F32", "BF16", "BOOL", "I64", "F8_E4M3", "U16", "C64")
             for i, shape in enumerate(SHAPES)}  # fmt: skip
    checkpoint.save(tmp_path / "ours", {"model": model})
    path = write(tmp_path / "ours", tmp_path / "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load({"model": found}, checkpoint_id=path)
    assert [name for name in model if not torch.equal(raw(found[name]), raw(model[name]))] == []
    read = checkpoint.read(path)
    assert [name for name in model if not torch.equal(raw(read[f"model.{name}"]), raw(model[name]))] == []
    if chunk_bytes == 1:
        assert len(checkpoint.catalog(path).tensor("model.F32.5").shards) == 24
        assert len(list(path.glob("*.distcp"))) > 100


T = torch.arange(3)
EXTRA = {"step": 3, "list": [1, {"a": 2}], "t": (1, 2), "deep": {"a": {"b": None}}, "numbers": {7: "x"}, "empty": [], "b": b"\0"}


def test_values_and_nested_names_come_back_through_dcp(tmp_path):
    # With an entry for "none", torch would take the folder for one of torch 2.3, in which a dict such as "deep" is one value.
    extra = {**EXTRA, "none": {}, "x": torch.arange(5), "each": checkpoint.PerRank([4])}
    checkpoint.save(tmp_path / "ours", {"model": torch.nn.Linear(2, 3), "extra": extra})
    path = write(tmp_path / "ours", tmp_path / "dcp")
    blank = {"step": 0, "list": [0, {"a": 0}], "t": (), "deep": {"a": {"b": 1}}, "numbers": {"7": ""}, "empty": None, "b": b""}
    state = {"extra": {**blank, "none": {}, "x": torch.zeros(5, dtype=torch.int64), "each": None}}
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["extra"].pop("x"), torch.arange(5))
    assert state["extra"] == {**EXTRA, "none": {}, "numbers": {"7": "x"}, "each": [[4]]}
    dcp_to_torch_save(path, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert whole["model"].keys() == {"weight", "bias"}
    assert whole["extra"]["list"] == [1, {"a": 2}]
    assert whole["extra"]["deep"] == {"a": {"b": None}}


@pytest.mark.parametrize(
    ("state", "options", "built"),
    [
        ([T, 5, [T, 1.5], {"w": T, "n": 1}], {}, None),
        ([[1, 2], [{"a": [T, 3]}, (T, 4)]], {}, [[1, 2], [{"a": [T, 3]}, [T, 4]]]),
        ([T, 5, 6], {"exclude": "x.l.1"}, {"0": T, "2": 6}),  # torch would fill the gap with None
        ([5, T], {"exclude": "x.l.1"}, {"0": 5}),  # to torch, a list without tensors is one value
        ([5, {}], {}, {"0": 5}),
        ({"a": 5, "b": 6}, {"rename": {"x.l.b": "x.l.a.b"}}, {"a": 5, "a.b": 6}),
    ],
)
def test_torch_builds_lists_of_tensors_and_values(tmp_path, state: Any, options: dict[str, Any], built: Any):
    checkpoint.save(tmp_path / "ours", {"x": {"l": state}})
    dcp_to_torch_save(write(tmp_path / "ours", tmp_path / "dcp", **options), tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["x"]["l"]
    torch.testing.assert_close(found, state if built is None else built, rtol=0, atol=0)
    assert checkpoint.read(tmp_path / "dcp").keys() == checkpoint.read(write(tmp_path / "dcp", tmp_path / "again")).keys()


def test_tied_weights_are_written_once(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 50, bias=False), "b": torch.nn.Linear(40, 50, bias=False)})
    model["b"].weight = model["a"].weight
    checkpoint.save(tmp_path / "ours", {"model": model})
    path = write(tmp_path / "ours", tmp_path / "dcp")
    assert (path / "__0_0.distcp").stat().st_size < 1.5 * 40 * 50 * 4
    found = {name: torch.zeros(50, 40) for name in ("a.weight", "b.weight")}
    dcp.load({"model": found}, checkpoint_id=path)
    assert all(torch.equal(tensor, model["a"].weight) for tensor in found.values())


def test_a_folder_of_dcp_is_written_again_from_itself(tmp_path):
    state = {"model": {"w": values_of((7, 5), "F32", 1), "t": values_of((4, 6), "F32", 2).t()}, "extra": {"step": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    write(tmp_path / "a", tmp_path / "b")
    assert bytes(tmp_path) not in (tmp_path / "b" / ".metadata").read_bytes()  # the folder is moved after it was written
    found = {"model": {"w": torch.zeros(7, 5), "t": torch.zeros(6, 4)}, "extra": {"step": 0}}
    dcp.load(found, checkpoint_id=tmp_path / "b")
    assert found["extra"] == {"step": 5}
    assert all(torch.equal(raw(found["model"][name]), raw(state["model"][name])) for name in ("w", "t"))


def test_small_tensors_are_written_together_and_large_ones_as_they_come(tmp_path, monkeypatch: pytest.MonkeyPatch):
    state = {f"w{i}": values_of((i,), "F32", i) for i in range(200)} | {"large": values_of((3 << 20,), "U8", 7)}
    checkpoint.save(tmp_path / "ours", state)
    sizes: list[int] = []
    inner = LocalWriter.write
    monkeypatch.setattr(LocalWriter, "write", lambda self, data: sizes.append(len(data)) or inner(self, data))
    path = write(tmp_path / "ours", tmp_path / "dcp")
    monkeypatch.undo()
    assert len(sizes) < 10
    assert sum(sizes) == sum(file.stat().st_size for file in path.glob("*.distcp"))
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=path)
    assert [name for name in state if not torch.equal(raw(found[name]), raw(state[name]))] == []


def test_only_into_an_empty_folder(tmp_path):
    checkpoint.save(tmp_path / "ours", {"w": torch.ones(2)})
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "notes.txt").write_text("")
    with pytest.raises(UsageError, match="already exists"):
        write(tmp_path / "ours", tmp_path / "dcp")
    with pytest.raises(UsageError, match="'nested' and 'flat' and 'numbered'"):
        write(tmp_path / "ours", tmp_path / "new", optimizer="flattened")
    with pytest.raises(UsageError, match="to='dcp'"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "new", to="torch", optimizer="flat")
    assert not (tmp_path / "new").exists()


def test_names_that_become_one_are_refused(tmp_path):
    checkpoint.save(tmp_path / "ours", {"a": [1, {"b": 2}], "a.0": 3})
    with pytest.raises(NameCollisionError, match=r"^a\.0: two things"):
        write(tmp_path / "ours", tmp_path / "dcp")


def test_a_failure_leaves_nothing_behind(tmp_path):
    checkpoint.save(tmp_path / "ours", {"a": torch.arange(100_000), "b": 1})
    [shard] = (tmp_path / "ours").glob("*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        write(tmp_path / "ours", tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


_WRITE = """
import resource, sys
from reshard_ckpt import checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.convert(sys.argv[1], sys.argv[2], to="dcp")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_memory_is_bounded(tmp_path):
    """300 MB pass through less than 150 MiB."""
    checkpoint.save(tmp_path / "ours", {f"w{i}": torch.full((25, 1_000_000), float(i)) for i in range(3)})
    command = [warm_python(), "-c", _WRITE, str(tmp_path / "ours"), str(tmp_path / "dcp")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 150
