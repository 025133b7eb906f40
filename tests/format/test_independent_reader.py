"""docs/format.md is enough to read a checkpoint: a reader written from it alone finds every element in its place."""

from __future__ import annotations

import ast
import datetime
import sys
import tempfile
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from hypothesis import given
from safetensors import safe_open
from safetensors.torch import load_file

from reshard_ckpt import checkpoint
from reshard_ckpt.format.catalog import encode_catalog
from reshard_ckpt.format.shard_file import parse_header
from tests.format import independent_reader
from tests.format.building import Built, Run, Tensor, build, checkpoints, position_bytes
from tests.tries import examples


def write(built: Built, root: Path) -> None:
    for key, data in built.files.items():
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_bytes(data)
    (root / "catalog.msgpack").write_bytes(encode_catalog(built.catalog))


@examples(150)
@given(built=checkpoints())
def test_reader_finds_every_element_and_value(built: Built):
    with tempfile.TemporaryDirectory() as folder:
        write(built, Path(folder))
        tensors, values = independent_reader.read(folder)
    wanted = {tensor.name: tensor for tensor in built.tensors if tensor.kind == 0}
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].shape == tensor.shape
        assert tensors[name].tobytes() == tensor.data
    per_rank = values.pop("extra.own", [])
    assert per_rank == [{"rank": rank} for rank in range(len(per_rank))]
    assert values == built.values


def test_reader_finds_links():
    links = independent_reader.links(Path(__file__).parent.parent / "data" / "v2")
    assert links == {"optimizer.state.up.exp_avg": ("optimizer", "up", "exp_avg", "model.up")}


@examples(50)
@given(built=checkpoints())
def test_reader_finds_members_where_the_parser_does(built: Built):
    with tempfile.TemporaryDirectory() as folder:
        write(built, Path(folder))
        for key, data in built.files.items():
            if key.endswith(".safetensors"):
                parsed = parse_header(data, file_size=len(data))
                assert independent_reader.members(Path(folder) / key) == {
                    member.name: (member.dtype, member.shape, offset)
                    for member, offset in zip(parsed.members, parsed.offsets, strict=True)
                }


def test_reader_reads_every_kind_of_value(tmp_path: Path):
    values = {
        "extra.big": {"n": 2**80, 3: (None, True, -1.5), (1, "a"): b"\0"},
        "extra.sets": [{1, 2}, frozenset({"x"}), 2 + 1j],
        "extra.array": np.arange(6, dtype="<i2").reshape(2, 3),
        "extra.scalar": np.float64(0.5),
    }
    objects = {"extra.day": datetime.date(2026, 1, 2), "extra.path": PurePosixPath("a/b"), "extra.span": datetime.timedelta(1, 2)}
    write(build([], values={**values, **objects}), tmp_path)
    _, read = independent_reader.read(tmp_path)
    assert [read.pop(name) for name in objects] == ["2026-01-02", "a/b", [1, 2, 0]]
    array, wanted = read.pop("extra.array"), values.pop("extra.array")
    assert np.array_equal(array, wanted)
    assert array.dtype == wanted.dtype
    assert read == values


def test_reader_reads_what_save_writes(tmp_path: Path):
    path = tmp_path / "step_3"
    weight = torch.arange(24.0).reshape(4, 6)
    state = {
        "model": {"w": weight, "tied": weight, "half": torch.arange(5).bfloat16(), "step": torch.tensor(3)},
        "extra": {"step": 3, "text": "x" * 5000, "rng": checkpoint.PerRank((1, 2))},
    }
    checkpoint.save(path, state)
    tensors, values = independent_reader.read(path)
    for name, tensor in state["model"].items():
        array = tensors[f"model.{name}"]
        assert array.shape == tensor.shape
        assert array.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert values == {"extra.step": 3, "extra.text": "x" * 5000, "extra.rng": [(1, 2)]}


def test_reader_is_written_from_the_specification_alone():
    source = Path(independent_reader.__file__).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    roots = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    roots |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert roots - set(sys.stdlib_module_names) == {"msgpack", "numpy"}
    assert len(source.splitlines()) < 150


def test_one_process_checkpoint_opens_with_safetensors(tmp_path: Path):
    data = position_bytes(0, 4 * 12)
    whole = Tensor("model.w", "F32", (3, 4), data, (Run((0, 0), (3, 4), 0, 12, 0),))
    scalar = Tensor("step", "I64", (), position_bytes(1, 8), (Run((), (), 0, 1, 0),))
    empty = Tensor("none", "BF16", (0, 3), b"", (Run((0, 0), (0, 3), 0, 0, 0),))
    write(build([whole, scalar, empty]), tmp_path)
    (path,) = tmp_path.glob("*/*.safetensors")
    loaded = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {"model.w": (3, 4), "step": (), "none": (0, 3)}
    assert loaded["model.w"].numpy().tobytes() == data
    assert loaded["none"].dtype == torch.bfloat16
    with safe_open(path, "pt") as opened:
        assert opened.get_slice("model.w")[1:2].numpy().tobytes() == data[16:32]
