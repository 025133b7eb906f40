"""DCP saves and this library loads, and the other way round: on random meshes, and whole models with their optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.dcp_cases import models, random_meshes
from tests.launch import run_ranks
from tests.tries import times

CASES, TENSORS = times(10), 15


@pytest.mark.slow
def test_random_tensors_on_random_meshes(tmp_path: Path):
    """300 random pairs of a saved and a loaded layout: 150 from DCP's folders, 150 into them."""
    ranks = run_ranks(random_meshes, 4, str(tmp_path), CASES, TENSORS, timeout_s=times(800))
    wrong = [line for rank in ranks for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:20]])


@pytest.mark.slow
def test_models_and_optimizers_in_each_form(tmp_path: Path):
    wrong = [line for rank in run_ranks(models, 4, str(tmp_path), timeout_s=800) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])
