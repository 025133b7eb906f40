"""Reading whole tensors and values of a step from memory, without a state to load into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import CheckpointNotFound, MismatchError
from tests.layouts import values_of


def test_a_step_is_read_from_memory_and_else_from_the_store(tmp_path: Path, shm: Path):
    run = Manager(tmp_path / "run", memory=Memory(copies=0, folder=str(shm)), persist_every="1h")
    with run:
        run.save(1, {"w": values_of((3, 4), "F32", 1), "note": "stored"})
        run.async_save(2, {"w": values_of((3, 4), "F32", 2), "note": "n" * 5000}).result()
        assert not (tmp_path / "run" / "step_2" / "catalog.msgpack").exists()
        stored, in_memory = run.read(1), run.read(2, ["w", "note"])
        assert torch.equal(stored["w"], values_of((3, 4), "F32", 1))
        assert stored["note"] == "stored"
        assert torch.equal(in_memory["w"], values_of((3, 4), "F32", 2))
        assert in_memory["note"] == "n" * 5000
        for step in (1, 2):
            found = run.catalog(step)
            assert found.names == ("w",)
        assert run.catalog(3) is None
        with pytest.raises(MismatchError, match="x: not in the checkpoint"):
            run.read(2, ["x"])
        with pytest.raises(CheckpointNotFound):
            run.read(3)
