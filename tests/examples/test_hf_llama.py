"""`examples/hf_llama.py`: told to go, and resumed on other ranks, it has the losses of a run that nothing broke."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from tests.docs.runner import imports_of
from tests.examples.llama_job import EXAMPLE, NUM_STEPS, job
from tests.launch import run_ranks


def trained(root: Path, nproc: int, until: str = "") -> tuple[dict[int, tuple[float, float]], set[int]]:
    """The loss and the learning rate of each step, and the steps that ranks saved when they left."""
    imports = imports_of(EXAMPLE.read_text())  # the model takes seconds
    printed = "".join(run_ranks(job, nproc, str(root), until, init=False, imports=imports))
    steps = re.findall(r"step (\d+): loss ([\d.]+), lr ([\d.e-]+)", printed)
    left = re.findall(r"saved step (\d+), \d+ bytes, and leaves", printed)
    assert len(left) == nproc
    return {int(step): (float(loss), float(lr)) for step, loss, lr in steps}, set(map(int, left))


@pytest.mark.slow
def test_a_llama_told_to_go_trains_on_other_ranks_as_if_nothing_had_happened(tmp_path: Path):
    unbroken, _ = trained(tmp_path / "unbroken", 2)
    assert list(unbroken) == list(range(1, NUM_STEPS + 1))
    first, (stopped,) = trained(tmp_path / "run", 2, until="step 6:")
    assert list(first) == list(range(1, stopped + 1))
    assert 6 <= stopped < NUM_STEPS, "it was told at step 6, of which some may follow, and did not leave"
    then, (last,) = trained(tmp_path / "run", 3)
    assert last == NUM_STEPS
    assert list(then) == list(range(stopped + 1, NUM_STEPS + 1))
    for step, (loss, lr) in (first | then).items():
        assert loss == pytest.approx(unbroken[step][0], rel=1e-4), step
        assert lr == unbroken[step][1]
    losses = [loss for loss, _ in unbroken.values()]
    assert len({round(loss, 3) for loss in losses}) == NUM_STEPS, "steps that look alike would not tell a batch from another"
    assert checkpoint.diff(tmp_path / "unbroken" / "step_12", tmp_path / "run" / "step_12").equal
