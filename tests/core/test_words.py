"""What a user may pass as a name, a path or an axis is refused by name where it is no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.core.words import a, plural
from reshard_ckpt.errors import CheckpointError

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


def test_words_agree_with_what_they_stand_by():
    assert [a(noun) for noun in ("argparse.Namespace", "dict", "OrderedDict", "uint8", "int")] == [
        "an argparse.Namespace",
        "a dict",
        "an OrderedDict",
        "a uint8",
        "an int",
    ]
    assert [plural(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
