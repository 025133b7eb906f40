"""The programs of docs/cookbook.md run as the page shows, and no rank has a sample or a random stream that another one has."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint
from tests.docs import runner
from tests.launch import ROOT

PAGE = ROOT / "docs" / "cookbook.md"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The page's `train.py`, whose streams are this process's."""
    code = next(block.text for block in runner.blocks(PAGE) if block.text.startswith("# train.py"))
    module = types.ModuleType("cookbook_train")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "train.py", "exec"), vars(module))
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield module
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.slow
def test_every_block_of_the_cookbook_runs_and_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    printed: dict[str, str] = {}
    command = runner._run_command
    monkeypatch.setattr(runner, "_run_command", lambda line, folder: printed.setdefault(line, command(line, folder)))
    assert runner.run_document(PAGE, tmp_path) == len(list(runner.blocks(PAGE)))

    resumed = next(text for line, text in printed.items() if "train.py runs/killed --tiny --tp=2" in line)
    assert resumed.startswith(("from step 2\n", "from step 4\n")), "nothing was killed, or nothing resumed"
    before, after = (checkpoint.read(f"runs/killed/step_{step}", ["rng", "data"]) for step in (6, 8))
    assert (len(before["rng"]), len(after["rng"])) == (4, 2)
    assert len({bytes(rng["torch"].numpy()) for rng in [*before["rng"], *after["rng"]]}) == 6
    assert [data["taken"] for data in after["data"]] == [8, 8]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_other_ranks_take_the_samples_of_the_job_each_once(train: types.ModuleType, size: int):
    saved = [train.Data(train.TINY, rank, 4) for rank in range(4)]
    batches = [iter(data) for data in saved]
    for _ in range(3):
        for own in batches:
            next(own)
    states = [data.state_dict() for data in saved]
    expected = torch.cat([next(own) for own in batches])
    taken = []
    for rank in range(size):
        data = train.Data(train.TINY, rank, size)
        data.load_state_dict(train.Data.on_other_ranks(states, rank, size))
        taken.append(next(iter(data)))
    assert sorted(torch.cat(taken).tolist()) == sorted(expected.tolist())
    assert len(set(map(tuple, expected.tolist()))) > 1


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_other_ranks_draw_from_streams_of_their_own(train: types.ModuleType, size: int):
    saved = []
    for rank in range(4):
        rng = train.Rng(1000 + rank, "cpu")
        torch.rand(5)
        saved.append(rng.state_dict())

    def drawn(state: object) -> tuple[float, ...]:
        train.Rng(0, "cpu").load_state_dict(state)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    new = [drawn(train.Rng.on_other_ranks(saved, rank, size)) for rank in range(size)]
    old = [drawn(state) for state in saved]
    for stream in zip(*new, *old, strict=True):  # of Python, of numpy, of torch
        assert len(set(stream)) == size + 4
    assert new == [drawn(train.Rng.on_other_ranks(saved, rank, size)) for rank in range(size)]
    assert old == [drawn(state) for state in saved]
