"""The program of the page about Accelerate: it goes on with other numbers of ranks. The test tells it that the CPU runs FSDP."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.docs.runner import blocks
from tests.launch import run_ranks

pytest.importorskip("accelerate")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"


def run(folder: str, *arguments: str) -> str:
    """Run the program on this rank; return what it prints."""
    import accelerate
    from accelerate.utils import DistributedType

    def on_a_cpu(fsdp_plugin: Any) -> Any:
        made = stock(cpu=True)
        fsdp_plugin.cpu_ram_efficient_loading = False
        fsdp = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin, "device": torch.device("cpu")}
        for state in (made.state, accelerate.PartialState):
            state._shared_state.update(fsdp)
        return made

    os.chdir(folder)
    stock = accelerate.Accelerator
    with (
        mock.patch.object(accelerate, "Accelerator", on_a_cpu),
        mock.patch.object(sys, "argv", ["train_accelerate.py", *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path("train_accelerate.py")
    return printed.getvalue()


def test_the_program_goes_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    program = next(block.text for block in blocks(PAGE) if block.text.startswith("# train_accelerate.py"))
    (tmp_path / "train_accelerate.py").write_text(program)
    (whole, *_) = run_ranks(run, 2, str(tmp_path), "6", init=False)
    run_ranks(run, 2, str(tmp_path), "4", init=False)
    assert checkpoint.inspect(tmp_path / "state_4" / "pytorch_model_fsdp_0").format == "reshard_ckpt"
    for num in (1, 3):
        (on, *_) = run_ranks(run, num, str(tmp_path), "6", "state_4", init=False)
        assert on == whole
        assert on.startswith("step 6, loss ")
