from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import ROOT, run_script

NUM_PROCESSES = {"custom_framework": 4, "dcp_fsdp2": 2, "dcp_torchtitan": 2, "ddp": 2, "fsdp2_tp": 4, "pipeline": 2}


def test_every_example_is_run():
    others = {"preemption"}  # test_preemption.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(NUM_PROCESSES) | others


@pytest.mark.parametrize("name", NUM_PROCESSES)
def test_example_loads_another_layout_bit_for_bit(name: str, tmp_path: Path):
    output = run_script(ROOT / "examples" / f"{name}.py", NUM_PROCESSES[name], [str(tmp_path / "checkpoint")])
    assert "bit for bit" in output
