"""What every format of another library must do, whoever brings it: open, verify, reshard, compare, and survive damage.

A format adds a function that makes a folder of it, and a check that compares what was read with values from elsewhere.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common import entry_points
from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.formats.source import GROUP, known_formats
from reshard_ckpt.storage import open_storage
from tests.families.bytecheckpoint import test_folders as bytecheckpoint
from tests.families.deepspeed.jobs import digest
from tests.families.deepspeed.test_folders import DATA as DEEPSPEED
from tests.families.deepspeed.test_folders import DIGESTS
from tests.families.megatron import folders as megatron
from tests.families.vescale import writing as vescale
from tests.formats.test_torch_checkpointing import DATA as TORCH_CHECKPOINTING

Check = Callable[[Mapping[str, Any]], None]

PLAIN = {
    "model.w": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "model.b": torch.arange(100, 106, dtype=torch.int64),
}


def is_plain(found: Mapping[str, Any]) -> None:
    tensors = {name: value for name, value in found.items() if torch.is_tensor(value)}
    assert sorted(tensors) == sorted(PLAIN)
    assert all(torch.equal(tensors[name], PLAIN[name]) for name in PLAIN)


def bare() -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in PLAIN.items()}


def npy(folder: Path) -> Check:
    """Two blocks of rows for each tensor."""
    folder.mkdir()
    index: dict[str, Any] = {"step": 7, "tensors": {}}
    for name, tensor in bare().items():
        blocks = []
        for number, at in enumerate((0, 2)):
            block = tensor[at : (2, len(tensor))[number]].numpy()
            np.save(folder / f"{name}.{number}.npy", block)
            blocks.append({"file": f"{name}.{number}.npy", "offsets": [at] + [0] * (tensor.ndim - 1)})
        index["tensors"][name] = {"shape": list(tensor.shape), "blocks": blocks}
    (folder / "index.json").write_text(json.dumps(index))
    return is_plain


def safetensors(folder: Path) -> Check:
    folder.mkdir()
    save_file(bare(), folder / "model.safetensors")
    return is_plain


def torch_file(folder: Path) -> Check:
    folder.mkdir()
    torch.save(bare(), folder / "pytorch_model.bin")
    return is_plain


def rank_files(folder: Path) -> Check:
    folder.mkdir()
    for rank in range(2):
        torch.save(bare(), folder / f"model_world_size_2_rank_{rank}.pt")
    return is_plain


def dcp_folder(folder: Path) -> Check:
    dcp.save({"model": bare()}, checkpoint_id=folder)
    return is_plain


def deepspeed(folder: Path, case: str = "z1-bf16-plain") -> Check:
    shutil.unpack_archive(DEEPSPEED / f"{case}.tar.xz", folder, filter="data")

    def check(found: Mapping[str, Any]) -> None:
        assert {name: digest(torch.as_tensor(found[name])) for name in DIGESTS[case]} == DIGESTS[case]

    return check


def megatron_folder(folder: Path) -> Check:
    name = "0.16.1-dense"
    root = megatron.unpack(name, folder)
    for path in root.iterdir():
        path.rename(folder / path.name)
    root.rmdir()

    def check(found: Mapping[str, Any]) -> None:
        weights = {key: value for key, value in found.items() if key.startswith("model.") and torch.is_tensor(value)}
        assert len(weights) > 5
        for key, value in weights.items():
            assert torch.equal(value, megatron.expected(key, name, value)), key

    return check


def bytecheckpoint_folder(folder: Path, flavour: str = "fsdp2") -> Check:
    shutil.copytree(bytecheckpoint.DATA / flavour / "global_step_5", folder)
    return lambda found: bytecheckpoint.same(dict(found), bytecheckpoint.expected(flavour))


def vescale_folder(folder: Path) -> Check:
    folder.mkdir()
    vescale.write_folder(folder / "model", bare())
    return is_plain


def torch_checkpointing(folder: Path) -> Check:
    shutil.copytree(TORCH_CHECKPOINTING / "step-3", folder)
    expected = load_file(TORCH_CHECKPOINTING / "expected.safetensors")

    def check(found: Mapping[str, Any]) -> None:
        assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]

    return check


@dataclass(frozen=True)
class Case:
    format: str
    make: Callable[[Path], Check]


CASES = [
    Case("npy", npy),
    Case("safetensors", safetensors),
    Case("torch", torch_file),
    Case("rank-files", rank_files),
    Case("dcp", dcp_folder),
    Case("deepspeed", deepspeed),
    Case("deepspeed", partial(deepspeed, case="t1-bf16-tp")),
    Case("megatron", megatron_folder),
    Case("bytecheckpoint", bytecheckpoint_folder),
    Case("bytecheckpoint", partial(bytecheckpoint_folder, flavour="fsdp-flat")),
    Case("vescale", vescale_folder),
    Case("torch_checkpointing", torch_checkpointing),
]


@pytest.fixture(autouse=True)
def example_is_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the format of `examples/npy_format.py`, as its entry point would."""
    point = EntryPoint("npy", "examples.npy_format:FORMAT", GROUP)
    monkeypatch.setattr(entry_points, "entry_points", lambda group: [point] if group == GROUP else [])
    known_formats.cache_clear()
    yield
    known_formats.cache_clear()


