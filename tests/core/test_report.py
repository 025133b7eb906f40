"""What a user may pass as a name, a path or an axis is refused by name where it is not text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.core.report import MAX_NAME_BYTES, plural, with_article
from reshard_ckpt.errors import CheckpointError, UnsupportedError

BAD = "\ud800"


@pytest.mark.parametrize(
    "call",
    [
        lambda root, state: checkpoint.load(root / "a", {"x": {BAD: 1}}),
        lambda root, state: checkpoint.load(root / "a", {"x": {BAD: 1, **state["x"]}}, strict=False),
        lambda root, state: checkpoint.load(root / "a", state, rename={"x.w": BAD}),
        lambda root, state: checkpoint.save(root / "b", state, mesh={BAD: 1}),
        lambda root, state: checkpoint.save(root / "b", state, metadata={BAD: 1}),
        lambda root, state: checkpoint.save(str(root / "b") + BAD, state),
        lambda root, state: checkpoint.load(str(root / "b") + BAD, state),
        lambda root, state: checkpoint.read(root / "a", [BAD]),
        lambda root, state: checkpoint.read(root / "a", [f"{BAD}*"]),
        lambda root, state: checkpoint.reshard(root / "a", root / "b", mesh={"dp": 1}, rename={"x": BAD}),
        lambda root, state: checkpoint.reshard(root / "a", root / "b", mesh={BAD: 1}),
        lambda root, state: checkpoint.convert(root / "a", root / "b", to="torch", rename={"x": BAD}),
        lambda root, state: checkpoint.convert(root / "a", root / "b", to="dcp", rename={"x": BAD}),
    ],
)
def test_text_that_cannot_be_written_is_a_named_error(tmp_path: Path, call: Any):
    state = {"x": {"w": torch.arange(3.0)}}
    checkpoint.save(tmp_path / "a", state)
    with pytest.raises(CheckpointError):
        call(tmp_path, state)


@pytest.mark.parametrize(
    ("state", "mesh"),
    [
        ({"x": {"n" * MAX_NAME_BYTES: torch.ones(2)}}, None),
        ({"x": {"n" * MAX_NAME_BYTES: 1}}, None),
        ({"é" * (MAX_NAME_BYTES // 2 + 1): 1}, None),
        ({"@" * (MAX_NAME_BYTES // 2): b"0" * 5000}, None),  # its bytes lie under a name in which each character takes three
        ({"x": 1}, {f"axis{i}": 1 for i in range(300)}),
    ],
)
def test_what_could_not_be_read_again_does_not_replace_a_checkpoint(tmp_path: Path, state: Any, mesh: Any):
    checkpoint.save(tmp_path, {"w": torch.arange(3.0)})
    with pytest.raises(UnsupportedError, match="that are read"):
        checkpoint.save(tmp_path, state, mesh=mesh)
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.arange(3.0))


def test_the_longest_names_can_be_read(tmp_path: Path):
    state = {"n" * MAX_NAME_BYTES: torch.arange(3.0), "é" * (MAX_NAME_BYTES // 2): 1}
    checkpoint.save(tmp_path, state)
    assert list(checkpoint.read(tmp_path)) == list(state)


def test_words_agree_with_what_they_stand_by():
    assert [with_article(noun) for noun in ("argparse.Namespace", "dict", "OrderedDict", "uint8", "int")] == [
        "an argparse.Namespace",
        "a dict",
        "an OrderedDict",
        "a uint8",
        "an int",
    ]
    assert [plural(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