@pytest.fixture(params=CASES, ids=lambda case: case.format)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def test_every_known_format_is_here() -> None:
    assert sorted(one.name for one in known_formats()) == sorted({case.format for case in CASES})


def test_it_opens_and_verifies(case: Case, tmp_path: Path) -> None:
    check = case.make(tmp_path / "src")
    check(checkpoint.read(tmp_path / "src"))
    assert checkpoint.inspect(tmp_path / "src").format == case.format
    report = checkpoint.verify(tmp_path / "src")
    assert report.ok, report.problems
    assert report.num_bytes > 0


def test_it_is_resharded_and_the_result_differs_in_nothing(case: Case, tmp_path: Path) -> None:
    check = case.make(tmp_path / "src")
    checkpoint.reshard(tmp_path / "src", tmp_path / "dst", mesh={"dp": 3})
    check(checkpoint.read(tmp_path / "dst"))
    found = checkpoint.diff(tmp_path / "src", tmp_path / "dst", values=True)
    assert found.equal, found


def test_a_folder_of_something_else_is_not_taken_for_one(case: Case, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "native", {"model": {"w": torch.zeros(2)}})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("nothing of interest")
    (format,) = (one for one in known_formats() if one.name == case.format)
    for name in ("empty", "notes", "missing") if case.format == "safetensors" else ("empty", "notes", "missing", "native"):
        assert format.open(open_storage(tmp_path / name), None) is None, name


def test_a_damaged_file_is_a_named_error_or_harms_nothing(case: Case, tmp_path: Path) -> None:
    """Each file in turn is deleted, emptied, cut and overwritten: no raw error, and what is read whole is right."""
    check = case.make(tmp_path / "src")
    files = sorted(path.relative_to(tmp_path / "src") for path in (tmp_path / "src").rglob("*") if path.is_file())
    assert files
    refused: list[str] = []
    for number, file in enumerate(files[:MOST_FILES]):
        for kind, damage in DAMAGES.items():
            copy = tmp_path / f"{number}-{kind}"
            shutil.copytree(tmp_path / "src", copy)
            damage(copy / file)
            try:
                found = checkpoint.read(copy)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            finally:
                shutil.rmtree(copy)
            if kind != "overwritten":
                check(found)
    assert len(refused) >= len(DAMAGES) - 1
    assert all(len(message) > 20 for message in refused)


MOST_FILES = 6


def _cut(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share - 1)])


def _overwrite(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(min(path.stat().st_size, 1 << 16)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "cut early": partial(_cut, share=0.1),
    "cut by a byte": partial(_cut, share=1),
    "overwritten": _overwrite,
}
